"""The answers of OpenAI's endpoints: objects and chunks around choices, the usage, and this project's own part."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from node.answers import event
from node.openai.choices import AnswerObject, Choices
from node.openai.fields import StreamOptions

OWN_FIELD = "tandem"


class OpenAIAnswer:
    """Of one request. kind: `chat.completion` or `text_completion`. samples: choices of each prompt."""

    def __init__(
        self,
        kind: str,
        request_id: str,
        model: str,
        choices: Sequence[Choices],
        *,
        samples: int,
        options: StreamOptions,
    ) -> None:
        self._kind = kind
        self._head = {"id": request_id, "created": int(time.time()), "model": model}
        self._choices = choices
        self._samples = samples
        self._options = options
        self._metas: dict[int, dict[str, Any]] = {}

    def whole(self, answers: Sequence[AnswerObject]) -> dict[str, Any]:
        """The JSON answer. answers: of all sequences, in order."""
        self._metas = {place: answer["meta_info"] for place, answer in enumerate(answers)}
        choices = [choice.whole(answer) for choice, answer in zip(self._choices, answers, strict=True)]
        return {**self._object(self._kind, choices), "usage": self._usage(), OWN_FIELD: self._own()}

    def events(self, answers: Sequence[AnswerObject], *, is_last: bool) -> bytes:
        """The chunks of what is new. is_last: the request has ended; its last chunk has this project's own part."""
        chunks = []
        for answer in answers:
            place = answer.get("index", 0)
            self._metas[place] = answer["meta_info"]
            chunks += [self._chunk([choice]) for choice in self._choices[place].take(answer)]
        if is_last and self._options.include_usage:
            chunks.append(self._chunk([]) | {"usage": self._usage()})
        if is_last and chunks:
            chunks[-1][OWN_FIELD] = self._own()
        return b"".join(map(event, chunks))

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._kind == "chat.completion" else self._kind
        chunk = self._object(kind, choices)
        if self._options.continuous_usage_stats:
            return chunk | {"usage": self._usage()}
        return chunk | ({"usage": None} if self._options.include_usage else {})

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"object": kind, **self._head, "choices": choices}

    def _usage(self) -> dict[str, Any]:
        """So far. A prompt counts once, however many answers it has."""
        prompts = [meta for place, meta in self._metas.items() if place % self._samples == 0]
        prompt = sum(meta["prompt_tokens"] for meta in prompts)
        completion = sum(meta["completion_tokens"] for meta in self._metas.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(meta["cached_tokens"] for meta in prompts)},
        }

    def _own(self) -> dict[str, Any]:
        """Times and rank of the sequence that took longest, bytes of all."""
        metas = [meta for meta in self._metas.values() if "timing" in meta]
        if not metas:
            return {}
        longest = max(metas, key=lambda meta: float(meta["e2e_latency"]))
        usage = self._usage()
        transfer_bytes: dict[str, int] = {}
        for meta in metas:
            for part, size in meta["transfer_bytes"].items():
                transfer_bytes[part] = transfer_bytes.get(part, 0) + size
        return {
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "e2e_latency": longest["e2e_latency"],
            "timing": longest["timing"],
            "transfer_bytes": transfer_bytes,
            **({"dp_rank": longest["dp_rank"]} if "dp_rank" in longest else {}),
        }
