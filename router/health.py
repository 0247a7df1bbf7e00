"""Which workers live: one loop a worker, which owns `alive`, `fingerprint` and `reason`.

A request that cannot connect may only report a worker dead. A dead one, one that drains for example, gets no new
requests. Those that run there go on. One that refuses the router's key is dead until it takes it. A worker that does
not answer a check is asked again at once. The second time it is silent: dead, and what it was asked is given up. One
where nobody listens is dead, not silent: its connections have broken by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Annotated

import msgspec

from common.config import Role, RouterConfig
from common.errors import WorkerError
from common.json_body import BAD_JSON
from router.breaker import BreakerState, Verdict
from router.client import REFUSED, REFUSED_KEY, UNREACHABLE, Network
from router.loads import ask_all, read_loads, report_all
from router.targets import MAX_RANKS
from router.worker import ASKED, Source, Worker

if TYPE_CHECKING:
    from router.workers import Workers

log = logging.getLogger("tandem.router")

_SILENT_AFTER = 2
_DEAD_AT_ONCE = (REFUSED, UNREACHABLE, REFUSED_KEY)
_ANSWERS = (REFUSED, REFUSED_KEY)
"""That nobody listens, or that a key is refused, is an answer too."""
_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}
PROBE_LIMIT_S = 20.0
"""For one token, as at the nodes."""


class HealthChecks:
    """Of all workers of one router."""

    def __init__(self, config: RouterConfig, workers: Workers, network: Network) -> None:
        self._workers = workers
        self._network = network
        self._required = config.require_fingerprint
        self._interval_s = config.health_interval_s
        self._limit_s = config.liveness_timeout_s / _SILENT_AFTER
        self._probe_after_s = config.idle_probe_interval_s
        self._heartbeat_timeout_s = config.heartbeat_timeout_s
        self._loops: dict[Worker, asyncio.Task[None]] = {}
        self._probes: dict[Worker, asyncio.Task[None]] = {}

    def watch(self, worker: Worker) -> None:
        self._loops[worker] = asyncio.create_task(self._watch(worker))

    def forget(self, worker: Worker) -> None:
        """Its loop ends at its next turn when it is the one that calls."""
        loop = self._loops.pop(worker, None)
        if loop is not None and loop is not asyncio.current_task():
            loop.cancel()

    async def stop(self) -> None:
        tasks = [*self._loops.values(), *self._probes.values()]
        self._loops.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def report(self, worker: Worker, error: WorkerError) -> None:
        """A request could not reach this worker, or lost it: dead at once if nobody listens, or if it does not take the
        router's key, and asked again now."""
        if error.code in _DEAD_AT_ONCE:
            self._mark_dead(worker, error.message, warns=True)
        worker.check_now.set()

    async def _watch(self, worker: Worker) -> None:
        while worker in self._loops:
            try:
                await self._check(worker)
            except Exception as error:  # a fault of ours must not leave it unwatched for good
                log.exception("the health check of %s worker %s failed", worker.role.value, worker.url)
                self._mark_dead(worker, f"its health check failed: {type(error).__name__}")
            if 0 < worker.unanswered < _SILENT_AFTER:
                continue
            if self._is_gone(worker):
                log.warning("%s worker %s has not registered again and is removed", worker.role.value, worker.url)
                self._workers.remove(worker)
                return
            if self._is_idle(worker) and worker not in self._probes:
                self._probes[worker] = asyncio.create_task(self._probe(worker))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await worker.check_now.wait()
            worker.check_now.clear()

    def _is_gone(self, worker: Worker) -> bool:
        """It registers by itself, has not done so for long, and does not live either."""
        late = time.monotonic() - worker.heard_s > self._heartbeat_timeout_s
        return worker.source is Source.SELF and late and not worker.alive

    async def _check(self, worker: Worker) -> None:
        targets = worker.targets
        asks = ask_all(targets)
        try:
            answer = await self._network.send("GET", f"{worker.url}/health", limit_s=self._limit_s)
            health = _health(await answer.read())
            worker.unanswered = 0
            if answer.status != 200:
                self._mark_dead(worker, " ".join(["/health answered", str(answer.status), *health.codes()]))
            elif not worker.alive or health.instance != worker.instance:
                await self._welcome(worker, health.instance)
            report_all(targets, asks, read_loads(bytes(health.loads)))
        except WorkerError as error:
            self._on_no_answer(worker, error)

    def _on_no_answer(self, worker: Worker, error: WorkerError) -> None:
        worker.unanswered = 0 if error.code in _ANSWERS else worker.unanswered + 1
        if error.code in _DEAD_AT_ONCE or worker.unanswered >= _SILENT_AFTER:
            self._mark_dead(worker, error.message, warns=error.code == REFUSED_KEY)
        if worker.unanswered == _SILENT_AFTER:
            self._workers.on_silence(worker, WorkerError("it does not answer", code="worker_silent"))

    async def _welcome(self, worker: Worker, instance: str | None) -> None:
        """Ask a worker that has just come up, or come back as another process, what it is before it gets requests."""
        if worker.alive:
            worker.alive, worker.reason = False, ASKED
        info = await self.ask(worker.url)
        if info.says is not None and info.node_role is not worker.role:
            self._on_other_role(worker, info)
            return
        if twin := self._twin(worker, instance):
            self._mark_dead(worker, f"it is the same process as {twin.url}")
            return
        is_new = instance is None or instance != worker.instance
        worker.fingerprint, worker.state_layout = info.fingerprint or worker.declared, info.state_layout
        worker.handoff, worker.num_ranks, worker.is_sglang = info.handoff, info.dp_size, info.is_sglang
        if is_new:
            worker.breaker.reset()
            worker.renew_targets()
        worker.resumes, worker.instance = info.resumes_answers, instance
        if refusal := why_refused(worker.fingerprint, self._required):
            self._mark_dead(worker, refusal)
            return
        worker.alive, worker.reason = True, ""
        log.info("%s worker %s is alive (state layout %s)", worker.role.value, worker.url, worker.fingerprint)
        self._workers.log_new_mismatches()

    def _twin(self, worker: Worker, instance: str | None) -> Worker | None:
        """A live worker that is the same process under another URL."""
        others = (other for other in self._workers.all if other is not worker and other.alive)
        return next((other for other in others if instance is not None and other.instance == instance), None)

    def _on_other_role(self, worker: Worker, info: ServerInfo) -> None:
        """Its node was started again as something else."""
        role = info.node_role
        if role is None or (role is Role.PREFILL and info.bootstrap_port is None):
            self._mark_dead(worker, f"it says that it is {info.says}, not {worker.role.value}")
            return
        log.info("%s worker %s is a %s worker now", worker.role.value, worker.url, role.value)
        self._workers.move(worker, role, info.bootstrap_port)

    async def ask(self, url: str) -> ServerInfo:
        """What a worker says of itself; nothing when it answers something else. Raises WorkerError."""
        answer = await self._network.send("GET", f"{url}/server_info", limit_s=self._limit_s)
        body = await answer.read()
        return _server_info(body) if answer.status == 200 else ServerInfo()

    def _mark_dead(self, worker: Worker, reason: str, *, warns: bool = False) -> None:
        """warns: aloud, although it may not have lived."""
        if worker.alive or worker.reason != reason:
            level = logging.WARNING if worker.alive or warns else logging.INFO
            log.log(level, "%s worker %s is not alive: %s", worker.role.value, worker.url, reason)
        worker.alive, worker.reason = False, reason

    # One token now and then

    def _is_idle(self, worker: Worker) -> bool:
        idle_s = time.monotonic() - worker.used_s
        is_due = 0 < self._probe_after_s <= idle_s and worker.num_legs == 0 and not worker.is_leaving
        return is_due and worker.alive and worker.breaker.state is not BreakerState.OPEN

    async def _probe(self, worker: Worker) -> None:
        """/health_generate of a worker that nobody has asked anything for long; a failure counts as a request's."""
        try:
            reason = await self._make_token(worker)
            worker.used_s = time.monotonic()
            self._workers.on_verdict(worker, None, Verdict.BAD if reason else Verdict.GOOD, reason)
        finally:
            self._probes.pop(worker, None)

    async def _make_token(self, worker: Worker) -> str:
        """Why it could not; empty when it could."""
        try:
            answer = await self._network.send("GET", f"{worker.url}/health_generate", limit_s=PROBE_LIMIT_S)
            await answer.read()
        except WorkerError as error:
            return f"/health_generate: {error.message}"
        return "" if answer.status < 500 else f"/health_generate answered {answer.status}"


def why_refused(fingerprint: str | None, required: str | None) -> str:
    """Empty when this state layout may serve here."""
    if required is None or fingerprint == required:
        return ""
    return f"it has state layout {fingerprint}, --require-fingerprint is {required}"


Name = Annotated[str, msgspec.Meta(max_length=256)]
_Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class ServerInfo(msgspec.Struct):
    """Of a worker, as far as the router reads it; what exceeds these bounds makes no sense. role, disaggregation_mode:
    the same, ours and SGLang's. A port of 0 is none."""

    fingerprint: Name | None = None
    state_layout: Name | None = None
    handoff: Name | None = None
    resumes_answers: bool = False
    role: Name | None = None
    disaggregation_mode: Name | None = None
    bootstrap_port: _Port | None = None
    disaggregation_bootstrap_port: _Port | None = None
    dp_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1

    def __post_init__(self) -> None:
        self.bootstrap_port = self.bootstrap_port or self.disaggregation_bootstrap_port or None

    @property
    def says(self) -> str | None:
        """Its role in its own words, None when it tells none. SGLang's `null`: not disaggregated."""
        return self.role or self.disaggregation_mode

    @property
    def is_sglang(self) -> bool:
        """Its own servers have no other word for their role."""
        return self.role is None and self.disaggregation_mode is not None

    @property
    def node_role(self) -> Role | None:
        """None when it tells none, or one that has no place behind a router."""
        return _ROLES.get(self.says or "")


def _server_info(body: bytes) -> ServerInfo:
    try:
        return msgspec.json.decode(body, type=ServerInfo)
    except BAD_JSON:
        return ServerInfo()


class _HealthError(msgspec.Struct):
    code: Name | None = None


class _Health(msgspec.Struct):
    instance: Name | None = None
    loads: msgspec.Raw = msgspec.Raw(b"[]")
    error: _HealthError | None = None

    def codes(self) -> list[str]:
        return [self.error.code] if self.error is not None and self.error.code else []


def _health(body: bytes) -> _Health:
    """Of a foreign worker nothing is known."""
    try:
        return msgspec.json.decode(body, type=_Health)
    except BAD_JSON:
        return _Health()
