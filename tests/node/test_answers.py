"""Answer objects from updates: text that never shrinks, SGLang's fields, events when they are due."""

from __future__ import annotations

import itertools
import math
import random
import time
import tracemalloc
from collections.abc import Callable

import msgspec
import pytest

from common.handoff import RoomAddress
from common.sampling import FinishReason, LogprobOptions, SamplingParams, TokenLogprob
from node.answers import Answer, StopTrimmer, event, json_bytes
from node.messages import Submit, Timing, Update
from node.resume import Resume
from node.tokenizer import (
    MAX_HELD_TOKENS,
    ByteLevelDetokenizer,
    Detokenizer,
    Tokenizer,
    WindowDetokenizer,
    load_tokenizer,
)

LENGTH = FinishReason(type="length", length=1)


@pytest.fixture(scope="module")
def tokenizer(model_path: str) -> Tokenizer:
    return load_tokenizer(model_path)


def submit(sampling: SamplingParams | None = None, logprobs: LogprobOptions | None = None) -> Submit:
    return Submit(
        rid="r",
        token_ids=[1, 2, 3],
        sampling=sampling or SamplingParams(),
        logprobs=logprobs or LogprobOptions(),
        room=None,
        arrival_s=0.0,
    )


def update(token_ids: list[int], finish: FinishReason | None = None, **fields: object) -> Update:
    values = {"logprobs": [], "num_cached_tokens": 2, **fields}
    return Update(rid="r", token_ids=token_ids, finish=finish, **values)  # type: ignore[arg-type]


def texts(
    tokenizer: Tokenizer, sampling: SamplingParams, ids: list[int], finish: FinishReason, size: int = 1
) -> list[str]:
    """The text after each update of `size` tokens."""
    answer = Answer(submit(sampling), tokenizer, return_text=False)
    shown = []
    for start in range(0, len(ids), size):
        is_last = start + size >= len(ids)
        answer.feed(update(ids[start : start + size], finish if is_last else None))
        shown.append(answer.object()["text"])
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(shown)), shown
    return shown


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_text_ends_before_the_stop_string_and_never_shows_a_part_of_it(tokenizer: Tokenizer, size: int) -> None:
    ids = tokenizer.encode("12 ab Quest Question")
    sampling = SamplingParams(stop=("Question", "zz"))
    shown = texts(tokenizer, sampling, ids, FinishReason(type="stop", matched="Question"), size)
    assert shown[-1] == "12 ab Quest "


def test_no_stop_trim_keeps_the_stop_string_and_holds_nothing_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a Question")
    sampling = SamplingParams(stop=("Question",), no_stop_trim=True)
    shown = texts(tokenizer, sampling, ids, FinishReason(type="stop", matched="Question"))
    assert shown[-1] == "a Question" and any(text.startswith("a Q") for text in shown[:-1])


def test_what_only_looked_like_a_stop_string_is_shown_in_the_end(tokenizer: Tokenizer) -> None:
    shown = texts(tokenizer, SamplingParams(stop=("Question",)), tokenizer.encode("a Quest"), LENGTH)
    assert shown[-1] == "a Quest" and shown[-2] == "a "


def test_a_stop_string_that_was_passed_over_is_kept(tokenizer: Tokenizer) -> None:
    """Before min_new_tokens it does not count, so its text has been shown."""
    ids = tokenizer.encode("a||b||")
    shown = texts(tokenizer, SamplingParams(stop=("||",)), ids, FinishReason(type="stop", matched="||"))
    assert shown[-1] == "a||b"


@pytest.mark.parametrize(("trim", "expected"), [(True, "ab"), (False, "abc")])
def test_the_stop_token_is_not_text(tokenizer: Tokenizer, trim: bool, expected: str) -> None:
    ids = tokenizer.encode("a") + tokenizer.encode("b") + tokenizer.encode("c")
    sampling = SamplingParams(stop_token_ids=(ids[-1],), no_stop_trim=not trim)
    answer = Answer(submit(sampling), tokenizer, return_text=False)
    answer.feed(update(ids, FinishReason(type="stop", matched=ids[-1])))
    assert answer.object()["text"] == expected and answer.object()["output_ids"] == ids


def test_half_a_character_waits_and_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("\U0001f9ff")
    assert len(ids) > 2
    assert texts(tokenizer, SamplingParams(), ids, LENGTH)[:-1] == [""] * (len(ids) - 1)
    assert texts(tokenizer, SamplingParams(), ids[:-1], LENGTH)[-1] == "\ufffd"


def test_trimmer_holds_the_longest_end_that_may_become_a_stop() -> None:
    trimmer = StopTrimmer(("abab", "bc"))
    for text, shown in [("xa", 1), ("xab", 1), ("xaba", 1), ("xabax", 5), ("xabaxb", 5), ("xabaxbb", 6)]:
        trimmer.grow(text)
        assert trimmer.shown == shown, text


def test_the_trimmer_agrees_with_trying_every_beginning() -> None:
    rng = random.Random(1)
    for _ in range(300):
        stops = tuple("".join(rng.choices("ab", k=rng.randrange(1, 7))) for _ in range(rng.randrange(4)))
        trimmer, text, shown = StopTrimmer(stops), "", 0
        for _ in range(12):
            text += "".join(rng.choices("ab", k=rng.randrange(4)))
            ends = (n for n in range(1, len(text) + 1) if any(s.startswith(text[-n:]) and len(s) > n for s in stops))
            shown = max(shown, len(text) - max(ends, default=0))
            trimmer.grow(text)
            assert trimmer.shown == shown, (stops, text)


def test_long_stop_strings_cost_little_memory_and_time() -> None:
    """64 of the longest, for each of many sequences; the text looks like all of them for as long as it can."""
    stops = tuple("a" * 1000 + f"{i:024}" for i in range(64))
    tracemalloc.start()
    trimmers = [StopTrimmer(stops) for _ in range(100)]
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 100 * 10_000
    start, text = time.process_time(), ""
    for i in range(2000):
        text += "b" if i % 500 == 499 else "a"
        trimmers[0].grow(text)
    assert trimmers[0].shown == len(text) and time.process_time() - start < 2


@pytest.mark.parametrize("make", [ByteLevelDetokenizer, WindowDetokenizer])
def test_a_resumed_answer_is_the_undisturbed_one_at_every_cut(
    tokenizer: Tokenizer, make: Callable[[Tokenizer, frozenset[int]], Detokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole characters, broken ones for longer than any is waited for, and the beginning of a stop string."""
    monkeypatch.setattr(tokenizer, "detokenizer", lambda *, skip_special_tokens: make(tokenizer, frozenset()))
    broken = tokenizer.encode("\U0001f9ff")[:1]
    ids = tokenizer.encode("a long answer 🧿日本語 Quest") + broken * (MAX_HELD_TOKENS + 5) + tokenizer.encode("🧿 end")
    sampling = SamplingParams(stop=("Question",))
    undisturbed = texts(tokenizer, sampling, ids, LENGTH)
    for cut in range(1, len(ids)):
        answer = Answer(submit(sampling), tokenizer, return_text=False, resume=Resume(output_ids=ids[:cut]))
        shown = [answer.object()["text"]]
        for token_id in ids[cut:-1]:
            answer.feed(update([token_id]))
            shown.append(answer.object()["text"])
        answer.feed(update(ids[-1:], LENGTH))
        assert [*shown, answer.object()["text"]] == undisturbed[cut - 1 :], cut


def test_a_disaggregated_answer_says_what_either_side_held(tokenizer: Tokenizer) -> None:
    alone = submit()
    handed_over = msgspec.structs.replace(alone, room=RoomAddress(host="h", port=1, room=2))
    for sent, details in ((alone, None), (handed_over, {"prefill": 2, "decode": 1})):
        answer = Answer(sent, tokenizer, return_text=False)
        answer.feed(update([5], num_local_cached_tokens=1))
        assert answer.object()["meta_info"].get("cached_tokens_details") == details


def test_meta_info_has_sglangs_fields_and_ours_at_the_end(tokenizer: Tokenizer) -> None:
    answer = Answer(submit(), tokenizer, return_text=False)
    answer.feed(update([4]))
    assert answer.object()["meta_info"] == {
        "id": "r",
        "finish_reason": None,
        "prompt_tokens": 3,
        "completion_tokens": 1,
        "cached_tokens": 2,
        "weight_version": "default",
    }
    timing = Timing(queue_s=1, prefill_s=2, transfer_s=3, decode_s=4, transfer_bytes={"ssm": 5})
    answer.feed(update([5], FinishReason(type="length", length=2), timing=timing))
    meta = answer.object()["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 2} and meta["e2e_latency"] > 0
    assert meta["timing"] == {"queue_s": 1, "prefill_s": 2, "transfer_s": 3, "decode_s": 4}
    assert meta["transfer_bytes"] == {"ssm": 5} and "output_token_logprobs" not in meta


def test_logprobs_have_sglangs_shape(tokenizer: Tokenizer) -> None:
    options = LogprobOptions(wanted=True, start_len=0, top_num=1)
    answer = Answer(submit(logprobs=options), tokenizer, return_text=True)
    prompt = [TokenLogprob(logprob=None, token_id=65), TokenLogprob(logprob=-1.0, token_id=66, top=((-0.5, 67),))]
    text = tokenizer.token_text
    answer.feed(update([4], logprobs=[TokenLogprob(logprob=-2.0, token_id=4, top=((-2.0, 4),))], input_logprobs=prompt))
    meta = answer.object()["meta_info"]
    assert meta["input_token_logprobs"] == [(None, 65, text(65)), (-1.0, 66, text(66))]
    assert meta["input_top_logprobs"] == [None, [(-0.5, 67, text(67))]]
    assert meta["output_token_logprobs"] == [(-2.0, 4, text(4))]
    assert meta["output_top_logprobs"] == [[(-2.0, 4, text(4))]]
    plain = Answer(submit(logprobs=LogprobOptions(wanted=True)), tokenizer, return_text=False)
    plain.feed(update([4], logprobs=[TokenLogprob(logprob=-2.0, token_id=4)]))
    meta = plain.object()["meta_info"]
    assert meta["input_token_logprobs"] == [] and meta["output_token_logprobs"] == [(-2.0, 4, None)]
    assert "output_top_logprobs" not in meta


def test_stream_interval_spaces_the_events(tokenizer: Tokenizer) -> None:
    answer = Answer(submit(SamplingParams(stream_interval=3)), tokenizer, return_text=False)
    due = []
    for i in range(8):
        answer.feed(update([65], LENGTH if i == 7 else None))
        due.append(answer.take_due())
    assert due == [True, False, False, True, False, False, True, True]


def test_events_are_one_line_and_infinities_become_null() -> None:
    assert event({"text": "a\nb"}) == b'data: {"text":"a\\nb"}\n\n'
    assert json_bytes([math.inf, math.nan]) == b"[null,null]"


def test_meta_info_names_the_rank_that_has_the_sequence(tokenizer: Tokenizer) -> None:
    answer = Answer(submit(), tokenizer, return_text=False)
    answer.dp_rank = 3
    answer.feed(update([4]))
    assert answer.object()["meta_info"]["dp_rank"] == 3
