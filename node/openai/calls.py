"""A call of an OpenAI endpoint, read: the /generate body that means the same, and what its answer has to look like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from node.openai.chat_text import ChatParts
from node.openai.fields import Wishes


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """names: fields of the /generate body by what the client called them, for errors. special_tokens: whether the
    tokenizer adds those that it adds to a text; a chat template has written its own. parts: of a chat's answer."""

    body: dict[str, Any]
    wishes: Wishes
    names: Mapping[str, str]
    special_tokens: bool
    parts: ChatParts = ChatParts()
