"""`tandem up` as a process of its own: what it prints, and that nothing outlives it, however it ends."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from accuracy.gsm_mini import Problem
from cli.settings import BUNDLED_MODEL
from cli.up import Options, check_nodes, curl_line, free_port, free_ports, plan_children, report
from common.errors import ConfigError
from tests.cli.fake_node import ANSWER

FAKE_UP = Path(__file__).with_name("fake_up.py")
REPO = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(REPO)}


class Up:
    """A running `up`. output: everything it has said so far. seen: every process below it that a test has looked at."""

    def __init__(self, process: subprocess.Popen[str], port: int, log: Path) -> None:
        self.process, self.port, self._log = process, port, log
        self.seen: list[psutil.Process] = []

    @property
    def output(self) -> str:
        return self._log.read_text()

    def until_said(self, words: str, limit_s: float = 30.0) -> None:
        deadline = time.monotonic() + limit_s
        while words not in self.output:
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)

    def family(self) -> list[psutil.Process]:
        found = psutil.Process(self.process.pid).children(recursive=True)
        self.seen += found
        return found

    def wait(self) -> int:
        return self.process.wait(40)


@contextmanager
def start_up(tmp_path: Path, *flags: str) -> Iterator[Up]:
    log = tmp_path / "up.log"
    port = free_ports(1)[0]
    command = [sys.executable, str(FAKE_UP), str(port), *flags]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)
    up = Up(process, port, log)
    try:
        yield up
    finally:
        if process.poll() is None:
            up.family()
            process.kill()
            process.wait()
        for child in up.seen:
            with suppress(psutil.NoSuchProcess):
                child.kill()


def assert_gone(family: list[psutil.Process], limit_s: float = 5.0) -> None:
    assert len(family) >= 3
    _, alive = psutil.wait_procs(family, timeout=limit_s)
    assert alive == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asks_prints_serves_and_stops(tmp_path: Path, number: signal.Signals) -> None:
    with start_up(tmp_path) as up:
        up.until_said("until Ctrl-C")
        family = up.family()
        assert len({os.getpgid(process.pid) for process in family}) == 3
        up.process.send_signal(number)
        assert up.wait() == 0
        assert_gone(family)
        more = f"tandem generate --url http://127.0.0.1:{up.port} --example"
        curl = f"curl -s http://127.0.0.1:{up.port}/generate"
        for words in ("router: ready", "Question: ", "6*7 = <<6*7=42>>42", "Expected: ", curl, more, "stopped"):
            assert words in up.output
        assert "queue 1.0 ms  prefill 20.0 ms  transfer 3.0 ms  decode 500.0 ms  (4 tokens/s)" in up.output
        assert "kv 1,024  conv 20  ssm 3,000  track 0" in up.output


def test_once_ends_by_itself(tmp_path: Path) -> None:
    with start_up(tmp_path, "--once") as up:
        assert up.wait() == 0
        assert "Expected: " in up.output
        assert "curl" not in up.output


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_child_that_dies_is_named_and_ends_the_others(tmp_path: Path, which: int) -> None:
    with start_up(tmp_path) as up:
        up.until_said("until Ctrl-C")
        family = up.family()
        family[which].kill()
        assert up.wait() == 1
        assert_gone(family)
        name = ("prefill node", "decode node", "router")[which]
        assert f"error: {name} (pid {family[which].pid}) was killed by SIGKILL" in up.output


def test_stubborn_processes_are_killed(tmp_path: Path) -> None:
    """Also one that a node had started and left behind."""
    with start_up(tmp_path, "--stubborn", "--with-rank") as up:
        up.until_said("until Ctrl-C")
        family = up.family()
        assert len(family) == 5
        up.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        up.process.send_signal(signal.SIGINT)  # an impatient user
        assert up.wait() == 0
        assert_gone(family)
        assert "decode node: does not end, killed" in up.output


def test_children_end_when_up_is_killed(tmp_path: Path) -> None:
    with start_up(tmp_path) as up:
        up.until_said("until Ctrl-C")
        family = up.family()
        up.process.kill()
        assert_gone(family)


def test_nodes_that_never_get_ready(tmp_path: Path) -> None:
    with start_up(tmp_path, "--mute") as up:
        up.until_said("pid")
        assert up.wait() == 1
        assert "error: not ready after 3 s: prefill node, decode node, router" in up.output


def test_a_child_that_cannot_start(tmp_path: Path) -> None:
    with start_up(tmp_path, "--no-such-flag") as up:
        assert up.wait() == 1
        assert "node (pid" in up.output
        assert "ended with exit status 2" in up.output


def test_a_port_that_is_taken_is_found_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "cli.main", "up", "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=ENVIRONMENT)
    assert done.returncode == 2
    assert done.stderr.startswith(f"tandem: error: --port {port}: in use on 127.0.0.1; ")
    assert "make serve PORT=" in done.stderr
    assert done.stderr.count("\n") == done.stderr.count("127.0.0.1") == 1


def test_ctrl_c_drains_nothing() -> None:
    """Who sits at the terminal does not wait for answers: nodes and router end what runs at once."""
    options = Options(
        host="127.0.0.1",
        port=1,
        model_path="m",
        device="cpu",
        transport="loopback",
        threads=None,
        start_timeout=1.0,
        log_level="info",
        once=False,
    )
    for plan in plan_children(options):
        at = plan.command.index("--drain-timeout")
        assert plan.command[at + 1] == "0", plan.name


def test_port_0_is_any_free_one() -> None:
    port = free_port("127.0.0.1", 0)
    assert 0 < port < 65536
    assert free_port("127.0.0.1", port) == port


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:5"),
        ("0.0.0.0", "http://127.0.0.1:5"),
        ("::", "http://[::1]:5"),
        ("::1", "http://[::1]:5"),
    ],
)
def test_the_url_reaches_the_router(host: str, url: str) -> None:
    options = Options(
        host=host,
        port=5,
        model_path="none",
        device="cpu",
        transport="loopback",
        threads=None,
        start_timeout=1.0,
        log_level="warning",
        once=True,
    )
    assert options.url == url


def options_for(device: str) -> Options:
    return Options(
        host="127.0.0.1",
        port=1,
        model_path="m",
        device=device,
        transport="auto",
        threads=None,
        start_timeout=1.0,
        log_level="info",
        once=False,
    )


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cpu", ("cpu", "cpu")), ("cuda:0,cuda:1", ("cuda:0", "cuda:1")), ("cuda:1, cuda:0", ("cuda:1", "cuda:0"))],
)
def test_each_node_gets_its_device(device: str, expected: tuple[str, str]) -> None:
    prefill, decode, router = plan_children(options_for(device))
    found = [plan.command[plan.command.index("--device") + 1] for plan in (prefill, decode)]
    assert tuple(found) == expected and "--device" not in router.command


def test_the_decode_node_gets_its_ranks_and_each_rank_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    prefill, decode, router = plan_children(dataclasses.replace(options_for("cpu"), dp_size=3))
    assert decode.command[decode.command.index("--dp-size") + 1] == "3"
    assert "--dp-size" not in prefill.command + router.command
    assert {plan.command[plan.command.index("--threads") + 1] for plan in (prefill, decode)} == {"2"}


@pytest.mark.parametrize("dp_size", [0, 65])
def test_ranks_that_cannot_be_are_refused(dp_size: int) -> None:
    with pytest.raises(ConfigError, match=f"--dp-size {dp_size}"):
        check_nodes(dataclasses.replace(options_for("cpu"), model_path=str(BUNDLED_MODEL), dp_size=dp_size))


@pytest.mark.parametrize("device", ["", "cuda:0,", "cuda:0,cuda:1,cuda:2", "cuda:0,cpu"])
def test_devices_that_make_no_sense_are_refused(device: str) -> None:
    command = [sys.executable, "-m", "cli.main", "up", "--port", "0", "--device", device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=ENVIRONMENT)
    assert done.returncode == 2
    assert (
        done.stderr
        == f"tandem: error: --device {device}: a device for both nodes, or two of a kind with a comma between them\n"
    )


PROBLEM = Problem(scheme="s", question="Tom's six bags hold 7 eggs each. How many?", worked="", answer=41)


def test_the_report_says_when_an_answer_is_wrong_and_does_without_timing() -> None:
    plain = ANSWER | {"meta_info": {"prompt_tokens": 1, "completion_tokens": 1}}
    lines = report(PROBLEM, plain, 0.5)
    assert "Expected: 41 (WRONG)" in lines
    assert lines[-1] == "1 prompt tokens, 1 new ones, 500 ms"


def test_the_curl_line_survives_a_shell() -> None:
    line = curl_line("http://h:1", PROBLEM).replace("curl -s http://h:1/generate", "printf %s", 1)
    body = subprocess.run(["sh", "-c", line], check=True, capture_output=True, text=True).stdout
    assert "Tom's six bags" in body
