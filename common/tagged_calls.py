"""Calls that a model writes as tags, with one tag for each argument (Nemotron 3, Qwen3-Coder).

    <function=f>\\n<parameter=a>\\n1\\n</parameter>\\n<parameter=b>\\nany text\\n</parameter>\\n</function>

A value is JSON, but for strings, which are written as they are: the schema of the parameter tells them apart. A string
that spells out `</parameter>` cannot be told from the end of one; that is the form's own limit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

OPEN = "<function="
CLOSE = "</function>"
_CALL = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_ARGUMENT = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def read_tagged_call(body: str, parameters: Mapping[str, dict[str, Any]]) -> tuple[str, str] | None:
    """(name, arguments as JSON) of what stands inside the markers; None when it is no call of a known function.

    parameters: the schema of its arguments by a function's name.
    """
    found = _CALL.fullmatch(body) if body.rstrip().endswith(CLOSE) else None
    if found is None or found[1] not in parameters:
        return None
    properties, at = parameters[found[1]].get("properties"), 0
    arguments: dict[str, str] = {}
    while (argument := _ARGUMENT.match(found[2], at)) is not None:
        schema = properties.get(argument[1]) if isinstance(properties, dict) else None
        arguments[argument[1]] = _value(argument[2], schema)
        at = argument.end()
    if found[2][at:].strip():
        return None
    return found[1], "{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in arguments.items()) + "}"


def is_string(schema: Any) -> bool:
    """Whether a parameter is written as it is."""
    return isinstance(schema, dict) and schema.get("type") == "string"


def _value(text: str, schema: Any) -> str:
    """The value as JSON: as the model wrote it where that is JSON, otherwise as a string."""
    if not is_string(schema):
        try:
            return bytes(msgspec.json.decode(text, type=msgspec.Raw)).decode()
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def tagged_call_rules(rule: str, name: str, parameters: Mapping[str, Any], whitespace: str) -> list[str]:
    """The call as rules of a grammar in llguidance's variant of Lark, the first of which is `rule`.

    Arguments come in the order of the schema, required ones always; strings are free, or one of their `enum`. Without
    `properties` there may be any.
    """
    begin, properties = _text(f"{OPEN}{name}>\n"), parameters.get("properties")
    if not isinstance(properties, dict) or not properties:
        any_argument = f'{rule}_any: "<parameter=" /[^>\\n]+/ ">\\n" {rule}_free'
        return [f"{rule}: {begin} {rule}_any* {_text(CLOSE)}", any_argument, _free(rule)]
    required = parameters.get("required")
    needed = [*required] if isinstance(required, list) else []
    uses = " ".join(f"{rule}_{i}{'' if key in needed else '?'}" for i, key in enumerate(properties))
    shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    rules = [f"{rule}: {begin} {uses} {_text(CLOSE)}"]
    for i, (key, schema) in enumerate(properties.items()):
        opening = _text(f"<parameter={key}>\n")
        rules.append(f"{rule}_{i}: {opening} {_value_rule(rule, schema, shared, whitespace)}")
    return [*rules, _free(rule)]


def _value_rule(rule: str, schema: Any, shared: Mapping[str, Any], whitespace: str) -> str:
    """A value and the end of its tag."""
    end = _text("\n</parameter>\n")
    if not isinstance(schema, dict) or not schema:
        return f"{rule}_free"
    if is_string(schema):
        choices = schema.get("enum")
        if not isinstance(choices, list) or not choices:
            return f"{rule}_free"
        return f"({' | '.join(_text(str(choice)) for choice in choices)}) {end}"
    options = {"x-guidance": {"whitespace_pattern": whitespace}, **shared, **schema}
    return f"%json {json.dumps(options)} {end}"


def _free(rule: str) -> str:
    return rf"{rule}_free[lazy]: /(.|\n)*/ {_text(chr(10) + '</parameter>' + chr(10))}"


def _text(text: str) -> str:
    return json.dumps(text)
