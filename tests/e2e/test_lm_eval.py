"""lm-eval's local-completions, unchanged, against the router: answers to questions, and likelihoods of given ones."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accuracy.gsm_mini import few_shot, problems, prompt
from tests.support.stack import MODEL, Stack

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed (extra clients)"),
]

COUNT = 30
ANSWERED = """
task: mini_answered
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["Question"], max_gen_toks: 200, temperature: 0}}
filter_list:
  - name: number
    filter: [{{function: regex, regex_pattern: "#### (-?[0-9]+)"}}, {{function: take_first}}]
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
CHOSEN = """
task: mini_chosen
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def write_tasks(folder: Path) -> None:
    data = folder / "data.jsonl"
    with data.open("w") as lines:
        for i, problem in enumerate(problems("heldout", 11, COUNT)):
            choices = [f" {problem.worked}", " The answer is a banana.", " 1 2 3 4 5 6 7 8 9."]
            label = i % 3
            choices[0], choices[label] = choices[label], choices[0]
            doc = {
                "text": prompt(problem, few_shot()),
                "answer": str(problem.answer),
                "choices": choices,
                "label": label,
            }
            lines.write(json.dumps(doc) + "\n")
    for name, text in (("answered", ANSWERED), ("chosen", CHOSEN)):
        (folder / f"{name}.yaml").write_text(text.format(data=data))


def test_lm_eval_local_completions(shared_stack: Stack, tmp_path: Path) -> None:
    write_tasks(tmp_path)
    arguments = (
        f"model=tandem-mini,base_url={shared_stack.router.url}/v1/completions,tokenizer={MODEL},num_concurrent=4"
    )
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", arguments]
    command += ["--tasks", "mini_answered,mini_chosen", "--include_path", str(tmp_path)]
    command += ["--output_path", str(tmp_path / "out"), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    assert results["mini_answered"]["exact_match,number"] >= 0.9, results
    assert results["mini_chosen"]["acc,none"] >= 0.9, results
