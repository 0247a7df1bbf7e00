"""The failure table of docs/operations.md as data: the tests walk it, so what it says is what happens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from tests.support.stack import REPO

NOTHING = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a mark of the table stands for. code, status, retryable: None when the client hears nothing of it."""

    mark: str
    within: str
    code: str | None
    status: int | None
    retryable: bool | None


@cache
def cells() -> dict[tuple[str, str, str], str]:
    """The mark of every (side, state, fault) where something can happen."""
    found = {}
    for side in ("prefill", "decode"):
        head, *rows = _table(f"state on the {side} rank")
        for state, *marks in rows:
            found |= {
                (side, state, fault): mark for fault, mark in zip(head[1:], marks, strict=True) if mark != NOTHING
            }
    return found


@cache
def outcomes() -> dict[str, Outcome]:
    _, *rows = _table("mark")
    return {mark: _outcome(mark, within, client) for mark, _, within, client, _ in rows}


def _outcome(mark: str, within: str, client: str) -> Outcome:
    said = re.match(r"(\d{3}) `(\w+)`, (retryable|final)", client)
    if said is None:
        return Outcome(mark=mark, within=within, code=None, status=None, retryable=None)
    status, code, kind = said.groups()
    return Outcome(mark=mark, within=within, code=code, status=int(status), retryable=kind == "retryable")


def _table(first_header: str) -> list[list[str]]:
    """The cells of the table that begins with this header."""
    lines = iter((REPO / "docs" / "operations.md").read_text().splitlines())
    header = next(line for line in lines if line.startswith(f"| {first_header} |"))
    next(lines)
    rows = [header]
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append(line)
    return [[cell.strip() for cell in row[1:-1].split("|")] for row in rows]
