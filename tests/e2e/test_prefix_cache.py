"""The prefix cache, in whole ranks: how much of a prompt is not computed again, on which side, and that no answer shows
it. Every answer is compared with that of a cold run alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from common.config import EngineConfig
from common.layout import StateKind
from common.sampling import FinishReason, LogprobOptions, SamplingParams
from engine.sequence import Sequence
from node.accounting import NO_ROOMS
from tests.support.models import Models
from tests.support.ranks import (
    PLAIN,
    ColdRuns,
    Outcome,
    Ranks,
    Request,
    assert_equivalent,
    disaggregated_ranks,
    unified_ranks,
)

CHUNK = 8
PAGE = 4
INTERVAL = 2 * CHUNK

Make = Callable[..., AbstractContextManager[Ranks]]
EACH_WAY = pytest.mark.parametrize("make", [unified_ranks, disaggregated_ranks], ids=["unified", "disaggregated"])
EACH_OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])


def engine(overlap: bool = True, **settings: object) -> EngineConfig:
    fixed = {
        "page_size": PAGE,
        "max_total_tokens": 4096,
        "max_state_slots": 64,
        "max_running_requests": 20,
        "chunked_prefill_size": -1,
        "mamba_track_interval": INTERVAL,
        "disable_overlap_schedule": not overlap,
    }
    return EngineConfig(**(fixed | settings))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model(models: Models) -> Path:
    return models("nemotron_h", CHUNK)


@pytest.fixture(scope="module")
def cold(model: Path) -> Iterator[ColdRuns]:
    with unified_ranks(model=model, engine=PLAIN) as ranks:
        yield ColdRuns(ranks)


def tokens(seed: int, count: int, low: int = 3, high: int = 97) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(low, high) for _ in range(count)]


def ask(ranks: Ranks, prompt: list[int], max_new_tokens: int = 4, **more: object) -> Outcome:
    return ranks.run([Request(prompt=prompt, max_new_tokens=max_new_tokens, **more)])[0]  # type: ignore[arg-type]


def prefilled(ranks: Ranks) -> list[int]:
    """Prompt tokens computed so far, by role."""
    return [role.host.scheduler.counters.prefill_tokens_computed for role in ranks.roles]  # type: ignore[attr-defined]


def flush(ranks: Ranks) -> None:
    """Once nothing runs; a prefill rank hears a little later that decode has what it sent."""
    ranks.run_until(lambda: ranks.flush() == [None] * len(ranks.roles))


# -- where a conversation resumes ----------------------------------------------------------------------------------


def saved_position(prompt: int, answer: int) -> int:
    """The last state that a request saves. The last token of its answer is never computed."""
    computed = prompt + answer - 1
    return max(prompt // CHUNK * CHUNK, computed // INTERVAL * INTERVAL)


@EACH_WAY
@EACH_OVERLAP
@pytest.mark.parametrize("length", [1, 2, CHUNK + 3, INTERVAL])
def test_a_conversation_resumes_at_its_last_saved_state(
    length: int, overlap: bool, make: Make, model: Path, cold: ColdRuns
) -> None:
    """Answers that end one before, at and one after the interval and twice the interval."""
    with make(model=model, engine=engine(overlap)) as ranks:
        for answer in [times * INTERVAL + shift for times in (1, 2) for shift in (-1, 0, 1)]:
            prompt = tokens(1000 * length + answer, length)
            first = ask(ranks, prompt, answer)
            assert_equivalent(first, cold.of(Request(prompt=prompt, max_new_tokens=answer)))
            again = [*prompt, *first.ids, 5]
            second = ask(ranks, again)
            assert second.cached == saved_position(length, answer), f"after an answer of {answer}"
            assert_equivalent(second, cold.of(Request(prompt=again, max_new_tokens=4)))
        ranks.assert_all_free()


@EACH_WAY
@EACH_OVERLAP
def test_an_answer_that_a_stop_token_ends_leaves_nothing_of_the_step_after_it(
    overlap: bool, make: Make, model: Path, cold: ColdRuns
) -> None:
    """With overlap the end is seen a step late; that step may have reached the interval."""
    length = 3
    with make(model=model, engine=engine(overlap)) as ranks:
        seen = set()
        for seed in range(40):
            prompt = tokens(seed, length)
            whole = cold.of(Request(prompt=prompt, max_new_tokens=INTERVAL + 2)).ids
            ends = [i for i, token in enumerate(whole) if token not in whole[:i] and i >= INTERVAL - length - 2]
            for end in ends[:2]:
                sampling = SamplingParams(
                    temperature=0.0, max_new_tokens=40, ignore_eos=True, stop_token_ids=(whole[end],)
                )
                first = ask(ranks, prompt, sampling=sampling)
                assert first.ids == whole[: end + 1] and first.finish is not None and first.finish.type == "stop"
                ranks.run_until(lambda: not ranks.roles[-1].host.scheduler.has_work())  # type: ignore[attr-defined]
                again = [*prompt, *first.ids, 5, 6]
                second = ask(ranks, again)
                assert second.cached == saved_position(length, end + 1)
                assert_equivalent(second, cold.of(Request(prompt=again, max_new_tokens=4)))
                seen.add(length + end + 1)
                flush(ranks)
        assert {INTERVAL - 1, INTERVAL, INTERVAL + 1} <= seen


# -- branches, whole prompts, namespaces, logprobs, flush ----------------------------------------------------------


@EACH_WAY
def test_three_prompts_with_a_common_prefix_miss_miss_and_hit(make: Make) -> None:
    """The bundled model, whose chunk is 64. The tails are so long that decode does not compute them itself."""
    common, chunk = tokens(1, 257, 100, 1000), 64
    prompts = [[*common, 10 + i, *tokens(2 + i, 300, 100, 1000)] for i in range(3)]
    settings = EngineConfig(max_total_tokens=8192, max_state_slots=16)
    with make(engine=settings) as ranks:
        outcomes = [ask(ranks, prompt, 8) for prompt in prompts]
        assert [o.cached for o in outcomes] == [0, 0, 257 // chunk * chunk]
        if make is disaggregated_ranks:
            ranks.run_until(lambda: all(leg.ended for leg in ranks.legs.values()))
            assert [leg.cached for leg in ranks.legs.values()] == [0, 0, 256]
            assert prefilled(ranks) == [3 * 558 - 256, 0]
        ranks.assert_all_free()
    with unified_ranks(engine=PLAIN) as plain:
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            assert_equivalent(outcome, ColdRuns(plain).of(Request(prompt=prompt, max_new_tokens=8)))


@EACH_WAY
@EACH_OVERLAP
def test_a_prompt_that_is_cached_whole_is_sent_again(overlap: bool, make: Make, model: Path, cold: ColdRuns) -> None:
    """A token is always computed: a state at the end of the prompt serves longer ones only, the second time the one a
    chunk before it is saved."""
    c = CHUNK
    expected = {c: [0, 0, 0], c + 1: [0, c, c], 3 * c: [0, 0, 2 * c, 2 * c], 3 * c + 3: [0, 3 * c, 3 * c]}
    with make(model=model, engine=engine(overlap)) as ranks:
        for length, hits in expected.items():
            prompt = tokens(length, length)
            outcomes = [ask(ranks, prompt) for _ in hits]
            assert [o.cached for o in outcomes] == hits, f"prompt of {length}"
            for outcome in outcomes:
                assert_equivalent(outcome, cold.of(Request(prompt=prompt, max_new_tokens=4)))
        ranks.assert_all_free()


@EACH_WAY
def test_an_extra_key_separates(make: Make, model: Path, cold: ColdRuns) -> None:
    prompt = tokens(1, 3 * CHUNK + 3)
    with make(model=model, engine=engine()) as ranks:
        keys = ["a", "b", None, "a", "b", None]
        outcomes = [ask(ranks, prompt, extra_key=key) for key in keys]
        assert [o.cached for o in outcomes] == [0, 0, 0, *[3 * CHUNK] * 3]
        for outcome in outcomes:
            assert_equivalent(outcome, cold.of(Request(prompt=prompt, max_new_tokens=4)))
        ranks.assert_all_free()


@EACH_WAY
def test_prompt_logprobs_over_a_cached_prefix_are_those_of_a_cold_run(make: Make, model: Path, cold: ColdRuns) -> None:
    """The prefill leg reports them; what comes before them may be cached. A miss saves a state at its branch."""
    prompt = tokens(1, 3 * CHUNK + 3)
    with make(model=model, engine=engine()) as ranks:
        ask(ranks, prompt)
        hits = {0: 0, 1: 0, CHUNK + 3: 0, 3 * CHUNK: CHUNK, 3 * CHUNK + 1: 3 * CHUNK, 3 * CHUNK + 2: 3 * CHUNK}
        for start, hit in hits.items():
            wanted = LogprobOptions(wanted=True, start_len=start, top_num=2)
            outcome = ask(ranks, prompt, logprobs=wanted)
            ranks.run_until(lambda rid=outcome.rid: len(ranks.roles) == 1 or ranks.legs[rid].ended)
            expected = cold.of(Request(prompt=prompt, max_new_tokens=4, logprobs=wanted))
            assert_equivalent(outcome, expected)
            assert outcome.cached == hit, f"logprobs from {start} on"
            found = (outcome if len(ranks.roles) == 1 else ranks.legs[outcome.rid]).prompt_logprobs
            assert found is not None and expected.prompt_logprobs is not None
            assert [t.token_id for t in found] == prompt[start:] == [t.token_id for t in expected.prompt_logprobs]
            assert [t.logprob for t in found] == pytest.approx([t.logprob for t in expected.prompt_logprobs], abs=1e-4)


@EACH_WAY
def test_flush_empties_the_caches_and_is_refused_while_requests_run(make: Make, model: Path) -> None:
    prompt = tokens(1, 3 * CHUNK + 3)
    with make(model=model, engine=engine()) as ranks:
        running = ranks.submit(Request(prompt=prompt, max_new_tokens=30))
        ranks.run_until(lambda: len(running.tokens) > 2)
        refusal = ranks.flush()[-1]
        assert refusal is not None and refusal.code == "busy"
        ranks.run_until(lambda: running.ended)
        assert ask(ranks, prompt).cached == 3 * CHUNK
        flush(ranks)
        for role in ranks.roles:
            state = role.host.state(NO_ROOMS)  # type: ignore[attr-defined]
            assert (state["pages_free"], state["slots_free"]) == (state["pages_total"], state["slots_total"])
            assert state["cache"]["pages_cached"] == state["cache"]["slots_cached"] == 0
        assert ask(ranks, prompt).cached == 0


# -- decode's own cache --------------------------------------------------------------------------------------------


def bytes_of(ranks: Ranks, num_pages: int, track: bool) -> dict[str, int]:
    """What crosses the wire with so many pages."""
    pools = ranks.decode.host.layout.pools
    size = {kind: sum(pool.item_bytes for pool in pools if pool.kind is kind) for kind in StateKind}
    sent = {"kv": num_pages * size[StateKind.KV], "conv": size[StateKind.CONV], "ssm": size[StateKind.SSM]}
    if track:
        sent["track"] = size[StateKind.CONV] + size[StateKind.SSM]
    return {part: count for part, count in sent.items() if count}


@EACH_OVERLAP
def test_a_short_turn_is_computed_by_decode_alone(overlap: bool, model: Path, cold: ColdRuns) -> None:
    with disaggregated_ranks(model=model, engine=engine(overlap)) as ranks:
        prompt = tokens(1, 3 * CHUNK + 3)
        first = ask(ranks, prompt, 6)
        ranks.run_until(lambda: ranks.legs[first.rid].ended)  # it counts what it sent once decode has it
        assert first.timing is not None and first.timing.transfer_bytes == bytes_of(ranks, 7, track=True)
        computed, sent = prefilled(ranks), ranks.prefill.transfer.stats()["bytes"]
        for _ in range(3):
            held = saved_position(len(prompt), len(first.ids))
            prompt = [*prompt, *first.ids, 7, 8, 9, 10, 11]
            first = ask(ranks, prompt, 6)
            leg = ranks.legs[first.rid]
            ranks.run_until(lambda leg=leg: leg.ended)
            assert_equivalent(first, cold.of(Request(prompt=prompt, max_new_tokens=6)))
            assert first.cached == held and first.timing is not None and first.timing.transfer_bytes == {}
            assert leg.error is None and leg.finish == FinishReason(type="length", length=0)
            computed = [computed[0], computed[1] + len(prompt) - held]
            assert prefilled(ranks) == computed, "prefill computes nothing, decode what it does not hold"
        assert ranks.prefill.transfer.stats()["bytes"] == sent
        ranks.assert_all_free()


@EACH_OVERLAP
@pytest.mark.parametrize("new", [40, 41])
def test_of_a_long_turn_only_the_missing_pages_and_the_state_are_sent(
    new: int, overlap: bool, model: Path, cold: ColdRuns
) -> None:
    with disaggregated_ranks(model=model, engine=engine(overlap, local_prefill_max_tokens=CHUNK)) as ranks:
        prompt, held_by_prefill, held = tokens(1, 3 * CHUNK + 3), 0, 0
        for turn in range(3):
            got = ask(ranks, prompt, 6)
            assert_equivalent(got, cold.of(Request(prompt=prompt, max_new_tokens=6)))
            missing = -(-len(prompt) // PAGE) - held // PAGE
            assert (got.cached, got.local) == (held_by_prefill, held)
            assert got.timing is not None
            assert got.timing.transfer_bytes == bytes_of(ranks, missing, track=len(prompt) % CHUNK != 0)
            held_by_prefill, held = len(prompt) // CHUNK * CHUNK, saved_position(len(prompt), 6)
            prompt = [*prompt, *got.ids, *tokens(turn, new)]
        assert prefilled(ranks)[1] == 0
        ranks.assert_all_free()


def watch_retractions(ranks: Ranks) -> list[tuple[int, int]]:
    """(tokens to compute again from the start, position of the last saved state) of each retraction on decode."""
    scheduler, seen = ranks.decode.host.scheduler, []
    retract = scheduler.retract

    def watched(sequence: Sequence) -> None:
        seen.append((sequence.num_tokens, sequence.checkpoint.position if sequence.checkpoint else 0))
        retract(sequence)

    scheduler.retract = watched  # type: ignore[method-assign]
    return seen


def test_a_retracted_request_resumes_at_its_last_saved_state(model: Path, cold: ColdRuns) -> None:
    """Retracted by hand, at every number of tokens made, with room to come back at once."""
    with disaggregated_ranks(model=model, engine=engine(overlap=False)) as ranks:
        seen, scheduler = watch_retractions(ranks), ranks.decode.host.scheduler
        for wanted in range(1, INTERVAL + 3):
            prompt, before = tokens(wanted, CHUNK + 3), prefilled(ranks)[1]
            outcome = ranks.submit(Request(prompt=prompt, max_new_tokens=INTERVAL + 4))
            ranks.run_until(lambda o=outcome, count=wanted: len(o.tokens) >= count)
            made = len(outcome.tokens)  # the first step may come right after the first token
            scheduler.retract(scheduler.running[0])
            ranks.run_until(lambda o=outcome: o.ended)
            assert_equivalent(outcome, cold.of(Request(prompt=prompt, max_new_tokens=INTERVAL + 4)))
            count, position = seen[-1]
            assert (count, position) == (len(prompt) + made, saved_position(len(prompt), made))
            assert prefilled(ranks)[1] - before == count - position < count
        ranks.assert_all_free()


@EACH_OVERLAP
def test_what_decode_retracts_for_want_of_pages_resumes_too(overlap: bool, model: Path, cold: ColdRuns) -> None:
    """The first one ends with the last page, so that what the second one had saved is not evicted. Without rooms, whose
    timing would decide who comes first."""
    small = engine(overlap, max_total_tokens=PAGE * 19)
    with disaggregated_ranks(model=model, engine=small) as ranks:
        seen = watch_retractions(ranks)
        requests = [Request(prompt=tokens(i, CHUNK + 3), max_new_tokens=27 + 13 * i) for i in range(2)]
        outcomes = [ranks.submit(request, alone=True) for request in requests]
        ranks.run_until(lambda: all(outcome.ended for outcome in outcomes))
        for request, outcome in zip(requests, outcomes, strict=True):
            assert_equivalent(outcome, cold.of(request))
        again = prefilled(ranks)[1] - sum(len(request.prompt) for request in requests)
        assert seen == [(37, 2 * INTERVAL)] and again == 37 - 2 * INTERVAL
        ranks.assert_all_free()


# -- pressure ------------------------------------------------------------------------------------------------------


@EACH_WAY
@EACH_OVERLAP
def test_eviction_breaks_no_answer(overlap: bool, make: Make, model: Path, cold: ColdRuns) -> None:
    """Conversations, more of them than the pools hold, take turns at random, some at the same time."""
    rng, turns = random.Random(3), [tokens(50 + i, rng.randint(1, 30)) for i, rng in enumerate([random.Random(9)] * 10)]
    with make(model=model, engine=engine(overlap, max_total_tokens=320, max_state_slots=9)) as ranks:
        hits = 0
        for _ in range(20):
            chosen = rng.sample(range(len(turns)), 3)
            outcomes = ranks.run([Request(prompt=turns[i], max_new_tokens=6) for i in chosen])
            for i, outcome in zip(chosen, outcomes, strict=True):
                assert_equivalent(outcome, cold.of(Request(prompt=turns[i], max_new_tokens=6)))
                turns[i] = [*turns[i], *outcome.ids, *tokens(i, 3)]
                hits += outcome.cached > 0
        caches = [role.host.scheduler.memory.cache for role in ranks.roles]  # type: ignore[attr-defined]
        assert hits >= 5
        assert all(cache.counters.evicted_pages and cache.counters.evicted_slots for cache in caches)
        ranks.assert_all_free()


@EACH_WAY
@EACH_OVERLAP
def test_a_saved_state_serves_also_when_its_slot_is_the_last_one(
    overlap: bool, make: Make, model: Path, cold: ColdRuns
) -> None:
    """Two slots: one request runs, the other slot holds the state that the next one resumes from."""
    prompt = tokens(1, 3 * CHUNK + 3)
    with make(model=model, engine=engine(overlap, max_state_slots=3)) as ranks:
        again = [*prompt, *ask(ranks, prompt).ids, 5]
        other = Request(prompt=tokens(2, 3), max_new_tokens=60)
        if make is disaggregated_ranks:  # the other runs on decode alone
            ranks.run_until(lambda: all(leg.ended for leg in ranks.legs.values()))
        running = ranks.submit(other, alone=True)
        ranks.run_until(lambda: len(running.tokens) > 2)
        second = ask(ranks, again)
        assert second.cached == 3 * CHUNK and not running.ended
        assert_equivalent(second, cold.of(Request(prompt=again, max_new_tokens=4)))
        ranks.run_until(lambda: running.ended)
        assert_equivalent(running, cold.of(other))
        ranks.assert_all_free()


def test_the_only_slot_serves_one_turn_after_the_other(model: Path, cold: ColdRuns) -> None:
    settings = engine(False, page_size=1, mamba_scheduler_strategy="no_buffer", max_state_slots=2)
    with unified_ranks(model=model, engine=settings) as ranks:
        prompt, held = tokens(1, CHUNK + 3), 0
        for _ in range(3):
            got = ask(ranks, prompt)
            assert got.cached == held
            assert_equivalent(got, cold.of(Request(prompt=prompt, max_new_tokens=4)))
            prompt, held = [*prompt, *got.ids, 5], len(prompt) + len(got.ids) - 1
        assert ask(ranks, tokens(2, 5)).cached == 0
        ranks.assert_all_free()
