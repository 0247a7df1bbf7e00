"""Past nights: one small file each in a folder, and whether the accuracy drifts down over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from accuracy.statistics import CUSUM_LIMIT, centre, cusum_below, spread
from accuracy.verdict import Verdict
from common.errors import ConfigError

REFERENCE_NIGHTS = 8
"""How many nights at least set the level and the spread that later ones are compared with."""


class Night(msgspec.Struct, frozen=True, kw_only=True):
    """at: ISO time, UTC. key: what has to be equal for nights to be compared. accuracies: of the runs."""

    at: str
    key: str
    questions: int
    verdict: Verdict
    accuracies: list[float]

    @property
    def mean(self) -> float:
        return centre(self.accuracies)


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """level, deviation: of the reference nights. sums: one a valid night, 0 for those of the reference. alarm: the last
    one is above the limit. None of it means anything while `enough` is not set."""

    enough: bool
    level: float
    deviation: float
    sums: list[float]
    limit: float
    alarm: bool


def load(folder: Path, key: str) -> list[Night]:
    """The nights of this key, oldest first. Raises ConfigError naming a file that is none."""
    nights = [_read(path) for path in sorted(folder.glob("*.json"))]
    return sorted((night for night in nights if night.key == key), key=lambda night: night.at)


def _read(path: Path) -> Night:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Night)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--history: {path} is no night of a gate: {error}", param="history") from error


def save(folder: Path, night: Night) -> Path:
    """Raises ConfigError when it cannot be written."""
    when = datetime.fromisoformat(night.at)
    path = folder / f"{when:%Y-%m-%dT%H%M%S}-{when.microsecond:06}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(night)) + b"\n")
    except OSError as error:
        raise ConfigError(f"--history {folder}: {error}", param="history") from error
    return path


def drift(nights: Sequence[Night]) -> Drift:
    """CUSUM of the nights' means after the first ones, which are the reference.

    The deviation is that from night to night or from run to run, the larger one, and one question at least. Nights
    without a valid verdict say nothing.
    """
    valid = [night for night in nights if night.verdict is not Verdict.INVALID]
    means = [night.mean for night in valid]
    reference, later = means[:REFERENCE_NIGHTS], means[REFERENCE_NIGHTS:]
    level, deviation = centre(reference), _deviation(valid[:REFERENCE_NIGHTS])
    found = cusum_below(later, level, deviation)
    sums = [0.0] * len(reference) + list(found.sums)
    return Drift(
        enough=bool(later),
        level=level,
        deviation=deviation,
        sums=sums,
        limit=CUSUM_LIMIT,
        alarm=bool(later) and sums[-1] > CUSUM_LIMIT,
    )


def _deviation(reference: Sequence[Night]) -> float:
    if not reference:
        return 1.0
    between = spread([night.mean for night in reference])
    within = math.sqrt(centre([spread(night.accuracies) ** 2 for night in reference]))
    return max(between, within, 1 / reference[0].questions)
