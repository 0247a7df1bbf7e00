"""Fixtures: ranks that are closed at the end of the test, in this process and in their own."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.config import LoopbackFaults, TransferConfig, TransportName
from common.layout import StateLayout

sys.path.insert(0, str(Path(__file__).parent))
from transfer_rig import Decode, Prefill, make_layout


def loopback(faults: LoopbackFaults | None = None, **changes: Any) -> TransferConfig:
    quick: dict[str, Any] = {
        "transport": TransportName.LOOPBACK,
        "faults": faults or LoopbackFaults(),
        "bootstrap_timeout_s": 5.0,
        "transfer_timeout_s": 5.0,
        "liveness_timeout_s": 2.0,
    }
    return TransferConfig(**(quick | changes))


@pytest.fixture
def config() -> Callable[..., TransferConfig]:
    """A loopback configuration with short time-outs; keywords change it."""
    return loopback


@pytest.fixture
def prefill(decode: Callable[..., Decode]) -> Iterator[Callable[..., Prefill]]:
    """Closed before decode: it writes to decode's memory."""
    made: list[Prefill] = []

    def make(*arguments: Any, **keywords: Any) -> Prefill:
        made.append(Prefill(*arguments, **keywords))
        return made[-1]

    yield make
    for side in made:
        side.close()


@pytest.fixture
def decode() -> Iterator[Callable[..., Decode]]:
    made: list[Decode] = []

    def make(*arguments: Any, **keywords: Any) -> Decode:
        made.append(Decode(*arguments, **keywords))
        return made[-1]

    yield make
    for side in made:
        side.close()


class Process:
    """A rank in its own process. `events` collects the lines that it writes. launcher: what starts it elsewhere."""

    def __init__(
        self, role: str, config: TransferConfig, layout: StateLayout, port: int, launcher: Sequence[str]
    ) -> None:
        setup = json.dumps([role, msgspec.to_builtins(config), msgspec.to_builtins(layout), port])
        self._process = subprocess.Popen(
            [*launcher, sys.executable, str(Path(__file__).parent / "transfer_rig.py"), setup],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        self.pid = self._process.pid
        self._lines: queue.Queue[list[Any]] = queue.Queue()
        self.events: list[list[Any]] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self.port: int = self.wait_for("ready")[1]

    def say(self, *command: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def wait_for(self, what: str, room: int | None = None, timeout_s: float = 15.0) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        while True:
            for event in self.events:
                if event[0] == what and room in (None, event[1]):
                    return event
            try:
                self.events.append(self._lines.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                raise AssertionError(f"no {what}, only {self.events}") from None

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        if self._process.poll() is None:
            self.signal(signal.SIGCONT)
        try:
            self._process.stdin.close()
            self._process.wait(5)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait(5)
        self._thread.join(5)
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(json.loads(line))


@pytest.fixture
def process() -> Iterator[Callable[..., Process]]:
    made: list[Process] = []

    def make(
        role: str,
        config: TransferConfig,
        layout: StateLayout | None = None,
        port: int = 0,
        launcher: Sequence[str] = (),
    ) -> Process:
        made.append(Process(role, config, layout or make_layout(), port, launcher))
        return made[-1]

    yield make
    for each in made:
        each.close()
