"""The statistics of a gate: how sure a share of right answers is, whether two servers differ, whether nights drift."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, mean, stdev

CUSUM_SLACK = 0.5
CUSUM_LIMIT = 4.0


@dataclass(frozen=True, slots=True)
class Interval:
    low: float
    high: float


def wilson(right: int, asked: int, confidence: float = 0.95) -> Interval:
    """Interval of the probability behind `right` of `asked` (Wilson 1927, without continuity correction).

    For nothing asked it is 0 … 1.
    """
    if asked == 0:
        return Interval(0.0, 1.0)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, weight = right / asked, z * z / asked
    centre = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / asked + weight / (4 * asked))
    # At the ends the formula gives 0 and 1, but for rounding.
    return Interval(0.0 if right == 0 else centre - half, 1.0 if right == asked else centre + half)


def mcnemar_exact(only_first: int, only_second: int) -> float:
    """Two-sided p that pairs of which one is right fall so unevenly when both sides are equally good (McNemar 1947).

    Exact: twice the binomial tail of the smaller count, at most 1. Pairs that agree say nothing.
    """
    pairs = only_first + only_second
    tail = sum(math.comb(pairs, k) for k in range(min(only_first, only_second) + 1))
    return min(1.0, tail / (1 << pairs) * 2)


@dataclass(frozen=True, slots=True)
class Cusum:
    """sums: after each value, how far the values have fallen below the target in all, beyond the slack, in deviations.

    alarm: index of the first sum above the limit, None when there is none.
    """

    sums: tuple[float, ...]
    alarm: int | None


def cusum_below(
    values: Sequence[float],
    target: float,
    deviation: float,
    *,
    slack: float = CUSUM_SLACK,
    limit: float = CUSUM_LIMIT,
) -> Cusum:
    """One-sided tabular CUSUM for a fall (Page 1954; NIST e-Handbook 6.3.2.3): S = max(0, S + (target - x)/sd - slack).

    With the default slack and limit it notices a fall of one deviation after about 8 values and cries wolf once in 330.
    """
    sums: list[float] = []
    total = 0.0
    for value in values:
        total = max(0.0, total + (target - value) / deviation - slack)
        sums.append(total)
    return Cusum(tuple(sums), next((i for i, s in enumerate(sums) if s > limit), None))


def spread(values: Sequence[float]) -> float:
    """Standard deviation of a sample; 0 for a single value."""
    return stdev(values) if len(values) > 1 else 0.0


def centre(values: Sequence[float]) -> float:
    """The mean; 0 of nothing."""
    return mean(values) if values else 0.0


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the others lies (nearest rank); 0 of nothing."""
    if not values:
        return 0.0
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
