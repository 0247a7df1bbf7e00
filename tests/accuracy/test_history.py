"""Nights are kept, compared with their like, and a drift is told before the bar is crossed."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from accuracy.history import REFERENCE_NIGHTS, Night, drift, load, save
from accuracy.verdict import Verdict
from common.errors import ConfigError

FIRST = datetime(2026, 3, 1, 3, 0, tzinfo=UTC)


def night(day: int, *accuracies: float, verdict: Verdict = Verdict.PASS, key: str = "k") -> Night:
    at = (FIRST + timedelta(days=day)).isoformat()
    return Night(at=at, key=key, questions=200, verdict=verdict, accuracies=list(accuracies))


def test_nights_come_back_in_order_and_by_key(tmp_path: Path) -> None:
    kept = [night(3, 0.9), night(1, 0.8, 0.7), night(2, 0.6, key="other")]
    for one in kept:
        save(tmp_path / "deep", one)
    assert load(tmp_path / "deep", "k") == [kept[1], kept[0]]
    assert load(tmp_path / "none", "k") == []


def test_a_file_that_is_no_night_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"x\.json is no night"):
        load(tmp_path, "k")


def test_upstreams_twenty_rounds_are_no_drift() -> None:
    rng = random.Random(0)
    nights = [night(day, *(round(rng.gauss(0.8975, 0.007) * 200) / 200 for _ in range(3))) for day in range(20)]
    found = drift(nights)
    assert found.enough
    assert not found.alarm
    assert 0.003 < found.deviation < 0.012


def test_a_slow_fall_is_told_before_the_bar() -> None:
    rng = random.Random(1)
    level, nights = 0.8975, []
    for day in range(60):
        mean = level - 0.001 * max(0, day - 12)
        nights.append(night(day, *(rng.gauss(mean, 0.007) for _ in range(3))))
        if drift(nights).alarm:
            break
    assert drift(nights).alarm
    assert nights[-1].mean > 0.87
    assert len(nights) > 13


def test_what_never_varied_is_measured_in_questions() -> None:
    nights = [night(day, 0.9) for day in range(REFERENCE_NIGHTS)]
    assert not drift(nights).enough
    assert drift([*nights, night(20, 0.895)]).deviation == pytest.approx(1 / 200)
    assert not drift([*nights, night(20, 0.895)]).alarm
    assert drift([*nights, night(20, 0.87)]).alarm


def test_invalid_nights_say_nothing() -> None:
    nights = [night(day, 0.9) for day in range(REFERENCE_NIGHTS + 1)]
    broken = drift([*nights, night(20, 0.1, verdict=Verdict.INVALID)])
    assert not broken.alarm
    assert len(broken.sums) == REFERENCE_NIGHTS + 1
    only = drift([night(0, 0.0, verdict=Verdict.INVALID)])
    assert (only.enough, only.alarm) == (False, False)
