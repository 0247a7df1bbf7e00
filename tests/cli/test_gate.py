"""`tandem gate` as a command: exit status, options that cannot work, what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accuracy.tasks import gsm_mini_task
from cli.main import main
from tests.accuracy.conftest import SGLANG
from tests.accuracy.stub import Says, serving

TASK = gsm_mini_task(seed=0, count=20, shots=5)
RIGHT = {q.prompt: Says(f" {q.label}") for q in TASK.questions}


def right(number: int, prompt: str) -> Any:
    return RIGHT[prompt]


def status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["gate", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def mini(url: str, folder: Path, *more: str) -> int:
    return status("gsm-mini", "--url", url, "--num-questions", "20", "--output", str(folder), *more)


def test_exit_status_says_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(right, info=SGLANG) as good:
        assert mini(f"{good.url}/", tmp_path / "good", "--history", str(tmp_path / "nights")) == 0
    assert "verdict: pass" in capsys.readouterr().out
    with serving(lambda n, p: Says(" 12345"), info=SGLANG) as bad:
        assert mini(bad.url, tmp_path / "bad") == 1
    assert "accuracy 0.000 is below 0.87 (20 wrong" in capsys.readouterr().out
    with serving(lambda n, p: "html", info=SGLANG) as odd:
        assert mini(odd.url, tmp_path / "odd") == 2
    assert "verdict: invalid" in capsys.readouterr().out
    written = {path.name for path in (tmp_path / "odd").iterdir()}
    assert written == {"answers.jsonl", "report.json", "report.xml", "report.html"}
    assert len(list((tmp_path / "nights").iterdir())) == 1


def test_every_prompt_and_answer_is_a_line(tmp_path: Path) -> None:
    with serving(right, info=SGLANG) as good:
        assert mini(good.url, tmp_path, "--warm", "0", "--shuffle", "3") == 0
    header, *lines = map(json.loads, (tmp_path / "answers.jsonl").read_text().splitlines())
    assert header["url"] == good.url
    assert {line["prompt"]: line["outcome"]["text"] for line in lines} == {p: s.text for p, s in RIGHT.items()}
    assert good.prompts() != [q.prompt for q in TASK.questions]


def test_gsm8k_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "x.jsonl"
    data.write_text("".join(json.dumps({"question": f"{i}?", "answer": f"#### {i}"}) + "\n" for i in range(8)))
    arguments = ("--data", str(data), "--output", str(tmp_path / "out"), "--warm", "0")
    with serving(lambda n, prompt: Says(prompt.split()[-2].strip("?")), info=SGLANG) as good:
        assert status("gsm8k", "--url", good.url, *arguments) == 0
    assert good.bodies[0]["sampling_params"]["stop"] == ["Question", "Assistant:", "<|separator|>"]
    found = json.loads((tmp_path / "out" / "report.json").read_text())["runs"][0]
    assert (found["right"], found["num_leaked"], found["accuracy_without_leaked"]) == (8, 5, 1.0)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--url", "localhost:30000"), "--url localhost:30000: an address like"),
        (("--baseline", "http://"), "--baseline http://: an address like"),
        (("--threshold", "87"), "--threshold"),
        (("--num-questions", "0"), "--num-questions"),
        (("--timeout", "0"), "--timeout"),
        (("--api", "grpc"), "--api"),
    ],
)
def test_settings_that_cannot_work(
    tmp_path: Path, arguments: tuple[str, str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mini("http://127.0.0.1:1", tmp_path, *arguments) == 2
    assert word in capsys.readouterr().err


def test_output_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert mini("http://127.0.0.1:1", tmp_path / "file" / "out") == 2
    assert "--output" in capsys.readouterr().err


def test_no_data_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("gsm8k", "--data", "/nowhere/test.jsonl") == 2
    assert "--data /nowhere/test.jsonl: " in capsys.readouterr().err
