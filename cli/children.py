"""Child processes that live and die together.

Each is the leader of its own process group, so that Ctrl-C reaches this process alone, which then ends them in order.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from cli.router_settings import KEY_VARIABLES
from common.errors import WorkerError

_POLL_S = 0.1
_HEALTH_LIMIT_S = 2.0
_KILL_S = 2.0


class ChildEndedError(WorkerError):
    """A child ended that nobody had told to."""


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """url: where it answers /health once it can serve."""

    name: str
    command: tuple[str, ...]
    url: str


@dataclass(slots=True)
class Child:
    plan: ChildPlan
    process: subprocess.Popen[bytes]
    healthy: bool = False


@dataclass(slots=True)
class Children:
    """To be started once and stopped once. say: prints a line of progress. grace_s: from SIGTERM to the kill.

    logs: folder for what each prints; None: where this process prints.
    """

    say: Callable[[str], None]
    grace_s: float = 8.0
    logs: Path | None = None
    running: list[Child] = field(default_factory=list)

    def start(self, plan: ChildPlan) -> None:
        """The command gets `--parent-pid`, so that it ends when this process is killed. It takes no API keys from the
        environment: who starts it asks it without one."""
        command = [*plan.command, "--parent-pid", str(os.getpid())]
        with contextlib.ExitStack() as opened:
            log = None if self.logs is None else opened.enter_context((self.logs / f"{plan.name}.log").open("ab"))
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log and subprocess.STDOUT,
                process_group=0,
                env={name: value for name, value in os.environ.items() if name not in KEY_VARIABLES},
            )
        self.running.append(Child(plan, process))
        self.say(f"{plan.name}: started, pid {process.pid}, {plan.url}")

    def wait_healthy(self, timeout_s: float, every_s: float = 5.0) -> None:
        """Raises ChildEndedError, and WorkerError when the time is over."""
        begin = last_word = time.monotonic()
        while waiting := [child.plan.name for child in self.running if not self._is_healthy(child, begin)]:
            self.raise_if_one_ended()
            now = time.monotonic()
            if now - begin > timeout_s:
                raise WorkerError(f"not ready after {timeout_s:.0f} s: {', '.join(waiting)}")
            if now - last_word > every_s:
                self.say(f"waiting for {', '.join(waiting)} ({now - begin:.0f} s)")
                last_word = now
            time.sleep(_POLL_S)

    def _is_healthy(self, child: Child, begin: float) -> bool:
        if not child.healthy and _answers_health(child.plan.url):
            child.healthy = True
            self.say(f"{child.plan.name}: ready after {time.monotonic() - begin:.1f} s")
        return child.healthy

    def raise_if_one_ended(self) -> None:
        """Raises ChildEndedError naming it."""
        for child in self.running:
            status = child.process.poll()
            if status is not None:
                raise ChildEndedError(f"{child.plan.name} (pid {child.process.pid}) {_how_it_ended(status)}")

    def watch(self) -> None:
        """Until one ends: raises ChildEndedError."""
        while True:
            self.raise_if_one_ended()
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """End all of them and whatever they have started; kill what does not end in time.

        The one started last goes first: it is the door, and nobody shall knock at those behind it when they are gone.
        """
        family = _descendants([child.process.pid for child in self.running])
        self._terminate(self.running[-1:])
        self._terminate(self.running[:-1])
        _kill([process for process in family if process.is_running()])
        for child in self.running:
            child.process.wait()

    def _terminate(self, children: Sequence[Child]) -> None:
        for child in children:
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self.grace_s
        for child in children:
            if not _ended_by(child.process, deadline):
                self.say(f"{child.plan.name}: does not end, killed")


def _answers_health(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=_HEALTH_LIMIT_S, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _how_it_ended(status: int) -> str:
    return f"ended with exit status {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"


def _ended_by(process: subprocess.Popen[bytes], deadline: float) -> bool:
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _descendants(pids: Sequence[int]) -> list[psutil.Process]:
    """The processes themselves and all below them. psutil tells a process from a later one with the same pid."""
    found: list[psutil.Process] = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            found += [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return found


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=_KILL_S)
