"""Request bodies: JSON objects, with messages that help when they are not."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, NoReturn

import msgspec

from common.errors import RequestError

BAD_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What reading JSON of others raises: not JSON, of another form, not UTF-8, nested without end."""
MAX_DEPTH = 128
"""Of lists and objects in each other: whoever walks through a body, and a writer of JSON too, needs stack for each."""


def decode_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a request body. NaN and Infinity are no JSON: the message names the field that holds one."""
    try:
        value = msgspec.json.decode(body)
    except BAD_JSON as error:
        _refuse_json(body, error)
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, not {type(value).__name__}", code="invalid_json")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _is_deep(value):
        raise RequestError(f"the body is nested too deep: at most {MAX_DEPTH} levels", code="invalid_json")
    return value


def _is_deep(value: Any) -> bool:
    """Level by level, without recursion."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def _refuse_json(body: bytes, error: Exception) -> NoReturn:
    """Python's own reader takes NaN and Infinity, so it can tell where they are."""
    try:
        found = next(_non_finite("", json.loads(body)), None)
    except (ValueError, RecursionError):
        found = None
    if found is not None:
        path, number = found
        raise RequestError(f"{path}: {number} is not a JSON number", code="invalid_json", param=path) from error
    raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from error


def _non_finite(path: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path or "body", value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _non_finite(f"{path}.{name}" if path else str(name), item)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _non_finite(f"{path}[{i}]", item)
