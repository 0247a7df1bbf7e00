"""The life of a front process: ports, ranks that fail or die, signals."""

from __future__ import annotations

import fcntl
import json
import os
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from common.config import NodeConfig, Role
from common.errors import ConfigError
from node.front import HTTP_STOP_S, bind
from node.ipc import ipc_directory, remove_stale
from node.processes import how_ended, rank_command
from tests.node.conftest import FakeNode, end, fake_node, is_up, node_config, spawn, wait_for
from tests.support.stack import REPO, free_port

SLOW = {"frequency_penalty": 1, "max_new_tokens": 150, "ignore_eos": True}


def fails_to_start(config: NodeConfig, log: Path, mode: str = "ok") -> str:
    """What a front that must not start says. No process of it is left."""
    process = spawn(config, log, mode=mode)
    try:
        assert process.wait(20) == 2, log.read_text()
    finally:
        if process.poll() is None:
            end(process)
    return log.read_text()


def test_the_front_needs_no_torch() -> None:
    check = "import node.front, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0


def test_each_role_has_its_rank_module() -> None:
    for role, module in ((Role.UNIFIED, "node"), (Role.PREFILL, "prefill_node"), (Role.DECODE, "decode_node")):
        assert rank_command(role) == [sys.executable, "-m", f"{module}.rank"]


def test_a_taken_port_is_found_before_a_rank_starts(model_path: str, tmp_path: Path) -> None:
    with bind("127.0.0.1", 0, "port") as taken:
        taken.listen()
        port = taken.getsockname()[1]
        said = fails_to_start(node_config(model_path, Role.UNIFIED, port=port), tmp_path / "log", mode="dies")
    assert f"config_error port_in_use: --port {port}: already in use" in said and "last words" not in said


def test_a_taken_bootstrap_port_is_found_before_a_rank_starts(model_path: str, tmp_path: Path) -> None:
    config = node_config(model_path, Role.PREFILL)
    port = config.server.bootstrap_port
    with bind("127.0.0.1", port, "port") as taken:
        taken.listen()
        said = fails_to_start(config, tmp_path / "log", mode="dies")
    assert f"--bootstrap-port {port}: already in use" in said and "last words" not in said


def test_two_fronts_that_start_at_once_do_not_share_a_port(model_path: str, tmp_path: Path) -> None:
    config = node_config(model_path, Role.UNIFIED)
    processes = [spawn(config, tmp_path / f"log{i}") for i in range(2)]
    try:
        wait_for(lambda: any(process.poll() is not None for process in processes))
        loser = next(i for i, process in enumerate(processes) if process.poll() is not None)
        assert processes[loser].returncode == 2
        assert "already in use" in (tmp_path / f"log{loser}").read_text()
        wait_for(lambda: is_up(f"http://127.0.0.1:{config.server.port}"))
    finally:
        for process in processes:
            if process.poll() is None:
                end(process)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_a_host_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--host|--port"):
        bind(host, free_port(), "port")


def test_a_rank_that_cannot_start_says_why(model_path: str, tmp_path: Path) -> None:
    said = fails_to_start(node_config(model_path, Role.UNIFIED), tmp_path / "log", mode="start-failed")
    assert "config_error invalid_config: --dtype float7: no such type" in said
    assert "does not end by itself" not in said


def test_a_signal_while_a_rank_loads_ends_the_node(model_path: str, tmp_path: Path) -> None:
    process = spawn(node_config(model_path, Role.UNIFIED), tmp_path / "log", mode="loads")
    try:
        wait_for(lambda: "loading" in (tmp_path / "log").read_text())
        (rank,) = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0 and not is_alive(rank)
    finally:
        if process.poll() is None:
            end(process)
    assert "does not end by itself" not in (tmp_path / "log").read_text()


def test_a_rank_that_dies_before_it_is_ready_is_quoted(model_path: str, tmp_path: Path) -> None:
    said = fails_to_start(node_config(model_path, Role.UNIFIED), tmp_path / "log", mode="dies")
    assert "worker_error rank_died: rank 0" in said
    assert "exit code 7\n  first line\n  the last words of the rank" in said


def test_a_missing_model_folder_is_named(tmp_path: Path) -> None:
    said = fails_to_start(node_config("/nowhere", Role.UNIFIED), tmp_path / "log")
    assert "--model-path /nowhere: no such folder" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_streams_ranks_and_front(model_path: str, tmp_path: Path, number: signal.Signals) -> None:
    with fake_node(node_config(model_path, Role.PREFILL), tmp_path / "log", num_ranks=2) as node:
        ranks = node.ranks()
        body = {"text": ["some text"] * 2, "sampling_params": {"min_p": 0.5}, "bootstrap_room": 0}
        with in_background(lambda: node.post(body)) as answer:
            wait_for(lambda: node.state(0)["num_running"] == node.state(1)["num_running"] == 1)
            node.process.send_signal(number)
            wait_for(lambda: health_code(node) == "draining")
            start = time.monotonic()
            node.process.send_signal(number)
            refused = answer()
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        assert node.process.wait(5) == 0 and time.monotonic() - start < 3
        assert len(ranks) == 2 and not any(map(is_alive, ranks))
        said = node.log.read_text()
        assert "bootstrap closed" in said and said.count("told to shut down") == 2


def test_a_drained_node_answers_what_it_runs_and_refuses_the_rest(model_path: str, tmp_path: Path) -> None:
    with fake_node(node_config(model_path, Role.UNIFIED), tmp_path / "log") as node:
        (rank,) = node.ranks()
        body = {"text": "some text", "sampling_params": {**SLOW, "max_new_tokens": 30}}
        with in_background(lambda: node.post({**body, "rid": "r"})) as answer, httpx.Client() as kept_alive:
            wait_for(lambda: kept_alive.get(f"{node.url}/server_info").json()["internal_states"][0]["num_running"] == 1)
            node.process.send_signal(signal.SIGTERM)
            wait_for(lambda: health_code(node) == "draining")
            refused = kept_alive.post(f"{node.url}/generate", json={**body, "rid": "s"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining" and refused.json()["error"]["retryable"] is True
            assert health_code(node, "/health_generate") == "draining"
            found = answer()
        assert found.status_code == 200 and found.json()["meta_info"]["finish_reason"]["type"] == "length"
        assert node.process.wait(5) == 0 and not is_alive(rank)
        assert "draining for 30 s at most, sequences that run: 1" in node.log.read_text()


def test_what_does_not_end_in_time_is_aborted(model_path: str, tmp_path: Path) -> None:
    config = node_config(model_path, Role.UNIFIED, drain_s=0.5)
    with fake_node(config, tmp_path / "log") as node:
        with in_background(lambda: node.post({"text": "a", "sampling_params": {"min_p": 0.5}})) as answer:
            wait_for(lambda: node.state()["num_running"] == 1)
            start = time.monotonic()
            node.process.send_signal(signal.SIGTERM)
            refused = answer()
        assert time.monotonic() - start >= 0.5
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        assert node.process.wait(5) == 0
        assert "1 sequences did not end in time and are aborted" in node.log.read_text()


def big_stream(node: FakeNode, **sampling: object) -> socket.socket:
    """A client that has asked for more than fits between it and the node, and that has read nothing yet."""
    body = {"input_ids": [[65] * 50] * 64, "sampling_params": {"max_new_tokens": 150, **sampling}, "stream": True}
    content = json.dumps({**body, "return_logprob": True, "top_logprobs_num": 20}).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(20)
    client.connect(("127.0.0.1", int(node.url.rpartition(":")[2])))
    client.sendall(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content) + content)
    assert client.recv(12) == b"HTTP/1.1 200"
    return client


def rest_of(client: socket.socket) -> bytes:
    parts = []
    while part := client.recv(1 << 20):
        parts.append(part)
    return b"".join(parts)


def test_a_drain_waits_for_answers_that_are_read_slowly(model_path: str, tmp_path: Path) -> None:
    """The rank has ended them long ago."""
    with fake_node(node_config(model_path, Role.UNIFIED), tmp_path / "log") as node, big_stream(node) as client:
        wait_for(lambda: node.state()["num_running"] == 0)
        node.process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            node.process.wait(HTTP_STOP_S + 2)
        answer = rest_of(client)
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and b"error" not in answer
        assert node.process.wait(10) == 0
        assert "drained: the node ends" in node.log.read_text()


def test_a_drain_waits_for_a_reader_no_longer_than_it_may(model_path: str, tmp_path: Path) -> None:
    config = node_config(model_path, Role.UNIFIED, drain_s=0.5)
    with fake_node(config, tmp_path / "log") as node, big_stream(node):
        wait_for(lambda: node.state()["num_running"] == 0)
        node.process.send_signal(signal.SIGTERM)
        assert node.process.wait(15) == 0
        assert "1 answers were not read in time" in node.log.read_text()


def test_a_slow_reader_learns_that_the_time_to_drain_is_over(model_path: str, tmp_path: Path) -> None:
    config = node_config(model_path, Role.UNIFIED, drain_s=0.5)
    with fake_node(config, tmp_path / "log") as node, big_stream(node, **SLOW) as client:
        node.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "64 sequences did not end in time" in node.log.read_text())
        answer = rest_of(client)
        error, done = answer.removesuffix(b"\r\n0\r\n\r\n").rstrip().split(b"data: ")[-2:]
        assert b'"code":"shutting_down"' in error and done == b"[DONE]"
        assert node.process.wait(10) == 0


def test_a_request_that_was_still_coming_in_is_refused(model_path: str, tmp_path: Path) -> None:
    """Its head came before the signal, its body after it. A head that comes later needs no body."""
    with fake_node(node_config(model_path, Role.UNIFIED), tmp_path / "log") as node:
        with in_background(lambda: node.post({"text": "a", "sampling_params": {"min_p": 0.5}})) as answer:
            wait_for(lambda: node.state()["num_running"] == 1)
            body = json.dumps({"text": "a", "sampling_params": {"max_new_tokens": 1}}).encode()
            address = ("127.0.0.1", int(node.url.rpartition(":")[2]))
            head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
            with socket.create_connection(address, 5) as late, socket.create_connection(address, 5) as later:
                late.sendall(head)
                node.process.send_signal(signal.SIGTERM)
                wait_for(lambda: health_code(node) == "draining")
                later.sendall(head)
                assert b" 503 " in later.recv(100)
                late.sendall(body)
                assert b" 503 " in late.recv(100)
            node.process.send_signal(signal.SIGTERM)
            assert answer().status_code == 503
        assert node.process.wait(5) == 0


def test_an_idle_node_ends_at_once(model_path: str, tmp_path: Path) -> None:
    with fake_node(node_config(model_path, Role.UNIFIED), tmp_path / "log") as node, httpx.Client() as kept_alive:
        assert kept_alive.get(f"{node.url}/health").status_code == 200
        start = time.monotonic()
        node.process.send_signal(signal.SIGINT)
        assert node.process.wait(5) == 0 and time.monotonic() - start < 3


def test_draining_does_not_wait_for_a_silent_rank(model_path: str, tmp_path: Path) -> None:
    """Its requests were told of their failure: nobody waits for them."""
    with fake_node(node_config(model_path, Role.UNIFIED), tmp_path / "log") as node:
        (rank,) = node.ranks()
        with in_background(lambda: node.post({"text": "a", "sampling_params": {"min_p": 0.5}})) as answer:
            wait_for(lambda: node.state()["num_running"] == 1)
            rank.suspend()
            node.process.send_signal(signal.SIGTERM)
            assert answer().json()["error"]["code"] == "rank_silent"
        assert node.process.wait(10) == 0 and not is_alive(rank)


def health_code(node: FakeNode, path: str = "/health") -> str:
    response = node.get(path)
    return "" if response.status_code == 200 else str(response.json()["error"]["code"])


@contextmanager
def in_background(call: Callable[[], httpx.Response]) -> Iterator[Callable[[], httpx.Response]]:
    """Yields a function that waits for what the call returns."""
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(call)
        yield lambda: found.result(20)


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_a_stream_learns_that_the_node_stops(model_path: str, tmp_path: Path) -> None:
    with fake_node(node_config(model_path, Role.UNIFIED), tmp_path / "log") as node:
        body = {"text": "some text", "sampling_params": SLOW, "stream": True}
        with httpx.stream("POST", f"{node.url}/generate", json=body, timeout=10) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            node.process.send_signal(signal.SIGTERM)
            wait_for(lambda: health_code(node) == "draining")
            node.process.send_signal(signal.SIGTERM)
            *_, error, done = lines
        assert "shutting down" in json.loads(error.removeprefix("data: "))["error"]["message"]
        assert done == "data: [DONE]" and node.process.wait(5) == 0


def test_a_rank_that_will_not_end_is_killed(model_path: str, tmp_path: Path) -> None:
    with fake_node(node_config(model_path, Role.UNIFIED), tmp_path / "log", mode="stuck") as node:
        (rank,) = node.ranks()
        node.process.send_signal(signal.SIGTERM)
        assert node.process.wait(12) == 0 and not is_alive(rank)


def test_a_killed_rank_fails_its_requests_at_once_and_health(model_path: str, tmp_path: Path) -> None:
    with fake_node(node_config(model_path, Role.DECODE), tmp_path / "log", num_ranks=2) as node:
        body = {"text": "some text", "sampling_params": SLOW}
        ended: dict[int, tuple[float, httpx.Response]] = {}

        def client(rank: int) -> None:
            response = node.post({**body, "routed_dp_rank": rank})
            ended[rank] = time.monotonic(), response

        clients = [threading.Thread(target=client, args=(rank,)) for rank in (0, 1)]
        for thread in clients:
            thread.start()
        wait_for(lambda: node.state(0)["num_running"] == node.state(1)["num_running"] == 1)
        victim = next(rank for rank in node.ranks() if rank.cmdline()[-1] == "1")
        killed = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        clients[1].join(5)
        assert ended[1][0] - killed < 0.4, "200 ms, and some for a busy machine"
        error = ended[1][1].json()["error"]
        assert ended[1][1].status_code == 503 and error["code"] == "rank_died" and "SIGKILL" in error["message"]
        assert node.get("/health").status_code == node.get("/health_generate").status_code == 200
        assert [load["alive"] for load in node.get("/get_load").json()] == [True, False]
        short = {"text": "a", "sampling_params": {"max_new_tokens": 1}, "routed_dp_rank": 1}
        assert node.post(short).status_code == 200, "the other rank serves it"
        info = node.get("/server_info").json()
        assert info["dp_size"] == 2 and [rank["alive"] for rank in info["ranks"]] == [True, False]
        assert info["internal_states"][0]["num_running"] == 1
        assert info["internal_states"][1]["error"]["code"] == "rank_died"
        clients[0].join(10)
        assert ended[0][1].status_code == 200
        wait_for(lambda: all(load["alive"] for load in node.get("/get_load").json()))
        info = node.get("/server_info").json()
        assert [rank["alive"] for rank in info["ranks"]] == [True, True] and info["ranks"][1]["pid"] != victim.pid
        assert node.post(short).status_code == 200


def kill_rank(node: FakeNode, rank: int) -> None:
    victim = next(process for process in node.ranks() if process.cmdline()[-1] == str(rank))
    victim.kill()
    wait_for(lambda: not node.get("/get_load").json()[rank]["alive"])


def death(node: FakeNode, rank: int) -> str:
    return str(node.state(rank).get("error"))


def test_a_rank_that_cannot_be_started_again_now_is_tried_again(model_path: str, tmp_path: Path) -> None:
    """The front has no descriptor left meanwhile."""
    with fake_node(node_config(model_path, Role.DECODE), tmp_path / "log", num_ranks=2) as node:
        limits = resource.prlimit(node.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(node.process.pid, resource.RLIMIT_NOFILE, (8, limits[1]))
        next(process for process in node.ranks() if process.cmdline()[-1] == "1").kill()
        wait_for(lambda: "rank 1 cannot be started: [Errno 24]" in node.log.read_text())
        resource.prlimit(node.process.pid, resource.RLIMIT_NOFILE, limits)
        wait_for(lambda: all(load["alive"] for load in node.get("/get_load").json()))


def test_why_a_rank_does_not_come_back_is_said(model_path: str, tmp_path: Path) -> None:
    config = node_config(model_path, Role.DECODE)
    with fake_node(config, tmp_path / "log", mode="fails-again", num_ranks=2) as node:
        kill_rank(node, 1)
        reason = "ended with exit code 1: --dtype float7: no such type"
        wait_for(lambda: reason in death(node, 1))
        assert "rank_died" in death(node, 1) and reason in node.log.read_text()
        assert node.get("/health").status_code == 200


def test_a_rank_that_does_not_get_ready_again_is_ended_and_tried_again(model_path: str, tmp_path: Path) -> None:
    """It may be stopped, and hold what others wait for to load."""
    config = node_config(model_path, Role.DECODE)
    with fake_node(config, tmp_path / "log", mode="loads-again", num_ranks=2) as node:
        kill_rank(node, 1)
        wait_for(
            lambda: "was killed by SIGKILL: it was not ready in " in node.state(1)["error"]["message"], within_s=60
        )
        wait_for(lambda: node.log.read_text().count("rank 1 is started again (pid") == 2)
        wait_for(lambda: node.log.read_text().count("it was not ready in") == 2, within_s=60)
        first, second = map(int, re.findall(r"it was not ready in (\d+) s", node.log.read_text()))
        assert abs(second - 2 * first) <= 1, "loading may take long for once"


def test_a_rank_that_dies_as_soon_as_it_serves_is_started_after_pauses(model_path: str, tmp_path: Path) -> None:
    """How long it loads counts for nothing; here it is longer than the longest pause."""
    config = node_config(model_path, Role.DECODE)
    with fake_node(config, tmp_path / "log", mode="dies-when-ready", num_ranks=2) as node:
        kill_rank(node, 1)
        wait_for(lambda: node.log.read_text().count("rank 1 is started again in") == 3)
        assert "rank 1 is started again in 0 s" not in node.log.read_text().partition("exit code 7")[2]


def test_a_rank_that_says_nothing_fails_the_request_in_time(model_path: str, tmp_path: Path) -> None:
    config = node_config(model_path, Role.UNIFIED, first_token_s=0.5)
    with fake_node(config, tmp_path / "log") as node:
        response = node.post({"text": "a", "sampling_params": {"min_p": 0.5}, "rid": "silent"})
        assert response.status_code == 503 and response.json()["error"]["code"] == "first_token_timeout"
        assert node.state()["aborted"] == ["silent"]


def test_a_node_whose_last_rank_dies_answers_and_ends(model_path: str, tmp_path: Path) -> None:
    with fake_node(node_config(model_path, Role.PREFILL), tmp_path / "log", num_ranks=2) as node:
        answers: list[httpx.Response] = []
        body = {"text": "some text", "sampling_params": {"min_p": 0.5}, "bootstrap_room": 1}
        client = threading.Thread(target=lambda: answers.append(node.post(body)))
        client.start()
        wait_for(lambda: node.state(1)["num_running"] == 1)
        for rank in node.ranks():
            os.kill(rank.pid, signal.SIGKILL)
        client.join(5)
        assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "rank_died"
        assert node.process.wait(5) == 2, "what serve_fake makes of the error that serve raises"
        said = node.log.read_text()
        assert "no rank is left" in said and "worker_error rank_died: rank " in said and "bootstrap closed" in said


def test_a_stopped_rank_fails_its_requests_until_it_goes_on(model_path: str, tmp_path: Path) -> None:
    """liveness_timeout_s is 2 here. The other rank serves on."""
    with fake_node(node_config(model_path, Role.DECODE), tmp_path / "log", num_ranks=2) as node:
        answers: list[httpx.Response] = []
        body = {"text": "some text", "sampling_params": SLOW, "routed_dp_rank": 1, "rid": "r"}
        client = threading.Thread(target=lambda: answers.append(node.post(body)))
        client.start()
        wait_for(lambda: node.state(1)["num_running"] == 1)
        rank = next(rank for rank in node.ranks() if rank.cmdline()[-1] == "1")
        rank.suspend()
        start = time.monotonic()
        try:
            client.join(6)
            assert 1.5 < time.monotonic() - start < 5
            error = answers[0].json()["error"]
            assert answers[0].status_code == 503 and error["code"] == "rank_silent" and "rank 1" in error["message"]
            assert node.get("/health").status_code == 200
            assert [load["alive"] for load in node.get("/get_load").json()] == [True, False]
            short = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
            assert node.post(short | {"routed_dp_rank": 1}).status_code == 200, "the other rank serves it"
        finally:
            rank.resume()
        wait_for(lambda: node.get("/get_load").json()[1]["alive"], within_s=3)
        again = node.post({**body, "sampling_params": {"max_new_tokens": 1}})
        assert again.status_code == 200 and node.state(1)["aborted"] == ["r"]


def test_a_rank_that_hangs_answers_no_question(model_path: str, tmp_path: Path) -> None:
    with fake_node(node_config(model_path, Role.PREFILL), tmp_path / "log") as node:
        (rank,) = node.ranks()
        rank.suspend()
        try:
            response = node.get("/health_generate")
            assert response.status_code == 503 and response.json()["error"]["code"] == "rank_silent"
        finally:
            rank.resume()


def test_the_ipc_directory_is_private_and_goes_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ipc_directory() as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        (path / "from_ranks").touch()
    assert not path.exists()
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with ipc_directory() as path, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(path / "from_ranks"))


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A folder that a front makes its own in: pytest's may be too long for a Unix socket's address."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


def test_what_a_killed_front_left_behind_is_removed_and_nothing_else(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_tmp))
    code = "import node.ipc, time; c = node.ipc.ipc_directory(); c.__enter__(); print(flush=True); time.sleep(60)"
    environment = {**os.environ, "TMPDIR": str(short_tmp)}
    fronts = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, cwd=REPO)
        for _ in range(2)
    ]
    try:
        for front in fronts:
            assert front.stdout is not None
            front.stdout.readline()
            front.stdout.close()
        fronts[0].kill()
        fronts[0].wait()
        others = [short_tmp / "tandem-notes", short_tmp / f"tandem-{2**30}", short_tmp / f"tandem-{2**30}-x.y"]
        others.append(short_tmp / f"tandem-{os.getpid()}-new")  # of a front that has not locked it yet
        for other in others:
            other.mkdir()
        elsewhere = (
            short_tmp / f"tandem-{2**30}-elsewhere"
        )  # of a process that is not seen from here, but holds the lock
        elsewhere.mkdir()
        (short_tmp / f"tandem-{2**30}-link").symlink_to(others[0])
        held = os.open(elsewhere, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
        with ipc_directory() as ours:
            kept = {path.name for path in short_tmp.iterdir()}
            theirs = {name for name in kept if name.startswith(f"tandem-{fronts[1].pid}-")}
            left_alone = {*(path.name for path in others), elsewhere.name, f"tandem-{2**30}-link"}
            assert len(theirs) == 1 and kept == theirs | left_alone | {ours.name}
        os.close(held)
        remove_stale(short_tmp)
        assert not elsewhere.exists()
    finally:
        for front in fronts:
            front.kill()
            front.wait()


@pytest.mark.parametrize(
    ("code", "words"),
    [(-9, "was killed by SIGKILL"), (-200, "was killed by signal 200"), (3, "ended with exit code 3")],
)
def test_how_a_process_ended(code: int, words: str) -> None:
    assert how_ended(code) == words
