"""From a sequence's updates to SGLang's answer objects, as JSON and as server-sent events.

One `Answer` a sequence. It is fed updates and can at any time be asked for its object: text and ids so far. The text
never takes back a character that it has shown: bytes that are not yet a character wait in the detokeniser, and an end
that may still grow into a stop string waits in the `StopTrimmer`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from common.errors import ErrorRecord
from common.sampling import FinishReason, TokenLogprob
from node.messages import Submit, Timing, Update
from node.resume import NOTHING, Resume
from node.tokenizer import Tokenizer

WEIGHT_VERSION = "default"
DONE_EVENT = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


class StopTrimmer:
    """Holds back the end of a growing text while it may be the beginning of a stop string.

    `shown` characters of the text may be given to the client.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._first_characters = frozenset(stop[0] for stop in stops)
        self._longest = max((len(stop) for stop in stops), default=1) - 1
        self._length = 0
        self._held = 0
        self.shown = 0

    def grow(self, text: str) -> None:
        """text: all of it so far."""
        self._held = self._longest_beginning(text, self._held + len(text) - self._length)
        self._length = len(text)
        self.shown = max(self.shown, len(text) - self._held)

    def finish(self, text: str, matched: str | None, searched_from: int) -> None:
        """The text is complete. It is cut before `matched`, which lies at or after searched_from (characters)."""
        found = -1 if matched is None else text.find(matched, max(0, searched_from))
        self.shown = len(text) if found < 0 else found

    def _longest_beginning(self, text: str, limit: int) -> int:
        """Length of the longest end of the text that a stop string begins with, the whole stop string excepted.

        limit: it is no longer, since what was held before has only grown by the new text. So each character costs a
        fixed number of looks, however long the stop strings are.
        """
        for length in range(min(self._longest, limit), 0, -1):
            if text[-length] in self._first_characters and self._begins(text[-length:]):
                return length
        return 0

    def _begins(self, end: str) -> bool:
        return any(len(stop) > len(end) and stop.startswith(end) for stop in self._stops)


LogprobEntry = tuple[float | None, int, str | None]


class LogprobLists:
    """Log-probabilities in SGLang's form, made once a token: an answer repeats all of them in every event.

    tokens: [logprob, id, text] of each token. alternatives: the same of the likeliest ones there, None where there are
    none (the first token of a prompt).
    """

    def __init__(self, token_text: Callable[[int], str | None]) -> None:
        self._token_text = token_text
        self.tokens: list[LogprobEntry] = []
        self.alternatives: list[list[LogprobEntry] | None] = []

    def extend(self, logprobs: list[TokenLogprob]) -> None:
        text = self._token_text
        for item in logprobs:
            self.tokens.append((item.logprob, item.token_id, text(item.token_id)))
            self.alternatives.append([(value, i, text(i)) for value, i in item.top] if item.top else None)


class Answer:
    """What the client gets for one sequence. return_text: put the text of each token beside its logprob.

    resume: the beginning of the answer, which another node has made and the client has seen.
    """

    def __init__(self, submit: Submit, tokenizer: Tokenizer, *, return_text: bool, resume: Resume = NOTHING) -> None:
        sampling = submit.sampling
        self._submit = submit
        self._tokenizer = tokenizer
        self._return_text = return_text
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=sampling.skip_special_tokens)
        self._trimmer = StopTrimmer(() if sampling.no_stop_trim else sampling.stop)
        self._output_ids = list(resume.output_ids)
        self._text = self._detokenizer.push(self._output_ids)
        self._trimmer.grow(self._text)
        self._input_logprobs = LogprobLists(self._token_text)
        self._output_logprobs = LogprobLists(self._token_text)
        self._output_logprobs.tokens += resume.token_logprobs
        self._output_logprobs.alternatives += resume.top_logprobs
        self.dp_rank: int | None = None
        """Of this node, once a rank has it."""
        self._num_cached_tokens = 0
        self._num_local_cached_tokens = 0
        self._finish: FinishReason | None = None
        self._timing: Timing | None = None
        self._end_s = 0.0
        self._num_reported = len(self._output_ids)

    @property
    def is_finished(self) -> bool:
        return self._finish is not None

    def feed(self, update: Update) -> None:
        self._output_ids += update.token_ids
        self._output_logprobs.extend(update.logprobs)
        self._num_cached_tokens = update.num_cached_tokens
        self._num_local_cached_tokens = update.num_local_cached_tokens
        if update.input_logprobs is not None:
            self._input_logprobs.extend(update.input_logprobs)
        length_before = len(self._text)
        self._text += self._detokenizer.push(self._visible_ids(update))
        if update.finish is None:
            self._trimmer.grow(self._text)
        else:
            self._end(update.finish, update.timing, length_before)

    def take_due(self) -> bool:
        """Whether an event is due (it then counts as made): at the first token, each stream_interval-th and the end."""
        since = len(self._output_ids) - self._num_reported
        due = self.is_finished or self._num_reported == 0 or since >= self._submit.sampling.stream_interval
        if due:
            self._num_reported = len(self._output_ids)
        return due

    def object(self) -> dict[str, Any]:
        """SGLang's answer object. `timing` and `transfer_bytes` are ours, on the last one of a sequence."""
        return {
            "text": self._text[: self._trimmer.shown],
            "output_ids": self._output_ids,
            "meta_info": self._meta_info(),
        }

    def _visible_ids(self, update: Update) -> list[int]:
        """The ids whose text is shown: without the token that ended the sequence."""
        finish = update.finish
        if finish is None or not isinstance(finish.matched, int) or self._submit.sampling.no_stop_trim:
            return update.token_ids
        return update.token_ids[:-1] if update.token_ids[-1:] == [finish.matched] else update.token_ids

    def _end(self, finish: FinishReason, timing: Timing | None, length_before: int) -> None:
        self._text += self._detokenizer.finish()
        matched = finish.matched if isinstance(finish.matched, str) and not self._submit.sampling.no_stop_trim else None
        self._trimmer.finish(self._text, matched, length_before - len(matched or "") + 1)
        self._finish, self._timing = finish, timing
        self._end_s = time.monotonic()

    def _meta_info(self) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self._submit.rid,
            "finish_reason": None if self._finish is None else finish_object(self._finish),
            "prompt_tokens": len(self._submit.token_ids),
            "completion_tokens": len(self._output_ids),
            "cached_tokens": self._num_cached_tokens,
            "weight_version": WEIGHT_VERSION,
        }
        if self.dp_rank is not None:
            meta["dp_rank"] = self.dp_rank
        if self._submit.room is not None:
            meta["cached_tokens_details"] = {
                "prefill": self._num_cached_tokens,
                "decode": self._num_local_cached_tokens,
            }
        if self._submit.logprobs.wanted:
            meta |= self._logprobs()
        if self.is_finished:
            meta["e2e_latency"] = self._end_s - self._submit.arrival_s
            meta |= timing_fields(self._timing or Timing())
        return meta

    def _logprobs(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "input_token_logprobs": self._input_logprobs.tokens,
            "output_token_logprobs": self._output_logprobs.tokens,
        }
        if self._submit.logprobs.top_num > 0:
            fields["input_top_logprobs"] = self._input_logprobs.alternatives
            fields["output_top_logprobs"] = self._output_logprobs.alternatives
        return fields

    def _token_text(self, token_id: int) -> str | None:
        return self._tokenizer.token_text(token_id) if self._return_text else None


def finish_object(finish: FinishReason) -> dict[str, Any]:
    match finish.type:
        case "stop":
            return {"type": "stop", "matched": finish.matched}
        case "length":
            return {"type": "length", "length": finish.length}
        case unknown:
            raise AssertionError(f"unknown finish reason {unknown}")


def timing_fields(timing: Timing) -> dict[str, Any]:
    return {
        "timing": {
            "queue_s": timing.queue_s,
            "prefill_s": timing.prefill_s,
            "transfer_s": timing.transfer_s,
            "decode_s": timing.decode_s,
        },
        "transfer_bytes": timing.transfer_bytes,
    }


def json_bytes(value: object) -> bytes:
    """JSON; numbers that JSON has no word for (NaN, Infinity) become null."""
    return _encode(value)


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def error_event(error: ErrorRecord) -> bytes:
    return event(error.body())
