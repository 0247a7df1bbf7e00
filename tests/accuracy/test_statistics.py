"""Wilson, McNemar and CUSUM against published examples, and against scipy where that is installed."""

from __future__ import annotations

import random

import pytest

from accuracy.statistics import Interval, cusum_below, mcnemar_exact, quantile, spread, wilson


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"),
    # Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_against_newcombe(right: int, asked: int, low: float, high: float) -> None:
    found = wilson(right, asked)
    assert found.low == pytest.approx(low, abs=5e-5)
    assert found.high == pytest.approx(high, abs=5e-5)


def test_wilson_at_the_ends() -> None:
    assert wilson(0, 0) == Interval(0.0, 1.0)
    assert wilson(7, 7).high == 1.0
    assert wilson(0, 7).low == 0.0


def test_mcnemar_against_fagerland() -> None:
    # Fagerland, Lydersen, Laake, BMC Med. Res. Methodol. 13:91 (2013): airway hyper-responsiveness, 1 against 7 pairs.
    assert mcnemar_exact(1, 7) == pytest.approx(0.0703, abs=5e-5)
    assert mcnemar_exact(7, 1) == mcnemar_exact(1, 7)


def test_mcnemar_without_evidence() -> None:
    assert mcnemar_exact(0, 0) == 1.0
    assert mcnemar_exact(3, 3) == 1.0


# NIST/SEMATECH e-Handbook of Statistical Methods, 6.3.2.3: h = 4.1959 and k = 0.3175 in units of the data.
NIST = (
    324.925, 324.675, 324.725, 324.350, 325.350, 325.225, 324.125, 324.525, 325.225, 324.600,
    324.625, 325.150, 328.325, 327.250, 327.825, 328.500, 326.675, 327.775, 326.875, 328.350,
)  # fmt: skip
NIST_SUMS = (
    0, 0, 0, 0, 0.03, 0, 0, 0, 0, 0, 0, 0, 3.01, 4.94, 7.45, 10.63, 11.99, 14.44, 16.00, 19.04,
)  # fmt: skip


def test_cusum_against_nist() -> None:
    mirrored = [-x for x in NIST]
    found = cusum_below(mirrored, target=-325, deviation=1.0, slack=0.3175, limit=4.1959)
    assert found.sums == pytest.approx(NIST_SUMS, abs=0.01)
    assert found.alarm == 13


def test_cusum_is_silent_on_what_rises_and_counts_in_deviations() -> None:
    assert cusum_below(NIST, 325, 1.0, slack=0.3175, limit=4.1959).alarm is None
    one = cusum_below([0.87, 0.86], 0.90, 0.01)
    assert one.sums == pytest.approx((2.5, 6.0))
    assert one.alarm == 1


def test_cusum_seldom_cries_wolf_and_soon_sees_a_fall_of_a_deviation() -> None:
    rng = random.Random(0)

    def run_length(fall: float) -> int:
        found = cusum_below([rng.gauss(-fall, 1) for _ in range(3000)], 0.0, 1.0)
        return 3000 if found.alarm is None else found.alarm + 1

    assert 250 < sum(run_length(0.0) for _ in range(200)) / 200 < 430  # 336 in the tables
    assert 7 < sum(run_length(1.0) for _ in range(200)) / 200 < 10  # 8.4


def test_spread_and_quantile() -> None:
    assert spread([0.5]) == 0.0
    assert spread([0.4, 0.6]) == pytest.approx(0.1414, abs=1e-4)
    assert quantile([], 0.5) == 0.0
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3.0


def test_against_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    rng = random.Random(1)
    for _ in range(200):
        asked = rng.randint(1, 400)
        right = rng.randint(0, asked)
        for confidence in (0.8, 0.95, 0.99):
            expected = stats.binomtest(right, asked).proportion_ci(confidence, method="wilson")
            assert wilson(right, asked, confidence).low == pytest.approx(expected.low, abs=1e-12)
            assert wilson(right, asked, confidence).high == pytest.approx(expected.high, abs=1e-12)
        assert mcnemar_exact(right, asked - right) == pytest.approx(stats.binomtest(right, asked).pvalue, rel=1e-9)
