"""Hundreds of mixed requests, some of them given up; every 25 a canary whose answer must be the first one's."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from accuracy.gsm_mini import STOP, few_shot, problems, prompt
from tests.support.stack import Stack, generate

WAVE, CLIENTS = 25, 5


def canary(made: Stack) -> list[int]:
    """A worked problem behind its examples, cold and later from the cache; what the trained model is sure of."""
    text = prompt(problems("heldout", 3, 5)[4], few_shot())
    answer = generate(made.router.url, {"text": text, "sampling_params": {"temperature": 0, "stop": STOP}})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["output_ids"])


def one_of_many(made: Stack, number: int) -> None:
    """A request of any kind: plain, streamed, of several samples, left by its client, aborted by another one."""
    draw = random.Random(number)
    rid = f"soak-{number}"
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": [draw.randrange(5, 900) for _ in range(draw.choice([1, 15, 16, 64, 65, 300]))],
        "sampling_params": {"temperature": draw.choice([0, 1.0]), "max_new_tokens": draw.choice([1, 2, 17])},
    }
    kind = draw.choice(["plain", "plain", "streamed", "samples", "left", "aborted"])
    if kind in ("left", "aborted"):
        body["sampling_params"] |= {"max_new_tokens": 3000, "ignore_eos": True}
    if kind == "samples":
        del body["rid"]
        body["sampling_params"]["n"] = 2
    if kind in ("plain", "samples"):
        answer = generate(made.router.url, body)
        assert answer.status_code == 200, answer.text
        return
    with httpx.stream("POST", f"{made.router.url}/generate", json={**body, "stream": True}, timeout=60) as stream:
        lines = stream.iter_lines()
        first = next(lines)
        assert stream.status_code == 200 and first.startswith("data:")
        if kind == "left":
            return
        if kind == "aborted":
            assert httpx.post(f"{made.router.url}/abort_request", json={"rid": rid}).status_code == 200
        *_, last, done = [first, *(line for line in lines if line)]
        assert done == "data: [DONE]" and ('"aborted"' in last) == (kind == "aborted")


def soak(made: Stack, number: int) -> None:
    expected = canary(made)
    with ThreadPoolExecutor(CLIENTS) as clients:
        for wave in range(0, number, WAVE):
            for done in [clients.submit(one_of_many, made, wave + i) for i in range(WAVE)]:
                done.result()
            assert canary(made) == expected, f"after {wave + WAVE} requests"
    deadline = time.monotonic() + 10
    while not (made.prefill.is_idle() and made.decode.is_idle()):
        assert time.monotonic() < deadline, "something is still held"
        time.sleep(0.05)
    for server in (made.prefill, made.decode):
        transfer: Any = server.state()["transfer"]
        assert not transfer.get("rooms") and not transfer.get("leases") and not transfer.get("digest_mismatches")


def test_a_hundred_requests(shared_stack: Stack) -> None:
    soak(shared_stack, 100)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_five_hundred_requests(shared_stack: Stack) -> None:
    soak(shared_stack, 500)
