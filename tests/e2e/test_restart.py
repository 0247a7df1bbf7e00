"""A killed node that is started again on its ports joins by itself; one that is told to end drains first."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.stack import MODEL, START_TIMEOUT_S, Server, free_port, generate, running, wait_healthy

PROMPT = [5 + i * 7 % 900 for i in range(200)]
MAX_NEW_TOKENS = 6
LIMIT_S = 150.0
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


SOME = [("prefill", ["front"]), ("decode", ["rank"]), ("prefill", ["rank"]), ("decode", ["front", "rank"])]
ALL = [(role, victims) for victims in (["front"], ["rank"], ["front", "rank"]) for role in ("prefill", "decode")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """A pair and its router on ports that stay the same when a node is started again."""

    nodes: dict[str, Server]
    router: Server
    start: Callable[[str], Server]

    def restart(self, role: str) -> None:
        self.nodes[role] = self.start(role)
        wait_healthy(self.nodes[role])

    def rest(self, role: str) -> list[int]:
        """The processes that must not be started again when the node of this role is."""
        other = self.nodes["decode" if role == "prefill" else "prefill"]
        return [other.process.pid, other.rank().pid, self.router.process.pid]


@contextmanager
def fixed_stack(folder: Path) -> Iterator[Fixed]:
    ports = {name: free_port() for name in ("prefill", "decode", "bootstrap", "router")}
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    node = ["--model-path", str(MODEL), "--local-prefill-max-tokens", "0", "--drain-timeout", "120"]
    options = {
        "prefill": ["--bootstrap-port", str(ports["bootstrap"]), *node],
        "decode": node,
        "router": ["--prefill", urls["prefill"], str(ports["bootstrap"]), "--decode", urls["decode"]],
    }
    starts = itertools.count()
    with ExitStack() as exits:

        def start(name: str) -> Server:
            command = [name, "--port", str(ports[name]), *options[name]]
            return exits.enter_context(running(f"{name}-{next(starts)}", command, urls[name], folder))

        nodes = {role: start(role) for role in ("prefill", "decode")}
        fixed = Fixed(nodes=nodes, router=start("router"), start=start)
        for server in (*nodes.values(), fixed.router):
            wait_healthy(server)
        yield fixed


def assert_all_given_back(fixed: Fixed) -> None:
    for node in fixed.nodes.values():
        wait_for(node.is_idle, f"{node.name} gives everything back", 30)
        state = node.state()
        transfer: dict[str, Any] = state["transfer"]  # type: ignore[assignment]
        assert len(transfer["peers"]) == 1 and transfer["peers_silent"] == transfer.get("quarantined", 0) == 0
        assert state["leaks_total"] == 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [SOME, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
def test_killed_and_drained_nodes(tmp_path: Path, kills: list[tuple[str, list[str]]]) -> None:
    with fixed_stack(tmp_path) as fixed:
        expected = generate(fixed.router.url, body()).json()["output_ids"]
        assert len(expected) == MAX_NEW_TOKENS
        load = Load(fixed.router.url, expected)
        with load.under_way():
            for role, victims in kills:
                wait_for(lambda seen=load.good + 2: load.good >= seen, "answers before the kill")
                rest = fixed.rest(role)
                kill(fixed.nodes[role], victims)
                fixed.restart(role)
                wait_for(lambda seen=load.good + 4: load.good >= seen, f"answers after {role} {victims}", 60)
                assert fixed.rest(role) == rest
        assert not load.wrong
        assert all(error["type"] in TYPED and error["retryable"] for error in load.errors), load.errors
        assert_all_given_back(fixed)
        drain_both(fixed)


def drain_both(fixed: Fixed) -> None:
    """SIGTERM while one node makes an answer and the other computes prompts: all of it is finished, then both end."""
    prefill, decode = fixed.nodes["prefill"], fixed.nodes["decode"]
    sampling = {"temperature": 0, "ignore_eos": True}
    long_answer = {"input_ids": PROMPT, "sampling_params": {**sampling, "max_new_tokens": 500}}
    prompts = {"input_ids": [[5 + i * 11 % 900 for i in range(4000)]] * 4}
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(generate, fixed.router.url, long_answer, LIMIT_S)
        wait_for(lambda: decode.state()["num_running"] == 1, "the answer has begun")
        others = pool.submit(
            generate, fixed.router.url, {**prompts, "sampling_params": {**sampling, "max_new_tokens": 2}}, LIMIT_S
        )
        wait_for(lambda: prefill.state()["num_prefilling"] == 4, "the prompts are being computed")
        for node in (prefill, decode):
            node.process.send_signal(signal.SIGTERM)
        for node in (prefill, decode):
            wait_for(lambda url=node.url: says_draining(url), f"{node.name} drains", 20)
        refused = generate(fixed.router.url, body())
        assert refused.status_code == 503 and refused.json()["error"]["retryable"] is True
        assert answer.result(LIMIT_S).status_code == 200, answer.result().text
        assert len(answer.result().json()["output_ids"]) == 500
        assert others.result(LIMIT_S).status_code == 200, others.result().text
    assert [node.process.wait(20) for node in (prefill, decode)] == [0, 0]


def says_draining(url: str) -> bool:
    response = httpx.get(f"{url}/health", timeout=10)
    return response.status_code == 503 and response.json()["error"]["code"] == "draining"
