"""Which workers there are, which two serve the next request, and what is held against each of them.

Whether a worker lives is router/health.py's; how workers come and go router/membership.py's.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from common.config import Role, RouterConfig
from common.errors import WorkerError
from router.affinity import Affinity
from router.breaker import Breaker, BreakerLimits, BreakerState, Verdict, guilty_leg
from router.client import Network
from router.health import HealthChecks
from router.leg_outcome import LegEnd, LegOutcome
from router.outliers import OutlierLimits, Outliers
from router.pairing import Pair, Pairing, Possible
from router.worker import ASKED, Worker, make_worker

if TYPE_CHECKING:
    from router.legs import Leg

__all__ = ["Pair", "Worker", "Workers", "make_worker"]

log = logging.getLogger("tandem.router")


class Workers:
    """All workers of one router. Raises ConfigError when an address is no URL.

    on_silence: told of each worker that has fallen silent, or is removed with what runs there: it gives that up.
    on_change: told whenever one has come, goes, is gone or has changed its role.
    """

    def __init__(self, config: RouterConfig, network: Network) -> None:
        self.prefill: tuple[Worker, ...] = ()
        self.decode: tuple[Worker, ...] = ()
        self.on_silence: Callable[[Worker, WorkerError], None] = _give_up_nothing
        self.on_change: list[Callable[[], None]] = []
        self.health = HealthChecks(config, self, network)
        self._limits = BreakerLimits(
            failures=config.breaker_failures,
            failure_rate=config.breaker_failure_rate,
            window_s=config.breaker_window_s,
            open_s=config.breaker_open_s,
        )
        self._outliers = Outliers(
            OutlierLimits(
                factor=config.outlier_factor,
                window_s=config.outlier_window_s,
                ejection_s=config.outlier_ejection_s,
            )
        )
        self.pairing = Pairing(config)
        self.legs_ended: Counter[tuple[Role, LegEnd]] = Counter()
        self._mismatches: tuple[str, ...] = ()
        self._started = False
        for role, addresses in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode)):
            for address in addresses:
                self.add(make_worker(role, address))

    @property
    def all(self) -> tuple[Worker, ...]:
        return self.prefill + self.decode

    def start(self) -> None:
        """Begin the health checks."""
        self._started = True
        for worker in self.all:
            self.health.watch(worker)

    async def stop(self) -> None:
        await self.health.stop()

    # Coming and going

    def add(self, worker: Worker) -> None:
        """It gets requests when it has been checked."""
        worker.breaker = Breaker(self._limits)
        self._set(worker, worker.role)
        if self._started:
            self.health.watch(worker)

    def leave(self, worker: Worker) -> None:
        """No new requests; it is removed when those that run there have ended."""
        worker.is_leaving = True
        if worker.num_legs == 0:
            self.remove(worker)
        else:
            self._tell_change()

    def stay(self, worker: Worker) -> None:
        """It was leaving, and is wanted again."""
        worker.is_leaving = False
        self._tell_change()

    def remove(self, worker: Worker) -> None:
        """At once: what runs there is given up, and goes on elsewhere where it can."""
        worker.is_leaving = True
        self.health.forget(worker)
        self._set(worker, None)
        self.on_silence(worker, WorkerError("it was removed", code="worker_removed"))
        log.info("%s worker %s is removed", worker.role.value, worker.url)

    def move(self, worker: Worker, role: Role, bootstrap_port: int | None) -> None:
        """Its node has another role now. It is welcomed anew before it gets requests."""
        worker.role, worker.bootstrap_port, worker.instance = role, bootstrap_port, None
        worker.alive, worker.reason = False, ASKED
        worker.breaker.reset()
        self._set(worker, role)
        worker.check_now.set()

    def _set(self, worker: Worker, role: Role | None) -> None:
        """Make it a worker of this role alone; None: of none."""
        self.prefill, self.decode = (
            (*(w for w in workers if w is not worker), *([worker] if role is own else []))
            for own, workers in ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode))
        )
        self._tell_change()

    def _tell_change(self) -> None:
        for tell in self.on_change:
            tell()

    # Choosing

    def pick(self, request: Affinity, failed: Collection[Pair] = (), *, resumes: bool = False) -> Pair:
        """One for this request, as the policies choose. failed, resumes: see `Possible`. Raises WorkerError (503),
        RequestError for a rank that no decode node has."""
        possible = self.possible(failed, resumes=resumes)
        request.check_rank(max(len(worker.targets) for worker in self.decode if worker.alive))
        return self.pairing.pick(possible, request)

    def possible(self, failed: Collection[Pair] = (), *, resumes: bool = False) -> Possible:
        """The pairs that may be picked, at least one. Raises WorkerError (503)."""
        possible = Possible(self.prefill, self.decode, failed, resumes=resumes)
        if not possible:
            raise WorkerError("no other pair of workers is alive" if failed else self.why_no_pair())
        return possible

    def has_pair(self) -> bool:
        """Whether requests can be served, if not at this very moment (a half-open worker may be trying one)."""
        prefill = [worker for worker in self.prefill if worker.is_in_service]
        return any(d.is_in_service and d.fits(p) for d in self.decode for p in prefill)

    def why_no_pair(self) -> str:
        for role, workers in ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode)):
            if not any(worker.alive for worker in workers):
                return f"no {role.value} worker is alive"
            if not any(worker.takes_requests for worker in workers):
                return f"no {role.value} worker takes requests: {', '.join(sorted({w.state for w in workers}))}"
        return "; ".join(["no pair of workers fits together", *self.mismatches()])

    def mismatches(self, of: Worker | None = None) -> tuple[str, ...]:
        """A line for each two live workers that do not fit together. of: only those of this one, alive or not."""
        pairs = ((p, d) for p in self.prefill for d in self.decode if not p.fits(d))
        if of is None:
            return tuple(_mismatch(p, d) for p, d in pairs if p.alive and d.alive)
        return tuple(_mismatch(*pair) for pair in pairs if of in pair and all(w.alive for w in pair if w is not of))

    # Legs

    def on_leg_begin(self, leg: Leg) -> None:
        """A leg opens. Called for every leg, before anything is sent."""
        worker = leg.worker
        worker.num_legs += 1
        worker.used_s = leg.began_s
        worker.breaker.on_begin(leg)

    def on_first_byte(self, leg: Leg) -> None:
        """The worker has begun with a good answer."""
        leg.worker.breaker.on_first_byte(leg)

    def on_leg_end(self, leg: Leg, outcome: LegOutcome) -> None:
        """It has ended. Called once for every leg that has begun."""
        worker = leg.worker
        worker.num_legs -= 1
        self.legs_ended[worker.role, outcome.end] += 1
        if leg.share is not None:
            leg.share.end()
        worker.used_s = time.monotonic()
        guilty = guilty_leg(leg, outcome)
        if guilty is not None:
            self.on_verdict(guilty.worker, guilty, Verdict.BAD, outcome.code or outcome.end.value)
        if guilty is not leg:
            self.on_verdict(worker, leg, Verdict.GOOD if outcome.end is LegEnd.OK else Verdict.NONE)
        if outcome.end is LegEnd.OK:
            self._compare(worker, outcome)
        if worker.is_leaving and worker.num_legs == 0 and worker in self.all:
            self.remove(worker)

    def on_verdict(self, worker: Worker, leg: Leg | None, verdict: Verdict, reason: str = "") -> None:
        """How it went at this worker. leg: None for a check."""
        before = worker.breaker.state
        worker.breaker.on_verdict(leg, verdict, reason)
        if before is worker.breaker.state:
            return
        if worker.breaker.state is BreakerState.OPEN:
            log.warning("%s worker %s gets no requests for a while: %s", worker.role.value, worker.url, reason)
        else:
            log.info("%s worker %s gets requests again", worker.role.value, worker.url)

    def _compare(self, worker: Worker, outcome: LegOutcome) -> None:
        reason = self._outliers.note(worker, outcome, self.prefill if worker.role is Role.PREFILL else self.decode)
        if reason:
            log.warning("%s worker %s is much slower than its peers: %s", worker.role.value, worker.url, reason)

    # Health

    def report(self, worker: Worker, error: WorkerError) -> None:
        """A request could not reach this worker, or lost it."""
        self.health.report(worker, error)

    def on_error(self, worker: Worker, status: int) -> None:
        """It answered a request with an error. If that is its own (it drains, a rank has died), it is asked now."""
        if status >= 500:
            worker.check_now.set()

    def log_new_mismatches(self) -> None:
        found = self.mismatches()
        for line in found:
            if line not in self._mismatches:
                log.error("these workers cannot serve together: %s", line)
        self._mismatches = found


def _give_up_nothing(_: Worker, __: WorkerError) -> None:
    """Until somebody dispatches."""


def _mismatch(prefill: Worker, decode: Worker) -> str:
    """How these two differ, naming both."""
    if prefill.fingerprint != decode.fingerprint:
        return f"{prefill.url} has state layout {prefill.told_layout}, {decode.url} has {decode.told_layout}"
    return f"{prefill.url} hands over by {prefill.handoff}, {decode.url} by {decode.handoff}"
