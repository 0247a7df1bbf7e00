"""OpenAI bodies: what they are as /generate bodies, and what is refused with which words."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from common.config import Role
from common.errors import RequestError
from common.reasoning import ReasoningParser
from node.chat_template import ChatTemplate
from node.limits import ServingLimits
from node.openai.calls import Call
from node.openai.chat import ChatModel, read_chat
from node.openai.completions import read_completion
from node.openai.fields import StreamOptions, in_openai_names
from node.openai.tokens import read_texts
from node.requests import expand, parse

LIMITS = ServingLimits(
    role=Role.UNIFIED,
    vocab_size=300,
    context_length=64,
    max_total_tokens=64,
    num_ranks=1,
    bootstrap_host="10.0.0.1",
    bootstrap_port=8998,
)
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
HELLO = [{"role": "user", "content": "hi"}]


def model(source: str = PLAIN, *, stops: tuple[str, ...] = (), special: tuple[str, ...] = ()) -> ChatModel:
    template = ChatTemplate(source, {}, stop_strings=stops)
    tokens = {"special_tokens": frozenset(special), "tag_tokens": frozenset[str]()}
    return ChatModel(template=template, reasoning=ReasoningParser.AUTO, **tokens)


def chat(found: ChatModel | None = None, **fields: Any) -> Call:
    return checked(read_chat({"messages": HELLO} | fields, found or model()))


def complete(**fields: Any) -> Call:
    return checked(read_completion({"prompt": "hi"} | fields))


def checked(call: Call) -> Call:
    """As an endpoint does: /generate's own checks, with errors in OpenAI's words. A character is a token."""
    try:
        parsed = parse(call.body, LIMITS)
        ids = [list(map(ord, p)) if isinstance(p, str) else p for p in parsed.prompts]
        expand(parsed, ids, LIMITS, arrival_s=0.0)
    except RequestError as error:
        raise in_openai_names(error, call.names) from error
    return call


def sampling(call: Call) -> dict[str, Any]:
    return dict(call.body["sampling_params"])


# -- what is accepted --------------------------------------------------------------------------------------------------


def test_the_smallest_bodies() -> None:
    small = chat()
    assert (small.body["text"], sampling(small)) == ("<user>hi<a>", {"max_new_tokens": None})
    assert not small.special_tokens and not small.wishes.logprobs and small.wishes.model is None
    text = complete()
    assert (text.body["text"], sampling(text)) == ("hi", {"max_new_tokens": 16})
    assert text.special_tokens and "return_logprob" not in text.body


def test_every_field_of_sampling_arrives_under_our_name() -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "frequency_penalty": 1,
        "presence_penalty": -1,
        "repetition_penalty": 1.5,
        "n": 2,
        "stop": ["x"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "logit_bias": {"5": -100},
        "seed": 11,
        "min_tokens": 1,
    }
    expected = {name: value for name, value in given.items() if name not in ("seed", "min_tokens")}
    expected |= {"sampling_seed": 11, "min_new_tokens": 1, "max_new_tokens": 4}
    assert sampling(chat(**given, max_tokens=4)) == expected
    assert sampling(complete(**given, max_tokens=4)) == expected


def test_of_two_names_for_the_length_the_newer_one_counts() -> None:
    assert sampling(chat(max_tokens=3))["max_new_tokens"] == 3
    assert sampling(chat(max_tokens=3, max_completion_tokens=5))["max_new_tokens"] == 5


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1], [2, 3]]], ids=str)
def test_the_type_of_a_prompt_tells_what_it_is(prompt: Any) -> None:
    field = "input_ids" if isinstance(prompt, list) and not isinstance(prompt[0], str) else "text"
    assert complete(prompt=prompt).body[field] == prompt


def test_what_is_harmless_is_ignored() -> None:
    harmless = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "parallel_tool_calls": True,
        "tool_choice": "none",
        "modalities": ["text"],
        "functions": [],
        "audio": None,
        "unknown_but_null": None,
        "response_format": {"type": "text"},
        "reasoning_effort": "low",
        "model": "any",
        "stream_options": {"include_usage": True, "include_obfuscation": False},
    }
    call = chat(**harmless)
    assert sampling(call) == {"max_new_tokens": None}
    assert call.wishes.model == "any" and call.wishes.stream_options == StreamOptions(include_usage=True)


def test_logprobs() -> None:
    of_chat = chat(logprobs=True, top_logprobs=3)
    assert (of_chat.body["return_logprob"], of_chat.body["top_logprobs_num"]) == (True, 3)
    assert "logprob_start_len" not in of_chat.body and of_chat.wishes.logprobs
    assert "return_logprob" not in chat(logprobs=False, top_logprobs=0).body
    answers_only, prompts_too = complete(logprobs=0), complete(logprobs=2, echo=True)
    assert (answers_only.body["logprob_start_len"], answers_only.body["top_logprobs_num"]) == (-1, 0)
    assert (prompts_too.body["logprob_start_len"], prompts_too.body["top_logprobs_num"]) == (0, 2)
    assert prompts_too.wishes.echo and prompts_too.wishes.logprobs
    assert "return_logprob" not in complete(echo=True).body


def test_a_cache_salt_is_an_extra_key() -> None:
    assert chat(cache_salt="s").body["extra_key"] == "s"
    assert chat(cache_salt="s", extra_key="e").body["extra_key"] == "e"


def test_a_leg_has_the_routers_fields() -> None:
    leg = {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 5, "routed_dp_rank": 0, "rid": "r"}
    call = read_chat({"messages": HELLO, **leg}, model())
    assert {name: call.body[name] for name in leg} == leg


def test_the_templates_stop_strings_are_added() -> None:
    stops = model(stops=("Q:",))
    assert sampling(chat(stops))["stop"] == ["Q:"]
    assert sampling(chat(stops, stop="x"))["stop"] == ["Q:", "x"]
    assert sampling(chat(stops, stop=["x", "y"]))["stop"] == ["Q:", "x", "y"]


# -- messages ----------------------------------------------------------------------------------------------------------


def test_messages_as_a_template_gets_them() -> None:
    source = "{{ messages | tojson }}"
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "be brief", "name": "boss"},
        {"role": "user", "content": [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "content": "2", "tool_call_id": "c"},
        {"role": "assistant", "content": "two", "reasoning_content": "hm", "function_call": None},
    ]
    expected = [
        {"role": "system", "content": "be brief", "name": "boss"},
        {"role": "user", "content": "1 + 1"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}, "id": "c"}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c"},
        {"role": "assistant", "content": "two", "reasoning_content": "hm"},
    ]
    assert json.loads(read_chat({"messages": messages}, model(source)).body["text"]) == expected


def test_variables_of_the_template() -> None:
    source = "{{ enable_thinking }} {{ reasoning_effort }}"
    fields = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}
    assert chat(model(source), **fields).body["text"] == "False high"


def test_an_answer_that_has_begun_goes_on() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Well,"}]
    assert chat(messages=messages, continue_final_message=True).body["text"] == "<user>hi<a>Well,"
    assert chat(messages=messages, add_generation_prompt=False).body["text"] == "<user>hi<assistant>Well,"


# -- tools, formats, thoughts ------------------------------------------------------------------------------------------


def test_a_response_format_is_a_grammar() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    assert (
        '"integer"'
        in read_chat({"messages": HELLO, "response_format": form}, model()).body["sampling_params"]["json_schema"]
    )
    assert "json_schema" in read_completion({"prompt": "x", "response_format": form}).body["sampling_params"]


def test_tools_are_for_templates_that_know_them() -> None:
    knows = model("{{ tools | tojson }}<tool_call>")
    call = read_chat({"messages": HELLO, "tools": [TOOL]}, knows)
    assert '"add"' in call.body["text"] and call.parts.tools.choice == "auto"
    assert "ebnf" not in call.body["sampling_params"]
    forced = read_chat({"messages": HELLO, "tools": [TOOL], "tool_choice": "required"}, model())
    assert "ebnf" in forced.body["sampling_params"] and '"add"' not in forced.body["text"]
    none = read_chat({"messages": HELLO, "tools": [TOOL], "tool_choice": "none"}, knows)
    assert '"add"' not in none.body["text"] and not none.parts.tools.tools


def test_thoughts_are_split_where_the_template_knows_them() -> None:
    opens = model("{{ messages[0].content }}<think>\n{# </think> #}")
    assert chat(opens).parts.thinking is True
    assert chat(opens, separate_reasoning=False).parts.thinking is None
    assert chat(model("{{ messages[0].content }}{# </think> #}")).parts.thinking is False
    assert chat().parts.thinking is None


# -- what is refused ---------------------------------------------------------------------------------------------------


def part(**fields: Any) -> list[Any]:
    return [{"role": "user", "content": [fields]}]


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": HELLO * 10_001}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 10_001}]}, "messages[0].content"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
    ({"messages": [*HELLO, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": part(type="image_url", image_url={})}, "messages[0].content[0].type"),
    ({"messages": part(type="text")}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "assistant", "audio": {"id": "x"}}]}, "messages[0].audio"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"temperature": 101}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_completion_tokens": 1.5}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"stop": 3}, "stop"),
    ({"stop": [""]}, "stop[0]"),
    ({"seed": -1}, "seed"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"logit_bias": {"999": 1}}, "logit_bias.999"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": []}, "stream_options"),
    ({"stream_options": {"include": True}}, "stream_options.include"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"model": 5}, "model"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"functions": [{}]}, "functions"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0]"),
    ({"tools": [TOOL]}, "tools"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"foo": 1}, "foo"),
    ({"messages": [{"role": "user", "content": "x" * 60}]}, "messages"),
]
BAD_TEXTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [1, 300]}, "prompt[1]"),
    ({"prompt": [[1], []]}, "prompt[1]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": "x" * 64}, "prompt"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"best_of": 3, "n": 2}, "best_of"),
    ({"echo": 1}, "echo"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"max_tokens": "16"}, "max_tokens"),
    ({"messages": HELLO}, "messages"),
    ({"rid": ""}, "rid"),
    ({"bootstrap_room": 5}, "bootstrap_room"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS, ids=lambda value: str(value)[:60])
def test_bad_chats_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert (caught.value.param, caught.value.http_status) == (param, 400)
    assert param in caught.value.message and "sampling_params" not in caught.value.message


@pytest.mark.parametrize(("fields", "param"), BAD_TEXTS, ids=lambda value: str(value)[:60])
def test_bad_completions_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        complete(**fields)
    assert (caught.value.param, caught.value.http_status) == (param, 400)
    assert param in caught.value.message and "sampling_params" not in caught.value.message


def test_a_model_without_a_template_says_so() -> None:
    none = msgspec.structs.replace(model(), template=None)
    with pytest.raises(RequestError, match="--chat-template") as caught:
        chat(none)
    assert caught.value.code == "no_chat_template"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": HELLO}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
        ({"messages": []}, "messages"),
        ({"prompt": "x", "temperature": 1}, "temperature"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_bodies_of_tokenize(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_texts(body, model().template)
    assert caught.value.param == param
