"""Log-probabilities as OpenAI shows them, from SGLang's lists of [logprob, token id, text]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from node.answers import LogprobEntry
from node.tokenizer import Tokenizer

LOWEST = -9999.0
"""For a probability of zero, whose logarithm JSON has no number for."""

Alternatives = list[LogprobEntry] | None


class TokenNames:
    """What a token is called. One that is no text by itself is called by its bytes: `bytes:\\xe2\\x82`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def bytes_of(self, token_id: int) -> bytes:
        return self._tokenizer.piece(token_id)

    def name(self, token_id: int) -> str:
        piece = self.bytes_of(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def finite(logprob: float | None) -> float:
    return LOWEST if logprob is None or not math.isfinite(logprob) else logprob


def chat_logprobs(names: TokenNames, entries: Sequence[LogprobEntry], tops: Sequence[Alternatives]) -> dict[str, Any]:
    """`logprobs` of a chat's choice. tops: alternatives of each entry, or nothing at all."""
    content = [
        _token(names, entry) | {"top_logprobs": [_token(names, item) for item in top or ()]}
        for entry, top in zip(entries, tops or [None] * len(entries), strict=True)
    ]
    return {"content": content, "refusal": None}


def _token(names: TokenNames, entry: LogprobEntry) -> dict[str, Any]:
    logprob, token_id, _ = entry
    return {
        "token": names.name(token_id),
        "logprob": finite(logprob),
        "bytes": list(names.bytes_of(token_id)),
    }


class TextLogprobs:
    """`logprobs` of a completion's choice, piece by piece. offset: characters of the text in front of the first token.

    A token's offset is the number of whole characters before it.
    """

    def __init__(self, names: TokenNames, tokenizer: Tokenizer, *, skip_special_tokens: bool, offset: int) -> None:
        self._names = names
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
        self._offset = offset

    def take(self, entries: Sequence[LogprobEntry], tops: Sequence[Alternatives]) -> dict[str, list[Any]]:
        """Of the next tokens."""
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry, top in zip(entries, tops or [None] * len(entries), strict=True):
            logprob, token_id, _ = entry
            found["tokens"].append(self._names.name(token_id))
            found["token_logprobs"].append(None if logprob is None else finite(logprob))
            found["top_logprobs"].append(None if logprob is None else self._top(entry, top))
            found["text_offset"].append(self._offset)
            self._offset += len(self._detokenizer.push([token_id]))
        return found

    def _top(self, entry: LogprobEntry, top: Alternatives) -> dict[str, float]:
        """The likeliest ones by name, and the token itself, which need not be among them."""
        by_name: dict[str, float] = {}
        for logprob, token_id, _ in [*(top or ()), entry]:
            by_name.setdefault(self._names.name(token_id), finite(logprob))
        return by_name
