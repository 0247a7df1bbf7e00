"""The processes of a run: started, hurt on purpose, started again on the same ports, ended.

A node that ends in a way that was not asked for is a surprise, and so is one that does not end when told to. Every
process of the run inherits a mark in its environment, so that none can be overlooked at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec
import psutil

from cli.chaos.options import Options
from cli.chaos.plan import DECODE, PREFILL, ROLE_OF
from cli.up import free_ports
from common.config import LoopbackFaults, Role, TransportName
from common.errors import WorkerError

_MARK = "TANDEM_CHAOS"
_REPO = Path(__file__).resolve().parents[2]
_START_S = 120.0
_DRAIN_S = 10.0
_STOP_S = 30.0
_POLL_S = 0.2
_AGAIN_S = 0.5
_HEALTH = aiohttp.ClientTimeout(total=2.0)
_LINK_BYTES_S = "1e8"  # of the loopback transport when nothing else is asked of it: a hand-off then takes a while
# So small that the first sweep touches all of it, and that saved states are evicted.
_POOLS = ("--max-total-tokens", "6144", "--max-mamba-cache-size", "24", "--max-running-requests", "8")


@dataclass(slots=True)
class Process:
    """One member of the fleet. expected: exit statuses that what was done to it explains. log: stdout and stderr, of
    all its lives. faults: where its transport looks for what it has to do wrong."""

    name: str
    command: tuple[str, ...]
    url: str
    log: Path
    environment: dict[str, str]
    faults: Path
    expected: set[int] = field(default_factory=set)
    surprises: list[str] = field(default_factory=list)
    lives: int = 0
    process: asyncio.subprocess.Process | None = None
    _keeper: asyncio.Task[None] | None = None
    _closing: bool = False
    _turn: int = -1

    async def start(self) -> None:
        """From now on it is there again whenever it has ended."""
        await self._launch()
        self._keeper = asyncio.create_task(self._keep())

    async def _launch(self) -> None:
        with self.log.open("ab" if self.lives else "wb") as output:
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                cwd=_REPO,
                env=self.environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )
        self.expected = set()
        self.lives += 1

    async def _keep(self) -> None:
        while True:
            assert self.process is not None
            status = await self.process.wait()
            if status not in self.expected:
                self.surprises.append(f"{self.name} ended with status {status} in its life {self.lives}")
            if self._closing:
                return
            await asyncio.sleep(_AGAIN_S)
            await self._launch()

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def front(self) -> psutil.Process | None:
        """The process itself, unless it has just ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid) if self.process is not None and self.alive else None
        return None

    def rank(self) -> psutil.Process | None:
        """One of a node's ranks, another one each time, unless there is none at the moment."""
        ranks = list(self.ranks().values())
        self._turn += 1
        return ranks[self._turn % len(ranks)] if ranks else None

    def ranks(self) -> dict[str, psutil.Process]:
        """Those that there are, by name."""
        front, found = self.front(), {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in front.children() if front is not None else ():
                if (words := _words(child))[-2:-1] == ["--rank"]:
                    found[f"rank {words[-1]}"] = child
        return found

    def kill(self, victim: psutil.Process | None) -> bool:
        """kill -9 of the front or of the rank. False when it was not there."""
        if victim is None:
            return False
        is_front = self.process is not None and victim.pid == self.process.pid
        self.expected.add(-signal.SIGKILL if is_front else 1)
        return _signal(victim, signal.SIGKILL)

    async def hold(self, victim: psutil.Process | None, seconds: float) -> bool:
        """SIGSTOP, and SIGCONT after that time whatever happens. False when it was not there."""
        if victim is None or not _signal(victim, signal.SIGSTOP):
            return False
        try:
            await asyncio.sleep(seconds)
        finally:
            _signal(victim, signal.SIGCONT)
        return True

    async def restart(self) -> bool:
        """SIGTERM: it drains and ends with status 0. False when it was not there."""
        process = self.process
        if process is None or not self.alive:
            return False
        self.expected.add(0)
        process.terminate()
        await self._ended(process)
        return True

    async def _ended(self, process: asyncio.subprocess.Process) -> None:
        try:
            await asyncio.wait_for(process.wait(), _STOP_S)
        except TimeoutError:
            self.surprises.append(f"{self.name} had not ended {_STOP_S:g} s after SIGTERM")
            self.expected.add(-signal.SIGKILL)
            process.kill()
            await process.wait()

    @contextlib.contextmanager
    def injecting(self, faults: LoopbackFaults) -> Iterator[None]:
        """While in it, the transport of this node does so."""
        fresh = self.faults.with_suffix(".fresh")
        fresh.write_bytes(msgspec.json.encode(faults))
        fresh.rename(self.faults)
        try:
            yield
        finally:
            self.faults.unlink()

    async def close(self) -> None:
        """End it for good, and be sure of it."""
        self._closing = True
        await self.restart()
        if self._keeper is not None:
            await self._keeper


class Fleet:
    """Entered: all are healthy. Left: all have ended. folder: for logs."""

    def __init__(self, options: Options, folder: Path) -> None:
        self._mark = uuid.uuid4().hex
        self._options, self._folder = options, folder
        self.unified, nodes, self.router = self._plan()
        self.nodes = {node.name: node for node in nodes}
        self.left_over: list[str] = []

    @property
    def members(self) -> list[Process]:
        """All but the unified node."""
        return [*self.nodes.values(), self.router]

    @property
    def surprises(self) -> list[str]:
        return [surprise for member in [*self.members, self.unified] for surprise in member.surprises]

    def _plan(self) -> tuple[Process, list[Process], Process]:
        options, ports = self._options, iter(free_ports(8))
        nodes, pairs = [], []
        for name in PREFILL + DECODE:
            bootstrap = ("--bootstrap-port", str(next(ports))) if name in PREFILL else ()
            nodes.append(self._node(name, ROLE_OF[name], next(ports), bootstrap))
            pairs += [f"--{ROLE_OF[name]}", nodes[-1].url, *bootstrap[1:]]
        unified = self._node("unified", Role.UNIFIED, next(ports))
        # By turns: every node is to have seen all kinds of work before its memory is measured.
        limits = ("--policy", "round_robin", "--liveness-timeout", str(options.liveness_s), "--health-interval", "0.5")
        return unified, nodes, self._process("router", next(ports), ("router", *limits, *pairs))

    def _node(self, name: str, role: Role, port: int, bootstrap: Sequence[str] = ()) -> Process:
        options, handoff = self._options, list(bootstrap)
        if role is not Role.UNIFIED:
            handoff += ["--transport", options.transport, "--verify", options.verify]
        if options.transport is TransportName.LOOPBACK and role is not Role.UNIFIED:
            handoff += ["--fault-file", str(self._folder / f"{name}.faults"), "--fault-bandwidth", _LINK_BYTES_S]
        liveness = str(options.liveness_s)
        times = ("--liveness-timeout", liveness, "--bootstrap-timeout", "10", "--transfer-timeout", "5")
        waits = ("--first-token-timeout", "20", "--drain-timeout", f"{_DRAIN_S:g}", "--log-level", "debug")
        steps = ("--model-path", options.model_path, "--threads", "1", "--chunked-prefill-size", "256")
        ranks = () if role is Role.UNIFIED else ("--dp-size", str(options.dp_size))
        return self._process(name, port, (role.value, *handoff, *times, *waits, *steps, *ranks, *_POOLS))

    def _process(self, name: str, port: int, arguments: Sequence[str]) -> Process:
        command = (sys.executable, "-m", "cli.main", *arguments, "--port", str(port), "--parent-pid", str(os.getpid()))
        return Process(
            name=name,
            command=command,
            url=f"http://127.0.0.1:{port}",
            log=self._folder / f"{name}.log",
            environment=os.environ | {_MARK: self._mark},
            faults=self._folder / f"{name}.faults",
        )

    async def __aenter__(self) -> Fleet:
        try:
            for member in [*self.members, self.unified]:
                await member.start()
            await self.wait_healthy([*self.members, self.unified])
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def wait_healthy(self, members: Sequence[Process]) -> None:
        """Raises WorkerError when they are not in time."""
        if not await self.all_healthy(members, time.monotonic() + _START_S):
            names = ", ".join(member.name for member in members)
            raise WorkerError(f"not all healthy after {_START_S:g} s: {names}; their logs: {self._folder}")

    async def all_healthy(self, members: Sequence[Process], deadline_s: float) -> bool:
        """Wait until each has been healthy once. False when the time (monotonic) is over."""
        async with aiohttp.ClientSession(timeout=_HEALTH) as session:
            waiting = list(members)
            while waiting := [member for member in waiting if not await _is_healthy(session, member)]:
                if time.monotonic() > deadline_s:
                    return False
                await asyncio.sleep(_POLL_S)
        return True

    async def close(self) -> None:
        """The door first. Then nobody of the run may be left; who is, is noted and killed."""
        await self.router.close()
        await asyncio.gather(*(member.close() for member in [*self.nodes.values(), self.unified]))
        _, left = await asyncio.to_thread(psutil.wait_procs, list(self._marked()), timeout=2.0)
        for process in left:
            self.left_over.append(_describe(process))
            _signal(process, signal.SIGKILL)

    def _marked(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_zombie = process.status() == psutil.STATUS_ZOMBIE
                if not is_zombie and process.environ().get(_MARK) == self._mark:
                    yield process


async def _is_healthy(session: aiohttp.ClientSession, member: Process) -> bool:
    try:
        async with session.get(f"{member.url}/health") as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def _words(process: psutil.Process) -> list[str]:
    """Its command; nothing when it has just ended."""
    try:
        words: list[str] = process.cmdline()
    except psutil.Error:
        return []
    return words


def _describe(process: psutil.Process) -> str:
    try:
        with process.oneshot():
            return f"process {process.pid} of {process.ppid()}, {process.status()}: {' '.join(process.cmdline())}"
    except psutil.NoSuchProcess:
        return f"process {process.pid}, which has just ended"


def _signal(process: psutil.Process, number: signal.Signals) -> bool:
    """False when it is no more; a later process of its number is not taken for it."""
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return False
    return True
