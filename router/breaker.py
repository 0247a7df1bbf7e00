"""The circuit breaker of a worker: one that fails gets no requests for a while, then one to try, then all again.

    CLOSED ──► OPEN ──► HALF_OPEN ──► CLOSED
                 ▲          └── the one that tries fails: longer

Only failures of the worker itself count. Who is at fault when a pair fails is decided in `guilty_leg`.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.errors import CapacityError, ConfigError, TransferError
from router.client import REFUSED, REFUSED_KEY
from router.leg_outcome import LegEnd, LegOutcome

if TYPE_CHECKING:
    from router.legs import Leg

_MIN_FOR_RATE = 20
_LONGEST = 8
"""Times `open_s`."""

_LEAVES = frozenset({"draining", "shutting_down", "worker_removed", REFUSED, REFUSED_KEY})
"""Codes of a worker that goes. Where nobody listens, or a key is refused, health checks know before anybody is sent
there."""
_FULL = CapacityError.type
_RANK_GONE = frozenset({"rank_died", "rank_silent"})
_PEER_GONE = frozenset({"peer_lost", "peer_silent"})
_UNREACHABLE = "peer_unreachable"
_BETWEEN = frozenset({TransferError.type, ConfigError.type})
"""Types of errors between two workers; whoever says so may be innocent. So with the code of a handshake in vain."""
_NO_HANDSHAKE = "bootstrap_timeout"
_LONG = "worker_timeout"


class BreakerState(enum.StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Verdict(enum.Enum):
    """Of a leg, on its worker."""

    GOOD = enum.auto()
    BAD = enum.auto()
    NONE = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerLimits:
    """failures: in a row, after which it opens; 0: never. failure_rate: of at least 20 requests within window_s,
    from which on it opens too. open_s: for how long, the first time; each try that fails doubles it, up to eight times.
    """

    failures: int = 3
    failure_rate: float = 0.5
    window_s: float = 30.0
    open_s: float = 5.0


class Breaker:
    """Of one worker. good_s: when something last went well, on `clock`; None: never."""

    def __init__(self, limits: BreakerLimits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits or BreakerLimits()
        self._clock = clock
        self.good_s: float | None = None
        self.reason: str | None = None
        self._openings = 0
        self._open_until_s: float | None = None
        self._probe: Leg | None = None
        self._in_a_row = 0
        self._recent: deque[tuple[float, bool]] = deque(maxlen=1000)

    @property
    def state(self) -> BreakerState:
        if self._open_until_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self._open_until_s else BreakerState.HALF_OPEN

    @property
    def allows(self) -> bool:
        """Whether a request may be sent there now: of a half-open one only the one that tries."""
        state = self.state
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and self._probe is None)

    def describe(self) -> dict[str, Any]:
        found: dict[str, Any] = {"state": self.state.value, "failures_in_a_row": self._in_a_row}
        if self._open_until_s is not None:
            found |= {"reason": self.reason, "open_for_s": round(max(0.0, self._open_until_s - self._clock()), 3)}
        return found

    def on_begin(self, leg: Leg) -> None:
        if self.state is BreakerState.HALF_OPEN and self._probe is None:
            self._probe = leg

    def on_first_byte(self, leg: Leg) -> None:
        """The one that tries is being answered: others may follow, but one more failure opens it again."""
        if leg is self._probe and self.state is BreakerState.HALF_OPEN:
            self._open_until_s = self._probe = None
            self._in_a_row = self._limits.failures - 1

    def on_verdict(self, leg: Leg | None, verdict: Verdict, reason: str = "") -> None:
        """leg: None for a check. What began before it opened has no say in whether it closes."""
        if self.state is BreakerState.CLOSED:
            self._count(verdict, reason)
        elif leg is self._probe and self.state is BreakerState.HALF_OPEN:
            self._probe = None
            self._judge(verdict, reason)

    def reset(self) -> None:
        """Another process listens there: nothing is held against it."""
        self._open_until_s = self._probe = self.reason = None
        self._openings = self._in_a_row = 0
        self._recent.clear()

    def _judge(self, verdict: Verdict, reason: str) -> None:
        if verdict is Verdict.GOOD:
            self._open_until_s = None
            self._count(verdict, reason)
        elif verdict is Verdict.BAD:
            self._open(reason)

    def _count(self, verdict: Verdict, reason: str) -> None:
        if verdict is Verdict.NONE:
            return
        now, is_good = self._clock(), verdict is Verdict.GOOD
        self._recent.append((now, is_good))
        if is_good:
            self._in_a_row, self._openings, self.good_s = 0, 0, now
            return
        self._in_a_row += 1
        if 0 < self._limits.failures <= self._in_a_row or self._fails_often(now):
            self._open(reason)

    def _fails_often(self, now: float) -> bool:
        while self._recent and self._recent[0][0] < now - self._limits.window_s:
            self._recent.popleft()
        failed = sum(not is_good for _, is_good in self._recent)
        enough = self._limits.failures > 0 and len(self._recent) >= _MIN_FOR_RATE
        return enough and failed >= self._limits.failure_rate * len(self._recent)

    def _open(self, reason: str) -> None:
        open_s = self._limits.open_s * min(2**self._openings, _LONGEST)
        self._openings += 1
        self._open_until_s = self._clock() + open_s
        self.reason, self._probe = reason, None
        self._in_a_row = 0
        self._recent.clear()


def guilty_leg(leg: Leg, outcome: LegOutcome) -> Leg | None:
    """Whose worker is to blame for how this leg ended; None: nobody's.

    A rank that has lost its peer accuses the peer. That of several ranks of a worker one is gone is nobody's fault: the
    others serve on, and who talked to it may know before its front and this router do. A long silence of one that
    answers its health checks was a long answer. Where a hand-off failed and both live, it is the worker of the two that
    has gone longer without anything going well; the other one has been well with others since.
    """
    is_failure = outcome.end in (LegEnd.WORKER_ERROR, LegEnd.LOST)
    if not is_failure or outcome.code in _LEAVES or outcome.kind == _FULL:
        return None
    if outcome.code == _LONG and leg.worker.unanswered == 0:
        return None
    partner = leg.partner
    if outcome.code in _RANK_GONE and len(leg.worker.targets) > 1:
        return None
    if partner is not None and outcome.code in _PEER_GONE and len(partner.worker.targets) > 1:
        return None
    if partner is not None and (outcome.code in _PEER_GONE or outcome.code == _UNREACHABLE):
        return partner if all(target.alive for target in partner.worker.targets) else None
    if partner is None or not (outcome.kind in _BETWEEN or outcome.code == _NO_HANDSHAKE):
        return leg
    return leg if _good_s(leg) <= _good_s(partner) else partner


def _good_s(leg: Leg) -> float:
    good_s = leg.worker.breaker.good_s
    return float("-inf") if good_s is None else good_s
