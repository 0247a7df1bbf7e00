"""Real processes for tests: nodes and a router started through the command line, stopped by pid whatever happens."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

REPO = Path(__file__).resolve().parents[2]
MODEL = REPO / "models" / "tandem-mini"
START_TIMEOUT_S = 90.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A started process. log: its stdout and stderr."""

    name: str
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def rank(self) -> psutil.Process:
        """The node's rank process."""
        return next(p for p in self.children() if any(a.endswith(".rank") for a in p.cmdline()))

    def state(self) -> dict[str, object]:
        """Counters of the node's first rank."""
        return httpx.get(f"{self.url}/server_info", timeout=10).json()["internal_states"][0]

    def is_idle(self) -> bool:
        """Every page and slot of the node's first rank is free, or cached for later requests."""
        state = self.state()
        return all(
            state[f"{kind}_free"] + state[f"{kind}_cached"] == state[f"{kind}_total"] for kind in ("pages", "slots")
        )  # type: ignore[operator]

    def text(self) -> str:
        return self.log.read_text(errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """router in front of prefill and decode; unified beside them when asked for."""

    router: Server
    prefill: Server
    decode: Server
    unified: Server | None


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "cli.main", *arguments]


@contextmanager
def running(name: str, arguments: Sequence[str], url: str, folder: Path) -> Iterator[Server]:
    """Start `tandem <arguments>`; on leaving, end it and everything it started."""
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(*arguments), cwd=REPO, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    server = Server(name=name, process=process, url=url, log=log)
    try:
        yield server
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes], grace_s: float = 10.0) -> None:
    family = [process.pid]
    if process.poll() is None:
        family += [p.pid for p in psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for pid in family:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def wait_healthy(server: Server, timeout_s: float = START_TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise AssertionError(f"{server.name} ended with {server.process.returncode}:\n{server.text()}")
        try:
            if httpx.get(f"{server.url}/health", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"{server.name} is not healthy after {timeout_s} s:\n{server.text()}")


@contextmanager
def node(role: str, folder: Path, extra: Sequence[str] = (), *, bootstrap_port: int | None = None) -> Iterator[Server]:
    """One node, not yet healthy: call `wait_healthy`."""
    port = free_port()
    arguments = [role, "--model-path", str(MODEL), "--port", str(port), *extra]
    if bootstrap_port is not None:
        arguments += ["--disaggregation-bootstrap-port", str(bootstrap_port)]
    with running(role, arguments, f"http://127.0.0.1:{port}", folder) as server:
        yield server


@contextmanager
def stack(
    folder: Path,
    *,
    with_unified: bool = False,
    extra: Sequence[str] = (),
    decode_extra: Sequence[str] = (),
    wait_for_router: bool = True,
) -> Iterator[Stack]:
    """A healthy router, prefill and decode. extra: options of every node. wait_for_router: until it has a live pair."""
    bootstrap_port = free_port()
    with ExitStack() as exits:
        prefill = exits.enter_context(node("prefill", folder, extra, bootstrap_port=bootstrap_port))
        decode = exits.enter_context(node("decode", folder, [*extra, *decode_extra]))
        unified = exits.enter_context(node("unified", folder, extra)) if with_unified else None
        port = free_port()
        arguments = ["router", "--port", str(port), "--decode", decode.url]
        arguments += ["--prefill", prefill.url, str(bootstrap_port)]
        router = exits.enter_context(running("router", arguments, f"http://127.0.0.1:{port}", folder))
        for server in (prefill, decode, unified, router if wait_for_router else None):
            if server is not None:
                wait_healthy(server)
        yield Stack(router=router, prefill=prefill, decode=decode, unified=unified)


def generate(url: str, body: dict[str, object], timeout_s: float = 60.0) -> httpx.Response:
    return httpx.post(f"{url}/generate", json=body, timeout=timeout_s)
