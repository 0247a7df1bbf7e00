"""Stopping against a slow twin that decodes the whole answer after every token."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from common.sampling import FinishReason, SamplingParams
from engine.stopping import StopChecker, find_stop

EOS = 0
SPECIAL = 1  # decodes to nothing
FIRST_BYTE = 1000  # token 1000 + b is the single byte b
PIECES = ["a", "b", "ab", "ba", "\n", "\n\n", "Question", "Que", "stion", " ", "é", "日本", "x" * 40, "�"]
FIRST_PIECE = 10


class Toy:
    """A byte-level vocabulary: whole pieces, single bytes, special tokens. Counts what it is asked to decode.

    strips_leading_space, byte_fallback: what sentencepiece decoders do: drop the space that a text begins with; write a
    run of byte tokens as one replacement character a byte unless the whole run is valid.
    """

    def __init__(self, *, strips_leading_space: bool = False, byte_fallback: bool = False) -> None:
        self.num_decoded = 0
        self.strips_leading_space = strips_leading_space
        self.byte_fallback = byte_fallback

    def decode(self, token_ids: Sequence[int]) -> str:
        self.num_decoded += len(token_ids)
        if self.byte_fallback:
            runs = itertools.groupby(token_ids, lambda token_id: token_id >= FIRST_BYTE)
            text = "".join(self._run(list(run)) for _, run in runs)
        else:
            text = self._bytes(token_ids).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def _run(self, token_ids: list[int]) -> str:
        try:
            return self._bytes(token_ids).decode()
        except UnicodeDecodeError:
            return "�" * len(token_ids)

    def _bytes(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(
            bytes([t - FIRST_BYTE]) if t >= FIRST_BYTE else PIECES[t - FIRST_PIECE].encode()
            for t in token_ids
            if t not in (EOS, SPECIAL)
        )


def ids(*pieces: str | bytes) -> list[int]:
    """Token ids of pieces; bytes become one token a byte."""
    found: list[int] = []
    for piece in pieces:
        if isinstance(piece, bytes):
            found += [FIRST_BYTE + byte for byte in piece]
        else:
            found.append(FIRST_PIECE + PIECES.index(piece))
    return found


def run(params: SamplingParams, token_ids: Sequence[int], toy: Toy | None = None) -> tuple[int, FinishReason | None]:
    """Feed the tokens one by one: how many were taken, and why it ended."""
    checker = StopChecker((toy or Toy()).decode, frozenset({EOS}))
    output: list[int] = []
    for token_id in token_ids:
        output.append(token_id)
        reason = checker.check(params, output)
        if reason is not None:
            return len(output), reason
    return len(output), None


def stop(matched: int | str) -> FinishReason:
    return FinishReason(type="stop", matched=matched)


class TestTokens:
    def test_eos_ends_it(self) -> None:
        assert run(SamplingParams(), [*ids("a"), EOS, *ids("b")]) == (2, stop(EOS))

    def test_eos_is_an_ordinary_token_when_ignored(self) -> None:
        assert run(SamplingParams(ignore_eos=True, max_new_tokens=3), [EOS, EOS, EOS]) == (
            3,
            FinishReason(type="length", length=3),
        )

    def test_stop_tokens_count_also_when_eos_is_ignored(self) -> None:
        params = SamplingParams(ignore_eos=True, stop_token_ids=(11, 99))
        assert run(params, [10, EOS, 11, 12]) == (3, stop(11))

    def test_a_token_comes_before_the_string_that_it_completes(self) -> None:
        params = SamplingParams(stop=("ab",), stop_token_ids=tuple(ids("b")))
        assert run(params, ids("a", "b")) == (2, stop(ids("b")[0]))

    def test_length(self) -> None:
        assert run(SamplingParams(max_new_tokens=2), ids("a", "a", "a")) == (2, FinishReason(type="length", length=2))

    @pytest.mark.parametrize("params", [SamplingParams(stop=("b",)), SamplingParams(stop_token_ids=tuple(ids("b")))])
    def test_stop_comes_before_length_on_one_token(self, params: SamplingParams) -> None:
        assert params.max_new_tokens > 2
        limited = SamplingParams(stop=params.stop, stop_token_ids=params.stop_token_ids, max_new_tokens=2)
        assert run(limited, ids("a", "b")) == run(params, ids("a", "b"))

    def test_no_token_at_all(self) -> None:
        checker = StopChecker(Toy().decode, frozenset({EOS}))
        assert checker.check(SamplingParams(max_new_tokens=0), []) == FinishReason(type="length", length=0)
        assert checker.check(SamplingParams(stop=("a",)), []) is None


class TestStrings:
    @pytest.mark.parametrize(
        ("pieces", "stops", "taken", "matched"),
        [
            (("a", "Question", "b"), ("Question",), 2, "Question"),
            (("a", "Que", "stion", "b"), ("Question",), 3, "Question"),
            (("Que", "a", "stion", "b"), ("Question",), 4, None),
            (("a", "Question"), ("uest",), 2, "uest"),
            (("a", "b", "Question"), ("abQ",), 3, "abQ"),
            (("\n\n", "\n"), ("\n\n\n",), 2, "\n\n\n"),
            (("\n\n",), ("\n",), 1, "\n"),
            (("ab", "a"), ("zz", "ba"), 2, "ba"),
            (("Question",), ("tion", "Que", "stion"), 1, "Que"),
            (("Question",), ("Quest", "Question", "Que"), 1, "Que"),
            (("Que", "stion"), ("stion", "estio", "Questions"), 2, "estio"),
            (("a", ""), ("",), 1, None),
        ],
    )
    def test_strings(self, pieces: tuple[str, ...], stops: tuple[str, ...], taken: int, matched: str | None) -> None:
        expected = None if matched is None else stop(matched)
        assert run(SamplingParams(stop=stops), ids(*filter(None, pieces))) == (taken, expected)

    def test_special_tokens_inside(self) -> None:
        tokens = [*ids("Que"), *[SPECIAL] * 200, *ids("stion")]
        assert run(SamplingParams(stop=("Question",), max_new_tokens=999), tokens) == (202, stop("Question"))

    def test_a_character_in_three_tokens(self) -> None:
        tokens = ids("a", "日本".encode(), "b")
        assert run(SamplingParams(stop=("日本",)), tokens) == (7, stop("日本"))
        assert run(SamplingParams(stop=("a日",)), tokens) == (4, stop("a日"))
        assert run(SamplingParams(stop=("本b",)), tokens) == (8, stop("本b"))

    def test_half_a_character_is_not_the_replacement_character(self) -> None:
        assert run(SamplingParams(stop=("�",)), ids("a", "日".encode(), "b")) == (5, None)
        assert run(SamplingParams(stop=("a�",)), ids("a", "�", "b")) == (3, stop("a�"))

    @pytest.mark.parametrize("byte_fallback", [False, True])
    @pytest.mark.parametrize("matched", ["。", "です。", "語で", "🎉。", "é🎉。x", "🎉。xab"])
    def test_a_tail_that_would_start_inside_a_character(self, matched: str, byte_fallback: bool) -> None:
        text = "日本語でé🎉。xab"
        tokens = ids(("日本" * 9).encode(), "日本語です。".encode() if matched in "です。" else text.encode())
        count, reason = run(SamplingParams(stop=(matched,)), tokens, Toy(byte_fallback=byte_fallback))
        assert reason == stop(matched)
        assert Toy().decode(tokens[:count]).endswith(matched)

    def test_a_space_that_the_decoder_drops_at_the_start(self) -> None:
        tokens = ids("a", " ", "b")
        assert run(SamplingParams(stop=("a ",)), tokens, Toy(strips_leading_space=True)) == (2, stop("a "))
        long = ids(*["a"] * 50, " ", "b")
        assert run(SamplingParams(stop=(" b",)), long, Toy(strips_leading_space=True)) == (52, stop(" b"))

    def test_before_min_new_tokens_strings_are_passed_over_for_good(self) -> None:
        tokens = ids("ab", "a", "b", "a", "ab")
        assert run(SamplingParams(stop=("ab",), min_new_tokens=3), tokens) == (3, stop("ab"))
        assert run(SamplingParams(stop=("ab",), min_new_tokens=4), tokens) == (5, stop("ab"))

    def test_cost_of_a_token_does_not_grow_with_the_answer(self) -> None:
        toy = Toy()
        checker = StopChecker(toy.decode, frozenset({EOS}))
        params = SamplingParams(stop=("Question", "\n\n\n"), max_new_tokens=10**6)
        rng = random.Random(0)
        rows = {
            "text": [rng.choice(ids("a", "ab", "\n", "日本")) for _ in range(5000)],
            "bytes": ids("日本語🎉".encode() * 400),
            "special": [SPECIAL] * 5000,
        }
        for tokens in rows.values():
            for length in (100, 1000, 5000):
                before = toy.num_decoded
                checker.check(params, tokens[:length])
                assert toy.num_decoded - before < 150

    @pytest.mark.parametrize("seed", range(4))
    def test_random_answers_against_the_twin(self, seed: int) -> None:
        rng = random.Random(seed)
        pieces = ids("a", "b", "ab", "ba", "\n", "é", "日本", " ") + ids("日é".encode()) + [SPECIAL]
        ends = 0
        for _ in range(400):
            tokens = [rng.choice(pieces) for _ in range(rng.randint(1, 40))]
            alphabet = "ab\né日本 "
            stops = ("".join(rng.choices(alphabet, k=rng.randint(1, 3))), some_part(rng, Toy().decode(tokens)))
            params = SamplingParams(stop=stops, min_new_tokens=rng.choice([0, 0, 5, 20]), max_new_tokens=35)
            expected = twin(params, tokens)
            assert run(params, tokens) == expected
            ends += expected[1] is not None and expected[1].type == "stop"
        assert 100 < ends < 390


def some_part(rng: random.Random, text: str) -> str:
    start = rng.randrange(len(text) + 1)
    return text[start : start + rng.randint(2, 9)]


def twin(params: SamplingParams, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
    """The slow, obvious rule: decode everything, look at every position."""
    toy, finished = Toy(), ""
    for count in range(1, len(tokens) + 1):
        before, finished = finished, toy.decode(tokens[:count]).rstrip("�")
        if count >= params.min_new_tokens:
            for start in range(len(finished)):
                for candidate in sorted(filter(None, params.stop), key=len):
                    end = start + len(candidate)
                    if finished[start:end] == candidate and end > len(before):
                        return count, stop(candidate)
        if count >= params.max_new_tokens:
            return count, FinishReason(type="length", length=count)
    return len(tokens), None


def test_find_stop_gives_the_place_to_trim_at() -> None:
    assert find_stop("ab ab", ["ab"], 0) == (0, "ab")
    assert find_stop("ab ab", ["ab"], 2) == (3, "ab")
    assert find_stop("ab ab", ["ab"], 5) is None
    assert find_stop("x\n\n", ["\n"], 1) == (1, "\n")
