"""`response_format` of a chat request: what form the answer has to have."""

from __future__ import annotations

import json
from typing import Any

from common.errors import RequestError

ANY_OBJECT = '{"type":"object"}'


def read_response_format(value: Any) -> str | None:
    """The JSON schema (as text) that the answer has to follow; None when it is free.

    value: null, {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"name": …,
    "schema": {…}}}. `strict` makes no difference: an answer follows its schema always. Raises RequestError.
    """
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _refused("response_format", "it must be an object")
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return ANY_OBJECT
        case "json_schema":
            return _read_schema(value.get("json_schema"))
        case _:
            raise _refused("response_format.type", "it must be one of text, json_object, json_schema")


def _read_schema(value: Any) -> str:
    where = "response_format.json_schema"
    if not isinstance(value, dict):
        raise _refused(where, "it must be an object with a schema")
    if value.get("strict") is not None and not isinstance(value["strict"], bool):
        raise _refused(f"{where}.strict", "it must be true or false")
    schema = value.get("schema")
    if not isinstance(schema, dict):
        raise _refused(f"{where}.schema", "it must be a JSON schema, an object")
    return json.dumps(schema)


def _refused(param: str, reason: str) -> RequestError:
    return RequestError(f"{param}: {reason}", param=param)
