"""What the text of a chat's answer is made of: a thought, calls of tools, and content, as it comes."""

from __future__ import annotations

from typing import Any

import msgspec

from common.reasoning import ReasoningSplitter, split_reasoning
from common.tools import NO_TOOLS, ToolCall, ToolFormat, ToolRequest, ToolSplitter


class ChatParts(msgspec.Struct, frozen=True, kw_only=True):
    """What is looked for in an answer. thinking: whether the prompt has opened a thought, None: thoughts are not told
    from content. tools, form: what may be called, and how the model writes that."""

    thinking: bool | None = None
    tools: ToolRequest = NO_TOOLS
    form: ToolFormat = ToolFormat.PLAIN


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """What a piece of text adds."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = []

    def delta(self) -> dict[str, Any]:
        """The fields of a chunk's `delta`."""
        fields: dict[str, Any] = {}
        if self.reasoning:
            fields["reasoning_content"] = self.reasoning
        if self.content:
            fields["content"] = self.content
        if self.calls:
            fields["tool_calls"] = [{"index": call.index, **_call(call)} for call in self.calls]
        return fields

    def message(self) -> dict[str, Any]:
        """The `message` of a whole answer. Content is null where calls are all that there is."""
        content = self.content if self.content or not self.calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [_call(call) for call in self.calls]
        return message


class ChatText:
    """Of one sequence. rid: its name, after which its calls are named."""

    def __init__(self, parts: ChatParts, rid: str) -> None:
        self._thinking = parts.thinking
        self._reasoning = ReasoningSplitter(thinking=parts.thinking) if parts.thinking is not None else None
        self._tools = ToolSplitter(parts.form, parts.tools, rid) if parts.tools.tools else None

    @property
    def has_calls(self) -> bool:
        return self._tools is not None and self._tools.num_calls > 0

    def push(self, text: str, *, is_last: bool) -> Piece:
        """The next piece of a text, maybe its last."""
        reasoning, content = "", text
        if self._reasoning is not None:
            reasoning, content = self._reasoning.push(text)
            if is_last:
                rest = self._reasoning.finish()
                reasoning, content = reasoning + rest.reasoning, content + rest.content
        return self._piece(reasoning, content, is_last=is_last)

    def whole(self, text: str) -> Piece:
        """All of a text at once."""
        reasoning, content = "", text
        if self._thinking is not None:
            reasoning, content = split_reasoning(text, thinking=self._thinking)
        return self._piece(reasoning, content, is_last=True)

    def _piece(self, reasoning: str, content: str, *, is_last: bool) -> Piece:
        calls: list[ToolCall] = []
        if self._tools is not None:
            content, calls = self._tools.push(content)
            if is_last:
                rest = self._tools.finish()
                content, calls = content + rest.content, calls + rest.calls
        return Piece(reasoning=reasoning, content=content, calls=calls)


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
