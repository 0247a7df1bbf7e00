"""One choice of an OpenAI answer, from the answer object of its sequence: at once, or piece by piece.

An answer object holds all of the text so far; a choice of a chunk holds what is new.
"""

from __future__ import annotations

from typing import Any, Protocol

from node.answers import LogprobEntry
from node.openai.chat_text import ChatText
from node.openai.logprobs import Alternatives, TextLogprobs, TokenNames, chat_logprobs

AnswerObject = dict[str, Any]
Choice = dict[str, Any]


class Choices(Protocol):
    """Of one sequence."""

    def whole(self, answer: AnswerObject) -> Choice:
        """The choice of a JSON answer."""
        ...

    def take(self, answer: AnswerObject) -> list[Choice]:
        """The choices of the next chunks, maybe none: what is new since the last call."""
        ...


class NewPart:
    """What of a growing answer object has not been sent. A text or token that a resumed answer begins with has been."""

    def __init__(self, sent_characters: int = 0, sent_tokens: int = 0) -> None:
        self._characters = sent_characters
        self._tokens = sent_tokens
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[LogprobEntry] = []
        self.alternatives: list[Alternatives] = []

    def read(self, answer: AnswerObject) -> None:
        meta = answer["meta_info"]
        self.text = answer["text"][self._characters :]
        self.token_ids = answer["output_ids"][self._tokens :]
        self.logprobs = meta.get("output_token_logprobs", [])[self._tokens :]
        self.alternatives = meta.get("output_top_logprobs", [])[self._tokens :]
        self._characters = len(answer["text"])
        self._tokens = len(answer["output_ids"])


class TextChoice:
    """Of /v1/completions. prompt: what is echoed. prompt_logprobs, logprobs: writers, None when nobody asked.

    shows_output False: on a prefill node, whose token another node's answer holds too.
    """

    def __init__(
        self,
        index: int,
        new: NewPart,
        *,
        prompt: str,
        prompt_logprobs: TextLogprobs | None,
        logprobs: TextLogprobs | None,
        token_ids: bool,
        shows_output: bool = True,
    ) -> None:
        self._index = index
        self._new = new
        self._prompt = prompt
        self._prompt_logprobs = prompt_logprobs
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._shows_output = shows_output

    def whole(self, answer: AnswerObject) -> Choice:
        self._new.read(answer)
        return self._choice(answer)

    def take(self, answer: AnswerObject) -> list[Choice]:
        self._new.read(answer)
        choice = self._choice(answer)
        is_empty = not choice["text"] and choice["logprobs"] is None and not self._token_ids
        return [] if is_empty and choice["finish_reason"] is None else [choice]

    def _choice(self, answer: AnswerObject) -> Choice:
        prompt, self._prompt = self._prompt, ""
        choice = {
            "index": self._index,
            "text": prompt + self._new.text,
            "logprobs": self._take_logprobs(answer),
            **finish_fields(answer),
        }
        return choice | ({"token_ids": self._new.token_ids} if self._token_ids else {})

    def _take_logprobs(self, answer: AnswerObject) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        meta = answer["meta_info"]
        parts = []
        if self._prompt_logprobs is not None:
            parts.append(self._prompt_logprobs.take(meta["input_token_logprobs"], meta.get("input_top_logprobs", [])))
            self._prompt_logprobs = None
        if self._shows_output:
            parts.append(self._logprobs.take(self._new.logprobs, self._new.alternatives))
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [value for part in parts for value in part[name]] for name in names}


class ChatChoice:
    """Of /v1/chat/completions. names: of tokens, when log-probabilities are wanted. begun: a resumed answer, whose
    client has the role.

    All that is new goes into one chunk, the finish reason too: so a router that has half of a stream knows by its
    chunks which tokens its client has seen.
    """

    def __init__(
        self, index: int, new: NewPart, text: ChatText, *, names: TokenNames | None, token_ids: bool, begun: bool
    ) -> None:
        self._index = index
        self._new = new
        self._text = text
        self._names = names
        self._token_ids = token_ids
        self._begun = begun

    def whole(self, answer: AnswerObject) -> Choice:
        self._new.read(answer)
        message = self._text.whole(answer["text"]).message()
        return self._choice({"message": message}, answer)

    def take(self, answer: AnswerObject) -> list[Choice]:
        """The role comes first, in a chunk of its own, as clients know it."""
        self._new.read(answer)
        choices: list[Choice] = []
        if not self._begun:
            self._begun = True
            role = {"role": "assistant", "content": ""}
            choices.append({"index": self._index, "delta": role, "logprobs": None, "finish_reason": None})
        is_last = answer["meta_info"]["finish_reason"] is not None
        delta = self._text.push(self._new.text, is_last=is_last).delta()
        shows_tokens = bool(self._new.token_ids) and (self._names is not None or self._token_ids)
        if delta or is_last or shows_tokens:
            choices.append(self._choice({"delta": delta}, answer))
        return choices

    def _choice(self, fields: dict[str, Any], answer: AnswerObject) -> Choice:
        choice = {"index": self._index, **fields, "logprobs": self._logprobs(), **finish_fields(answer)}
        if self._text.has_calls and choice["finish_reason"] == "stop":
            choice["finish_reason"] = "tool_calls"
        return choice | ({"token_ids": self._new.token_ids} if self._token_ids else {})

    def _logprobs(self) -> dict[str, Any] | None:
        if self._names is None:
            return None
        return chat_logprobs(self._names, self._new.logprobs, self._new.alternatives)


def finish_fields(answer: AnswerObject) -> dict[str, Any]:
    """`finish_reason`, null while the answer goes on, and what stopped it, as an SGLang server tells."""
    reason = answer["meta_info"]["finish_reason"]
    if reason is None:
        return {"finish_reason": None}
    return {"finish_reason": reason["type"], "matched_stop": reason.get("matched")}
