"""When an answer is over: end token, stop token, stop string or length, asked after every new token.

A stop string may begin several tokens back, lie inside a token, or end with a character whose bytes come in several
tokens. It counts when its last character is finished by the newest token; text before that was judged before. Only the
tail that can hold the longest stop string is decoded, and only when the newest token adds text.
This file knows the tokenizer as a `decode` function only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from common.sampling import FinishReason, SamplingParams

_UNFINISHED = "\ufffd"  # what decoders write for the bytes of an incomplete character
_QUARTERS = 4  # a character of UTF-8 has at most 4 bytes, so a token with any byte of one is at least a quarter of it


class StopChecker:
    """decode: token ids → text, for any piece of an answer. eos_ids: the model's end tokens.

    One checker serves every sequence: it remembers no more than how much text each token id stands for.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], eos_ids: frozenset[int]) -> None:
        self._decode = decode
        self._eos_ids = eos_ids
        self._quarters: dict[int, int] = {}

    def check(self, params: SamplingParams, output_ids: Sequence[int]) -> FinishReason | None:
        """Why the answer ends with the last of output_ids, or None. Called once after each new token.

        A token that ends it comes before a string, and either before length. Stop strings that end before
        min_new_tokens are passed over for good; end and stop tokens cannot be sampled before it.
        """
        matched = self._stop_token(params, output_ids)
        if matched is None and params.stop and len(output_ids) >= params.min_new_tokens:
            matched = self._stop_string(params.stop, output_ids)
        if matched is not None:
            return FinishReason(type="stop", matched=matched)
        if len(output_ids) >= params.max_new_tokens:
            return FinishReason(type="length", length=len(output_ids))
        return None

    def _stop_token(self, params: SamplingParams, output_ids: Sequence[int]) -> int | str | None:
        if not output_ids:
            return None
        token_id = output_ids[-1]
        ends = token_id in params.stop_token_ids or (token_id in self._eos_ids and not params.ignore_eos)
        return token_id if ends else None

    def _stop_string(self, stops: tuple[str, ...], output_ids: Sequence[int]) -> str | None:
        if not output_ids or self._quarters_of(output_ids[-1]) == 0:
            return None
        start, text = self._tail(output_ids, max(map(len, stops)))
        if not any(stop in text for stop in stops):
            return None
        before = self._decode(output_ids[start:-1])
        found = find_stop(_finished(text), stops, len(_finished(before)))
        return None if found is None else found[1]

    def _tail(self, output_ids: Sequence[int], longest: int) -> tuple[int, str]:
        """Where the tail starts and its text: `longest` characters in front of the newest token's, or the whole answer.

        A stop string needs one character less: the first may be a space that the decoder drops.
        """
        start = len(output_ids) - 1
        missing = _QUARTERS * longest
        while start > 0 and missing > 0:
            start -= 1
            missing -= self._quarters_of(output_ids[start])
        return self._from_character(output_ids, start)

    def _from_character(self, output_ids: Sequence[int], start: int) -> tuple[int, str]:
        """Decode from `start`, or from up to three tokens earlier so as not to begin inside a character.

        That would spoil more than the one: some decoders give up a whole run of byte tokens for a wrong one.
        """
        text = self._decode(output_ids[start:])
        earliest = max(0, start - _QUARTERS + 1)
        while start > earliest and text.startswith(_UNFINISHED):
            start -= 1
            text = self._decode(output_ids[start:])
        return start, text

    def _quarters_of(self, token_id: int) -> int:
        """The least text, in quarters of a character, that this token adds anywhere; 0 for one that is never shown.

        Measured behind itself: some decoders drop the space that a text begins with.
        """
        known = self._quarters.get(token_id)
        if known is None:
            alone = self._decode([token_id])
            if _UNFINISHED in alone:
                known = _QUARTERS * (len(alone) - alone.count(_UNFINISHED)) + 1
            else:
                known = _QUARTERS * (len(self._decode([token_id, token_id])) - len(alone))
            self._quarters[token_id] = known
        return known


def find_stop(text: str, stops: Iterable[str], finished_before: int) -> tuple[int, str] | None:
    """Where a stop string starts in `text`, and which one; None when there is none.

    Only one that ends behind the first `finished_before` characters counts (those before the newest token, without an
    incomplete last one). Of several, the one that starts first; of those, the shortest.
    """
    found: list[tuple[int, int, str]] = []
    for stop in stops:
        start = text.find(stop, max(0, finished_before - len(stop) + 1)) if stop else -1
        if start >= 0:
            found.append((start, len(stop), stop))
    return (min(found)[0], min(found)[2]) if found else None


def _finished(text: str) -> str:
    """Text without a last character whose bytes are still to come."""
    return text.rstrip(_UNFINISHED)
