"""The grammar that a chat answer has to follow, from its response format, its tools and its thought."""

from __future__ import annotations

import enum
import json
from typing import Any

from common.reasoning import CLOSE, OPEN, opens_thinking
from common.response_format import ANY_OBJECT
from common.tools import ToolFormat, ToolRequest

GRAMMARS = frozenset({"json_schema", "ebnf"})  # the fields of `sampling_params` that constrain an answer here
MAX_FORCED_CALLS = 16
# Between the tokens of JSON: a space, or a new line and its indentation. Unbounded, a model may write nothing else.
WHITESPACE = r" |\r?\n[ \t]{0,24}"


class Thought(enum.Enum):
    """What may come before the constrained part of an answer. NONE: nothing. POSSIBLE: `<think>…</think>`, or nothing.
    OPEN: the rest of a thought that the prompt has opened."""

    NONE = "none"
    POSSIBLE = "possible"
    OPEN = "open"


def thought_of(prompt: str, *, splits: bool) -> Thought:
    """prompt: as rendered by the chat template. splits: whether answers are split (`splits_reasoning`)."""
    if not splits:
        return Thought.NONE
    if opens_thinking(prompt):
        return Thought.OPEN
    return Thought.NONE if prompt.rstrip().endswith(CLOSE) else Thought.POSSIBLE


def constraints(
    schema: str | None, tools: ToolRequest, form: ToolFormat, thought: Thought, special_tokens: frozenset[str]
) -> dict[str, Any]:
    """Fields for `sampling_params`; empty where the answer is free.

    schema: of `read_response_format`. special_tokens: of the tokenizer: a marker that is one is not spelt out, and is
    shown in a text only with skip_special_tokens false.
    """
    markers = [*form.markers] if tools.tools else []
    if thought is not Thought.NONE:
        markers += [OPEN, CLOSE]
    fields: dict[str, Any] = {"skip_special_tokens": False} if special_tokens.intersection(markers) else {}
    if schema is None and not tools.is_forced:
        return fields
    if schema is not None and thought is Thought.NONE and not tools.tools:
        return {**fields, "json_schema": schema}
    return {**fields, "ebnf": _grammar(schema, tools, form, thought, special_tokens)}


def _grammar(
    schema: str | None, tools: ToolRequest, form: ToolFormat, thought: Thought, special_tokens: frozenset[str]
) -> str:
    """In llguidance's variant of Lark."""
    answers = ["calls"] if tools.is_forced else ["answer", "calls"] if tools.tools else ["answer"]
    rules = [f"start: {_before(thought)} ({' | '.join(answers)})"]
    if thought is not Thought.NONE:
        rules += _thought_rules(thought, special_tokens)
    if "answer" in answers:
        rules.append(f"answer: %json {_json(json.loads(schema or ANY_OBJECT))}")
    if "calls" in answers:
        rules += _call_rules(tools, form, special_tokens)
    return "\n".join(rules) + "\n"


def _before(thought: Thought) -> str:
    return {Thought.NONE: "", Thought.POSSIBLE: "thought?", Thought.OPEN: "thought"}[thought]


def _thought_rules(thought: Thought, special_tokens: frozenset[str]) -> list[str]:
    opening = f"{_terminal(OPEN, special_tokens)} " if thought is Thought.POSSIBLE else ""
    if CLOSE in special_tokens:
        return [f"thought: {opening}THINKING? {CLOSE} GAP", r"THINKING: /(.|\n)+/", r"GAP: /\n{0,2}/"]
    return [
        f"thought: {opening}thinking GAP",
        rf"thinking[lazy]: /(.|\n)*/ {_terminal(CLOSE, special_tokens)}",
        r"GAP: /\n{0,2}/",
    ]


def _call_rules(tools: ToolRequest, form: ToolFormat, special_tokens: frozenset[str]) -> list[str]:
    begin, end = (_terminal(marker, special_tokens) if marker else "" for marker in form.markers)
    more = MAX_FORCED_CALLS - 1 if tools.parallel and tools.named is None else 0
    one = " | ".join(f"call_{i}" for i in range(len(tools.callable)))
    match form:
        case ToolFormat.HERMES:
            calls = [
                f'calls: wrapped ("\\n" wrapped){{0,{more}}}' if more else "calls: wrapped",
                f'wrapped: {begin} "\\n" call "\\n" {end}',
            ]
        case ToolFormat.NEMOTRON | ToolFormat.PLAIN:
            repeated = f' (", " call){{0,{more}}}' if more else ""
            calls = [f'calls: {begin} "[" call{repeated} "]" {end}']
    bodies = [
        f"call_{i}: {json.dumps(_head(tool.name))} %json {_json(tool.parameters)} {json.dumps('}')}"
        for i, tool in enumerate(tools.callable)
    ]
    return [*calls, f"call: {one}", *bodies]


def _json(schema: dict[str, Any]) -> str:
    """A schema with the bound on white space, unless it sets its own."""
    options = schema.get("x-guidance")
    guidance = {"whitespace_pattern": WHITESPACE} | (options if isinstance(options, dict) else {})
    return json.dumps({**schema, "x-guidance": guidance})


def _head(name: str) -> str:
    return f'{{"name": {json.dumps(name)}, "arguments": '


def _terminal(marker: str, special_tokens: frozenset[str]) -> str:
    """A special token is named without quotes; any other marker is text."""
    return marker if marker in special_tokens else json.dumps(marker)
