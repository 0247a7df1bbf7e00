"""How a field is refused, at the nodes and at the router: in the same words, with the value that was given."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NoReturn

import msgspec

from common.errors import RequestError

MAX_SHOWN_CHARACTERS = 80


def refuse(name: str, value: object, wanted: str) -> NoReturn:
    raise RequestError(f"{name}: {show(value)} is not allowed; it must be {wanted}", param=name)


def show(value: object) -> str:
    """A value as the client wrote it, shortened."""
    try:
        text = msgspec.json.encode(value).decode() if not isinstance(value, float) else str(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        text = str(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else text[: MAX_SHOWN_CHARACTERS - 1] + "…"


def check_known(where: str, given: Iterable[str], known: frozenset[str]) -> None:
    """Refuse a name that nothing here knows, and say which known one it resembles."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            path = f"{where}.{name}" if where else name
            raise RequestError(f"{path}: unknown parameter{hint}", code="unknown_parameter", param=path)
