"""sgl-eval, unchanged, against the router's chat endpoint. It grades what models put into a box, which tandem-mini does
not know; so what is counted here are the right answers in the predictions that it has written.

It does not go together with this project's other dependencies: give it an environment of its own and put its bin into
PATH (`python -m venv X && X/bin/pip install sgl-eval`).
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from accuracy.gsm_mini import extract_answer, problems
from tests.support.stack import Stack

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("sgl-eval") is None, reason="sgl-eval is not in PATH"),
]
COUNT = 40


def test_sgl_eval_asks_and_gets_right_answers(shared_stack: Stack, tmp_path: Path) -> None:
    asked = problems("heldout", 17, COUNT)
    data, prompt = tmp_path / "data.jsonl", tmp_path / "prompt.yaml"
    rows = [
        {"id": i, "problem": problem.question, "expected_answer": str(problem.answer)}
        for i, problem in enumerate(asked)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompt.write_text('user: "{problem}"\n')
    command = [
        "sgl-eval",
        "run",
        "gsm8k",
        "--base-url",
        f"{shared_stack.router.url}/v1",
        "--out-dir",
        str(tmp_path / "out"),
    ]
    command += ["--from-dataset", str(data), "--prompt", str(prompt), "--num-threads", "4", "--temperature", "0"]
    command += ["--max-tokens", "300", "--seed", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (tmp_path / "out").rglob("output-rs*.jsonl")
    predictions = [json.loads(line) for line in file.read_text().splitlines()]
    right = [str(extract_answer(row["generation"])) == row["expected_answer"] for row in predictions]
    assert len(right) == COUNT and sum(right) >= 0.9 * COUNT, predictions[:3]
