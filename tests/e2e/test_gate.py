"""The gate against real nodes: a healthy stack passes every check, a broken one is caught and the part is named."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from accuracy.bisect import bisect, open_nodes
from accuracy.tasks import gsm_mini_task
from tests.support.stack import REPO, Stack, command, stack

QUESTION = gsm_mini_task(seed=3, count=1, shots=2).questions[0]


def tandem_gate(*arguments: str, timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("gate", *arguments), cwd=REPO, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def test_a_healthy_pair_passes_against_unified(shared_stack: Stack, tmp_path: Path) -> None:
    assert shared_stack.unified is not None
    addresses = ("--url", shared_stack.router.url, "--baseline", shared_stack.unified.url)
    size = ("--num-questions", "8", "--parallel", "8", "--warm", "1", "--output", str(tmp_path))
    done = tandem_gate("gsm-mini", *addresses, *size)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["verdict"], report["api"]) == ("pass", "generate")
    assert [run["flush"] for run in report["runs"]] == ["flushed", "flushed", "", ""]
    assert report["runs"][2]["cached_share"] > 0.5, "the warm run is warm"
    assert [pairing["differing"] for pairing in report["pairings"]] == [0, 0]


def test_kl_and_parity_of_a_healthy_pair(shared_stack: Stack) -> None:
    assert shared_stack.unified is not None
    size = ("--url", shared_stack.router.url, "--num-prompts", "2", "--new-tokens", "24")
    kl = tandem_gate("kl", *size)
    assert kl.returncode == 0, kl.stdout + kl.stderr
    assert "warm  KL" in kl.stdout
    parity = tandem_gate("parity", *size, "--baseline", shared_stack.unified.url)
    assert parity.returncode == 0, parity.stdout + parity.stderr
    assert "warm: 2 equal, 0 near tie, 0 different" in parity.stdout


def test_a_server_that_is_not_there_is_no_verdict() -> None:
    done = tandem_gate("kl", "--url", "http://127.0.0.1:1", "--num-prompts", "1")
    assert done.returncode == 2
    assert done.stderr.startswith("tandem: invalid: http://127.0.0.1:1")


async def test_bisection_finds_nothing_in_a_healthy_pair(shared_stack: Stack) -> None:
    assert shared_stack.unified is not None
    async with open_nodes(shared_stack.router.url, shared_stack.unified.url, 60.0) as nodes:
        found = await bisect(nodes, {"text": QUESTION.prompt}, max_tokens=64, stop=["Question"])
    assert not found.differs
    assert not found.notes
    stages = {(one.run, one.stage) for one in found.findings}
    assert {("cold", "after prefill"), ("cold", "after commit"), ("cold", "at the end")} <= stages
    assert ("warm", "after prefill on decode") in stages
    parts = {one.part for one in found.findings if one.stage == "after commit"}
    assert parts == {"kv", "conv", "ssm", "track conv", "track ssm"}


def test_bisection_names_the_part_that_was_spoilt(shared_stack: Stack, tmp_path: Path) -> None:
    assert shared_stack.unified is not None
    broken = ["--transport", "loopback", "--verify", "off", "--fault-zero", "ssm"]
    with stack(tmp_path, extra=broken) as running:
        done = tandem_gate(
            "bisect", "--url", running.router.url, "--unified", shared_stack.unified.url, "--prompt", QUESTION.prompt
        )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "cold, after prefill: conv equal, ssm equal, kv equal" in done.stdout
    assert "first difference: cold, after commit: ssm of layer 0 (relative distance " in done.stdout


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--fault-engine", "wrong-slot"), "--fault-engine: only with --transport loopback"),
        (("--fault-engine", "bad-luck", "--transport", "loopback"), "--fault-engine bad-luck: one of "),
    ],
)
def test_faults_of_the_engine_are_for_tests(options: tuple[str, ...], word: str) -> None:
    arguments = command("unified", "--port", "0", *options)
    done = subprocess.run(arguments, cwd=REPO, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert word in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_known_fault_is_caught(tmp_path: Path) -> None:
    done = tandem_gate("mutate", "--output", str(tmp_path), timeout_s=3500)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {row["fault"]: row for row in json.loads((tmp_path / "mutate.json").read_text())}
    healthy = found.pop("none")
    assert (healthy["refused"], healthy["gate"], healthy["first"]) == (0, "pass", None)
    assert min(healthy["cold"], healthy["warm"]) - found["ssm-dropped"]["cold"] >= 0.2
    assert len(found) >= 14


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_healthy_pair_never_fails(shared_stack: Stack, tmp_path: Path) -> None:
    """Other questions, another order and another concurrency each time."""
    for repeat in range(20):
        which = ("--seed", str(100 + repeat), "--shuffle", str(repeat), "--parallel", str(1 + 7 * repeat % 32))
        size = ("--num-questions", "25", "--warm", "1", "--output", str(tmp_path))
        done = tandem_gate("gsm-mini", "--url", shared_stack.router.url, *which, *size, timeout_s=600)
        assert done.returncode == 0, f"repeat {repeat}: {done.stdout}{done.stderr}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_nightly_job_on_the_cpu(tmp_path: Path) -> None:
    arguments = ["deploy/nightly/nightly.sh", "models/tandem-mini", str(tmp_path), "--task", "gsm-mini"]
    arguments += ["--num-questions", "40", "--parallel", "16", "--warm", "1"]
    environment = {**os.environ, "NODE_OPTIONS": ""}
    done = subprocess.run(
        arguments, cwd=REPO, env=environment, capture_output=True, text=True, timeout=1700, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [night] = tmp_path.glob("20*")
    summary = json.loads((night / "summary.json").read_text())
    assert [(one["setting"], one["verdict"]) for one in summary] == [("extra_buffer", "pass"), ("no_buffer", "pass")]
    assert {path.name for path in (tmp_path / "history").iterdir()} == {"extra_buffer", "no_buffer"}
    assert "report.html" in (night / "index.html").read_text()
