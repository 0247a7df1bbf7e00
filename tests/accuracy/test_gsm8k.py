"""gsm8k's prompts, stops and extraction are those of SGLang's few-shot script.

The data set is no part of the project: what needs it is skipped unless GSM8K_DATA names its test.jsonl.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from accuracy import gsm8k
from accuracy.tasks import gsm8k_task
from common.errors import ConfigError

# SHA-256 of the prompts that SGLang 0.5.17's get_few_shot_examples(lines, 5) + get_one_example(lines, i, False) make
# of gsm8k's test.jsonl, i from 0 to 199, joined by zero bytes.
FIRST_200 = "8eb7a1779675f263d407ab68c813c764013265014017a29e53f13a747fe37b7d"


def write(path: Path, items: list[tuple[str, str]]) -> Path:
    lines = [json.dumps({"question": q, "answer": a}) for q, a in items]
    path.write_text("# a comment\n" + "\n".join(lines) + "\n")
    return path


def test_prompts_of_a_small_file(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.jsonl", [("One?", "It is 1.\n#### 1"), ("Two?", "#### 1,002"), ("Three\u2028?", "#### 3")]
    )
    task = gsm8k_task(path, count=10, shots=2)
    before = "Question: One?\nAnswer: It is 1.\n#### 1\n\nQuestion: Two?\nAnswer: #### 1,002\n\n"
    assert [q.prompt for q in task.questions] == [
        before + "Question: One?\nAnswer:",
        before + "Question: Two?\nAnswer:",
        before + "Question: Three\u2028?\nAnswer:",
    ]
    assert [q.label for q in task.questions] == [1, 1002, 3]
    assert [q.leaked for q in task.questions] == [True, True, False]
    assert task.stop == ("Question", "Assistant:", "<|separator|>")
    assert len(gsm8k_task(path, count=1, shots=0).questions) == 1


@pytest.mark.skipif("GSM8K_DATA" not in os.environ, reason="GSM8K_DATA does not name gsm8k's test.jsonl")
def test_prompts_of_the_real_file() -> None:
    path = Path(os.environ["GSM8K_DATA"])
    assert hashlib.sha256(path.read_bytes()).hexdigest() == gsm8k.SHA256
    prompts = [q.prompt for q in gsm8k_task(path, count=200, shots=5).questions]
    assert hashlib.sha256("\0".join(prompts).encode()).hexdigest() == FIRST_200


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" 5 + 7 = 12.\n#### 12", 12),
        ("$1,234,567", 1234567),
        ("it costs $12.50", 50),
        ("none", None),
        ("", None),
        ("#### 007", None),  # no literal of Python's, for which SGLang has no number either
        ("#### 000", 0),
        ("-5", 5),
        ("٣", None),
        ("1" * 4301, None),
    ],
)
def test_extraction(text: str, expected: int | None) -> None:
    assert gsm8k.extract(text) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: no JSON"),
        ("[]", "line 2: an object with the strings question and answer"),
        ('{"question": "a", "answer": 3}', "line 2: an object"),
        ('{"question": "a", "answer": "none"}', "line 2: the answer has no number"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"question": "a", "answer": "#### 1"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=message) as caught:
        gsm8k.read(path)
    assert caught.value.param == "data"


def test_too_few_items_and_no_file(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", [("a", "1")])
    with pytest.raises(ConfigError, match="--shots 5: the file has 1 items"):
        gsm8k_task(path, count=1, shots=5)
    with pytest.raises(ConfigError, match="No such file"):
        gsm8k.read(tmp_path / "missing")


# -- fetching ------------------------------------------------------------------------------------------------------

CONTENT = b'{"question": "a", "answer": "1"}\n'
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = self.path == "/data"
        self.send_response(200 if found else 404)
        self.send_header("content-length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def address() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_fetched_once_and_checked(address: str, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "test.jsonl"
    assert gsm8k.fetch(target, f"{address}/data", DIGEST) == target
    assert target.read_bytes() == CONTENT
    assert gsm8k.fetch(target, "http://127.0.0.1:1/", DIGEST) == target, "it is there already"
    target.write_bytes(b"other")
    with pytest.raises(ConfigError, match="sha256"):
        gsm8k.fetch(target, f"{address}/data", DIGEST)


def test_what_cannot_be_fetched_is_told(address: str, tmp_path: Path) -> None:
    for url in ("http://127.0.0.1:1/", f"{address}/elsewhere"):
        with pytest.raises(ConfigError, match="give it with --data FILE") as caught:
            gsm8k.fetch(tmp_path / "x", url, DIGEST)
        assert caught.value.code == "no_data"
    with pytest.raises(ConfigError, match="sha256"):
        gsm8k.fetch(tmp_path / "x", f"{address}/data", "0" * 64)
    assert list(tmp_path.iterdir()) == [], "nothing wrong is kept"
