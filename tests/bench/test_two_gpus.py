"""The benchmark on two cards, tried on the CPU with tiny sizes, so that nothing is first tried on the cards."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench import two_gpus
from bench.two_gpus import Row, Stack, limited, rows
from tests.support.stack import REPO


def run(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "bench/two_gpus.py", "--device", "cpu", "--out", str(out), *arguments]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=400)


def figures(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "two_gpus.json").read_text())["figures"]
    return found


def run_here(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bench/two_gpus.py", "--device", "cpu", "--out", str(out), *arguments])
    return two_gpus.main()


@pytest.mark.timeout(300)
def test_rows_are_measured_written_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    done = run(tmp_path, "--rows", "links,first tcp")
    assert done.returncode == 0, done.stderr
    found = figures(tmp_path)
    assert {*found} == {"links", "first tcp", "made"}
    for transport in ("loopback", "mooncake"):
        cases = {key: case for key, case in found["links"][transport].items() if key != "installed"}
        assert len(cases) >= 5 and all(case["intact"] and case["write_ms"] > 0 for case in cases.values())
    one = found["first tcp"]["1 x 64"]
    assert one["tcp_mb"] > 0.5 > one["unified_mb"] and one["tcp_more_ms"] == round(one["tcp_ms"] - one["unified_ms"], 2)
    assert found["made"]["links"]["took_s"] > 0
    assert run_here(monkeypatch, tmp_path, "--rows", "links,first tcp", "--resume") == 0
    assert figures(tmp_path) == found and "== links" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_row(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    found = figures(tmp_path)
    assert {*found} == {row.name for row in rows()} | {"made"}
    assert found["mini"]["parity"] == {"status": 0, "cold equal": 16, "warm equal": 16}
    assert found["mini"]["gsm-mini"]["verdict"] == "pass"
    assert found["goodput"]["pair holds"] == 1.0
    assert found["saturated"]["bounded router at 2/s"]["answered"] >= 2


def test_a_row_that_fails_is_told_and_those_after_it_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def late(_: object) -> dict[str, Any]:
        time.sleep(20)
        return {}

    def fails(_: object) -> dict[str, Any]:
        raise RuntimeError("no memory")

    wanted = [
        Row(name="late", work=late, limit_s=0.05),
        Row(name="fails", work=fails, limit_s=5),
        Row(name="good", work=lambda _: {"a": 1}, limit_s=5, group=1),
    ]
    found: dict[str, Any] = {}
    two_gpus.run_all(wanted, two_gpus.CPU, found, tmp_path, None)
    assert found["failures"] == {"late": "TimeoutError: longer than 0.05 s", "fails": "RuntimeError: no memory"}
    assert found["good"] == {"a": 1} and figures(tmp_path) == found


def test_unknown_rows_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_here(monkeypatch, tmp_path, "--rows", "links,nonsense")
    assert "nonsense: no such row" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_every_row_names_servers_that_can_be_started(tmp_path: Path) -> None:
    stack = Stack(scale=two_gpus.CARDS, nano=tmp_path)
    routers = stack.routers()
    for row in rows():
        nodes = [name for name in row.servers if name not in routers]
        devices = {name: stack.node(name)[1]["device"] for name in nodes}
        for router in set(row.servers) & set(routers):
            prefill, decode, _ = routers[router]
            assert {*prefill, *decode} <= {*nodes}, f"{row.name}: {router}"
        assert {*devices.values()} <= {*two_gpus.CARDS.devices, "cuda"}  # of several ranks: one a card


def test_a_limit_is_taken_back() -> None:
    with limited(0.05):
        pass
    time.sleep(0.1)
    with pytest.raises(TimeoutError, match=r"longer than 0.01 s"), limited(0.01):
        time.sleep(5)
