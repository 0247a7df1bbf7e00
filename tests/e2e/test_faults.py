"""A byte that is lost, changed or misplaced in flight fails exactly its request; without digests it shows. In every
family of models."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from common.config import LoopbackFaults, Verify
from tests.support.models import FAMILIES, Models
from tests.support.ranks import Outcome, Ranks, Request, assert_equivalent, disaggregated_ranks, unified_ranks
from transfer import posting

CHUNK = 16
EVERY = 3
EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES)

Reference = Callable[[str], list[Outcome]]


def tasks(count: int = 9) -> list[Request]:
    """None ends on the grid: each has a state that was saved on the way."""
    return [
        Request(prompt=[3 + (i * 37 + j * 11) % 90 for j in range(145 + i)], max_new_tokens=8) for i in range(count)
    ]


@pytest.fixture(scope="module")
def reference(models: Models) -> Reference:
    """family -> what each of the tasks is answered, undisturbed."""

    @cache
    def of(family: str) -> list[Outcome]:
        with unified_ranks(model=models(family, CHUNK)) as ranks:
            return [ranks.run([task])[0] for task in tasks()]

    return of


@EACH_FAMILY
@pytest.mark.parametrize("part", ["kv", "conv", "ssm", "track", "metadata"])
def test_one_flipped_byte_fails_its_request_and_no_other(
    part: str, family: str, models: Models, reference: Reference
) -> None:
    expected = reference(family)
    with disaggregated_ranks(model=models(family, CHUNK), faults=LoopbackFaults(flip=part, every=EVERY)) as ranks:
        outcomes = ranks.run(tasks())
        ranks.assert_all_free()
        mismatches = ranks.decode.transfer.stats()["digest_mismatches"]
    failed = [o for o in outcomes if o.error is not None]
    assert len(failed) == len(outcomes) // EVERY == mismatches[part]
    for outcome in failed:
        assert outcome.error is not None and outcome.tokens == []
        assert outcome.error.code == "digest_mismatch" and part in outcome.error.message
    for outcome, undisturbed in zip(outcomes, expected, strict=True):
        if outcome.error is None:
            assert_equivalent(outcome, undisturbed)


@EACH_FAMILY
@pytest.mark.parametrize("part", ["kv", "conv", "ssm", "track"])
@pytest.mark.parametrize("fault", ["zero", "drop"])
def test_a_lost_part_is_caught_by_its_digest(part: str, fault: str, family: str, models: Models) -> None:
    faults = LoopbackFaults(**{fault: part})  # type: ignore[arg-type]
    with disaggregated_ranks(model=models(family, CHUNK), faults=faults) as ranks:
        fill_pools(ranks)
        outcomes = ranks.run(tasks(3))
        ranks.assert_all_free()
    assert [o.error.code if o.error else None for o in outcomes] == ["digest_mismatch"] * 3


@EACH_FAMILY
@pytest.mark.parametrize("part", ["kv", "conv", "ssm"])
def test_without_digests_a_lost_part_shows_in_the_answer(
    part: str, family: str, models: Models, reference: Reference
) -> None:
    """A lost track slot shows in the next answer: see `test_mutations`."""
    expected = reference(family)
    faults = LoopbackFaults(zero=part)
    with disaggregated_ranks(model=models(family, CHUNK), faults=faults, verify=Verify.OFF) as ranks:
        outcomes = ranks.run(tasks())
    assert all(o.error is None for o in outcomes)
    different = 0
    for outcome, undisturbed in zip(outcomes, expected, strict=True):
        try:
            assert_equivalent(outcome, undisturbed)
        except AssertionError:
            different += 1
    assert different >= len(outcomes) - 1


@EACH_FAMILY
def test_two_requests_with_swapped_slots_are_both_caught(
    family: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = posting.plan_slot

    def misplaced(layout, mine, theirs, pair, layers, **rest):  # type: ignore[no-untyped-def]
        return original(layout, mine, theirs, (pair[0], 3 - pair[1]), layers, **rest)

    with disaggregated_ranks(model=models(family, CHUNK)) as ranks:
        fill_pools(ranks)
        with monkeypatch.context() as patch:
            patch.setattr(posting, "plan_slot", misplaced)
            outcomes = ranks.run(tasks(2))
        ranks.assert_all_free()
        after = ranks.run(tasks(2))
    assert [o.error.code if o.error else None for o in outcomes] == ["digest_mismatch"] * 2
    assert [o.error for o in after] == [None, None]


def fill_pools(ranks: Ranks) -> None:
    """Garbage where the state will land, so that what is not written cannot be right by chance."""
    pools = ranks.decode.host.runner.pools
    for pool in (pools.kv, pools.conv, pools.ssm):
        pool.fill_(0.37)
