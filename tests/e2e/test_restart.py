"""A node that was killed and is started again on the same ports joins by itself; nobody else is started again."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from tests.support.stack import MODEL, START_TIMEOUT_S, Server, free_port, generate, running, wait_healthy

PROMPT = [5 + i * 7 % 900 for i in range(200)]
MAX_NEW_TOKENS = 6
TYPED = {"worker_error", "transfer_error", "capacity_error"}


@dataclass(slots=True)
class Load:
    """Two clients that ask, one after the other, until `stop`. Each answer is right or a typed error that may be sent
    again."""

    url: str
    expected: list[int]
    good: int = 0
    errors: list[dict[str, object]] = field(default_factory=list)
    wrong: list[object] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    def run(self, stream: bool) -> None:
        while not self.stopping.is_set():
            self.ask(stream)
            self.stopping.wait(0.02)

    def ask(self, stream: bool) -> None:
        response = generate(self.url, body(stream))
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        found = httpx.Response(200, text=lines[-2]).json() if stream and len(lines) > 1 else response.json()
        if "error" in found:
            self.errors.append(found["error"])
        elif found["output_ids"] == self.expected:
            self.good += 1
        else:
            self.wrong.append(found)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        clients = [threading.Thread(target=self.run, args=(stream,)) for stream in (False, True)]
        for client in clients:
            client.start()
        try:
            yield
        finally:
            self.stopping.set()
            for client in clients:
                client.join(60)


def body(stream: bool = False) -> dict[str, object]:
    sampling = {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS, "ignore_eos": True}
    return {"input_ids": PROMPT, "sampling_params": sampling, "stream": stream}


def wait_for(condition: Callable[[], bool], what: str, within_s: float = START_TIMEOUT_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not in time"
        time.sleep(0.05)


def kill(node: Server, victims: Sequence[str]) -> None:
    """SIGKILL to the front, the rank or both at once; waits for the end of the node."""
    rank = node.rank()
    for victim in victims:
        os.kill(node.process.pid if victim == "front" else rank.pid, signal.SIGKILL)
    node.process.wait(20)
    psutil.wait_procs([rank], timeout=5)
    assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE


KILLS = [("prefill", ["front"]), ("decode", ["rank"]), ("prefill", ["rank"]), ("decode", ["front", "rank"])]


def test_killed_nodes_join_again_under_load(tmp_path: Path) -> None:
    ports = {"prefill": free_port(), "decode": free_port(), "bootstrap": free_port(), "router": free_port()}
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    settings = ["--model-path", str(MODEL), "--local-prefill-max-tokens", "0"]
    commands = {
        "prefill": ["prefill", "--port", str(ports["prefill"]), "--bootstrap-port", str(ports["bootstrap"]), *settings],
        "decode": ["decode", "--port", str(ports["decode"]), *settings],
        "router": ["router", "--port", str(ports["router"]), "--decode", urls["decode"]],
    }
    commands["router"] += ["--prefill", urls["prefill"], str(ports["bootstrap"])]
    starts = 0
    with ExitStack() as exits:

        def start(name: str) -> Server:
            nonlocal starts
            starts += 1
            return exits.enter_context(running(f"{name}-{starts}", commands[name], urls[name], tmp_path))

        nodes = {name: start(name) for name in ("prefill", "decode")}
        router = start("router")
        for server in (*nodes.values(), router):
            wait_healthy(server)
        expected = generate(router.url, body()).json()["output_ids"]
        assert len(expected) == MAX_NEW_TOKENS
        load = Load(router.url, expected)
        with load.under_way():
            for role, victims in KILLS:
                wait_for(lambda seen=load.good + 2: load.good >= seen, "answers before the kill")
                other = nodes["decode" if role == "prefill" else "prefill"]
                survivors = [other.process.pid, other.rank().pid, router.process.pid]
                kill(nodes[role], victims)
                nodes[role] = start(role)
                wait_healthy(nodes[role])
                wait_for(lambda seen=load.good + 4: load.good >= seen, f"answers after {role} {victims}", 20)
                assert [other.process.pid, other.rank().pid, router.process.pid] == survivors
        assert not load.wrong
        assert all(error["type"] in TYPED and error["retryable"] for error in load.errors), load.errors
        for node in nodes.values():
            wait_for(node.is_idle, f"{node.name} gives everything back", 10)
            transfer = node.state()["transfer"]
            assert len(transfer["peers"]) == 1 and transfer["peers_silent"] == 0  # type: ignore[index]
            assert transfer.get("quarantined", 0) == 0 and node.state()["leaks_total"] == 0  # type: ignore[attr-defined]
