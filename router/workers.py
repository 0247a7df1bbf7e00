"""Which workers there are, which of them live, and which two serve the next request.

A worker's health loop owns `alive`, `fingerprint` and `reason`; a request that cannot connect may only report it dead.
A dead one, one that drains for example, gets no new requests. Those that run there go on.
A worker that does not answer a check is asked again at once. The second time it is silent: dead, and what it was asked
is given up. One where nobody listens is dead, not silent: its connections have broken by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from common.config import Role, RouterConfig, WorkerAddress
from common.errors import ConfigError, WorkerError
from router.client import REFUSED, UNREACHABLE, Network
from router.leg_outcome import LegOutcome

if TYPE_CHECKING:
    from router.legs import Leg

log = logging.getLogger("tandem.router")

_SILENT_AFTER = 2
_NO_CONNECTION = (REFUSED, UNREACHABLE)


@dataclass(slots=True, eq=False)
class Worker:
    """One node as the router sees it.

    host: what the other leg calls it by (of a prefill worker: where its rooms are opened). fingerprint: of its state
    layout, handoff: how it hands state over; None while unknown or when it publishes none. resumes: whether it goes on
    with answers that others began. instance: of the process, None when it tells none. reason: why it is not alive.
    unanswered: checks in a row. num_legs: that run there.
    """

    role: Role
    url: str
    host: str
    bootstrap_port: int | None
    alive: bool = False
    fingerprint: str | None = None
    handoff: str | None = None
    resumes: bool = False
    instance: str | None = None
    reason: str = "not checked yet"
    unanswered: int = 0
    num_legs: int = 0
    check_now: asyncio.Event = field(default_factory=asyncio.Event)

    def fits(self, other: Worker) -> bool:
        """Whether these two can hand over state."""
        return (self.fingerprint, self.handoff) == (other.fingerprint, other.handoff)

    def describe(self) -> dict[str, Any]:
        state = {"role": self.role.value, "url": self.url, "alive": self.alive, "fingerprint": self.fingerprint}
        return state if self.alive else state | {"reason": self.reason}


class Pair(NamedTuple):
    prefill: Worker
    decode: Worker


def make_worker(role: Role, address: WorkerAddress) -> Worker:
    """Raises ConfigError for what is no http URL."""
    host = _host(address.url)
    if host is None:
        raise ConfigError(f"--{role.value} {address.url}: a URL such as http://127.0.0.1:30001", param=role.value)
    return Worker(role, address.url.rstrip("/"), host, address.bootstrap_port)


def _host(url: str) -> str | None:
    """None for what is no http URL."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    return parts.hostname if parts.scheme in ("http", "https") else None


class Workers:
    """All workers of one router. Raises ConfigError when an address is no URL.

    on_silence: told of each worker that has fallen silent.
    """

    def __init__(self, config: RouterConfig, network: Network) -> None:
        self.prefill = tuple(make_worker(Role.PREFILL, address) for address in config.prefill)
        self.decode = tuple(make_worker(Role.DECODE, address) for address in config.decode)
        self._network = network
        self.on_silence: Callable[[Worker, WorkerError], None] = _ignore
        self._interval_s = config.health_interval_s
        self._check_limit_s = config.liveness_timeout_s / _SILENT_AFTER
        self._dealt: set[Worker] = set()
        self._mismatches: tuple[str, ...] = ()
        self._loops: list[asyncio.Task[None]] = []

    @property
    def all(self) -> tuple[Worker, ...]:
        return self.prefill + self.decode

    def start(self) -> None:
        """Begin the health checks."""
        self._loops = [asyncio.create_task(self._watch(worker)) for worker in self.all]

    async def stop(self) -> None:
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)

    # Choosing

    def pick(self, failed: Collection[Pair] = (), *, resumes: bool = False) -> Pair:
        """A live pair that fits together, each side by turns in random order, so that every pair is formed.

        failed: pairs that are not to be picked; workers of none of them come first. resumes: only workers that go on
        with answers that others began. Raises WorkerError (503).
        """
        decode = [worker for worker in self.decode if worker.alive and worker.resumes >= resumes]

        def partners(prefill: Worker) -> list[Worker]:
            return [d for d in decode if d.fits(prefill) and (prefill, d) not in failed]

        candidates = [p for p in self.prefill if p.alive and p.resumes >= resumes and partners(p)]
        if not candidates:
            raise WorkerError("no other pair of workers is alive" if failed else self.why_no_pair())
        tried = {worker for pair in failed for worker in pair}
        prefill = self._deal(_untried(candidates, tried))
        return Pair(prefill, self._deal(_untried(partners(prefill), tried)))

    def has_pair(self) -> bool:
        prefill = [worker for worker in self.prefill if worker.alive]
        return any(d.alive and d.fits(p) for d in self.decode for p in prefill)

    def _deal(self, workers: list[Worker]) -> Worker:
        """One of those that have not had their turn yet; when all have had it, the next round begins."""
        waiting = [worker for worker in workers if worker not in self._dealt]
        if not waiting:
            self._dealt.difference_update(workers)
            waiting = workers
        chosen = random.choice(waiting)
        self._dealt.add(chosen)
        return chosen

    def why_no_pair(self) -> str:
        for role, workers in ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode)):
            if not any(worker.alive for worker in workers):
                return f"no {role.value} worker is alive"
        return "; ".join(["no pair of workers fits together", *self.mismatches()])

    def mismatches(self) -> tuple[str, ...]:
        """A line for each two live workers that do not fit together, naming both."""
        pairs = [(p, d) for p in self.prefill for d in self.decode if p.alive and d.alive and not p.fits(d)]
        return tuple(
            f"{p.url} has state layout {p.fingerprint}, {d.url} has {d.fingerprint}"
            if p.fingerprint != d.fingerprint
            else f"{p.url} hands over by {p.handoff}, {d.url} by {d.handoff}"
            for p, d in pairs
        )

    # Legs

    def on_leg_begin(self, leg: Leg) -> None:
        """A leg opens. Called for every leg, before anything is sent."""
        leg.worker.num_legs += 1

    def on_leg_end(self, leg: Leg, outcome: LegOutcome) -> None:
        """It has ended. Called once for every leg that has begun."""
        leg.worker.num_legs -= 1

    # Health

    def report(self, worker: Worker, error: WorkerError) -> None:
        """A request could not reach this worker, or lost it: dead at once if nobody listens, and asked again now."""
        if error.code in _NO_CONNECTION:
            self._mark_dead(worker, error.message)
        worker.check_now.set()

    def on_error(self, worker: Worker, status: int) -> None:
        """It answered a request with an error. If that is its own (it drains, a rank has died), it is asked now."""
        if status >= 500:
            worker.check_now.set()

    async def _watch(self, worker: Worker) -> None:
        while True:
            await self._check(worker)
            if 0 < worker.unanswered < _SILENT_AFTER:
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await worker.check_now.wait()
            worker.check_now.clear()

    async def _check(self, worker: Worker) -> None:
        try:
            answer = await self._network.send("GET", f"{worker.url}/health", limit_s=self._check_limit_s)
            health = _health(await answer.read())
            worker.unanswered = 0
            if answer.status != 200:
                self._mark_dead(worker, " ".join(["/health answered", str(answer.status), *health.codes()]))
            elif not worker.alive or health.instance != worker.instance:
                await self._welcome(worker, health.instance)
        except WorkerError as error:
            self._on_no_answer(worker, error)

    def _on_no_answer(self, worker: Worker, error: WorkerError) -> None:
        worker.unanswered = 0 if error.code == REFUSED else worker.unanswered + 1
        if error.code in _NO_CONNECTION or worker.unanswered >= _SILENT_AFTER:
            self._mark_dead(worker, error.message)
        if worker.unanswered == _SILENT_AFTER:
            self.on_silence(worker, WorkerError("it does not answer", code="worker_silent"))

    async def _welcome(self, worker: Worker, instance: str | None) -> None:
        """Ask a worker that has just come up, or come back as another process, what it is before it gets requests."""
        worker.alive, worker.reason = False, "asked what it is"
        answer = await self._network.send("GET", f"{worker.url}/server_info", limit_s=self._check_limit_s)
        info = _server_info(await answer.read()) if answer.status == 200 else _ServerInfo()
        worker.fingerprint, worker.handoff = info.fingerprint, info.handoff
        worker.resumes, worker.instance = info.resumes_answers, instance
        worker.alive, worker.reason = True, ""
        log.info("%s worker %s is alive (state layout %s)", worker.role.value, worker.url, worker.fingerprint)
        self._log_new_mismatches()

    def _mark_dead(self, worker: Worker, reason: str) -> None:
        if worker.alive or worker.reason != reason:
            level = logging.WARNING if worker.alive else logging.INFO
            log.log(level, "%s worker %s is not alive: %s", worker.role.value, worker.url, reason)
        worker.alive, worker.reason = False, reason

    def _log_new_mismatches(self) -> None:
        found = self.mismatches()
        for line in found:
            if line not in self._mismatches:
                log.error("these workers cannot serve together: %s", line)
        self._mismatches = found


def _ignore(_: Worker, __: WorkerError) -> None:
    """What is told to nobody."""


def _untried(workers: list[Worker], tried: Collection[Worker]) -> list[Worker]:
    """Those that were not tried; all when there are none."""
    return [worker for worker in workers if worker not in tried] or workers


class _ServerInfo(msgspec.Struct):
    fingerprint: str | None = None
    handoff: str | None = None
    resumes_answers: bool = False


def _server_info(body: bytes) -> _ServerInfo:
    try:
        return msgspec.json.decode(body, type=_ServerInfo)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _ServerInfo()


class _HealthError(msgspec.Struct):
    code: str | None = None


class _Health(msgspec.Struct):
    instance: str | None = None
    error: _HealthError | None = None

    def codes(self) -> list[str]:
        return [self.error.code] if self.error is not None and self.error.code else []


def _health(body: bytes) -> _Health:
    """Of a foreign worker nothing is known."""
    try:
        return msgspec.json.decode(body, type=_Health)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Health()
