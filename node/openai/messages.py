"""The messages of a chat, checked and in the form that chat templates know."""

from __future__ import annotations

import json
from typing import Any

from common.errors import RequestError
from common.refusals import refuse
from node.fields import read_string

MAX_NAME_CHARACTERS = 1024
MAX_ITEMS = 10_000  # messages of a chat, parts of a message, calls in it
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_UNSUPPORTED = ("audio", "function_call")

Message = dict[str, Any]


def read_messages(value: Any) -> list[Message]:
    """Role, content as one string, and what else templates read of a message. Raises RequestError naming the place."""
    if not isinstance(value, list) or not 0 < len(value) <= MAX_ITEMS:
        refuse("messages", value, f"a list of 1 to {MAX_ITEMS} messages")
    return [_read_message(f"messages[{i}]", item) for i, item in enumerate(value)]


def _read_message(path: str, value: Any) -> Message:
    if not isinstance(value, dict):
        refuse(path, value, "an object with role and content")
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        refuse(f"{path}.role", role, "one of " + ", ".join(_ROLES))
    for name in _UNSUPPORTED:
        if value.get(name):
            raise RequestError(f"{path}.{name}: not supported", code="unsupported_parameter", param=f"{path}.{name}")
    message: Message = {"role": _ROLES[role]}
    tool_calls = _read_tool_calls(f"{path}.tool_calls", value.get("tool_calls")) if role == "assistant" else []
    if value.get("content") is not None or not tool_calls:
        message["content"] = _read_content(f"{path}.content", value.get("content"))
    if tool_calls:
        message.setdefault("content", "")
        message["tool_calls"] = tool_calls
    for name in ("name", "tool_call_id"):
        if value.get(name) is not None:
            message[name] = read_string(f"{path}.{name}", value[name], max_length=MAX_NAME_CHARACTERS)
    if role == "assistant" and value.get("reasoning_content") is not None:
        message["reasoning_content"] = _read_text(f"{path}.reasoning_content", value["reasoning_content"])
    return message


def _read_content(path: str, value: Any) -> str:
    """A string, or the texts of a list of parts put together."""
    if not isinstance(value, list):
        return _read_text(path, value)
    if len(value) > MAX_ITEMS:
        refuse(path, f"{len(value)} parts", f"at most {MAX_ITEMS}")
    return "".join(_read_part(f"{path}[{i}]", part) for i, part in enumerate(value))


def _read_part(path: str, part: Any) -> str:
    if not isinstance(part, dict):
        refuse(path, part, "an object with type and text")
    if part.get("type") != "text":
        raise RequestError(
            f"{path}.type: {part.get('type')!s:.80} is not supported, only text",
            code="unsupported_parameter",
            param=f"{path}.type",
        )
    return _read_text(f"{path}.text", part.get("text"))


def _read_text(path: str, value: Any) -> str:
    if not isinstance(value, str):
        refuse(path, value, "a string")
    return value


def _read_tool_calls(path: str, value: Any) -> list[Message]:
    """Calls that the model has made before. Their arguments, a JSON text for OpenAI, are an object for templates."""
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > MAX_ITEMS:
        refuse(path, value, f"a list of at most {MAX_ITEMS} tool calls")
    return [_read_tool_call(f"{path}[{i}]", item) for i, item in enumerate(value)]


def _read_tool_call(path: str, value: Any) -> Message:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict):
        refuse(path, value, "an object with a function")
    name = read_string(f"{path}.function.name", function.get("name"), max_length=MAX_NAME_CHARACTERS)
    arguments = _read_arguments(f"{path}.function.arguments", function.get("arguments"))
    call: Message = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if value.get("id") is not None:
        call["id"] = read_string(f"{path}.id", value["id"], max_length=MAX_NAME_CHARACTERS)
    return call


def _read_arguments(path: str, value: Any) -> Any:
    if value is None or value == "":
        return {}
    if isinstance(value, dict):
        return value
    try:
        found = json.loads(value) if isinstance(value, str) else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        refuse(path, value, "a JSON object as text")
    return found
