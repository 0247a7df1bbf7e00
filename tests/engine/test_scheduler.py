"""The scheduler against a runner that keeps books: every step must continue exactly the sequence it claims to."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest
import torch
from torch import Tensor

from common.errors import CapacityError
from common.sampling import LogprobOptions, SamplingParams
from engine.allocator import PageAllocator, SlotAllocator
from engine.batch import OnLayer, Row
from engine.device import Device
from engine.memory import SequenceMemory
from engine.radix_cache import RadixCache
from engine.scheduler import Chunk, Limits, Scheduler
from engine.sequence import Phase, Sequence
from engine.stopping import StopChecker

VOCAB = 97
EOS = 0
PAGE = 4
CHUNK = 8


class BookkeepingRunner:
    """Stands in for the model: the logits are a function of the whole history, which it reads back from slot and pages.

    A slot remembers the tokens it stands for; a page remembers its tokens. A row that starts at the wrong position,
    uses another sequence's slot or page, or misses a page fails an assertion.
    """

    def __init__(self) -> None:
        self.slot_tokens: dict[int, list[int]] = {}
        self.page_tokens: dict[int, list[int]] = {}
        self.poisoned_logits_for: set[int] = set()

    def copy_slots(self, sources: Seq[int], targets: Seq[int]) -> None:
        for source, target in zip(sources, targets, strict=True):
            self.slot_tokens[target] = list(self.slot_tokens[source])

    def forward(self, rows: Seq[Row], on_layer: OnLayer | None = None) -> Tensor:
        slots = [r.slot for r in rows] + [r.track.slot for r in rows if r.track]
        assert rows and len(set(slots)) == len(slots) and 0 not in slots
        return torch.cat([self._row(row) for row in rows])

    def _row(self, row: Row) -> Tensor:
        assert 0 not in row.page_table and row.token_ids
        history = [] if row.start == 0 else self.slot_tokens[row.slot]
        assert len(history) == row.start
        for position, token in enumerate(row.token_ids, start=row.start):
            page = row.page_table[position // PAGE]
            tokens = [] if position % PAGE == 0 else self.page_tokens[page]
            self.page_tokens[page] = [*tokens[: position % PAGE], token]
        history = history + list(row.token_ids)
        self.slot_tokens[row.slot] = history
        if row.track is not None:
            assert row.start < row.track.position <= len(history) and row.track.position % CHUNK == 0
            self.slot_tokens[row.track.slot] = history[: row.track.position]
        stored = [t for page in row.page_table for t in self.page_tokens.get(page, [])][: len(history)]
        assert stored == history, "the pages do not hold the sequence that the slot stands for"
        first = len(history) - row.num_logits
        rows = [logits_after(history[: first + i + 1]) for i in range(row.num_logits)]
        if row.token_ids[0] in self.poisoned_logits_for:
            rows = [torch.full((VOCAB,), float("nan")) for _ in rows]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)


def logits_after(history: Seq[int]) -> Tensor:
    generator = torch.Generator().manual_seed(hash(tuple(history)) % 2**31)
    logits = torch.randn(VOCAB, generator=generator)
    logits[EOS] += 0.5
    return logits


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    """The greedy answer of the pretended model, up to and with EOS."""
    history, answer = list(prompt), []
    while len(answer) < count and (not answer or answer[-1] != EOS):
        answer.append(int(logits_after(history).argmax()))
        history.append(answer[-1])
    return answer


def make_scheduler(
    *,
    pages: int = 200,
    slots: int = 20,
    budget: int = 16,
    max_running: int = 16,
    hold: bool = False,
    cache: bool = True,
    overlap: bool = True,
    mixed: bool = False,
) -> Scheduler:
    eos_ids = frozenset({EOS})
    runner = BookkeepingRunner()
    page_pool, slot_pool = PageAllocator(pages), SlotAllocator(slots)
    memory = SequenceMemory(
        pages=page_pool,
        slots=slot_pool,
        cache=RadixCache(page_pool, slot_pool, page_size=PAGE, cache_chunk=CHUNK) if cache else None,
        copy_slots=runner.copy_slots,
        page_size=PAGE,
    )
    return Scheduler(
        device=Device(runner, eos_ids, overlap=overlap),
        memory=memory,
        stopping=StopChecker(lambda ids: " ".join(map(str, ids)), eos_ids),
        limits=Limits(
            page_size=PAGE,
            prefill_budget=budget,
            cache_chunk=CHUNK,
            max_running=max_running,
            track_interval=2 * CHUNK if cache else None,
            tracks_prefill=cache,
            caches_final_state=False,
            mixed=mixed,
        ),
        overlap=overlap,
        hold_after_prefill=hold,
    )


def make_sequence(
    rid: str, prompt: list[int], max_new_tokens: int, arrival_s: float = 0.0, **extra: object
) -> Sequence:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens)
    return Sequence(
        rid=rid,
        prompt_ids=prompt,
        sampling=sampling,
        logprobs=LogprobOptions(**extra),  # type: ignore[arg-type]
        arrival_s=arrival_s,
    )


def drain(scheduler: Scheduler) -> list[str]:
    """Step until nothing is left; returns the rids in the order in which they ended."""
    ended = []
    for _ in range(10_000):
        report = scheduler.step()
        if report is None:
            break
        for emission in report.emissions:
            if emission.finish is not None:
                scheduler.release(emission.sequence)
                ended.append(emission.sequence.rid)
        for sequence, _ in report.failures:
            scheduler.release(sequence)
            ended.append(sequence.rid)
    assert not scheduler.has_work()
    return ended


def assert_all_free(scheduler: Scheduler) -> None:
    """Nothing is held by a request, and after a flush nothing by the cache."""
    memory = scheduler.memory
    if memory.cache is not None:
        memory.cache.check_integrity(request_pages=[], request_slots=[])
        memory.cache.flush()
    memory.pages.check_integrity()
    memory.slots.check_integrity()
    assert memory.pages.num_free == memory.pages.num_usable
    assert memory.slots.num_free == memory.slots.num_usable


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 40, 41])
def test_chunked_prefill_and_decode_continue_one_sequence(length: int) -> None:
    scheduler = make_scheduler()
    prompt = [1 + i % 90 for i in range(length)]
    sequence = make_sequence("a", prompt, 12)
    scheduler.add(sequence)
    drain(scheduler)
    assert sequence.output_ids == expected_tokens(prompt, 12)
    assert_all_free(scheduler)


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_random_arrivals_in_small_pools_give_the_answers_of_each_alone(
    seed: int, mixed: bool, overlap: bool, cache: bool
) -> None:
    """Shared prefixes, aborts, retractions and evictions; the runner checks every state and page that is used."""
    rng = random.Random(seed)
    scheduler = make_scheduler(
        pages=rng.randint(20, 40), slots=rng.randint(3, 9), max_running=rng.randint(2, 8), cache=cache, overlap=overlap,
        mixed=mixed,
    )  # fmt: skip
    prefixes = [[rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 30))] for _ in range(3)]
    pending = [
        make_sequence(f"r{i}", rng.choice(prefixes)[: rng.randint(1, 30)] + tail(rng), rng.randint(0, 30), i)
        for i in range(40)
    ]
    done: list[Sequence] = []
    aborted: set[str] = set()
    while pending or scheduler.has_work():
        while pending and rng.random() < 0.3:
            scheduler.add(pending.pop(0))
        running = scheduler.running + scheduler.prefilling + list(scheduler.waiting)
        if running and rng.random() < 0.03:
            victim = rng.choice(running)
            scheduler.remove(victim)
            scheduler.release(victim)
            aborted.add(victim.rid)
        report = scheduler.step()
        for emission in report.emissions if report else []:
            if emission.finish is not None:
                scheduler.release(emission.sequence)
                done.append(emission.sequence)
        assert not (report and report.failures)
        scheduler.memory.pages.check_integrity()
        scheduler.memory.slots.check_integrity()
    assert len(done) + len(aborted) == 40
    for sequence in done:
        assert sequence.output_ids == expected_tokens(sequence.prompt_ids, sequence.sampling.max_new_tokens)
    assert_all_free(scheduler)


def tail(rng: random.Random) -> list[int]:
    return [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 6))]


def answer(scheduler: Scheduler, rid: str, prompt: list[int], max_new_tokens: int) -> Sequence:
    sequence = make_sequence(rid, prompt, max_new_tokens)
    sequence.sampling = SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens, ignore_eos=True)
    scheduler.add(sequence)
    drain(scheduler)
    return sequence


@pytest.mark.parametrize("overlap", [False, True])
def test_three_prompts_that_branch_miss_miss_and_hit(overlap: bool) -> None:
    scheduler = make_scheduler(overlap=overlap)
    common = [1 + i % 90 for i in range(33)]
    cached = [answer(scheduler, f"r{i}", common + [50 + i] * 20, 2).num_cached_tokens for i in range(3)]
    assert cached == [0, 0, 32]
    assert_all_free(scheduler)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("answered", [5, 6, 7, 8, 21, 22, 23, 24])
def test_a_conversation_resumes_where_decode_saved_last(overlap: bool, answered: int) -> None:
    """Interval 16: a prompt of 10 tokens passes 16 with 7 answer tokens (6 computed), 32 with 23."""
    scheduler = make_scheduler(overlap=overlap)
    prompt = [1 + i % 90 for i in range(10)]
    first = answer(scheduler, "first", prompt, answered)
    computed = len(prompt) + answered - 1
    second = answer(scheduler, "second", prompt + first.output_ids + [7], 4)
    saved = max(8, computed - computed % 16)
    assert second.num_cached_tokens == saved
    assert second.output_ids == expected_without_end(second.prompt_ids, 4)
    assert_all_free(scheduler)


def expected_without_end(prompt: list[int], count: int) -> list[int]:
    history = list(prompt)
    for _ in range(count):
        history.append(int(logits_after(history).argmax()))
    return history[len(prompt) :]


def test_without_a_slot_for_it_a_checkpoint_is_skipped_and_counted() -> None:
    scheduler = make_scheduler(slots=3, overlap=False)
    sequences = [make_sequence(f"r{i}", [i + 1] * 9, 3, arrival_s=i) for i in range(2)]
    for sequence in sequences:
        scheduler.add(sequence)
    drain(scheduler)
    assert scheduler.memory.counters.checkpoints_skipped > 0
    for sequence in sequences:
        assert sequence.output_ids == expected_tokens(sequence.prompt_ids, 3)
    assert_all_free(scheduler)


def test_retraction_takes_the_latest_arrival_and_changes_no_answer() -> None:
    scheduler = make_scheduler(pages=10, slots=5)
    prompts = [[5, 6, 7, 8, 9], [10, 11, 12], [20, 21, 22, 23]]
    sequences = [make_sequence(f"r{i}", p, 14, arrival_s=i) for i, p in enumerate(prompts)]
    for sequence in sequences:
        sequence.sampling = SamplingParams(temperature=0.0, max_new_tokens=14, ignore_eos=True)
        scheduler.add(sequence)
    first_retracted = None
    while scheduler.has_work():
        report = scheduler.step()
        assert report is not None and not report.failures
        if scheduler.counters.retractions and first_retracted is None:
            first_retracted = scheduler.waiting[0].rid
        for emission in report.emissions:
            if emission.finish is not None:
                scheduler.release(emission.sequence)
    assert first_retracted == "r2"
    for sequence, prompt in zip(sequences, prompts, strict=True):
        history = list(prompt)
        for token in sequence.output_ids:
            assert token == int(logits_after(history).argmax())
            history.append(token)
        assert len(sequence.output_ids) == 14
    assert_all_free(scheduler)


def test_an_answer_that_outgrows_every_page_fails_alone() -> None:
    scheduler = make_scheduler(pages=4, slots=3)
    sequence = make_sequence("big", [3] * 8, 30)
    sequence.sampling = SamplingParams(temperature=0.0, max_new_tokens=30, ignore_eos=True)
    scheduler.add(sequence)
    failures = []
    while scheduler.has_work():
        report = scheduler.step()
        assert report is not None
        failures += report.failures
    assert [type(error) for _, error in failures] == [CapacityError]
    scheduler.release(sequence)
    assert_all_free(scheduler)


def test_order_of_arrival_is_kept_when_slots_run_out() -> None:
    scheduler = make_scheduler(slots=2)
    for i in range(6):
        scheduler.add(make_sequence(f"r{i}", [i + 1, i + 2], 3, arrival_s=i))
    assert drain(scheduler) == [f"r{i}" for i in range(6)]


def test_non_finite_logits_fail_their_row_and_no_other() -> None:
    scheduler = make_scheduler(overlap=False)
    assert isinstance(scheduler.device.runner, BookkeepingRunner)
    scheduler.device.runner.poisoned_logits_for = {66}
    good, bad = make_sequence("good", [5, 6, 7], 6), make_sequence("bad", [66, 1, 2], 6)
    scheduler.add(bad)
    scheduler.add(good)
    report = scheduler.step()
    assert report is not None
    assert [s.rid for s, _ in report.failures] == ["bad"]
    assert report.failures[0][1].code == "non_finite_logits"
    assert bad.phase is Phase.DONE
    scheduler.release(bad)
    drain(scheduler)
    assert good.output_ids == expected_tokens(good.prompt_ids, 6)
    assert_all_free(scheduler)


def test_a_prefill_scheduler_holds_a_sequence_until_it_is_released() -> None:
    scheduler = make_scheduler(hold=True)
    sequence = make_sequence("a", list(range(1, 30)), 50)
    scheduler.add(sequence)
    chunks = []
    while scheduler.has_work():
        report = scheduler.step()
        assert report is not None
        chunks += [(c.start, c.end) for c in report.chunks]
    assert chunks == [(0, 16), (16, 29)]
    assert sequence.phase is Phase.HELD and len(sequence.output_ids) == 1
    assert scheduler.memory.pages.num_free < scheduler.memory.pages.num_usable
    scheduler.release(sequence)
    assert_all_free(scheduler)


@pytest.mark.parametrize("start_len", [0, 1, 2, 7, 8, 9, 15, 16, 17, 27, 28])
@pytest.mark.parametrize("budget", [8, 16, 64])
def test_prompt_logprobs_over_chunks_are_those_of_each_position(start_len: int, budget: int) -> None:
    scheduler = make_scheduler(budget=budget)
    prompt = [1 + (7 * i) % 90 for i in range(28)]
    sequence = make_sequence("a", prompt, 2, wanted=True, start_len=start_len, top_num=2)
    scheduler.add(sequence)
    drain(scheduler)
    assert [t.token_id for t in sequence.prompt_logprobs] == prompt[start_len:]
    for position, entry in enumerate(sequence.prompt_logprobs, start=start_len):
        if position == 0:
            assert entry.logprob is None
            continue
        reference = torch.log_softmax(logits_after(prompt[:position]), dim=-1)
        assert entry.logprob == pytest.approx(reference[prompt[position]].item(), abs=1e-5)
        assert entry.top[0][1] == int(reference.argmax())


def test_a_state_whose_logits_were_not_finite_is_not_cached() -> None:
    scheduler = make_scheduler(overlap=False)
    assert isinstance(scheduler.device.runner, BookkeepingRunner)
    scheduler.device.runner.poisoned_logits_for = {66}
    bad = make_sequence("bad", [66, *range(1, 12)], 6)
    scheduler.add(bad)
    drain(scheduler)
    cache = scheduler.memory.cache
    assert cache is not None and cache.num_cached_slots == 0
    assert_all_free(scheduler)


# Saved states that a hand-off may be reading


def is_owned(scheduler: Scheduler, slot: int) -> bool:
    return any(slot in slots for slots in scheduler.memory.slots.owned().values())


@pytest.mark.parametrize("overlap", [False, True])
def test_a_state_that_the_cache_had_already_stays_until_release(overlap: bool) -> None:
    """Two alike in one step: the second one's saved state is not wanted, but a hand-off has begun to read it."""
    scheduler = make_scheduler(hold=True, budget=64, overlap=overlap)
    pair = [make_sequence(rid, list(range(1, 20)), 5) for rid in "ab"]
    for sequence in pair:
        scheduler.add(sequence)
    drain(scheduler)
    first, second = (sequence.tracked for sequence in pair)
    assert first is not None and second is not None and first.position == second.position == 16
    assert pair[0].spare_slots == [] and pair[1].spare_slots == [second.slot] and first.slot != second.slot
    scheduler.release(pair[0])
    assert is_owned(scheduler, second.slot)
    scheduler.release(pair[1])
    assert not is_owned(scheduler, second.slot)
    assert_all_free(scheduler)


@pytest.mark.parametrize("why", ["not finite", "removed"])
def test_a_state_that_may_not_be_cached_stays_until_release(why: str) -> None:
    scheduler = make_scheduler(hold=True, budget=64, overlap=True)
    assert isinstance(scheduler.device.runner, BookkeepingRunner)
    scheduler.device.runner.poisoned_logits_for = {66} if why == "not finite" else set()
    sequence = make_sequence("bad", [66, *range(1, 19)], 5)
    scheduler.add(sequence)
    scheduler.step()
    if why == "removed":
        scheduler.remove(sequence)
    while scheduler.has_work():
        scheduler.step()
    assert sequence.tracked is not None and sequence.spare_slots == [sequence.tracked.slot]
    assert is_owned(scheduler, sequence.tracked.slot)
    scheduler.release(sequence)
    assert_all_free(scheduler)


def test_what_a_step_will_prefill_is_told_before_it_runs() -> None:
    """Also under overlap: chunk by chunk, and the last one names the saved state, which no one has donated yet."""
    scheduler = make_scheduler(hold=True, budget=8, overlap=True)
    sequence = make_sequence("a", list(range(1, 20)), 5)
    scheduler.add(sequence)
    told: list[tuple[int, int, Phase, int | None]] = []

    def listen(chunks: list[Chunk]) -> OnLayer:
        for chunk in chunks:
            tracked = chunk.sequence.tracked
            told.append((chunk.start, chunk.end, chunk.sequence.phase, tracked.position if tracked else None))
        return lambda layer: None

    while scheduler.has_work():
        scheduler.step(listen)
    assert told == [
        (0, 8, Phase.PREFILL, None),
        (8, 16, Phase.PREFILL, 16),
        (16, 19, Phase.HELD, 16),
    ]
    scheduler.release(sequence)
    assert_all_free(scheduler)
