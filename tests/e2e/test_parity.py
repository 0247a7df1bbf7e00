"""Disaggregated ≡ unified ≡ alone, at lengths around every boundary, and bit for bit what crossed the wire."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest

from common.config import EngineConfig, TransportName
from tests.support.models import FAMILIES, Models
from tests.support.ranks import (
    MODEL,
    Outcome,
    Request,
    Snapshots,
    assert_bytes_crossed_unchanged,
    assert_equivalent,
    disaggregated_ranks,
    unified_ranks,
)

PAGE, CONV = 16, 4
SMALL_CHUNK = 32  # of the families
EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES)


def boundaries(c: int) -> list[int]:
    """c: the model's chunk."""
    of_chunk = [c - 1, c, c + 1, 2 * c - 1, 2 * c, 2 * c + 1, 3 * c + 7]
    return [1, 2, 3, CONV, CONV + 1, PAGE - 1, PAGE, PAGE + 1, *of_chunk]


def lengths(count: int, longest: int) -> list[int]:
    """Every boundary first, then odd lengths drawn evenly on a logarithmic scale up to `longest`."""
    rng = random.Random(7)
    drawn = [min(longest, int(2 ** rng.uniform(2, longest.bit_length())) | 1) for _ in range(count)]
    return [*boundaries(64), *drawn][:count]


def requests(count: int, longest: int) -> list[Request]:
    rng = random.Random(11)
    return [
        Request(prompt=[rng.randrange(3, 1024) for _ in range(n)], max_new_tokens=rng.randint(3, 10))
        for n in lengths(count, longest)
    ]


def engine(budget: int) -> EngineConfig:
    return EngineConfig(
        max_total_tokens=32768, max_state_slots=24, max_running_requests=20, chunked_prefill_size=budget
    )


def small_requests() -> list[Request]:
    rng = random.Random(13)
    return [
        Request(prompt=[rng.randrange(3, 97) for _ in range(n)], max_new_tokens=rng.randint(3, 10))
        for n in boundaries(SMALL_CHUNK)
    ]


def alone(tasks: list[Request], model: Path = MODEL) -> list[Outcome]:
    with unified_ranks(model=model, engine=engine(2048)) as ranks:
        return [ranks.run([task])[0] for task in tasks]


def batched(ranks_of: object, tasks: list[Request], size: int, budget: int, check_bytes: bool) -> list[Outcome]:
    with ranks_of(engine=engine(budget)) as ranks:  # type: ignore[operator]
        snapshots = Snapshots()
        if check_bytes:
            snapshots.watch(ranks.prefill, ranks.decode)
        outcomes: list[Outcome] = []
        for start in range(0, len(tasks), size):
            outcomes += ranks.run(tasks[start : start + size])
        ranks.assert_all_free()
        if check_bytes:
            assert_bytes_crossed_unchanged(snapshots, len(tasks))
            assert ranks.decode.host.scheduler.counters.prefill_tokens_computed == 0
    return outcomes


def compare(tasks: list[Request], budgets: list[int], model: Path = MODEL) -> None:
    reference = alone(tasks, model)
    unified, apart = partial(unified_ranks, model=model), partial(disaggregated_ranks, model=model)
    after_step = partial(apart, disable_layerwise_transfer=True)
    for size in (1, 16):
        for budget in budgets if size == 16 else [2048]:
            for ranks_of in (unified, apart, *([after_step] if budget == budgets[0] else [])):
                is_pair = ranks_of is not unified
                for got, expected in zip(batched(ranks_of, tasks, size, budget, is_pair), reference, strict=True):
                    assert_equivalent(got, expected)


@pytest.mark.timeout(300)
def test_disaggregated_is_unified_is_alone() -> None:
    compare(requests(40, 700), [64, 512])


@EACH_FAMILY
def test_in_every_family(family: str, models: Models) -> None:
    compare(small_requests(), [SMALL_CHUNK, 512], models(family, SMALL_CHUNK))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_disaggregated_is_unified_is_alone_for_200_prompts() -> None:
    compare(requests(200, 1500), [64, 128, 512])


def test_over_mooncake_the_same_shape_gives_identical_answers() -> None:
    tasks = requests(15, 700)
    reference = alone(tasks)
    with disaggregated_ranks(engine=engine(2048), transport=TransportName.MOONCAKE) as ranks:
        for task, expected in zip(tasks, reference, strict=True):
            outcome = ranks.run([task])[0]
            assert outcome.ids == expected.ids
            assert [t.logprob for t in outcome.tokens] == [t.logprob for t in expected.tokens]


@EACH_FAMILY
def test_retraction_on_decode_changes_no_answer(family: str, models: Models) -> None:
    model = models(family, SMALL_CHUNK)
    tasks = [Request(prompt=list(range(10 + i, 60 + i)), max_new_tokens=60) for i in range(6)]
    reference = alone(tasks, model)
    small = EngineConfig(max_total_tokens=400, max_state_slots=8, max_running_requests=6)
    with disaggregated_ranks(model=model, engine=small) as ranks:
        outcomes = ranks.run(tasks)
        assert ranks.decode.host.scheduler.counters.retractions > 0
        ranks.assert_all_free()
    for got, expected in zip(outcomes, reference, strict=True):
        assert_equivalent(got, expected)
