"""The grammar that a chat answer has to follow, from its response format, its tools and its thought."""

from __future__ import annotations

import enum
import json
from typing import Any

from common.reasoning import CLOSE, OPEN, opens_thinking
from common.tagged_calls import tagged_call_rules
from common.tools import Tool, ToolFormat, ToolRequest

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
    schema: str | None,
    tools: ToolRequest,
    form: ToolFormat,
    thought: Thought,
    special_tokens: frozenset[str],
    tag_tokens: frozenset[str],
) -> dict[str, Any]:
    """Fields for `sampling_params`; empty where the answer is free.

    schema: of `read_response_format`. special_tokens, tag_tokens: of the tokenizer: a marker that is one is not spelt
    out, and a special one is shown in a text only with skip_special_tokens false.
    """
    markers = [*form.markers] if tools.tools else []
    if thought is not Thought.NONE:
        markers += [OPEN, CLOSE]
    fields: dict[str, Any] = {"skip_special_tokens": False} if special_tokens.intersection(markers) else {}
    if schema is not None and thought is Thought.NONE and not tools.tools:
        return {**fields, "json_schema": schema}
    answers = _answers(schema, tools, form)
    if not answers:
        return fields
    return {**fields, "ebnf": _grammar(answers, schema, tools, form, thought, special_tokens | tag_tokens)}


def _answers(schema: str | None, tools: ToolRequest, form: ToolFormat) -> list[str]:
    """Rules of the grammar, one of which the answer follows: answer (of the schema), calls, or text with calls in it.
    None: it may be anything."""
    if tools.is_forced:
        return ["calls"]
    if schema is not None:
        return ["answer", "calls"] if tools.tools else ["answer"]
    is_strict = any(tool.strict for tool in tools.tools) and form is not ToolFormat.PLAIN
    return ["text"] if is_strict else []


def _grammar(
    answers: list[str],
    schema: str | None,
    tools: ToolRequest,
    form: ToolFormat,
    thought: Thought,
    single_tokens: frozenset[str],
) -> str:
    """In llguidance's variant of Lark."""
    rules = [f"start: {_before(thought)} ({' | '.join(answers)})"]
    if thought is not Thought.NONE:
        rules += _thought_rules(thought, single_tokens)
    if schema is not None and "answer" in answers:
        rules.append(f"answer: %json {_json(json.loads(schema))}")
    if "text" in answers:
        rules += _text_rules(form, single_tokens)
    if answers != ["answer"]:
        rules += _call_rules(tools, form, single_tokens)
    return "\n".join(rules) + "\n"


def _before(thought: Thought) -> str:
    return {Thought.NONE: "", Thought.POSSIBLE: "thought?", Thought.OPEN: "thought"}[thought]


def _thought_rules(thought: Thought, single_tokens: frozenset[str]) -> list[str]:
    opening = f"{_terminal(OPEN, single_tokens)} " if thought is Thought.POSSIBLE else ""
    if CLOSE in single_tokens:
        return [f"thought: {opening}THINKING? {CLOSE} GAP", r"THINKING: /(.|\n)+/", r"GAP: /\n{0,2}/"]
    return [
        f"thought: {opening}thinking GAP",
        rf"thinking[lazy]: /(.|\n)*/ {_terminal(CLOSE, single_tokens)}",
        r"GAP: /\n{0,2}/",
    ]


def _text_rules(form: ToolFormat, single_tokens: frozenset[str]) -> list[str]:
    """Text in which what begins like a call is one. (Where only one is wanted, the others are not looked for.)"""
    begin, end = _markers(form, single_tokens)
    if form.markers[0] in single_tokens:
        return [f"text: (TEXT? {begin} inside {end})* TEXT?", r"TEXT: /(.|\n)+/"]
    return [
        "text: part* TEXT",
        f"part: head inside {end}",
        f"head[lazy]: TEXT {begin}",
        r"TEXT: /(.|\n)*/",
    ]


def _call_rules(tools: ToolRequest, form: ToolFormat, single_tokens: frozenset[str]) -> list[str]:
    """Nothing but calls."""
    begin, end = _markers(form, single_tokens)
    more = MAX_FORCED_CALLS - 1 if tools.parallel and tools.named is None else 0
    match form:
        case ToolFormat.HERMES | ToolFormat.TAGS:
            repeated = f' ("\\n" {begin} inside {end}){{0,{more}}}' if more else ""
            inside = '"\\n" call "\\n"'
        case ToolFormat.NEMOTRON | ToolFormat.PLAIN:
            repeated = ""
            inside = f'"[" call (", " call){{0,{more}}} "]"' if more else '"[" call "]"'
    bodies = [rule for i, tool in enumerate(tools.callable) for rule in _body_rules(f"call_{i}", tool, tools, form)]
    one = " | ".join(f"call_{i}" for i in range(len(tools.callable)))
    return [f"calls: {begin} inside {end}{repeated}", f"inside: {inside}", f"call: {one}", *bodies]


def _body_rules(rule: str, tool: Tool, tools: ToolRequest, form: ToolFormat) -> list[str]:
    parameters = _parameters(tool, tools)
    if form is ToolFormat.TAGS:
        return tagged_call_rules(rule, tool.name, parameters, WHITESPACE)
    return [f"{rule}: {json.dumps(_head(tool.name))} %json {_json(parameters)} {json.dumps('}')}"]


def _parameters(tool: Tool, tools: ToolRequest) -> dict[str, Any]:
    """What arguments have to follow: in a call that the model chose, a schema that is not strict is advice."""
    return tool.parameters if tool.strict or tools.is_forced else {"type": "object"}


def _markers(form: ToolFormat, single_tokens: frozenset[str]) -> tuple[str, str]:
    begin, end = form.markers
    return (_terminal(begin, single_tokens), _terminal(end, single_tokens)) if begin else ("", "")


def _json(schema: dict[str, Any]) -> str:
    """A schema with the bound on white space, unless it sets its own."""
    options = schema.get("x-guidance")
    guidance = {"whitespace_pattern": WHITESPACE} | (options if isinstance(options, dict) else {})
    return json.dumps({**schema, "x-guidance": guidance})


def _head(name: str) -> str:
    return f'{{"name": {json.dumps(name)}, "arguments": '


def _terminal(marker: str, single_tokens: frozenset[str]) -> str:
    """A marker that is a token of its own is named without quotes; any other is text."""
    return marker if marker in single_tokens else json.dumps(marker)
