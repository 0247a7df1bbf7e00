"""`tandem router --workers N`: the parent of N processes that take connections from the same listening sockets.

The parent owns the sockets, so no client is refused while a process is started again. It passes signals on and serves
nothing itself.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec

from cli.lifeline import die_with_parent
from common.config import RouterConfig, SiblingConfig
from common.errors import ConfigError, ServingError
from common.keys import Key
from common.logs import configure_logging
from router.app import listen, serve_on

log = logging.getLogger("tandem.router")

_LIVED_LONG_S = 10.0
_BACKOFF_S = (0.2, 30.0)
_POLL_S = 0.5


def share_of(config: RouterConfig, count: int, folder: str) -> RouterConfig:
    """What each of `count` processes is told. Bounds are of the router as a whole: each process has its part of them.

    Raises ConfigError when there is not one for each.
    """
    changes: dict[str, object] = {}
    for name in ("max_concurrent_requests", "requests_per_minute", "tokens_per_minute"):
        whole = getattr(config, name)
        if whole is not None:
            changes[name] = _part(name, whole, count)
    if config.queue_size:
        changes["queue_size"] = -(-config.queue_size // count)
    if config.state_file is None:  # so that all learn of a worker that comes or goes
        changes["state_file"] = str(Path(folder) / "workers.json")
    return msgspec.structs.replace(config, **changes)


def _part(name: str, whole: int, count: int) -> int:
    if whole < count:
        option = name.replace("_", "-")
        raise ConfigError(f"--{option} {whole}: at least one for each of --workers {count}", param=name)
    return whole // count


@dataclass(slots=True)
class _Child:
    """backoff_s: to wait before it is started again."""

    number: int
    process: multiprocessing.process.BaseProcess
    began_s: float
    backoff_s: float = _BACKOFF_S[0]
    restart_at_s: float | None = None


class RouterProcesses:
    """To be run once, in the main thread, whose signals it takes. Raises ConfigError before it listens."""

    def __init__(self, config: RouterConfig, keys: Sequence[Key], count: int) -> None:
        self._keys, self._count = keys, count
        self._folder = tempfile.TemporaryDirectory(prefix="tandem-router-")
        self._config = share_of(config, count, self._folder.name)
        self._listeners = listen(config, keys)
        self._children: list[_Child] = []
        self._is_ending = False

    def run(self) -> None:
        """Until SIGTERM or SIGINT, and the end of all; SIGHUP goes to all."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        try:
            self._children = [_Child(i, self._start(i), time.monotonic()) for i in range(self._count)]
            while any(child.process.is_alive() for child in self._children) or not self._is_ending:
                multiprocessing.connection.wait([child.process.sentinel for child in self._alive()], timeout=_POLL_S)
                self._restart_ended()
        finally:
            for child in self._alive():
                child.process.kill()
            for child in self._children:
                child.process.join()
            self._folder.cleanup()

    def _alive(self) -> list[_Child]:
        return [child for child in self._children if child.process.is_alive()]

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._is_ending = self._is_ending or number != signal.SIGHUP
        for child in self._alive():
            if child.process.pid is not None:
                os.kill(child.process.pid, signal.SIGHUP if number == signal.SIGHUP else signal.SIGTERM)

    def _start(self, number: int) -> multiprocessing.process.BaseProcess:
        siblings = SiblingConfig(folder=self._folder.name, number=number, count=self._count)
        config = msgspec.structs.replace(self._config, siblings=siblings)
        process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(config, list(self._listeners), tuple(self._keys), os.getpid()), name=f"router-{number}"
        )
        process.start()
        return process

    def _restart_ended(self) -> None:
        now_s = time.monotonic()
        for child in self._children:
            if self._is_ending or child.process.is_alive():
                continue
            if child.restart_at_s is None:
                has_lived = now_s - child.began_s > _LIVED_LONG_S
                child.backoff_s = _BACKOFF_S[0] if has_lived else min(2 * child.backoff_s, _BACKOFF_S[1])
                child.restart_at_s = now_s + child.backoff_s
                log.error("process %d has ended (exit status %s)", child.number, child.process.exitcode)
            elif now_s >= child.restart_at_s:
                child.process, child.began_s, child.restart_at_s = self._start(child.number), now_s, None


def _serve(config: RouterConfig, listeners: list[socket.socket], keys: tuple[Key, ...], parent_pid: int) -> None:
    """One of the processes."""
    os.setpgid(0, 0)  # a terminal's Ctrl-C is the parent's to pass on
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert config.siblings is not None
    configure_logging(config.log_level, f"router-{config.siblings.number}")
    die_with_parent(parent_pid)
    try:
        serve_on(config, listeners, keys)
    except ServingError as error:
        log.error("%s", error.message)
        sys.exit(2)
