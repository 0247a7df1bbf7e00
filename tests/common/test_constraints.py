"""Grammars of chat answers, tried with llguidance itself on texts that they must take and must not."""

from __future__ import annotations

import enum
import json
from functools import cache
from typing import Any

import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from common.constraints import Thought, constraints, thought_of
from common.errors import RequestError
from common.response_format import read_response_format
from common.tools import NO_TOOLS, ToolCall, ToolFormat, ToolRequest, ToolSplitter, read_tools
from node.grammar_check import check
from node.grammars import Question
from tests.support.stack import MODEL

MARKERS = ["<think>", "</think>", "<TOOLCALL>", "</TOOLCALL>", "<tool_call>", "</tool_call>"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "g"}},
]
NONE = frozenset[str]()
FORCED = read_tools({"tools": TOOLS, "tool_choice": "required"})
F, G = '{"name": "f", "arguments": {"a": 12}}', '{"name": "g", "arguments": {"x": [1, null]}}'
CALLS = {
    ToolFormat.HERMES: (
        "<tool_call>\n%s\n</tool_call>",
        "<tool_call>\n%s\n</tool_call>\n<tool_call>\n%s\n</tool_call>",
    ),
    ToolFormat.NEMOTRON: ("<TOOLCALL>[%s]</TOOLCALL>", "<TOOLCALL>[%s, %s]</TOOLCALL>"),
    ToolFormat.PLAIN: ("[%s]", "[%s, %s]"),
}


class Kind(enum.Enum):
    """What the markers are to a model: text, special tokens, or tokens that are text of an answer."""

    TEXT = "text"
    SPECIAL = "special"
    TAG = "tag"

    @property
    def tokens(self) -> tuple[frozenset[str], frozenset[str]]:
        """(special tokens, tag tokens)."""
        markers = frozenset(MARKERS)
        return markers if self is Kind.SPECIAL else NONE, markers if self is Kind.TAG else NONE


@cache
def tokens(kind: Kind) -> tuple[LLTokenizer, tokenizers.Tokenizer]:
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    match kind:
        case Kind.SPECIAL:
            tokenizer.add_special_tokens(MARKERS)
        case Kind.TAG:
            tokenizer.add_tokens(MARKERS)
        case Kind.TEXT:
            pass
    return LLTokenizer(tokenizer.to_str(), n_vocab=1024 + len(MARKERS), eos_token=[0]), tokenizer


EVERY_KIND = pytest.mark.parametrize("kind", Kind)


class Trial:
    """One grammar, and what it says of texts."""

    def __init__(self, fields: dict[str, Any], kind: Kind) -> None:
        (field,) = fields.keys() - {"skip_special_tokens"}
        self._tokens, self._tokenizer = tokens(kind)
        verdict = check(self._tokens, Question(kind=field, text=fields[field]))
        assert verdict.error is None, verdict.error
        self._text = verdict.text

    def takes(self, text: str) -> bool:
        """Whether the whole text is an answer."""
        matcher = LLMatcher(self._tokens, self._text, log_level=0)
        token_ids = self._tokenizer.encode(text).ids
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@EVERY_KIND
@pytest.mark.parametrize("form", CALLS)
def test_a_forced_call_is_one_of_the_tools_with_valid_arguments(form: ToolFormat, kind: Kind) -> None:
    trial = Trial(constraints(None, FORCED, form, Thought.NONE, *kind.tokens), kind)
    one, two = CALLS[form]
    for good in (one % F, one % G, two % (F, G), two % (G, F)):
        assert trial.takes(good), good
    for bad in ("", "x" + one % F, one % F + "x", one % '{"name": "h", "arguments": {}}', F):
        assert not trial.takes(bad), bad
    for arguments in ('{"a": "12"}', "{}", '{"a": 1, "b": 2}', "[]"):
        assert not trial.takes(one % ('{"name": "f", "arguments": ' + arguments + "}")), arguments
    assert not trial.takes(f"<think>x</think>{one % F}")


@pytest.mark.parametrize("form", CALLS)
def test_a_named_function_is_called_once_and_no_other(form: ToolFormat) -> None:
    one, two = CALLS[form]
    named = read_tools({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}})
    trial = Trial(constraints(None, named, form, Thought.NONE, NONE, NONE), Kind.TEXT)
    assert trial.takes(one % G) and not trial.takes(one % F) and not trial.takes(two % (G, G))
    single = read_tools({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False})
    trial = Trial(constraints(None, single, form, Thought.NONE, NONE, NONE), Kind.TEXT)
    assert trial.takes(one % F) and not trial.takes(two % (F, G))


@EVERY_KIND
def test_a_thought_comes_before_what_is_constrained(kind: Kind) -> None:
    schema = '{"type": "integer"}'
    opened, possible = (
        Trial(constraints(schema, NO_TOOLS, ToolFormat.PLAIN, thought, *kind.tokens), kind)
        for thought in (Thought.OPEN, Thought.POSSIBLE)
    )
    for good in ("\nTwo {1} < 3\nand </b> 😀\n</think>\n\n12", "</think>12", "x</think>\n12"):
        assert opened.takes(good) and possible.takes(f"<think>{good}"), good
    assert possible.takes("12") and not opened.takes("12")
    for bad in ("x", "x</think>", "x</think>y", "x</think>\n\n\n\n12"):
        assert not opened.takes(bad) and not possible.takes(f"<think>{bad}"), bad


def test_an_answer_of_a_schema_may_call_a_tool_instead() -> None:
    auto = read_tools({"tools": TOOLS})
    trial = Trial(constraints('{"enum": [7]}', auto, ToolFormat.NEMOTRON, Thought.NONE, NONE, NONE), Kind.TEXT)
    assert trial.takes("7") and trial.takes(f"<TOOLCALL>[{F}]</TOOLCALL>") and not trial.takes("8")


def test_white_space_is_bounded_unless_the_schema_sets_its_own() -> None:
    schema = {"type": "array", "items": {"enum": [1]}}
    for thought, prefix in ((Thought.NONE, ""), (Thought.OPEN, "</think>")):
        trial = Trial(constraints(json.dumps(schema), NO_TOOLS, ToolFormat.PLAIN, thought, NONE, NONE), Kind.TEXT)
        assert trial.takes(prefix + "[1, 1]") and trial.takes(prefix + "[\n        1,\n        1\n]")
        assert (
            trial.takes(prefix + "[1,1]") and not trial.takes(prefix + "[\n\n1]") and not trial.takes(prefix + "[  1]")
        )
        own = json.dumps({**schema, "x-guidance": {"whitespace_pattern": " {2}"}})
        trial = Trial(constraints(own, NO_TOOLS, ToolFormat.PLAIN, thought, NONE, NONE), Kind.TEXT)
        assert trial.takes(prefix + "[1,  1]") and not trial.takes(prefix + "[1, 1]")


@EVERY_KIND
@pytest.mark.parametrize("form", [ToolFormat.HERMES, ToolFormat.NEMOTRON])
def test_what_begins_like_a_call_of_strict_tools_is_one(form: ToolFormat, kind: Kind) -> None:
    (f, g), (one, two) = TOOLS, CALLS[form]
    strict = [{"type": "function", "function": {**f["function"], "strict": True}}, g]
    tools = read_tools({"tools": strict})
    trial = Trial(constraints(None, tools, form, Thought.NONE, *kind.tokens), kind)
    for good in ("", "Hello\n< é", one % F, f"Hm. {one % G}", f"a\n{one % F} then", two % (F, G)):
        assert trial.takes(good), good
    assert trial.takes(f"x {one % F} y {one % G} z")
    wrong = (one % '{"name": "f", "arguments": {"a": "x"}}', one % '{"name": "h", "arguments": {}}', one[:14] + "x")
    assert not any(map(trial.takes, wrong))
    assert trial.takes(one % '{"name": "g", "arguments": {"anything": [1]}}'), "not strict"
    opened = Trial(constraints(None, tools, form, Thought.OPEN, *kind.tokens), kind)
    assert opened.takes(f"I could.</think>Hi {one % F}") and not opened.takes("I could.")
    assert not opened.takes(f"x</think>{one[:14]}x")


def tagged(name: str, **arguments: str) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


SEARCH = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "unit": {"type": "string", "enum": ["km", "mi"]},
        "places": {"type": "array", "items": {"$ref": "#/$defs/place"}},
        "any": {},
    },
    "required": ["text"],
    "$defs": {"place": {"type": "integer"}},
}


@EVERY_KIND
@pytest.mark.parametrize("thought", [Thought.NONE, Thought.OPEN])
def test_forced_calls_in_tags(kind: Kind, thought: Thought) -> None:
    tools = [{"type": "function", "function": {"name": "s", "parameters": SEARCH}}, TOOLS[1]]
    forced = read_tools({"tools": tools, "tool_choice": "required"})
    trial = Trial(constraints(None, forced, ToolFormat.TAGS, thought, *kind.tokens), kind)
    before = "Hm.</think>\n" if thought is Thought.OPEN else ""
    one, two = tagged("s", text="é\n<b> {1"), tagged("s", text="", unit="km", places="[1, 2]", any="what ever")
    for good in (one, two, f"{one}\n{two}", tagged("g"), tagged("g", x="1", y="é"), tagged("s", text="a", any="{}")):
        assert trial.takes(before + good), good
        assert read_back(good, forced)
    bad = (tagged("s"), tagged("s", unit="km"), tagged("s", text="x", unit="m"), tagged("s", text="x", places='["a"]'))
    for text in (*bad, tagged("h"), tagged("s", text="x", other="1"), one + "x", one[:-13]):
        assert not trial.takes(before + text), text


@EVERY_KIND
def test_calls_in_tags_of_strict_tools(kind: Kind) -> None:
    tools = [{"type": "function", "function": {"name": "s", "parameters": SEARCH, "strict": True}}, TOOLS[0]]
    auto = read_tools({"tools": tools})
    trial = Trial(constraints(None, auto, ToolFormat.TAGS, Thought.NONE, *kind.tokens), kind)
    for good in ("", "Hello", f"Hm. {tagged('s', text='x')} and", tagged("f", a="no integer")):
        assert trial.takes(good), good
    assert not trial.takes(tagged("s", unit="km")) and not trial.takes(tagged("h"))


def test_odd_schemas_in_tags() -> None:
    """What JSON schema has no meaning for is no error of ours."""
    odd = {"properties": {"a": True, "b": {"type": "string", "enum": 5}}, "required": 5}
    forced = read_tools(
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": odd}}], "tool_choice": "required"}
    )
    trial = Trial(constraints(None, forced, ToolFormat.TAGS, Thought.NONE, NONE, NONE), Kind.TEXT)
    assert trial.takes(tagged("f")) and trial.takes(tagged("f", a="x", b="y"))


def read_back(text: str, tools: ToolRequest) -> list[ToolCall]:
    splitter = ToolSplitter(ToolFormat.TAGS, tools, "rid")
    return splitter.push(text).calls + splitter.finish().calls


def test_a_free_answer_has_no_grammar_but_its_markers_are_shown() -> None:
    auto, markers = read_tools({"tools": TOOLS}), frozenset(MARKERS)
    assert constraints(None, NO_TOOLS, ToolFormat.PLAIN, Thought.NONE, markers, NONE) == {}
    for tags in (NONE, markers):
        assert constraints(None, auto, ToolFormat.HERMES, Thought.POSSIBLE, NONE, tags) == {}
    shown = {"skip_special_tokens": False}
    assert constraints(None, auto, ToolFormat.HERMES, Thought.NONE, frozenset({"<tool_call>"}), NONE) == shown
    assert constraints(None, NO_TOOLS, ToolFormat.HERMES, Thought.OPEN, frozenset({"</think>"}), NONE) == shown
    assert constraints(None, NO_TOOLS, ToolFormat.HERMES, Thought.NONE, markers, NONE) == {}
    assert "skip_special_tokens" not in constraints(None, FORCED, ToolFormat.HERMES, Thought.OPEN, NONE, markers)


@pytest.mark.parametrize(
    ("prompt", "splits", "expected"),
    [
        ("<|assistant|>\n<think>\n", True, Thought.OPEN),
        ("<|assistant|>\n<think></think>\n\n", True, Thought.NONE),
        ("<|assistant|>\n", True, Thought.POSSIBLE),
        ("<|assistant|>\n<think>\n", False, Thought.NONE),
    ],
)
def test_the_prompt_says_what_thought_may_come(prompt: str, splits: bool, expected: Thought) -> None:
    assert thought_of(prompt, splits=splits) is expected


def test_response_formats() -> None:
    assert read_response_format(None) is read_response_format({"type": "text"}) is None
    assert json.loads(read_response_format({"type": "json_object"}) or "") == {"type": "object"}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "integer"}}}
    assert json.loads(read_response_format(wanted) or "") == {"type": "integer"}


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("json", "response_format"),
        ({}, "response_format.type"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": "{}"}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}, "response_format.json_schema.strict"),
    ],
)
def test_bad_response_formats_are_named(value: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_response_format(value)
    assert caught.value.param == param


def test_every_request_that_forces_calls_makes_a_grammar_that_compiles() -> None:
    """Names and schemas with everything that has to be quoted."""
    odd = {
        "type": "object",
        "properties": {'q"\\/\n%é😀': {"enum": ['"', "\\", "\n", "/"]}},
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "a-b.c_9", "parameters": odd}}]
    request: ToolRequest = read_tools({"tools": tools, "tool_choice": "required"})
    trial = Trial(constraints(None, request, ToolFormat.TAGS, Thought.OPEN, NONE, NONE), Kind.TEXT)
    assert trial.takes("</think>" + tagged("a-b.c_9", **{'q"\\/\n%é😀': '"\\n"'}))
    for form in CALLS:
        trial = Trial(constraints(None, request, form, Thought.OPEN, NONE, NONE), Kind.TEXT)
        call = json.dumps({"name": "a-b.c_9", "arguments": {'q"\\/\n%é😀': "\n"}}, ensure_ascii=False)
        assert trial.takes("</think>" + CALLS[form][0] % call)
