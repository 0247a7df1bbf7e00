"""kill -9 of any one process: the client has an answer or an error within two seconds, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.stack import Stack, generate, stack

LONG = {"text": "Question: Tom", "sampling_params": {"temperature": 0, "max_new_tokens": 6000, "ignore_eos": True}}
LIMIT_S = 2.0


@pytest.fixture
def fresh_stack(tmp_path: Path) -> Iterator[Stack]:
    with stack(tmp_path) as running:
        yield running


def victim_pid(running: Stack, victim: str) -> int:
    match victim:
        case "router":
            return running.router.process.pid
        case "prefill front":
            return running.prefill.process.pid
        case "prefill rank":
            return running.prefill.rank().pid
        case "decode front":
            return running.decode.process.pid
        case "decode rank":
            return running.decode.rank().pid
        case _:
            raise AssertionError(victim)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition, within_s: float = 5.0) -> bool:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("victim", ["router", "decode front", "decode rank"])
def test_killed_while_decoding(fresh_stack: Stack, victim: str, stream: bool) -> None:
    outcome: list[object] = []

    def client() -> None:
        try:
            response = generate(fresh_stack.router.url, {**LONG, "stream": stream})
            outcome.append(response.text)
        except httpx.HTTPError as error:
            outcome.append(error)

    thread = threading.Thread(target=client)
    thread.start()
    assert wait_until(lambda: fresh_stack.decode.state()["num_running"] == 1)
    ranks = [fresh_stack.prefill.rank().pid, fresh_stack.decode.rank().pid]
    start = time.monotonic()
    os.kill(victim_pid(fresh_stack, victim), signal.SIGKILL)
    thread.join(10)
    assert not thread.is_alive() and time.monotonic() - start < LIMIT_S
    if victim == "router":
        assert isinstance(outcome[0], httpx.HTTPError)
    else:
        assert '"error"' in str(outcome[0])
    if victim == "decode front":
        assert wait_until(lambda: not is_running(ranks[1])), "the rank outlived its front"


@pytest.mark.parametrize("victim", ["prefill front", "prefill rank"])
def test_killed_while_prefilling(fresh_stack: Stack, victim: str) -> None:
    outcome: list[httpx.Response] = []
    body = {"input_ids": [[5 + i % 900 for i in range(7000)]] * 6, "sampling_params": {"max_new_tokens": 4}}
    thread = threading.Thread(target=lambda: outcome.append(generate(fresh_stack.router.url, body)))
    thread.start()
    assert wait_until(lambda: int(fresh_stack.prefill.state()["num_prefilling"]) > 0)  # type: ignore[call-overload]
    start = time.monotonic()
    os.kill(victim_pid(fresh_stack, victim), signal.SIGKILL)
    thread.join(10)
    assert not thread.is_alive() and time.monotonic() - start < LIMIT_S
    assert outcome[0].status_code in (502, 503) and outcome[0].json()["error"]["type"]
    decode = fresh_stack.decode
    assert wait_until(decode.is_idle)
    alone = generate(decode.url, {"text": "Question:", "sampling_params": {"temperature": 0, "max_new_tokens": 3}})
    assert alone.status_code == 200


def test_router_health_follows_its_workers(fresh_stack: Stack) -> None:
    assert httpx.get(f"{fresh_stack.router.url}/health").status_code == 200
    os.kill(fresh_stack.decode.rank().pid, signal.SIGKILL)
    assert wait_until(lambda: httpx.get(f"{fresh_stack.router.url}/health").status_code == 503)
    refused = generate(fresh_stack.router.url, {"text": "a"})
    assert refused.status_code == 503 and refused.json()["error"]["retryable"] is True
