"""POST /tokenize and POST /detokenize, as SGLang and vLLM have them."""

from __future__ import annotations

from typing import Any

import msgspec

from common.errors import RequestError
from common.refusals import refuse
from common.tools import read_tools
from node.chat_template import ChatTemplate
from node.fields import read_bool, read_token_ids
from node.openai.chat import TEMPLATE_FIELDS, render
from node.openai.fields import given
from node.openai.logprobs import TokenNames
from node.tokenizer import Tokenizer

MAX_LISTS = 512
_TOKENIZE = TEMPLATE_FIELDS | {
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "model",
    "prompt",
    "add_special_tokens",
    "return_token_strs",
}
_DETOKENIZE = frozenset(["model", "tokens", "skip_special_tokens"])


class Texts(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be tokenised. field: where it comes from. is_list: the client gave a list."""

    texts: list[str]
    field: str
    is_list: bool
    special_tokens: bool
    token_strs: bool

    def answer(self, tokens: list[list[int]], names: TokenNames, context_length: int) -> dict[str, Any]:
        """tokens: of each text. Raises RequestError when the last one was too long for those after it to be made."""
        if len(tokens) < len(self.texts):
            raise RequestError(
                f"{self.field}: more than {context_length} tokens", code="context_length_exceeded", param=self.field
            )
        counts = [len(ids) for ids in tokens]
        answer: dict[str, Any] = {
            "tokens": tokens if self.is_list else tokens[0],
            "count": counts if self.is_list else counts[0],
            "max_model_len": context_length,
        }
        if self.token_strs:
            strings = [[names.name(token_id) for token_id in ids] for ids in tokens]
            answer["token_strs"] = strings if self.is_list else strings[0]
        return answer


def read_texts(raw: dict[str, Any], template: ChatTemplate | None) -> Texts:
    """Of /tokenize: `prompt`, a string or a list of strings, or `messages`. Raises RequestError."""
    fields = given(raw, _TOKENIZE)
    if ("prompt" in fields) == ("messages" in fields):
        raise RequestError("prompt or messages: one of them must be given", param="prompt")
    is_chat = "messages" in fields
    prompt = render(fields, template, read_tools(fields)) if is_chat else fields["prompt"]
    texts = prompt if isinstance(prompt, list) else [prompt]
    if not all(isinstance(text, str) for text in texts) or not 0 < len(texts) <= MAX_LISTS:
        refuse("prompt", prompt, f"a string or a list of 1 to {MAX_LISTS} strings")
    return Texts(
        texts=texts,
        field="messages" if is_chat else "prompt",
        is_list=isinstance(prompt, list),
        special_tokens=read_bool("add_special_tokens", fields.get("add_special_tokens", not is_chat)),
        token_strs=read_bool("return_token_strs", fields.get("return_token_strs", False)),
    )


def detokenize(raw: dict[str, Any], tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """`tokens`, a list of ids or a list of such lists, as `text` (SGLang's name) and `prompt` (vLLM's)."""
    fields = given(raw, _DETOKENIZE)
    tokens: Any = fields.get("tokens")
    is_list = isinstance(tokens, list) and bool(tokens) and isinstance(tokens[0], list)
    if is_list and len(tokens) > MAX_LISTS:
        refuse("tokens", f"{len(tokens)} lists", f"at most {MAX_LISTS}")
    lists = tokens if is_list else [tokens]
    skips = read_bool("skip_special_tokens", fields.get("skip_special_tokens", True))
    texts = [
        tokenizer.decode(read_token_ids(f"tokens[{i}]" if is_list else "tokens", ids, vocab_size), skips)
        for i, ids in enumerate(lists)
    ]
    text = texts if is_list else texts[0]
    return {"text": text, "prompt": text}
