"""Decode on several ranks: the tokens of one node, an even load, and the death of one rank."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from tests.e2e.test_foreign_routers import wait_ready
from tests.support.stack import REPO, Server, command, free_port, generate, node, running, stop, wait_healthy

MEASURED_RANKS = (1, 2, 3)
GAP = 1e-4  # of the reference's two likeliest tokens, below which another one may be taken


def body(place: int, max_new_tokens: int = 12) -> dict[str, Any]:
    """Prompts of 30 to 130 tokens, of which every fourth begins like others."""
    length = 30 + 13 * place % 101
    first = 7 if place % 4 == 0 else place
    ids = [(11 * i * (first + 3) + 5 * first) % 400 + 100 for i in range(length)] + [100 + place % 300]
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}


def ask_all(url: str, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All at once."""

    def ask(each: dict[str, Any]) -> dict[str, Any]:
        answer = generate(url, each, timeout_s=300)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    with ThreadPoolExecutor(len(bodies)) as threads:
        return list(threads.map(ask, bodies))


def assert_same(got: dict[str, Any], reference: dict[str, Any]) -> None:
    ours, theirs = got["output_ids"], reference["output_ids"]
    if ours == theirs:
        return
    first = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    best, second = (entry[0] for entry in reference["meta_info"]["output_top_logprobs"][first][:2])
    assert best - second < GAP, f"token {first}: {ours[first]} instead of {theirs[first]}"


def info(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.url}/server_info", timeout=30).json()
    return found


def finished(server: Server) -> list[int]:
    return [state["requests_finished"] for state in info(server)["internal_states"]]


@contextmanager
def pair(folder: Path, *, prefill_dp: int, decode_dp: int, extra: Sequence[str] = ()) -> Iterator[list[Server]]:
    """[router, prefill, decode], healthy."""
    bootstrap_port, port = free_port(), free_port()
    options = ("--transport", "loopback", "--max-running-requests", "16", *extra)
    with ExitStack() as exits:
        prefill = exits.enter_context(
            node("prefill", folder, (*options, "--dp-size", str(prefill_dp)), bootstrap_port=bootstrap_port)
        )
        decode = exits.enter_context(node("decode", folder, (*options, "--dp-size", str(decode_dp))))
        arguments = ["router", "--port", str(port), "--health-interval", "0.2", "--decode", decode.url]
        arguments += ["--prefill", prefill.url, str(bootstrap_port)]
        router = exits.enter_context(running("router", arguments, f"http://127.0.0.1:{port}", folder))
        for server in (prefill, decode, router):
            wait_healthy(server)
        yield [router, prefill, decode]


def rank_process(server: Server, rank: int) -> psutil.Process:
    return next(p for p in server.children() if p.cmdline()[-2:] == ["--rank", str(rank)])


def assert_weights_are_shared(ranks: Sequence[psutil.Process]) -> None:
    """Each rank has all of the large ones in the file, and none of them for itself."""
    for rank in ranks:
        pages = [each for each in rank.memory_maps(grouped=False) if "tandem-weights" in each.path]
        rss, pss = sum(each.rss for each in pages), sum(each.pss for each in pages)
        assert rss > 30_000_000 and pss < 1.1 * rss / len(ranks), (rss, pss)
        assert sum(each.anonymous for each in pages) == 0


def check_same_tokens(folder: Path, *, num_prompts: int, prefill_dp: int, decode_dp: int) -> None:
    bodies = [body(place) for place in range(num_prompts)]
    with node("unified", folder) as unified:
        wait_healthy(unified)
        references = ask_all(unified.url, bodies)
    with pair(folder, prefill_dp=prefill_dp, decode_dp=decode_dp) as (router, prefill, decode):
        for got, reference in zip(ask_all(router.url, bodies), references, strict=True):
            assert_same(got, reference)
        counts = finished(decode)
        assert sum(counts) == num_prompts and max(counts) <= 1.2 * min(counts), counts
        for server, dp in ((prefill, prefill_dp), (decode, decode_dp)):
            found = info(server)
            assert found["dp_size"] == dp == len(found["internal_states"]) == len(found["ranks"])
        if decode_dp > 1:
            assert_weights_are_shared([rank_process(decode, rank) for rank in range(decode_dp)])
        for place, url in ((0, decode.url), (1, decode.url)):  # asked directly: it chooses
            assert_same(generate(url, bodies[place]).json(), references[place])


def test_two_prefill_and_three_decode_ranks_answer_as_one_node(tmp_path: Path) -> None:
    check_same_tokens(tmp_path, num_prompts=40, prefill_dp=2, decode_dp=3)


@pytest.mark.slow
@pytest.mark.parametrize("decode_dp", MEASURED_RANKS)
def test_one_prefill_and_some_decode_ranks_answer_200_prompts_as_one_node(tmp_path: Path, decode_dp: int) -> None:
    check_same_tokens(tmp_path, num_prompts=200, prefill_dp=1, decode_dp=decode_dp)


class Stream(threading.Thread):
    """One streamed request. tokens: how many and when, by the monotonic clock; ids: all; error: its code."""

    def __init__(self, url: str, request: dict[str, Any]) -> None:
        super().__init__()
        self.url, self.request = url, request
        self.times: list[float] = []
        self.ids: list[int] = []
        self.rid: str = request["rid"]
        self.error: str | None = None
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", f"{self.url}/generate", json=self.request | {"stream": True}, timeout=120) as answer:
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                if data and data != "[DONE]":
                    self._take(msgspec.json.decode(data.encode()))

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = event["error"]["code"]
            return
        self.ids = event["output_ids"]
        self.times.append(time.monotonic())


def by_rank(decode: Server) -> dict[str, int]:
    found = httpx.get(f"{decode.url}/debug/state", timeout=30).json()
    return {entry["rid"]: entry["rank"] for entry in found["requests"]}


def until(condition: Any, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def test_the_death_of_a_rank_is_nothing_to_the_others(tmp_path: Path) -> None:
    """Its own requests go on at the other rank; those of the other one do not pause; it comes back."""
    with pair(tmp_path, prefill_dp=1, decode_dp=2) as (router, _, decode):
        requests = [body(place, max_new_tokens=400) | {"rid": f"r{place}"} for place in range(1, 5)]
        for request in requests:
            request["return_logprob"] = False
        streams = [Stream(router.url, request) for request in requests]
        until(lambda: all(len(stream.times) > 20 for stream in streams))
        ranks = by_rank(decode)
        assert sorted(ranks[stream.rid] for stream in streams) == [0, 0, 1, 1]
        victim = rank_process(decode, 1)
        killed = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        until(lambda: not info(decode)["ranks"][1]["alive"], within_s=5)
        assert httpx.get(f"{decode.url}/health", timeout=10).status_code == 200
        assert generate(router.url, body(9)).status_code == 200, "while it is away"
        for stream in streams:
            stream.join(120)
        assert [(stream.error, len(stream.ids)) for stream in streams] == [(None, 400)] * 4
        for stream in streams:
            if ranks[stream.rid] == 0:
                gaps = [b - a for a, b in zip(stream.times, stream.times[1:], strict=False)]
                after = [
                    b - a for a, b in zip(stream.times, stream.times[1:], strict=False) if a < killed + 2 and b > killed
                ]
                assert max(after) < 0.5 + 20 * statistics.median(gaps), (max(after), statistics.median(gaps))
        until(lambda: all(rank["alive"] for rank in info(decode)["ranks"]))
        assert rank_process(decode, 1).pid != victim.pid
        before = finished(decode)
        ask_all(router.url, [body(place) for place in range(20, 28)])
        assert all(now > then for now, then in zip(finished(decode), before, strict=True)), "both serve again"
        references = [generate(decode.url, request).json()["output_ids"] for request in requests]
        assert [stream.ids for stream in streams] == references


def test_a_prefill_rank_that_died_serves_again(tmp_path: Path) -> None:
    with pair(tmp_path, prefill_dp=2, decode_dp=1) as (router, prefill, _):
        ask_all(router.url, [body(place) for place in range(4)])
        victim = rank_process(prefill, 1)
        os.kill(victim.pid, signal.SIGKILL)
        until(lambda: not info(prefill)["ranks"][1]["alive"], within_s=5)
        ask_all(router.url, [body(place) for place in range(4, 8)])
        until(lambda: all(rank["alive"] for rank in info(prefill)["ranks"]))
        ask_all(router.url, [body(place) for place in range(8, 20)])
        assert min(finished(prefill)) > 0


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("sglang_router") is None, reason="sglang-router is not installed")
def test_a_foreign_router_knows_nothing_of_ranks_and_uses_all(tmp_path: Path) -> None:
    """It mints rooms at random: prefill goes by them, decode chooses."""
    with pair(tmp_path, prefill_dp=2, decode_dp=2) as (_, prefill, decode):
        port = free_port()
        arguments = ["--pd-disaggregation", "--host", "127.0.0.1", "--port", str(port), "--decode", decode.url]
        arguments += ["--prefill", prefill.url, str(info(prefill)["bootstrap_port"])]
        arguments += ["--prometheus-port", str(free_port())]
        launch = [sys.executable, "-m", "sglang_router.launch_router", *arguments]
        foreign = subprocess.Popen(launch, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_ready(f"http://127.0.0.1:{port}", foreign)
            bodies = [body(place) for place in range(24)]
            answers = ask_all(f"http://127.0.0.1:{port}", bodies)
            assert all(min(finished(server)) >= 4 for server in (prefill, decode)), (
                finished(prefill),
                finished(decode),
            )
            for got, request in zip(answers[:4], bodies, strict=False):
                assert_same(got, generate(decode.url, request).json())
        finally:
            stop(foreign)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_gate_passes_cold_and_warm(tmp_path: Path) -> None:
    """extra_buffer, the default, on both sides; the tokens of a node without ranks besides."""
    size = ("--num-questions", "100", "--parallel", "48", "--warm", "1", "--output", str(tmp_path))
    with pair(tmp_path, prefill_dp=1, decode_dp=2) as (router, _, decode), node("unified", tmp_path) as unified:
        wait_healthy(unified)
        arguments = command("gate", "gsm-mini", "--url", router.url, "--baseline", unified.url, *size)
        done = subprocess.run(arguments, cwd=REPO, capture_output=True, text=True, timeout=1400, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        counts = finished(decode)
        assert info(decode)["mamba_scheduler_strategy"] == "extra_buffer"
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["verdict"] == "pass" and report["runs"][2]["cached_share"] > 0.5, report
    assert min(counts) > 0.8 * max(counts), counts


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_faults_at_ranks_under_load() -> None:
    faults = ("--fault", "kill-rank", "--fault", "stop-rank", "--fault", "restart")
    arguments = command("chaos", "--seconds", "40", "--seed", "5", "--dp-size", "2", *faults)
    done = subprocess.run(arguments, cwd=REPO, capture_output=True, text=True, timeout=390, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
