"""Tools of a request, and calls in a text, however it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.errors import RequestError
from common.tools import (
    MAX_TOOLS,
    NO_TOOLS,
    ToolCall,
    ToolFormat,
    ToolRequest,
    ToolSplitter,
    check_template,
    read_tools,
    tool_format,
)

HERMES, TAGS, NEMOTRON, PLAIN = ToolFormat.HERMES, ToolFormat.TAGS, ToolFormat.NEMOTRON, ToolFormat.PLAIN


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


TOOLS = [tool("f", parameters={"type": "object"}, description="F"), tool("g")]

# -- the request -------------------------------------------------------------------------------------------------------


def test_without_tools_or_with_choice_none_the_model_is_told_of_none() -> None:
    assert read_tools({}) == read_tools({"tools": []}) == read_tools({"tool_choice": "auto"}) == NO_TOOLS
    assert read_tools({"tools": TOOLS, "tool_choice": "none"}) == NO_TOOLS


def test_what_a_request_says_of_tools() -> None:
    auto = read_tools({"tools": TOOLS})
    assert (auto.choice, auto.named, auto.parallel, auto.is_forced) == ("auto", None, True, False)
    assert [t.name for t in auto.callable] == ["f", "g"] and auto.raw == TOOLS
    assert auto.tools[1].parameters == {"type": "object"}
    required = read_tools({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False})
    assert required.is_forced and not required.parallel and len(required.callable) == 2
    named = read_tools({"tools": TOOLS, "tool_choice": tool("g")})
    assert named.is_forced and [t.name for t in named.callable] == ["g"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [tool(f"f{i}") for i in range(MAX_TOOLS + 1)]}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "code"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": "f"}]}, "tools[0].function"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("a\n")]}, "tools[0].function.name"),
        ({"tools": [tool("x" * 65)]}, "tools[0].function.name"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters.type"),
        ({"tools": [tool(description=5)]}, "tools[0].function.description"),
        ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": tool("h")}, "tool_choice.function.name"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": ["f"]}}},
            "tool_choice.function.name",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": tool("f")}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)
def test_refusals_name_the_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_tools(body)
    assert caught.value.param == param and caught.value.http_status == 400


def test_the_format_follows_from_the_template() -> None:
    assert tool_format("{{ tools }} <tool_call>") is HERMES
    assert tool_format("{{ tools }} <tool_call>\n<function=") is TAGS
    assert tool_format("{{ tools }} <TOOLCALL>") is NEMOTRON
    assert tool_format("{{ tools }}") is tool_format(None) is PLAIN


def test_a_template_without_tools_takes_only_forced_calls() -> None:
    auto, forced = read_tools({"tools": TOOLS}), read_tools({"tools": TOOLS, "tool_choice": "required"})
    for template in (None, "{{ messages }} my_tools"):
        check_template(forced, template)
        check_template(NO_TOOLS, template)
        with pytest.raises(RequestError, match="chat template knows none"):
            check_template(auto, template)
    check_template(auto, "{% if tools %}")


# -- calls in a text ---------------------------------------------------------------------------------------------------

AUTO = read_tools({"tools": TOOLS})
PROPERTIES = {"s": {"type": "string"}, "n": {"type": "integer"}}
TYPED = read_tools({"tools": [tool("f", parameters={"type": "object", "properties": PROPERTIES})]})
FORCED = read_tools({"tools": TOOLS, "tool_choice": "required"})
BOTH = '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": [1, "]"]}}]'
CALL_F, CALL_G = ("f", '{"a": 1}'), ("g", '{"b": [1, "]"]}')


def tagged(name: str, **arguments: str) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


CASES: list[tuple[ToolFormat, ToolRequest, str, str, list[tuple[str, str]]]] = [
    (HERMES, AUTO, "No call. \n", "No call. \n", []),
    (HERMES, AUTO, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [CALL_F]),
    (
        HERMES,
        AUTO,
        'Let me. \n<tool_call>{"name":"f","arguments":{"a": 1}}</tool_call>\n<tool_call>{"name":"g"}</tool_call>\n',
        "Let me.",
        [CALL_F, ("g", "{}")],
    ),
    (HERMES, AUTO, '<tool_call>{"name":"f"}</tool_call> then', " then", [("f", "{}")]),
    (HERMES, AUTO, '<tool_call>{"name":"f","arguments":"{\\"x\\": 1}"}</tool_call>', "", [("f", '{"x": 1}')]),
    (
        HERMES,
        AUTO,
        '<tool_call>{"name":"f","arguments":{"t":"</tool_call> é 😀 \\u00e9", "n": 1e400}}</tool_call>',
        "",
        [("f", '{"t":"</tool_call> é 😀 \\u00e9", "n": 1e400}')],
    ),
    (TAGS, AUTO, "Hm. " + tagged("f", a="1") + "\n" + tagged("g", b='[1, "]"]'), "Hm.", [CALL_F, CALL_G]),
    (TAGS, AUTO, f"{tagged('g')} then", " then", [("g", "{}")]),
    (TAGS, TYPED, tagged("f", s="12", n="12"), "", [("f", '{"s": "12", "n": 12}')]),
    (TAGS, TYPED, tagged("f", s=" </tool_call> 1\n", n="NaN"), "", [("f", '{"s": " </tool_call> 1\\n", "n": "NaN"}')]),
    (TAGS, TYPED, tagged("f", n=" 1e400", é="[1,2]"), "", [("f", '{"n": 1e400, "\\u00e9": [1,2]}')]),
    (TAGS, TYPED, tagged("f", s="", x='{"y": null}'), "", [("f", '{"s": "", "x": {"y": null}}')]),
    (TAGS, AUTO, "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>", "", [CALL_F]),
    (NEMOTRON, AUTO, f"<TOOLCALL>{BOTH}</TOOLCALL>", "", [CALL_F, CALL_G]),
    (NEMOTRON, AUTO, f"Hm.\n\n<TOOLCALL>{BOTH}</TOOLCALL>\n", "Hm.", [CALL_F, CALL_G]),
    (PLAIN, FORCED, BOTH, "", [CALL_F, CALL_G]),
    (PLAIN, AUTO, BOTH, BOTH, []),
    *(
        (form, AUTO, text, text, [])
        for form, text in [
            (HERMES, 'a <tool_call>{"name": "f", "arg'),
            (HERMES, 'a <tool_call>{"name": "f"}</tool_c'),
            (HERMES, "a <tool_call>{broken}</tool_call> b "),
            (HERMES, 'a <tool_call>{"name": "h"}</tool_call>'),
            (HERMES, 'a <tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
            (HERMES, 'a <tool_call>{"name": "f", "arguments": "x"}</tool_call>'),
            (HERMES, 'a <tool_call>{"name": "f", "arguments": {"n": NaN}}</tool_call>'),
            (HERMES, "a <tool_call></tool_call>"),
            (HERMES, "a <tool"),
            (TAGS, tagged("h", a="1")),
            (TAGS, tagged("f", a="1")[:-20]),
            (TAGS, "a <tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call> b"),
            (TAGS, "a <tool_call>\n<function=f>\nx\n</function>\n</tool_call> b"),
            (TAGS, 'a <tool_call>{"name": "f"}</tool_call>'),
            (NEMOTRON, "<TOOLCALL>[]</TOOLCALL>"),
            (NEMOTRON, '<TOOLCALL>[{"name": "f"}, {"name": "h"}]</TOOLCALL>'),
        ]
    ),
    (PLAIN, FORCED, '[{"name": "f", "argu', '[{"name": "f", "argu', []),
]


def streamed(form: ToolFormat, request: ToolRequest, text: str, size: int) -> tuple[str, list[ToolCall]]:
    splitter = ToolSplitter(form, request, "rid")
    pieces = [splitter.push(text[i : i + size]) for i in range(0, len(text), size)]
    pieces.append(splitter.finish())
    calls = [call for piece in pieces for call in piece.calls]
    assert splitter.num_calls == len(calls)
    return "".join(piece.content for piece in pieces), calls


@pytest.mark.parametrize(("form", "request_", "text", "content", "calls"), CASES)
def test_calls_are_found_wherever_the_text_is_cut(
    form: ToolFormat, request_: ToolRequest, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for size in range(1, len(text) + 1):
        found_content, found = streamed(form, request_, text, size)
        assert (found_content, [(call.name, call.arguments) for call in found]) == (content, calls), size
        assert [call.index for call in found] == list(range(len(found)))


def test_calls_have_names_that_follow_from_the_request() -> None:
    """A stream that another node goes on with names them as the first node would have."""
    _, calls = streamed(NEMOTRON, AUTO, f"<TOOLCALL>{BOTH}</TOOLCALL>", 5)
    _, again = streamed(NEMOTRON, AUTO, f"<TOOLCALL>{BOTH}</TOOLCALL>", 7)
    assert calls == again and len({call.id for call in calls}) == 2
    assert all(call.id.startswith("call_") for call in calls)


def test_without_parallel_calls_only_the_first_counts() -> None:
    alone = read_tools({"tools": TOOLS, "parallel_tool_calls": False})
    content, calls = streamed(NEMOTRON, alone, f"<TOOLCALL>{BOTH}</TOOLCALL>", 3)
    assert (content, [call.name for call in calls]) == ("", ["f"])


def test_a_function_that_is_not_the_named_one_is_no_call() -> None:
    named = read_tools({"tools": TOOLS, "tool_choice": tool("g")})
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert streamed(HERMES, named, text, 4) == (text, [])


def test_content_is_not_held_back_without_need() -> None:
    splitter = ToolSplitter(HERMES, AUTO, "rid")
    assert splitter.push("Let me see").content == "Let me see"
    assert splitter.push(" <b> <").content == " <b>"
    assert splitter.push("tool").content == ""
    assert splitter.push("box>").content == " <toolbox>"


def test_a_long_call_costs_no_more_than_its_length() -> None:
    """Searched from where the last search ended: a megabyte of arguments in pieces of one token."""
    text = "<tool_call>" + json.dumps({"name": "f", "arguments": {"t": "x" * 300_000}}) + "</tool_call>"
    _, calls = streamed(HERMES, AUTO, text, 4)
    assert len(calls) == 1 and len(calls[0].arguments) > 300_000


def test_a_long_tagged_call_costs_no_more_than_its_length() -> None:
    text = tagged("f", t="</tool_call>" * 5000)
    _, calls = streamed(TAGS, AUTO, text, 4)
    assert json.loads(calls[0].arguments)["t"] == "</tool_call>" * 5000
