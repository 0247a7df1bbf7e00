"""What only the router can end, through real processes: one leg fails, dies or stops while nothing joins the two yet.

The states are those of docs/operations.md's failure table: `expected` on the prefill rank, `queued` and `running` on
the decode rank.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import failure_table
from tests.support.stack import Server, Stack, free_port, generate, running, stack, wait_healthy

LIVENESS_S, AT_ONCE_S = 2.0, 1.0
NOTICED_S = 0.5  # an answer of a loaded machine is late by so much
PREFILL_CONTEXT = 1024
NODES = ("--liveness-timeout", str(LIVENESS_S), "--max-running-requests", "1", "--max-total-tokens", "16384")


@pytest.fixture(scope="module")
def running_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Decode has one place; prefill takes shorter prompts than decode."""
    with stack(
        tmp_path_factory.mktemp("failures"),
        extra=[*NODES, "--context-length", str(PREFILL_CONTEXT)],
        decode_extra=["--context-length", "8192"],
    ) as made:
        yield made


class Call:
    """One request of a client that waits, on a thread of its own. answer: None while it waits."""

    def __init__(self, made: Stack, seed: int, max_new_tokens: int) -> None:
        prompt = [5 + (seed * 31 + i * 7) % 900 for i in range(200)]
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        body: dict[str, object] = {"input_ids": prompt, "sampling_params": sampling}
        self.answer: httpx.Response | None = None
        self._thread = threading.Thread(target=self._run, args=(made.router.url, body))
        self._thread.start()

    def _run(self, url: str, body: dict[str, object]) -> None:
        self.answer = generate(url, body)

    def error(self, within_s: float) -> dict[str, Any]:
        """The answer must be an error, in time."""
        self._thread.join(within_s + NOTICED_S)
        assert self.answer is not None, f"no answer within {within_s} s"
        assert self.answer.status_code >= 400, self.answer.text
        return dict(self.answer.json()["error"])

    def tokens(self) -> int:
        self._thread.join(100)
        assert self.answer is not None and self.answer.status_code == 200
        return len(self.answer.json()["output_ids"])


def wait_until(condition: Callable[[], Any], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def one_runs_one_is_queued(made: Stack, max_new_tokens: int = 6000) -> tuple[Call, Call]:
    first = Call(made, 1, max_new_tokens)
    wait_until(lambda: made.decode.state()["num_running"] == 1)
    second = Call(made, 2, 4)
    wait_until(lambda: made.decode.state()["num_reserving"] == 1)
    return first, second


def is_empty(server: Server) -> bool:
    state = server.state()
    counts = ("num_waiting", "num_prefilling", "num_running")
    return server.is_idle() and not any(state[name] for name in counts) and not state["transfer"].get("rooms")  # type: ignore[attr-defined]


def test_a_prompt_that_is_too_long_for_prefill_alone(running_stack: Stack) -> None:
    body: dict[str, object] = {"input_ids": [5] * (PREFILL_CONTEXT + 100), "sampling_params": {"max_new_tokens": 4}}
    started = time.monotonic()
    refused = generate(running_stack.router.url, body)
    assert time.monotonic() - started < AT_ONCE_S + NOTICED_S
    assert refused.status_code == 400 and "1024" in refused.json()["error"]["message"]
    wait_until(lambda: is_empty(running_stack.decode), AT_ONCE_S + NOTICED_S)
    assert running_stack.decode.state()["num_reserving"] == 0


def test_closing_the_sending_half_of_a_connection_ends_the_request(running_stack: Stack) -> None:
    """Until something is written, nobody can tell it from a client that has left."""
    sampling = {"max_new_tokens": 6000, "ignore_eos": True}
    body = json.dumps({"input_ids": [5, 6, 7], "sampling_params": sampling}).encode()
    url = httpx.URL(running_stack.router.url)
    with socket.create_connection((url.host, url.port), timeout=20) as client:
        client.sendall(b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        wait_until(lambda: running_stack.decode.state()["num_running"] == 1)
        client.shutdown(socket.SHUT_WR)
        wait_until(lambda: running_stack.decode.state()["num_running"] == 0, AT_ONCE_S + NOTICED_S)
        assert client.recv(1) == b""
    wait_until(lambda: is_empty(running_stack.prefill))


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_rank_stops_before_the_ranks_know_each_other(running_stack: Stack, side: str) -> None:
    """A stopped prefill rank ends what is queued and does no harm to what runs, which outlasts the time-out; a stopped
    decode rank ends both."""
    marks = failure_table.cells()
    victim: Server = getattr(running_stack, side)
    long, queued = one_runs_one_is_queued(running_stack, 3000 if side == "prefill" else 6000)
    pid = victim.rank().pid
    os.kill(pid, signal.SIGSTOP)
    try:
        error = queued.error(LIVENESS_S + AT_ONCE_S)
        assert (error["code"], error["retryable"]) == ("rank_silent", True)
        if side == "prefill":
            assert marks["decode", "queued", "other side silent"] == "other leg"
            assert marks["decode", "running", "other side silent"] == "no harm"
            assert long.tokens() == 3000
            wait_until(lambda: is_empty(running_stack.decode))
        else:
            assert marks["prefill", "expected", "other side silent"] == "other leg"
            assert long.error(AT_ONCE_S)["code"] == "rank_silent"
            wait_until(lambda: is_empty(running_stack.prefill), AT_ONCE_S + NOTICED_S)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: httpx.get(f"{running_stack.router.url}/health").status_code == 200)
    assert Call(running_stack, 3, 4).tokens() == 4
    for server in (running_stack.prefill, running_stack.decode):
        wait_until(lambda server=server: is_empty(server))


def test_prefill_is_killed_beside_a_running_request(tmp_path: Path) -> None:
    marks = failure_table.cells()
    with stack(tmp_path, extra=NODES) as made:
        long, queued = one_runs_one_is_queued(made, 300)
        os.kill(made.prefill.rank().pid, signal.SIGKILL)
        error = queued.error(AT_ONCE_S)
        assert error["code"] in ("rank_died", "worker_lost") and error["retryable"]
        assert marks["decode", "queued", "prefill dead"] == "other leg"
        assert marks["decode", "running", "prefill dead"] == "no harm"
        assert long.tokens() == 300
        wait_until(lambda: is_empty(made.decode))


def test_decode_is_killed_and_then_refuses_connections(tmp_path: Path) -> None:
    with stack(tmp_path, extra=NODES) as made, late_router(made, tmp_path) as late:
        _, queued = one_runs_one_is_queued(made)
        os.kill(made.decode.rank().pid, signal.SIGKILL)
        assert queued.error(AT_ONCE_S)["code"] in ("rank_died", "worker_lost")
        assert failure_table.cells()["prefill", "expected", "decode dead"] == "other leg"
        wait_until(lambda: is_empty(made.prefill), AT_ONCE_S + NOTICED_S)
        made.decode.process.wait(10)  # its last rank is dead
        started = time.monotonic()
        refused = generate(late.url, {"text": "a"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "worker_unavailable"
        wait_until(lambda: is_empty(made.prefill), AT_ONCE_S + NOTICED_S)
        assert time.monotonic() - started < AT_ONCE_S + 2 * NOTICED_S


@contextmanager
def late_router(made: Stack, folder: Path) -> Iterator[Server]:
    """One that does not look after its workers for a long time: it learns of a death by asking for something."""
    port = free_port()
    bootstrap_port = httpx.get(f"{made.prefill.url}/server_info").json()["disaggregation_bootstrap_port"]
    arguments = ["router", "--port", str(port), "--health-interval", "300", "--decode", made.decode.url]
    arguments += ["--prefill", made.prefill.url, str(bootstrap_port)]
    with running("late-router", arguments, f"http://127.0.0.1:{port}", folder) as server:
        wait_healthy(server)
        yield server
