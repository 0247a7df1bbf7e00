"""`tandem chaos` in its short and its long form, and that it finds what is there to be found."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.stack import Server, running

BASE = ("chaos", "--margin", "20", "--settle-timeout", "60")
LEAKED_ROOM = 2**62


def report_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def arguments(folder: Path, *more: str) -> tuple[str, ...]:
    return (*BASE, *more, "--report", str(folder / "report.json"), "--logs", str(folder / "logs"))


def chaos(folder: Path, *more: str, limit_s: float) -> tuple[int, str]:
    """Exit status and output of a run to its end."""
    with running("chaos", arguments(folder, *more), "", folder) as server:
        status = server.process.wait(limit_s)
        return status, server.text()


@pytest.mark.timeout(400)
def test_two_minutes_of_faults(tmp_path: Path) -> None:
    status, output = chaos(tmp_path, "--seconds", "70", "--seed", "4", limit_s=380)
    assert status == 0, output
    report = report_of(tmp_path)
    assert report["answers"]["right"] > 100 and report["errors"], "nothing was served, or nothing was disturbed"
    assert sum(report["lives"].values()) > 5 + 5, "nodes were not killed"


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("transport", "seconds"), [("loopback", "1200"), ("mooncake", "300")])
def test_long_runs(tmp_path: Path, transport: str, seconds: str) -> None:
    status, output = chaos(tmp_path, "--seconds", seconds, "--transport", transport, limit_s=2300)
    assert status == 0, output


@pytest.mark.timeout(300)
def test_wrong_answers_and_a_room_that_stays_are_found(tmp_path: Path) -> None:
    """Without digests what arrives wrong is used. The room: a prefill leg that no decode node comes for."""
    options = ("--seconds", "9", "--seed", "9", "--verify", "off", "--fault", "corrupt", "--settle-timeout", "2")
    with running("chaos", arguments(tmp_path, *options), "", tmp_path) as server:
        with leaking_room(server):
            status = server.process.wait(280)
        output = server.text()
    assert status == 1, output
    violations = report_of(tmp_path)["violations"]
    assert any("wrong after" in line for line in violations["right answers or typed errors"]), output
    assert "prefill-1: rooms expected 1" in violations["all free when the faults are over"], output
    clean = ("every process ended as expected", "no process left", "no request computed twice to its end")
    assert not any(violations[name] for name in clean), output


@contextmanager
def leaking_room(server: Server) -> Iterator[None]:
    """From the first sweep to the end of the run: a leg at prefill-1 alone, opened again whenever it ends."""
    thread = threading.Thread(target=_leak, args=(server,))
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _leak(server: Server) -> None:
    while "sweep before" not in server.text():
        if server.process.poll() is not None:
            return
        time.sleep(0.2)
    router = next(line for line in server.text().splitlines() if "all healthy" in line).split()[-1]
    (prefill, *_) = httpx.get(f"{router}/server_info", timeout=10).json()["prefill"]
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}, "bootstrap_room": LEAKED_ROOM}
    url = f"http://127.0.0.1:{prefill['port']}/generate"
    while server.process.poll() is None:
        try:
            httpx.post(url, json=body, timeout=60)
        except httpx.HTTPError:
            time.sleep(0.2)
