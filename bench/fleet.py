"""Nodes and routers of this machine for a benchmark, by name: started together, ended together, also by its kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.stack import Server, free_port, running, stop, wait_healthy

Options = Mapping[str, object]


class Fleet:
    """What a name stands for is one process with what it has started. logs: folder of what they print."""

    def __init__(self, logs: Path, exits: ExitStack) -> None:
        self._logs, self._exits = logs, exits
        self._servers: dict[str, Server] = {}
        self._bootstrap: dict[str, int] = {}

    def node(self, name: str, role: str, options: Options) -> None:
        """Begin to start a node. options: without dashes; True for a flag."""
        given = dict(options)
        if role == "prefill":
            given["bootstrap-port"] = self._bootstrap[name] = free_port()
        self._start(name, role, given)

    def router(self, name: str, prefill: Sequence[str], decode: Sequence[str], options: Options) -> None:
        """In front of these nodes."""
        pairs: list[str] = []
        for one in prefill:
            pairs += ["--prefill", self.url(one), str(self._bootstrap[one])]
        for one in decode:
            pairs += ["--decode", self.url(one)]
        self._start(name, "router", options, pairs)

    def _start(self, name: str, role: str, options: Options, more: Sequence[str] = ()) -> None:
        port = free_port()
        words = [role, "--port", str(port), "--log-level", "warning", "--parent-pid", str(os.getpid()), *more]
        for key, value in options.items():
            words += [f"--{key}"] if value is True else [f"--{key}", str(value)]
        server = running(name, words, f"http://127.0.0.1:{port}", self._logs)
        self._servers[name] = self._exits.enter_context(server)

    def wait(self, names: Sequence[str], limit_s: float) -> None:
        """Until these are healthy. Raises AssertionError with what a process said that ended or did not get there."""
        for name in names:
            wait_healthy(self._servers[name], limit_s)

    def names(self) -> list[str]:
        return list(self._servers)

    def url(self, name: str) -> str:
        return self._servers[name].url

    def pid(self, name: str) -> int:
        return self._servers[name].process.pid

    def info(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url(name)}/server_info", timeout=20).json()
        return found

    def end(self, names: Sequence[str]) -> None:
        """At once: what runs there is dropped."""
        gone = [self._servers.pop(name) for name in names if name in self._servers]
        for _ in range(2):  # the second one ends what drains
            for server in gone:
                if server.process.poll() is None:
                    server.process.send_signal(signal.SIGTERM)
        for server in gone:
            stop(server.process)


@contextmanager
def fleet(logs: Path) -> Iterator[Fleet]:
    with ExitStack() as exits:
        made = Fleet(logs, exits)
        try:
            yield made
        finally:
            made.end(made.names())
