"""prefix_aware against the best that caches of that size allow, on 4 + 4 workers and a skewed trace.

Best possible: the hit rate of one worker whose cache is as large as those of all four together and which serves
everything, in the same order, whatever its load (`best_hit_rate`). Load: the work a worker has done over the trace.
"""

from __future__ import annotations

import random

import pytest

from common.config import PolicyName, Role
from router.affinity import Path
from router.policies import Decisions, make_policy
from router.prefix_tree import PrefixTree
from tests.router.fleet_model import Fleet, Request, best_hit_rate, imbalance, skewed_trace

NUM_WORKERS = 4
ROOMY, TIGHT = 1200, 150
"""Blocks of 64 tokens in a cache: together a quarter of a million tokens, and so few that conversations fall out."""


@pytest.fixture(scope="module")
def trace() -> list[Request]:
    return skewed_trace(num_requests=3000, num_conversations=400, num_systems=6, gap_s=0.05, seed=1)


def run(name: PolicyName, trace: list[Request], cache_blocks: int = ROOMY) -> Fleet:
    rng = random.Random(3)
    policies = (
        make_policy(name, Role.PREFILL, Decisions(), rng),
        make_policy(name, Role.DECODE, Decisions(), rng),
    )
    fleet = Fleet(NUM_WORKERS, cache_blocks, policies)
    fleet.run(trace)
    return fleet


@pytest.mark.parametrize("cache_blocks", [ROOMY, TIGHT])
def test_prefix_aware_hits_nearly_all_that_can_be_hit_and_spreads_the_load(
    trace: list[Request], cache_blocks: int
) -> None:
    fleet = run(PolicyName.PREFIX_AWARE, trace, cache_blocks)
    best = best_hit_rate(trace, NUM_WORKERS * cache_blocks)
    print(
        f"\nhit rate: best possible {best:.3f}, prefix_aware {fleet.hit_rate:.3f} ({fleet.hit_rate / best:.2f} of it)"
    )
    print(f"busiest worker: prefill {imbalance(fleet.prefill):.2f} × mean, decode {imbalance(fleet.decode):.2f}")
    assert fleet.hit_rate >= 0.9 * best
    assert imbalance(fleet.prefill) <= 1.5
    assert imbalance(fleet.decode) <= 1.5


def test_policies_that_know_no_prefix_stay_far_below(trace: list[Request]) -> None:
    """So the trace is one where the choice matters."""
    best = best_hit_rate(trace, NUM_WORKERS * ROOMY)
    for name in (PolicyName.ROUND_ROBIN, PolicyName.RANDOM):
        fleet = run(name, trace)
        print(f"\nhit rate of {name}: {fleet.hit_rate:.3f} ({fleet.hit_rate / best:.2f} of the best possible)")
        assert fleet.hit_rate < 0.75 * best


class Forgetful(PrefixTree):
    def match(self, path: Path, salt: int) -> int:
        return 0


class Undiscerning(PrefixTree):
    def match(self, path: Path, salt: int) -> int:
        return super().match(path, 0)

    def add(self, path: Path, salt: int) -> None:
        super().add(path, 0)


@pytest.mark.parametrize("tree", [Forgetful(), Undiscerning(), PrefixTree(max_bytes=0)])
def test_a_broken_tree_shows(trace: list[Request], tree: PrefixTree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which forgets, does not tell targets apart, or is full at once."""
    monkeypatch.setattr("router.policies.PrefixTree", lambda: tree)
    assert run(PolicyName.PREFIX_AWARE, trace).hit_rate < 0.75 * best_hit_rate(trace, NUM_WORKERS * ROOMY)
