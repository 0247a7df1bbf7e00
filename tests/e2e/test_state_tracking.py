"""Prefix hits, checkpoints, overlap, pieces and the hand-off in every combination ≡ each prompt cold and alone.

A case first sends prefixes, then prompts that continue them, on ranks with a real engine (a random model of a family,
whose chunk is c) and, where disaggregated, a real hand-off. Some continue the answers too.
Tokens, logprobs and the final conv and SSM states must be those of a cold run alone without any cache.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from common.config import EngineConfig
from engine.pools import StatePools
from node.messages import Timing
from tests.support.models import FAMILIES, Models
from tests.support.ranks import (
    PLAIN,
    Outcome,
    Ranks,
    Request,
    assert_equivalent,
    disaggregated_ranks,
    unified_ranks,
)
from tests.support.ties import ROUNDING, watched_routing

CONV = 4
NEW_TOKENS = 6
States = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """s, u: see `prefix_lengths` and `suffix_lengths`, as indices. cut: prefill budget in cache chunks, 0 is off.

    answer: none, the prefixes are of one stem, and sent one after the other; else each prompt has a prefix of its own,
    sent at once, and continues its answer of 2 tokens (short), or of so many that decode saves a state (long).
    """

    family: str
    chunk: int
    page: int
    s: int
    u: int
    batch: str
    strategy: str
    overlap: bool
    cut: int
    mixed: bool
    disaggregated: bool
    local: int
    answer: str

    @property
    def cache_chunk(self) -> int:
        return max(self.chunk, self.page)

    @property
    def is_allowed(self) -> bool:
        """no_buffer caches with pages of one token and without overlap only."""
        return self.strategy == "extra_buffer" or (self.page == 1 and not self.overlap)


VALUES: Mapping[str, Sequence[Any]] = {
    "family": FAMILIES,
    "chunk": (8, 16),
    "page": (1, 16, 32),
    "s": tuple(range(12)),
    "u": tuple(range(6)),
    "batch": ("alone", "three", "sixteen", "beside decodes"),
    "strategy": ("extra_buffer", "no_buffer"),
    "overlap": (True, False),
    "cut": (0, 1, 2),
    "mixed": (False, True),
    "disaggregated": (False, True),
    "local": (0, 256),
    "answer": ("none", "short", "long"),
}


def prefix_lengths(c: int) -> list[int]:
    return [0, 1, CONV - 1, CONV, CONV + 1, c - 1, c, c + 1, 2 * c - 1, 2 * c, 2 * c + 1, 3 * c + 7]


def suffix_lengths(c: int) -> list[int]:
    return [1, 2, 3, c - 1, c, c + 1]


def cases(count: int, seed: int, families: Sequence[str] = FAMILIES) -> list[Case]:
    """Random cases, chosen so that every pair of values that can occur together does."""
    rng, all_values = random.Random(seed), {**VALUES, "family": families}
    missing: set[tuple[tuple[str, Any], ...]] = set()
    for a, b in itertools.combinations(all_values, 2):
        missing |= {((a, x), (b, y)) for x in all_values[a] for y in all_values[b] if is_possible({a: x, b: y})}
    chosen: list[Case] = []
    while missing or len(chosen) < count:
        tried = [draw(rng, all_values) for _ in range(20 if missing else 1)]
        best = max(tried, key=lambda case: len(pairs(case) & missing))
        if pairs(best) & missing or not missing:
            chosen.append(best)
            missing -= pairs(best)
    return chosen


def is_possible(values: dict[str, Any]) -> bool:
    if values.get("strategy") == "no_buffer":
        return values.get("page", 1) == 1 and not values.get("overlap", False)
    return True


def draw(rng: random.Random, all_values: Mapping[str, Sequence[Any]]) -> Case:
    while True:
        case = Case(**{name: rng.choice(values) for name, values in all_values.items()})
        if case.is_allowed:
            return case


def pairs(case: Case) -> set[tuple[tuple[str, Any], ...]]:
    return set(itertools.combinations([(name, getattr(case, name)) for name in VALUES], 2))


def engine(case: Case) -> EngineConfig:
    return EngineConfig(
        page_size=case.page,
        max_total_tokens=4096,
        max_state_slots=64,
        max_running_requests=24,
        chunked_prefill_size=case.cut * case.cache_chunk if case.cut else -1,
        mamba_scheduler_strategy=case.strategy,
        mamba_track_interval=case.cache_chunk,
        disable_overlap_schedule=not case.overlap,
        enable_mixed_chunk=case.mixed,
        local_prefill_max_tokens=case.local,
    )


class Finals:
    """The conv and SSM state of every sequence that a role finishes, by prompt."""

    def __init__(self, ranks: Ranks) -> None:
        self.states: dict[tuple[int, ...], States] = {}
        host = ranks.roles[-1].host  # type: ignore[attr-defined]
        emit = host.emit

        def watched(emission: Any, timing: Timing | None) -> None:
            sequence = emission.sequence
            if emission.finish is not None:
                slot = sequence.slot or sequence.checkpoint.slot  # no_buffer has given its own slot to the cache
                self.states[tuple(sequence.prompt_ids)] = host.runner.pools.slot_state(slot)
            emit(emission, timing)

        host.emit = watched


class Cold(NamedTuple):
    """A prompt's cold run. routing_gap: see `Routing`."""

    outcome: Outcome
    states: States
    routing_gap: float


class References:
    """Cold runs alone, without cache and overlap, each prompt once."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._known: dict[tuple[str, int, tuple[int, ...]], Cold] = {}

    def of(self, case: Case, prompts: list[list[int]]) -> list[Cold]:
        """Of the case's model."""
        keys = [(case.family, case.chunk, tuple(prompt)) for prompt in prompts]
        unknown = [key for key in keys if key not in self._known]
        if unknown:
            model = self._models(case.family, case.chunk)
            with unified_ranks(model=model, engine=PLAIN) as ranks, watched_routing() as routing:
                finals = Finals(ranks)
                for key in unknown:
                    outcome = ranks.run([Request(prompt=list(key[-1]), max_new_tokens=NEW_TOKENS)])[0]
                    self._known[key] = Cold(outcome, finals.states[key[-1]], routing.take())
        return [self._known[key] for key in keys]

    @property
    def share_of_ties(self) -> float:
        """Of all prompts, those that nothing can be compared with."""
        return sum(cold.routing_gap < ROUNDING for cold in self._known.values()) / len(self._known)


@pytest.fixture(scope="module")
def references(models: Models) -> References:
    return References(models)


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 97) for _ in range(count)]


def lengths_of(case: Case, rng: random.Random) -> list[tuple[int, int]]:
    """(prefix, suffix) of each prompt; the first one is the case's own."""
    s, u = prefix_lengths(case.chunk), suffix_lengths(case.chunk)
    count = {"alone": 1, "three": 3, "sixteen": 16, "beside decodes": 3}[case.batch]
    return [(s[case.s], u[case.u])] + [(rng.choice(s), rng.choice(u)) for _ in range(count - 1)]


def send_prefixes(ranks: Ranks, case: Case, seed: int) -> list[list[int]]:
    """Returns the prompts that continue them."""
    lengths = lengths_of(case, random.Random(seed))
    suffixes = [tokens(1000 + seed * 31 + i, m) for i, (_, m) in enumerate(lengths)]
    if case.answer == "none":
        stem = tokens(seed % 5, max(prefix_lengths(case.chunk)))
        for n in sorted({n for n, _ in lengths if n}):
            ranks.run([Request(prompt=stem[:n], max_new_tokens=2)])
        return [stem[:n] + suffix for (n, _), suffix in zip(lengths, suffixes, strict=True)]
    prefixes = [tokens(2000 + seed * 31 + i, n) for i, (n, _) in enumerate(lengths)]
    asked = [
        Request(prompt=p, max_new_tokens=2 if case.answer == "short" else case.cache_chunk + 2) for p in prefixes if p
    ]
    answers = iter(ranks.run(asked))
    return [p + (next(answers).ids if p else []) + suffix for p, suffix in zip(prefixes, suffixes, strict=True)]


@contextmanager
def ranks_of(case: Case, models: Models, *, plausible: bool = False, **settings: Any) -> Iterator[Ranks]:
    """What nobody has written is NaN or huge, so that whoever reads it fails; plausible: it could be another's."""
    make = disaggregated_ranks if case.disaggregated else unified_ranks
    with make(model=models(case.family, case.chunk), engine=engine(case), **settings) as ranks:
        for role in ranks.roles:
            pools = role.host.runner.pools  # type: ignore[attr-defined]
            if plausible:
                fill(pools)
            else:
                poison(pools)
        yield ranks


def poison(pools: StatePools) -> None:
    pools.poison_pages(range(1, pools.num_pages))
    for slot in range(1, pools.num_slots):
        pools.poison_slot(slot)


def fill(pools: StatePools) -> None:
    for pool in (pools.kv, pools.conv, pools.ssm):
        pool.fill_(0.37)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a case answered to each prompt, and the state that it ended with."""

    prompts: list[list[int]]
    outcomes: list[Outcome]
    states: list[States | None]


def run(case: Case, seed: int, models: Models, **settings: Any) -> Run:
    with ranks_of(case, models, **settings) as ranks:
        prompts = send_prefixes(ranks, case, seed)
        finals = Finals(ranks)
        others = []
        if case.batch == "beside decodes":
            others = [ranks.submit(Request(prompt=tokens(70 + i, 5 + i), max_new_tokens=40)) for i in range(2)]
            ranks.run_until(lambda: all(len(o.tokens) >= 3 for o in others))
        outcomes = ranks.run([Request(prompt=p, max_new_tokens=NEW_TOKENS) for p in prompts])
        ranks.run_until(lambda: all(o.ended for o in others))
        ranks.assert_all_free()
    return Run(prompts=prompts, outcomes=outcomes, states=[finals.states.get(tuple(p)) for p in prompts])


def assert_cold(found: Run, case: Case, references: References) -> None:
    """The equivalence that every case is about. Where rounding chose an expert there is none."""
    expected = references.of(case, found.prompts)
    for outcome, states, (cold, cold_states, gap) in zip(found.outcomes, found.states, expected, strict=True):
        if gap < ROUNDING:
            continue
        assert_equivalent(outcome, cold)
        if outcome.ids == cold.ids:
            assert states is not None
            for name, ours, theirs in zip(("conv", "ssm"), states, cold_states, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n} state: {m}")


def check(case: Case, seed: int, models: Models, references: References) -> None:
    assert_cold(run(case, seed, models), case, references)


@pytest.mark.timeout(400)
def test_every_pair_of_settings_is_equivalent_to_a_cold_run(models: Models, references: References) -> None:
    sweep(cases(160, seed=1), models, references)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", FAMILIES)
def test_1000_cases_of_a_family_are_equivalent_to_a_cold_run(
    family: str, models: Models, references: References
) -> None:
    sweep(cases(1000, seed=2, families=[family]), models, references)


def sweep(chosen: list[Case], models: Models, references: References) -> None:
    failures: list[str] = []
    for seed, case in enumerate(chosen):
        try:
            check(case, seed, models, references)
        except AssertionError as error:
            failures.append(f"{case} seed {seed}: {str(error).splitlines()[0]}")
    assert not failures, f"{len(failures)} of {len(chosen)} cases differ:\n" + "\n".join(failures[:20])
    assert references.share_of_ties < 0.02
