"""Which worker is much slower than its peers, and for how long it gets no requests because of that.

Compared are medians over a window: of a prefill leg the time to its answer, of a streaming decode leg the time to its
first byte and the gap between two chunks. Answers that are not streamed say nothing of a decode worker: they are as
slow as they are long.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from weakref import WeakKeyDictionary

from common.config import Role
from router.leg_outcome import LegOutcome
from router.worker import Worker

_MIN_SAMPLES = 20
_MAX_SAMPLES = 200
_LONGEST = 8
"""Times `ejection_s`."""
_FLOORS_S = {"first byte": 0.2, "gap": 0.02}
"""Differences below these are nobody's trouble, whatever their ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlierLimits:
    """factor: times the median of its peers' medians; 0: nobody is ejected. ejection_s: the first time; it doubles, up
    to eight times, with each one that follows soon."""

    factor: float = 0.0
    window_s: float = 30.0
    ejection_s: float = 30.0


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float
    measures: dict[str, float]


class Outliers:
    """Of one router; what it finds it writes into the workers (`ejected_until_s`, `ejections`)."""

    def __init__(self, limits: OutlierLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._samples: WeakKeyDictionary[Worker, deque[_Sample]] = WeakKeyDictionary()

    def note(self, worker: Worker, outcome: LegOutcome, peers: Sequence[Worker]) -> str:
        """A leg that went well. peers: all workers of the role, itself included. Returns why the worker is ejected now,
        or nothing."""
        measures = _measures(worker.role, outcome)
        if self._limits.factor == 0 or not measures:
            return ""
        samples = self._samples.setdefault(worker, deque(maxlen=_MAX_SAMPLES))
        samples.append(_Sample(self._clock(), measures))
        others = [peer for peer in peers if peer is not worker and peer.alive]
        num_ejected = sum(self._is_ejected(peer) for peer in others)
        if self._is_ejected(worker) or 2 * (num_ejected + 1) > len(others) + 1:
            return ""
        reason = next(filter(None, (self._why(name, worker, others) for name in measures)), "")
        if reason:
            self._eject(worker)
        return reason

    def _is_ejected(self, worker: Worker) -> bool:
        return self._clock() < worker.ejected_until_s

    def _why(self, name: str, worker: Worker, others: Sequence[Worker]) -> str:
        own = self._median(worker, name)
        peers = [found for peer in others if (found := self._median(peer, name)) is not None]
        if own is None or not peers:
            return ""
        usual = median(peers)
        if own < self._limits.factor * usual or own - usual < _FLOORS_S[name]:
            return ""
        return f"median {name} {own * 1000:.0f} ms, of its peers {usual * 1000:.0f} ms"

    def _median(self, worker: Worker, name: str) -> float | None:
        """Of the window; None for too few samples."""
        samples, oldest = self._samples.get(worker, deque()), self._clock() - self._limits.window_s
        while samples and samples[0].at_s < oldest:
            samples.popleft()
        found = [sample.measures[name] for sample in samples if name in sample.measures]
        return median(found) if len(found) >= _MIN_SAMPLES else None

    def _eject(self, worker: Worker) -> None:
        now, ejection_s = self._clock(), self._limits.ejection_s
        if now - worker.ejected_until_s > _LONGEST * ejection_s:
            worker.ejections = 0
        worker.ejected_until_s = now + ejection_s * min(2**worker.ejections, _LONGEST)
        worker.ejections += 1
        self._samples.pop(worker, None)


def _measures(role: Role, outcome: LegOutcome) -> dict[str, float]:
    found = {"first byte": outcome.first_byte_s, "gap": outcome.gap_s}
    if role is Role.DECODE and outcome.gap_s is None:
        return {}
    return {name: value for name, value in found.items() if value is not None}
