"""Chat templates against transformers, which is what they are written for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers import PreTrainedTokenizerFast

from common.errors import ConfigError, RequestError
from node.chat_template import ChatTemplate, load_chat_template
from tests.support.stack import MODEL

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = """{{ bos_token }}
{%- for message in messages %}
    {%- if loop.first and message.role != "system" %}
        {{- '<|im_start|>system\nYou help.<|im_end|>\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\n' }}
    {% generation %}{{- message.content | trim }}{% endgeneration %}
    {{- '<|im_end|>' + '\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
TOOLS = """{%- if tools %}
{{- "Tools:\n" }}
{%- for tool in tools %}
{{ tool | tojson }}{{ "\n" }}
{%- endfor %}
{%- endif %}
{%- for message in messages if message.role != 'system' %}
  {%- if message.tool_calls %}
    {%- for call in message.tool_calls %}
<call>{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson(indent=2) }}</call>
    {%- endfor %}
  {%- elif message.role == "tool" %}
<result>{{ message.content }}</result>
  {%- else %}
{{ message.role }}: {{ message.content }}
  {%- endif %}
{%- endfor %}{{ eos_token }}"""
THINKING = """{%- set ns = namespace(enable_thinking=true) %}
{%- for message in messages %}
    {%- if '/no_think' in message.content %}{% set ns.enable_thinking = false %}
    {%- elif '/think' in message.content %}{% set ns.enable_thinking = true %}{% endif %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
{{- '<' + message.role + '>' }}{{ message.content.replace('/no_think', '').replace('/think', '').strip() }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<assistant>' }}{{ '<think>\n' if enable_thinking | default(ns.enable_thinking) else '<think></think>' }}
{%- endif %}"""
MACRO = """{%- macro say(role, text='') -%}
    [{{ role | upper }}] {{ text }}
{% endmacro -%}
{%- for m in messages %}{% if loop.index0 == 3 %}{% break %}{% endif %}{{ say(m.role, m.content) }}{% endfor -%}
{{ [1, 2] | tojson }} {{ {"é<>&'": "ü"} | tojson }} {{ dict(a=1) | tojson(separators=(',', ':')) }}
{{ strftime_now('%Y') }}"""

CHAT = [
    {"role": "system", "content": "Be <b>brief</b> & 'kind'. /no_think"},
    {"role": "user", "content": "  Wie spät ist es? 😀 \n"},
    {"role": "assistant", "content": "Spät."},
    {"role": "user", "content": "Danke {{ 7 * 7 }}"},
]
CALLS = [
    {"role": "user", "content": "add"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2, "ü"]}}}
        ],
    },
    {"role": "tool", "content": "3", "tool_call_id": "c"},
]
SPECS = [{"type": "function", "function": {"name": "add", "description": "<é>", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(MODEL / "tokenizer.json"), **TOKENS)


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("messages", [CHAT, CALLS, CHAT[1:2]], ids=["chat", "calls", "one"])
@pytest.mark.parametrize("source", [CHATML, TOOLS, THINKING, MACRO], ids=["chatml", "tools", "thinking", "macro"])
def test_templates_give_what_transformers_gives(
    source: str, messages: list[dict[str, Any]], generate: bool, reference: PreTrainedTokenizerFast
) -> None:
    for tools in (None, SPECS):
        for variables in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
            expected = reference.apply_chat_template(
                messages,
                chat_template=source,
                tools=tools,
                add_generation_prompt=generate,
                tokenize=False,
                **variables,
            )
            template = ChatTemplate(source, TOKENS)
            found = template.render(messages, tools=tools, add_generation_prompt=generate, variables=variables)
            assert found == expected


def test_the_bundled_model_is_asked_as_it_was_taught() -> None:
    template = load_chat_template(str(MODEL), None)
    assert template is not None and template.stop_strings == ("Question",)
    messages = [{"role": "user", "content": "A?"}, {"role": "assistant", "content": " 1\n#### 1\n"}]
    prompt = template.render([*messages, {"role": "user", "content": "B?"}])
    assert prompt == "Question: A?\nAnswer: 1\n#### 1\n\nQuestion: B?\nAnswer:"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content }}",
        "{{ messages + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{% set _ = messages.append(1) %}",
        "{% for i in range(999999999) %}x{% endfor %}",
        "{{ 'x' * 99999999 }}",
    ],
)
def test_what_a_template_does_not_take_is_the_clients_error(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


def test_where_a_template_comes_from(tmp_path: Path) -> None:
    assert load_chat_template(str(tmp_path), None) is None
    config = {"chat_template": "old {{ bos_token }}", "bos_token": {"content": "<B>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert rendered(tmp_path) == "old <B>"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert rendered(tmp_path) == "plain"
    found = load_chat_template(str(tmp_path), None)
    assert found is not None and found.render([], tools=SPECS) == "tools"
    (tmp_path / "chat_template.jinja").write_text("new")
    assert rendered(tmp_path) == "new"
    (tmp_path / "own.jinja").write_text("own")
    assert rendered(tmp_path, str(tmp_path / "own.jinja")) == "own"


def rendered(folder: Path, file: str | None = None) -> str:
    template = load_chat_template(str(folder), file)
    assert template is not None
    return template.render([])


@pytest.mark.parametrize(("content", "words"), [(None, "No such file"), (b"{% if %}", "line 1"), (b"\xff", "codec")])
def test_a_file_that_is_no_template_is_refused_at_start(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "own.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        load_chat_template(str(tmp_path), str(file))
    assert caught.value.param == "chat_template" and "--chat-template" in caught.value.message


def test_a_template_cannot_change_its_sandbox() -> None:
    with pytest.raises(jinja2.TemplateSyntaxError):
        ChatTemplate("{% import 'os' as %}", {})
