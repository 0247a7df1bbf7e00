"""Random lives of requests in small pools: what is freed is poisoned at once, so that whoever reads it shows.

After every operation free + owned + cached = all; at the end nothing has leaked, and every answer that was finished is
that of a cold run alone.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from common.config import EngineConfig
from common.sampling import SamplingParams
from tests.support.models import Models
from tests.support.ranks import (
    PLAIN,
    ColdRuns,
    Outcome,
    Ranks,
    Request,
    assert_equivalent,
    check_integrity,
    disaggregated_ranks,
    run_late,
    unified_ranks,
)

CHUNK = 8

Make = Callable[..., AbstractContextManager[Ranks]]
EACH_WAY = pytest.mark.parametrize("make", [unified_ranks, disaggregated_ranks], ids=["unified", "disaggregated"])


@pytest.fixture(scope="module")
def model(models: Models) -> Path:
    return models("nemotron_h", CHUNK)


@pytest.fixture(scope="module")
def cold(model: Path) -> Iterator[ColdRuns]:
    with unified_ranks(model=model, engine=PLAIN) as ranks:
        yield ColdRuns(ranks)


def poison_what_is_freed(role: Any) -> None:
    """Slots become NaN and pages huge as soon as a request or the cache gives them back, and to begin with."""
    memory, pools = role.host.scheduler.memory, role.host.runner.pools
    free_pages, free_slot = memory.pages.free, memory.slots.free

    def pages_freed(pages: Sequence[int]) -> None:
        free_pages(pages)
        pools.poison_pages(pages)

    def slot_freed(slot: int) -> None:
        free_slot(slot)
        pools.poison_slot(slot)

    memory.pages.free, memory.slots.free = pages_freed, slot_freed
    pools.poison_pages(range(1, pools.num_pages))
    for slot in range(1, pools.num_slots):
        pools.poison_slot(slot)


class Life:
    """Does one random operation after the other. asked: every request, with what it asked for."""

    def __init__(self, ranks: Ranks, rng: random.Random, cold: ColdRuns) -> None:
        self.ranks, self.rng, self.cold = ranks, rng, cold
        self.done: Counter[str] = Counter()
        self.asked: list[tuple[Request, Outcome]] = []
        self.stems = [self.tokens(40) for _ in range(3)]
        for role in ranks.roles:
            poison_what_is_freed(role)

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(3, 97) for _ in range(count)]

    def schedulers(self) -> list[Any]:
        return [role.host.scheduler for role in self.ranks.roles]  # type: ignore[attr-defined]

    def unfinished(self) -> list[Outcome]:
        return [outcome for _, outcome in self.asked if not outcome.ended]

    def operate(self) -> None:
        names = ["arrive", "branch", "continue", "again", "abort", "evict", "retract", "flush", "step"]
        name = self.rng.choices(names, [8, 8, 12, 4, 4, 6, 3, 1, 54])[0]
        getattr(self, name if name != "continue" else "continue_one")()
        self.done[name] += 1
        self.ranks.step()
        for role in self.ranks.roles:
            check_integrity(role)

    def submit(self, prompt: list[int]) -> None:
        """Some answers end at a stop token, which is seen when the next step is on its way."""
        if len(self.unfinished()) < 8:
            sampling = SamplingParams(
                temperature=0.0,
                max_new_tokens=self.rng.choice([1, 2, 5, 9, 17, 33]),
                ignore_eos=True,
                stop_token_ids=tuple(self.tokens(self.rng.choice([0, 0, 10]))),
            )
            request = Request(prompt=prompt, sampling=sampling)
            self.asked.append((request, self.ranks.submit(request)))

    def arrive(self) -> None:
        self.submit(self.tokens(self.rng.randint(1, 45)))

    def branch(self) -> None:
        """A prefix that others have, cut anywhere, and a tail of its own."""
        self.submit(self.rng.choice(self.stems)[: self.rng.randint(1, 40)] + self.tokens(self.rng.randint(1, 9)))

    def finished(self) -> list[tuple[Request, Outcome]]:
        return [(request, outcome) for request, outcome in self.asked if outcome.finish is not None]

    def continue_one(self) -> None:
        """The next turn of a conversation."""
        short = [(r, o) for r, o in self.finished()[-20:] if len(r.prompt) + len(o.ids) < 75]
        if short:
            request, outcome = self.rng.choice(short)
            self.submit([*request.prompt, *outcome.ids, *self.tokens(self.rng.randint(1, 12))])

    def again(self) -> None:
        if self.asked:
            self.submit(self.rng.choice(self.asked[-10:])[0].prompt)

    def abort(self) -> None:
        if self.unfinished():
            self.ranks.abort(self.rng.choice(self.unfinished()))

    def evict(self) -> None:
        cache = self.rng.choice(self.schedulers()).memory.cache
        self.rng.choice([cache.evict_pages, cache.evict_slots])(self.rng.randint(1, 3))

    def retract(self) -> None:
        """When nothing is in flight: a step before it, in which nothing is planned, lets the last one land."""
        scheduler = self.schedulers()[-1]
        scheduler._plan = list
        self.ranks.step()
        del scheduler._plan
        if scheduler.running:
            scheduler.retract(self.rng.choice(scheduler.running))

    def flush(self) -> None:
        """As /flush_cache does, but while requests run."""
        for scheduler in self.schedulers():
            scheduler.memory.flush()

    def step(self) -> None:
        for _ in range(self.rng.randint(0, 6)):
            if not self.ranks.step():
                time.sleep(0.0005)  # a transfer has its own threads

    def end(self) -> None:
        self.ranks.run_until(lambda: not self.unfinished())
        self.ranks.assert_all_free()

    def assert_cold(self) -> int:
        """Returns how many answers there are."""
        for request, outcome in self.finished():
            assert_equivalent(outcome, self.cold.of(request))
        codes = {outcome.error.code for _, outcome in self.asked if outcome.error is not None}
        assert codes <= {"aborted"}, codes
        return len(self.finished())


def small_pools(rng: random.Random, overlap: bool) -> EngineConfig:
    return EngineConfig(
        page_size=rng.choice([1, 4, 8, 16]),
        max_total_tokens=rng.choice([144, 192, 256]),
        max_state_slots=rng.choice([4, 6, 8, 11]),
        max_running_requests=rng.choice([3, 6]),
        chunked_prefill_size=rng.choice([16, 32, -1]),
        mamba_track_interval=16,
        disable_overlap_schedule=not overlap,
        enable_mixed_chunk=rng.random() < 0.5,
        local_prefill_max_tokens=rng.choice([0, 8, 256]),
    )


def live(make: Make, when: str, model: Path, cold: ColdRuns, operations: int, seed: int) -> Counter[str]:
    """when: without overlap; with it; with it and every step as late as possible. Returns what has happened."""
    rng = random.Random(seed)
    with make(model=model, engine=small_pools(rng, when != "plain")) as ranks:
        if when == "late":
            run_late(ranks)
        life = Life(ranks, rng, cold)
        for _ in range(operations):
            life.operate()
        life.end()
        for scheduler in life.schedulers():
            caches = scheduler.memory.cache.counters
            life.done.update(retractions=scheduler.counters.retractions, hits=caches.hits)
            life.done.update(pages=caches.evicted_pages, slots=caches.evicted_slots)
    life.done["answers"] += life.assert_cold()
    return life.done


MUST_HAPPEN = ("retractions", "hits", "pages", "slots", "abort", "branch", "flush", "continue")


@EACH_WAY
@pytest.mark.parametrize("when", ["plain", "late"])
def test_a_thousand_random_operations_leak_nothing_and_change_no_answer(
    when: str, make: Make, model: Path, cold: ColdRuns
) -> None:
    done: Counter[str] = Counter()
    for seed in range(8):
        done += live(make, when, model, cold, 125, seed)
    assert all(done[what] for what in MUST_HAPPEN) and done["answers"] >= 80, done


@pytest.mark.slow
@pytest.mark.timeout(1800)
@EACH_WAY
@pytest.mark.parametrize("when", ["plain", "overlap", "late"])
def test_ten_thousand_random_operations_leak_nothing_and_change_no_answer(
    when: str, make: Make, model: Path, cold: ColdRuns
) -> None:
    for seed in range(100, 140):
        live(make, when, model, cold, 250, seed)


# -- how many slots a request owns ---------------------------------------------------------------------------------


@EACH_WAY
@pytest.mark.parametrize("when", ["plain", "late"])
def test_a_running_request_owns_little_more_than_one_slot(when: str, make: Make, model: Path) -> None:
    """Over all steps in which eight requests decode; a second slot is owned for the one step that crosses an interval.

    Deterministic: it counts. A slot that the cache holds can be had back, and is not counted.
    """
    interval = 32
    settings = EngineConfig(
        max_total_tokens=4096,
        max_state_slots=40,
        mamba_track_interval=interval,
        disable_overlap_schedule=when == "plain",
    )
    with make(model=model, engine=settings) as ranks:
        if when == "late":
            run_late(ranks)
        rng = random.Random(1)
        requests = [
            Request(prompt=[rng.randrange(3, 97) for _ in range(9 + 5 * i)], max_new_tokens=100) for i in range(8)
        ]
        outcomes = [ranks.submit(request) for request in requests]
        scheduler = ranks.roles[-1].host.scheduler  # type: ignore[attr-defined]
        slots, owned = scheduler.memory.slots, []
        ranks.run_until(lambda: len(scheduler.running) == len(requests))
        while len(scheduler.running) == len(requests):
            owned.append(slots.num_usable - slots.num_free - scheduler.memory.cache.num_cached_slots)
            ranks.step()
        ranks.run_until(lambda: all(outcome.ended for outcome in outcomes))
    checkpoints = scheduler.memory.counters.checkpoints
    assert len(owned) > 2 * interval and checkpoints >= 3 * len(requests)
    assert 1 <= sum(owned) / len(owned) / len(requests) <= 1.15
