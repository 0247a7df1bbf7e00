"""`tandem … --engine sglang` over a stub that speaks SGLang's contract, as real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.sglang.conftest import FakePython
from tests.support.stack import MODEL, Server, free_port, running, wait_healthy

LIMIT_S = 60.0


def wait_for(what: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {limit_s} s")


@contextmanager
def sglang_node(role: str, folder: Path, python: str, *extra: str, port: int | None = None) -> Iterator[Server]:
    port = port or free_port()
    arguments = [role, "--engine", "sglang", "--sglang-python", python, "--model-path", str(MODEL)]
    arguments += ["--port", str(port), *extra]
    with running(f"{role}-{port}", arguments, f"http://127.0.0.1:{port}", folder) as server:
        yield server


def pids_below(server: Server) -> list[int]:
    return [process.pid for process in server.children()]


def the_stub(server: Server) -> psutil.Process:
    return next(
        p for p in server.children() if "sglang.launch_server" in p.cmdline() and "node.sglang.leash" not in p.cmdline()
    )


def all_gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def wait_ready(server: Server) -> None:
    """As the supervisor sees it."""
    wait_healthy(server)
    wait_for(lambda: "node ready on" in server.text())


def exit_code(server: Server) -> int:
    return server.process.wait(LIMIT_S)


def test_it_serves_what_was_asked_for_and_ends_with_everything_below_it(
    tmp_path: Path, fake_python: FakePython
) -> None:
    options = ["--page-size", "4", "--max-running-requests", "7", "--sglang-arg=--kv-cache-dtype", "--sglang-arg=bf16"]
    with sglang_node("unified", tmp_path, fake_python(), *options) as server:
        wait_ready(server)
        info = httpx.get(f"{server.url}/server_info").json()
        assert (info["page_size"], info["max_running_requests"], info["kv_cache_dtype"]) == (4, 7, "bf16")
        told = httpx.get(f"{server.url}/stub/seen").json()
        assert told["made"] >= 1, "a token was made before it counted as ready"
        assert told["env"]["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false"
        assert "sglang | The server is fired up" in server.text()
        below = pids_below(server)
        assert len(below) == 3, "leash, server, its scheduler"
        server.process.send_signal(signal.SIGTERM)
        assert exit_code(server) == 0
        assert all_gone(below)


def test_a_server_that_ends_while_it_starts_ends_the_node_and_says_why(tmp_path: Path, fake_python: FakePython) -> None:
    with sglang_node("unified", tmp_path, fake_python(STUB_FAULT="exit")) as server:
        assert exit_code(server) == 1
        last = server.text().strip().splitlines()[-2:]
        assert "tandem: error: sglang.launch_server ended with exit code 3" in last[0]
        assert "CUDA out of memory" in last[1]


@pytest.mark.slow
def test_a_flag_that_this_server_does_not_know_ends_the_node(tmp_path: Path, fake_python: FakePython) -> None:
    with sglang_node("unified", tmp_path, fake_python(), "--sglang-arg=--no-such-flag") as server:
        assert exit_code(server) == 1
        assert "unrecognized arguments: --no-such-flag" in server.text()


def test_a_server_that_hangs_while_it_starts_is_ended(tmp_path: Path, fake_python: FakePython) -> None:
    with sglang_node("unified", tmp_path, fake_python(STUB_FAULT="hang"), "--sglang-start-timeout", "2.5") as server:
        below = wait_for(lambda: pids_below(server) if len(pids_below(server)) == 3 else None)
        assert exit_code(server) == 1
        assert "SGLang is not ready after 2.5 s" in server.text()
        assert all_gone(below)


def test_a_server_that_dies_later_is_started_again(tmp_path: Path, fake_python: FakePython) -> None:
    with sglang_node("unified", tmp_path, fake_python()) as server:
        wait_ready(server)
        below = [process.pid for process in server.children()]
        the_stub(server).kill()
        wait_for(lambda: server.text().count("node ready on") == 2)
        assert "ended with exit code 137" in server.text()
        assert answers(server.url)
        assert all_gone(below), "its scheduler too, which holds memory of a card"


def test_a_server_that_no_longer_answers_is_started_again(tmp_path: Path, fake_python: FakePython) -> None:
    with sglang_node("unified", tmp_path, fake_python(), "--sglang-health-timeout", "1") as server:
        wait_ready(server)
        httpx.post(f"{server.url}/stub/fault")
        wait_for(lambda: server.text().count("node ready on") == 2)
        assert "SGLang does not answer for 1 s" in server.text()


def test_a_port_that_is_taken_is_refused_before_anything_starts(tmp_path: Path, fake_python: FakePython) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with sglang_node("decode", tmp_path, fake_python(), port=port) as server:
            assert exit_code(server) == 2
            assert f"--port {port}: already in use" in server.text()
        prefill = sglang_node("prefill", tmp_path, fake_python(), "--bootstrap-port", str(port))
        with prefill as server:
            assert exit_code(server) == 2
            assert f"--bootstrap-port {port}: already in use" in server.text()


@pytest.mark.slow
def test_a_server_that_does_not_end_is_killed_when_its_time_is_over(tmp_path: Path, fake_python: FakePython) -> None:
    with sglang_node("unified", tmp_path, fake_python(STUB_FAULT="slow_stop"), "--drain-timeout", "1") as server:
        wait_ready(server)
        below = pids_below(server)
        server.process.send_signal(signal.SIGTERM)
        assert exit_code(server) == 0
        assert all_gone(below)


def test_a_second_signal_waits_for_nothing(tmp_path: Path, fake_python: FakePython) -> None:
    with sglang_node("unified", tmp_path, fake_python(STUB_FAULT="slow_stop"), "--drain-timeout", "600") as server:
        wait_ready(server)
        below = pids_below(server)
        server.process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(1)
        server.process.send_signal(signal.SIGINT)
        assert exit_code(server) == 0
        assert all_gone(below)


@pytest.mark.parametrize("victim", ["supervisor", "leash"])
def test_nothing_outlives_a_killed_supervisor_or_leash(tmp_path: Path, fake_python: FakePython, victim: str) -> None:
    with sglang_node("unified", tmp_path, fake_python(), "--drain-timeout", "1") as server:
        wait_ready(server)
        below = pids_below(server)
        stub = the_stub(server).pid
        leash = next(p for p in server.children() if "node.sglang.leash" in p.cmdline()).pid
        os.kill(server.process.pid if victim == "supervisor" else leash, signal.SIGKILL)
        wait_for(lambda: all_gone(below if victim == "supervisor" else [leash, stub]))
        if victim == "leash":  # what has escaped holds the output open
            wait_for(lambda: server.text().count("node ready on") == 2)
        for pid in below:
            if not all_gone([pid]):
                os.kill(pid, signal.SIGKILL)


def test_router_takes_registered_servers_pairs_what_fits_and_says_what_does_not(
    tmp_path: Path, fake_python: FakePython
) -> None:
    port, bootstrap, python = free_port(), free_port(), fake_python()
    url = f"http://127.0.0.1:{port}"
    register = ["--router", url, "--heartbeat-interval", "0.3"]
    with ExitStack() as exits:
        router = exits.enter_context(running("router", ["router", "--port", str(port)], url, tmp_path))
        prefill = sglang_node("prefill", tmp_path, python, *register, "--bootstrap-port", str(bootstrap))
        exits.enter_context(prefill)
        decode = exits.enter_context(sglang_node("decode", tmp_path, python, *register))
        other = exits.enter_context(sglang_node("decode", tmp_path, python, *register, "--mamba-ssm-dtype", "bfloat16"))
        wait_healthy(router)
        wait_for(lambda: len(httpx.get(f"{url}/server_info").json()["workers"]) == 3)
        wait_for(lambda: all(w["alive"] for w in httpx.get(f"{url}/server_info").json()["workers"]))
        info = httpx.get(f"{url}/server_info").json()
        prints = {worker["url"]: worker["fingerprint"] for worker in info["workers"]}
        assert prints[decode.url].startswith("sglang-0.5.17,model=")
        assert "ssm=bfloat16" in prints[other.url] and len(info["mismatches"]) == 1
        answer = httpx.post(f"{url}/generate", json={"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}})
        assert answer.json()["output_ids"] == [3, 4, 5]
        legs = httpx.get(f"{decode.url}/stub/seen").json()
        assert [leg["bootstrap_port"] for leg in legs["seen"]] == [bootstrap]
        assert not httpx.get(f"{other.url}/stub/seen").json()["seen"]
        assert legs["env"]["MC_FORCE_TCP"] == "1" and "--disaggregation-transfer-backend" in legs["argv"]
        decode.process.send_signal(signal.SIGTERM)
        assert exit_code(decode) == 0
        wait_for(lambda: len(httpx.get(f"{url}/server_info").json()["workers"]) == 2)
