"""Tools, response formats and thoughts by the `openai` package, with a chat template that knows of them all.

The model does not: what it is to say is forced, by `regex` where it is not the server's own grammar that is tried.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests.support.stack import REPO, Stack, stack

TEMPLATE = REPO / "tests" / "support" / "thinking.jinja"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TIME = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]}
TIME |= {"additionalProperties": False}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time", "parameters": TIME}},
]
SCHEMAS = {"get_weather": WEATHER, "get_time": TIME}
OWN = ("regex", "json_schema", "separate_reasoning", "chat_template_kwargs")  # fields that the package does not know
ASK: list[Any] = [{"role": "user", "content": "How is the weather in Rome? /no_think"}]
THINK: list[Any] = [{"role": "user", "content": "How is the weather in Rome? /think"}]
WEATHER_FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = ["--chat-template", str(TEMPLATE), "--transport", "loopback"]
    with stack(tmp_path_factory.mktemp("tools"), extra=options) as running:
        yield running


@pytest.fixture(scope="module")
def clients(servers: Stack) -> Iterator[tuple[openai.OpenAI, openai.OpenAI]]:
    """Of the router, and of the decode node, which serves alone who asks it directly."""
    with (
        openai.OpenAI(base_url=f"{servers.router.url}/v1", api_key="none", max_retries=0) as router,
        openai.OpenAI(base_url=f"{servers.decode.url}/v1", api_key="none", max_retries=0) as alone,
    ):
        yield router, alone


def chat(client: openai.OpenAI, *, messages: list[Any] = ASK, **fields: Any) -> Any:
    own = {name: fields.pop(name) for name in OWN if name in fields}
    defaults = {"model": "tandem-mini", "messages": messages, "temperature": 0, "max_tokens": 150}
    return client.chat.completions.create(**(defaults | fields), extra_body=own)


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[dict[str, Any], list[Any]]:
    """A stream put together as clients do (content, reasoning_content, finish_reason), and its calls."""
    whole: dict[str, Any] = {"content": "", "reasoning_content": "", "finish_reason": None}
    calls: dict[int, dict[str, str]] = {}
    for chunk in chat(client, stream=True, **fields):
        for choice in chunk.choices:
            whole["content"] += choice.delta.content or ""
            whole["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
            whole["finish_reason"] = choice.finish_reason or whole["finish_reason"]
            for part in choice.delta.tool_calls or ():
                call = calls.setdefault(part.index, {"id": "", "name": "", "arguments": ""})
                call["id"] += part.id or ""
                call["name"] += part.function.name or ""
                call["arguments"] += part.function.arguments or ""
    return whole, [calls[index] for index in sorted(calls)]


def thought_of(message: Any) -> str | None:
    return getattr(message, "reasoning_content", None)


def check_call(call: Any) -> None:
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert call.id.startswith("call_") and call.type == "function"


# -- calls -------------------------------------------------------------------------------------------------------------


def test_a_required_call_has_valid_arguments_and_is_the_same_everywhere(clients: tuple[openai.OpenAI, ...]) -> None:
    answers = [chat(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False) for client in clients]
    for answer in answers:
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        (call,) = choice.message.tool_calls
        check_call(call)
    router, alone = (answer.choices[0].message.tool_calls[0].function for answer in answers)
    assert (router.name, router.arguments) == (alone.name, alone.arguments)


def test_calls_of_random_answers_are_valid(clients: tuple[openai.OpenAI, ...]) -> None:
    one = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    for choice in chat(clients[0], **one, temperature=1, seed=1, n=8).choices:
        assert choice.finish_reason == "tool_calls", choice
        for call in choice.message.tool_calls:
            check_call(call)


def test_a_named_function_is_called(clients: tuple[openai.OpenAI, ...]) -> None:
    for name in SCHEMAS:
        choice = {"type": "function", "function": {"name": name}}
        (call,) = chat(clients[0], tools=TOOLS, tool_choice=choice).choices[0].message.tool_calls
        check_call(call)
        assert call.function.name == name


def test_a_stream_of_a_call_is_the_call(clients: tuple[openai.OpenAI, ...]) -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "temperature": 1, "seed": 5, "parallel_tool_calls": False}
    message = chat(clients[0], **fields).choices[0].message
    whole, calls = streamed(clients[0], **fields)
    assert whole == {"content": "", "reasoning_content": "", "finish_reason": "tool_calls"}
    assert [(c["name"], c["arguments"]) for c in calls] == [
        (c.function.name, c.function.arguments) for c in message.tool_calls
    ]
    assert all(call["id"].startswith("call_") for call in calls)


AUTO = r'Hi\. <TOOLCALL>\[\{"name": "get_time", "arguments": \{"zone": "UTC"\}\}\]</TOOLCALL>'


def test_a_call_that_the_model_chose_is_found(clients: tuple[openai.OpenAI, ...]) -> None:
    for client in clients:
        choice = chat(client, tools=TOOLS, regex=AUTO).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Hi."
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("get_time", '{"zone": "UTC"}')
    whole, calls = streamed(clients[0], tools=TOOLS, regex=AUTO)
    assert whole == {"content": "Hi.", "reasoning_content": "", "finish_reason": "tool_calls"}
    assert [call["name"] for call in calls] == ["get_time"]


def test_strict_tools_leave_an_answer_without_calls_free(clients: tuple[openai.OpenAI, ...]) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    for client in clients:
        choice = chat(client, tools=strict, max_tokens=20).choices[0]
        assert choice.message.content and choice.message.tool_calls is None


def test_without_tools_or_with_none_a_call_is_text(clients: tuple[openai.OpenAI, ...]) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = chat(clients[0], regex=AUTO, **fields).choices[0]
        assert choice.finish_reason == "stop" and choice.message.tool_calls is None
        assert choice.message.content.startswith("Hi. <TOOLCALL>")


def test_a_call_that_is_cut_is_no_call(clients: tuple[openai.OpenAI, ...]) -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 12}
    choice = chat(clients[0], **fields).choices[0]
    assert choice.finish_reason == "length" and choice.message.tool_calls is None
    assert choice.message.content.startswith("<TOOLCALL>")
    assert streamed(clients[0], **fields) == (
        {"content": choice.message.content, "reasoning_content": "", "finish_reason": "length"},
        [],
    )


def test_a_conversation_goes_on_with_the_tool_s_answer(clients: tuple[openai.OpenAI, ...]) -> None:
    message = chat(clients[0], tools=TOOLS, tool_choice="required", parallel_tool_calls=False).choices[0].message
    call = message.tool_calls[0]
    more = [*ASK, message, {"role": "tool", "tool_call_id": call.id, "content": '{"sun": true}'}]
    answer = chat(clients[0], messages=more, tools=TOOLS, response_format=WEATHER_FORMAT, tool_choice="none")
    jsonschema.validate(json.loads(answer.choices[0].message.content), WEATHER)


# -- response formats --------------------------------------------------------------------------------------------------


def test_a_response_format_is_followed(clients: tuple[openai.OpenAI, ...]) -> None:
    contents = [chat(c, response_format=WEATHER_FORMAT).choices[0].message.content for c in clients]
    assert contents[0] == contents[1]
    jsonschema.validate(json.loads(contents[0]), WEATHER)
    text = chat(clients[0], response_format={"type": "text"}, max_tokens=5).choices[0].message.content
    assert not text.startswith("{")


def test_parse_of_the_openai_package_works(clients: tuple[openai.OpenAI, ...]) -> None:
    """What it makes of a pydantic model is a strict schema."""
    import pydantic

    class Verdict(pydantic.BaseModel):
        right: bool
        stars: int = pydantic.Field(ge=1, le=5)

    answer = clients[0].chat.completions.parse(
        model="tandem-mini", messages=ASK, response_format=Verdict, temperature=0, max_tokens=60
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Verdict) and 1 <= parsed.stars <= 5


# -- thoughts ----------------------------------------------------------------------------------------------------------

THOUGHT = r"Hm\.\n\nRome is\.\n</think>\n\nSunny\. </b>\n"


def test_a_thought_is_told_from_content_also_in_a_stream(clients: tuple[openai.OpenAI, ...]) -> None:
    for client in clients:
        message = chat(client, messages=THINK, regex=THOUGHT).choices[0].message
        assert (thought_of(message), message.content) == ("Hm.\n\nRome is.", "Sunny. </b>\n")
    whole, _ = streamed(clients[0], messages=THINK, regex=THOUGHT)
    assert whole == {
        "content": "Sunny. </b>\n",
        "reasoning_content": "Hm.\n\nRome is.",
        "finish_reason": "stop",
    }


def test_an_answer_that_is_cut_inside_its_thought_is_all_thought(clients: tuple[openai.OpenAI, ...]) -> None:
    fields = {"messages": THINK, "regex": "[a-z]{40}</think>x", "max_tokens": 9}
    choice = chat(clients[0], **fields).choices[0]
    assert choice.finish_reason == "length" and not choice.message.content
    assert thought_of(choice.message)
    whole, _ = streamed(clients[0], **fields)
    assert whole["reasoning_content"] == thought_of(choice.message) and whole["content"] == ""


def test_no_think_answers_at_once(clients: tuple[openai.OpenAI, ...]) -> None:
    for fields in (
        {"messages": ASK},
        {"messages": THINK, "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [{"role": "system", "content": "/no_think"}, {"role": "user", "content": "How is Rome?"}]},
    ):
        message = chat(clients[0], regex="Sunny", **fields).choices[0].message
        assert (thought_of(message), message.content) == (None, "Sunny")


def test_a_thought_stays_in_the_text_when_asked_to(clients: tuple[openai.OpenAI, ...]) -> None:
    message = chat(clients[0], messages=THINK, regex=THOUGHT, separate_reasoning=False).choices[0].message
    assert thought_of(message) is None and message.content == "Hm.\n\nRome is.\n</think>\n\nSunny. </b>\n"


def test_a_thought_comes_before_a_call_that_the_model_chose(clients: tuple[openai.OpenAI, ...]) -> None:
    fields = {"messages": THINK, "tools": TOOLS, "regex": rf"Hm\.</think>{AUTO}"}
    choice = chat(clients[0], **fields).choices[0]
    assert (thought_of(choice.message), choice.message.content) == ("Hm.", "Hi.")
    assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 1
    whole, calls = streamed(clients[0], **fields)
    assert whole == {"content": "Hi.", "reasoning_content": "Hm.", "finish_reason": "tool_calls"} and len(calls) == 1


def test_with_an_open_thought_the_schema_waits_for_its_end(clients: tuple[openai.OpenAI, ...]) -> None:
    """The model never ends its thought, so all of the answer is free, and none of it content."""
    choice = chat(clients[0], messages=THINK, response_format=WEATHER_FORMAT, max_tokens=30).choices[0]
    assert choice.finish_reason == "length" and thought_of(choice.message) and not choice.message.content


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}},
            "response_format",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": 5}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}},
            "tool_choice.function.name",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"regex": "[0-9"}, "regex"),
        ({"regex": "a", "response_format": WEATHER_FORMAT}, "response_format"),
        ({"json_schema": "{}", "response_format": WEATHER_FORMAT}, "response_format"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"description": "x" * 70_000}}}]}
            | {"tool_choice": "required"},
            "tools",
        ),
        ({"separate_reasoning": 1}, "separate_reasoning"),
    ],
)
def test_bad_requests_are_400_and_named(clients: tuple[openai.OpenAI, ...], fields: dict[str, Any], param: str) -> None:
    for client in clients:
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client, **fields)
        assert caught.value.param == param, caught.value


def test_a_bad_response_format_of_a_completion_is_named(clients: tuple[openai.OpenAI, ...]) -> None:
    bad = {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        clients[0].completions.create(model="tandem-mini", prompt="a", extra_body={"response_format": bad})
    assert caught.value.param == "response_format"
    good = clients[0].completions.create(
        model="tandem-mini", prompt="a", max_tokens=99, extra_body={"response_format": WEATHER_FORMAT}, temperature=0
    )
    jsonschema.validate(json.loads(good.choices[0].text), WEATHER)


def test_tools_that_the_template_does_not_show_are_refused_unless_they_are_forced(shared_stack: Stack) -> None:
    body = {"model": "tandem-mini", "messages": [{"role": "user", "content": "1+1?"}], "tools": TOOLS, "temperature": 0}
    url = f"{shared_stack.router.url}/v1/chat/completions"
    refused = httpx.post(url, json=body, timeout=30)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools"
    forced = httpx.post(url, json={**body, "tool_choice": "required", "parallel_tool_calls": False}, timeout=30).json()
    (call,) = forced["choices"][0]["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    assert re.fullmatch("call_[0-9a-f]+", call["id"])
