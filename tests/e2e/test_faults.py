"""A byte that is lost, changed or misplaced in flight fails exactly its request; without digests it shows."""

from __future__ import annotations

import pytest

from common.config import LoopbackFaults, Verify
from tests.support.ranks import Ranks, Request, assert_equivalent, disaggregated_ranks, unified_ranks
from transfer import posting

EVERY = 3


def tasks(count: int = 9) -> list[Request]:
    return [
        Request(prompt=[3 + (i * 37 + j * 11) % 1000 for j in range(150 + i)], max_new_tokens=8) for i in range(count)
    ]


def reference() -> list:  # type: ignore[type-arg]
    with unified_ranks() as ranks:
        return [ranks.run([task])[0] for task in tasks()]


@pytest.mark.parametrize("part", ["kv", "conv", "ssm", "metadata"])
def test_one_flipped_byte_fails_its_request_and_no_other(part: str) -> None:
    expected = reference()
    with disaggregated_ranks(faults=LoopbackFaults(flip=part, every=EVERY)) as ranks:
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


@pytest.mark.parametrize("part", ["kv", "conv", "ssm"])
@pytest.mark.parametrize("fault", ["zero", "drop"])
def test_a_lost_part_is_caught_by_its_digest(part: str, fault: str) -> None:
    with disaggregated_ranks(faults=LoopbackFaults(**{fault: part})) as ranks:  # type: ignore[arg-type]
        fill_pools(ranks)
        outcomes = ranks.run(tasks(3))
        ranks.assert_all_free()
    assert [o.error.code if o.error else None for o in outcomes] == ["digest_mismatch"] * 3


@pytest.mark.parametrize("part", ["kv", "conv", "ssm"])
def test_without_digests_a_lost_part_shows_in_the_answer(part: str) -> None:
    expected = reference()
    with disaggregated_ranks(faults=LoopbackFaults(zero=part), verify=Verify.OFF) as ranks:
        outcomes = ranks.run(tasks())
    assert all(o.error is None for o in outcomes)
    different = 0
    for outcome, undisturbed in zip(outcomes, expected, strict=True):
        try:
            assert_equivalent(outcome, undisturbed)
        except AssertionError:
            different += 1
    assert different >= len(outcomes) - 1


def test_two_requests_with_swapped_slots_are_both_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = posting.plan_slot

    def misplaced(layout, mine, theirs, pair, layers, **rest):  # type: ignore[no-untyped-def]
        return original(layout, mine, theirs, (pair[0], 3 - pair[1]), layers, **rest)

    with disaggregated_ranks() as ranks:
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
