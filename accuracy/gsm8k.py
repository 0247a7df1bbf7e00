"""gsm8k as SGLang's few-shot script asks it: the same prompts, stops and extraction, byte for byte.

The first items of the file are the worked examples, and the questions are counted from item 0 too: those that are both
are leaked, and the accuracy without them is shown beside the one with them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from common.errors import ConfigError

URL = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/test.jsonl"
SHA256 = "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"
STOP = ("Question", "Assistant:", "<|separator|>")

_FETCH_TIMEOUT_S = 30.0
_MAX_DIGITS = 4300  # of a number that Python reads


class Item(NamedTuple):
    """answer: worked, with the number last."""

    question: str
    answer: str


def default_file() -> Path:
    """Where the data set is kept once it has been fetched."""
    return Path.home() / ".cache" / "tandem" / "gsm8k" / "test.jsonl"


def fetch(target: Path, url: str = URL, sha256: str = SHA256) -> Path:
    """The data set at `target`, fetched from its public address unless it is there. Raises ConfigError."""
    if not target.is_file():
        content = _download(url)
        _check_digest(content, sha256, url)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".part")
        partial.write_bytes(content)
        partial.replace(target)
    _check_digest(target.read_bytes(), sha256, str(target))
    return target


def _download(url: str) -> bytes:
    try:
        answer = httpx.get(url, timeout=_FETCH_TIMEOUT_S, follow_redirects=True)
        answer.raise_for_status()
    except httpx.HTTPError as error:
        raise ConfigError(
            f"gsm8k cannot be fetched from {url} ({error or type(error).__name__}): "
            "get its test.jsonl by other means and give it with --data FILE",
            code="no_data",
            param="data",
        ) from error
    return answer.content


def _check_digest(content: bytes, sha256: str, where: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ConfigError(f"{where}: not gsm8k's test.jsonl: sha256 {found}, expected {sha256}", param="data")


def read(path: Path) -> list[Item]:
    """The items of a JSONL file with `question` and `answer`, without lines that begin with #. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data {path}: {error}", param="data") from error
    numbered = [(n, line) for n, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    return [_item(line, f"--data {path}, line {n}") for n, line in numbered]


def _item(line: str, where: str) -> Item:
    try:
        found: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: no JSON: {error}", param="data") from error
    match found:
        case {"question": str(question), "answer": str(answer)}:
            item = Item(question, answer)
        case _:
            raise ConfigError(f"{where}: an object with the strings question and answer is expected", param="data")
    if extract(item.answer) is None:
        raise ConfigError(f"{where}: the answer has no number", param="data")
    return item


def shots(items: Sequence[Item], count: int) -> str:
    """The first items with their answers, as they stand before every question. Raises ConfigError."""
    if count > len(items):
        raise ConfigError(f"--shots {count}: the file has {len(items)} items", param="shots")
    return "".join(f"{question(item)} {item.answer}\n\n" for item in items[:count])


def question(item: Item) -> str:
    return f"Question: {item.question}\nAnswer:"


def extract(text: str) -> int | None:
    """The last run of digits, commas removed. None: there is none, or none that Python takes for a literal (007)."""
    runs = re.findall(r"\d+", text.replace(",", ""))
    return _literal(runs[-1]) if runs else None


def _literal(digits: str) -> int | None:
    begins_with_zero = digits[0] == "0" and digits.strip("0") != ""
    if not digits.isascii() or begins_with_zero or len(digits) > _MAX_DIGITS:
        return None
    return int(digits)
