"""POST /v1/chat/completions: the body as a /generate body, with the prompt that the model's chat template makes."""

from __future__ import annotations

from typing import Any

import msgspec

from common.constraints import GRAMMARS, constraints, thought_of
from common.errors import RequestError
from common.reasoning import ReasoningParser, opens_thinking, splits_reasoning
from common.refusals import refuse
from common.response_format import read_response_format
from common.tools import NO_TOOLS, ToolRequest, check_template, read_tools, tool_format
from node.chat_template import ChatTemplate
from node.fields import NumberRule, read_bool, read_number
from node.openai.calls import Call
from node.openai.chat_text import ChatParts
from node.openai.fields import (
    COMMON,
    MAX_TOP_LOGPROBS,
    check_unsupported,
    constrain,
    generate_fields,
    given,
    read_wishes,
)
from node.openai.messages import Message, read_messages

_TOP_LOGPROBS = NumberRule(integer=True, low=0, high=MAX_TOP_LOGPROBS)
_UNSUPPORTED = frozenset(["functions", "function_call", "audio", "prediction", "web_search_options", "task"])
_IGNORED = frozenset(
    [
        "verbosity",
        "stream_reasoning",
        "return_meta_info",
        "return_prompt_token_ids",
        "max_dynamic_patch",
        "min_dynamic_patch",
        "use_audio_in_video",
    ]
)
TEMPLATE_FIELDS = frozenset(
    ["messages", "chat_template_kwargs", "reasoning_effort", "continue_final_message", "add_generation_prompt"]
)
_KNOWN = (
    COMMON
    | _UNSUPPORTED
    | _IGNORED
    | TEMPLATE_FIELDS
    | {"tools", "tool_choice", "parallel_tool_calls", "separate_reasoning"}
    | {"max_tokens", "max_completion_tokens", "top_logprobs", "modalities"}
)
_NAMES = {"text": "messages", "input_ids": "messages", "top_logprobs_num": "top_logprobs"}
_RESERVED = ("messages", "tools", "add_generation_prompt")


class ChatModel(msgspec.Struct, frozen=True, kw_only=True):
    """How this model chats. template: None where it has none. reasoning: how thoughts are told from content.
    special_tokens, tag_tokens: the tokenizer's."""

    template: ChatTemplate | None
    reasoning: ReasoningParser
    special_tokens: frozenset[str]
    tag_tokens: frozenset[str]

    @property
    def tool_source(self) -> str | None:
        return None if self.template is None else self.template.tool_source

    @property
    def splits_reasoning(self) -> bool:
        return splits_reasoning(self.reasoning, None if self.template is None else self.template.source)


def read_chat(raw: dict[str, Any], model: ChatModel) -> Call:
    """Raises RequestError. What /generate has to say of the fields it says itself."""
    fields = given(raw, _KNOWN)
    check_unsupported(fields, _UNSUPPORTED)
    if fields.get("modalities", ["text"]) != ["text"]:
        refuse("modalities", fields["modalities"], '["text"]')
    tools = read_tools(fields)
    check_template(tools, model.tool_source)
    prompt = render(fields, model.template, tools)
    body = generate_fields(fields, _max_tokens(fields)) | {"text": prompt}
    constrained = _constraints(fields, prompt, tools, model)
    source = "tools" if tools.is_forced else "response_format"
    names = constrain(body["sampling_params"], constrained, source)
    if constrained.keys().isdisjoint(GRAMMARS):  # a grammar says itself where an answer ends
        _add_stops(body["sampling_params"], model.template)
    logprobs = read_bool("logprobs", fields.get("logprobs", False))
    body |= _logprob_fields(fields, logprobs=logprobs)
    return Call(
        body=body,
        wishes=read_wishes(fields, logprobs=logprobs),
        names=_NAMES | names,
        special_tokens=False,
        parts=_parts(fields, prompt, tools, model),
    )


def _constraints(fields: dict[str, Any], prompt: str, tools: ToolRequest, model: ChatModel) -> dict[str, Any]:
    """What response format and tools make of `sampling_params`."""
    schema = read_response_format(fields.get("response_format"))
    thought = thought_of(prompt, splits=model.splits_reasoning)
    form = tool_format(model.tool_source)
    return constraints(schema, tools, form, thought, model.special_tokens, model.tag_tokens)


def _parts(fields: dict[str, Any], prompt: str, tools: ToolRequest, model: ChatModel) -> ChatParts:
    separate = read_bool("separate_reasoning", fields.get("separate_reasoning", True))
    thinking = opens_thinking(prompt) if separate and model.splits_reasoning else None
    return ChatParts(thinking=thinking, tools=tools, form=tool_format(model.tool_source))


def render(fields: dict[str, Any], template: ChatTemplate | None, tools: ToolRequest = NO_TOOLS) -> str:
    """The prompt of `messages`. With continue_final_message the answer goes on with the last one, the assistant's."""
    if template is None:
        raise RequestError(
            "messages: this model has no chat template; start the node with --chat-template, or use /v1/completions",
            code="no_chat_template",
            param="messages",
        )
    messages = read_messages(fields.get("messages"))
    begun = _begun_answer(messages, fields)
    prompt = template.render(
        messages,
        tools=tools.raw or None,
        add_generation_prompt=read_bool("add_generation_prompt", fields.get("add_generation_prompt", True)),
        variables=_variables(fields),
    )
    if not prompt and not begun:
        raise RequestError("messages: the chat template makes nothing of them", param="messages")
    return prompt + begun


def _begun_answer(messages: list[Message], fields: dict[str, Any]) -> str:
    """Takes it off the messages."""
    if not read_bool("continue_final_message", fields.get("continue_final_message", False)):
        return ""
    if messages[-1]["role"] != "assistant" or "tool_calls" in messages[-1]:
        refuse("continue_final_message", True, "false unless the last message is the assistant's, and its text")
    return str(messages.pop()["content"])


def _variables(fields: dict[str, Any]) -> dict[str, Any]:
    value = fields.get("chat_template_kwargs", {})
    if not isinstance(value, dict):
        refuse("chat_template_kwargs", value, "an object of the template's variables")
    for name in _RESERVED:
        if name in value:
            path = f"chat_template_kwargs.{name}"
            raise RequestError(f"{path}: a field of the request, not a variable of the template", param=path)
    effort = {"reasoning_effort": fields["reasoning_effort"]} if "reasoning_effort" in fields else {}
    return effort | value


def _add_stops(sampling: dict[str, Any], template: ChatTemplate | None) -> None:
    """The template's own beside the client's, whatever that is."""
    stops = list(template.stop_strings) if template is not None else []
    asked = sampling.get("stop") or []
    if stops and isinstance(asked, str | list):
        sampling["stop"] = stops + ([asked] if isinstance(asked, str) else asked)


def _max_tokens(fields: dict[str, Any]) -> Any:
    """Of both names the newer one counts. None: as many as fit."""
    return fields.get("max_completion_tokens", fields.get("max_tokens"))


def _logprob_fields(fields: dict[str, Any], *, logprobs: bool) -> dict[str, Any]:
    top = read_number("top_logprobs", fields.get("top_logprobs", 0), _TOP_LOGPROBS)
    if not logprobs:
        if top:
            refuse("top_logprobs", top, "left out, or logprobs must be true")
        return {}
    return {"return_logprob": True, "top_logprobs_num": top}
