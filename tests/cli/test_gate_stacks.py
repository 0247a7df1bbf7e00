"""The parts of `tandem gate mutate` and `nightly` that need no node."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from accuracy.tasks import gsm_mini_task
from accuracy.verdict import Verdict
from cli.gate.mutate import FAULTS, HEALTHY, Caught, mutate_options
from cli.gate.nightly import NightlyOptions, Outcome, checked_settings, exit_code, nightly
from cli.main import main
from common.errors import ConfigError
from engine.families import read_config
from engine.faults import ENGINE_FAULTS
from engine.weights import load_weights
from node.tokenizer import load_tokenizer
from tests.accuracy.conftest import make_options
from tests.support.stack import MODEL, REPO


def caught(fault: str, **changed: Any) -> Caught:
    values: dict[str, Any] = {
        "fault": fault,
        "refused": 0,
        "asked": 80,
        "cold": 1.0,
        "warm": 1.0,
        "gate": Verdict.PASS,
        "loses": False,
        "p": 1.0,
        "first": None,
    }
    return Caught(**(values | changed))


def test_what_has_caught_a_fault() -> None:
    assert caught("x").by == []
    assert caught("x", refused=3).by == ["digest"]
    assert caught("x", gate=Verdict.FAIL, first="ssm").by == ["gate", "bisect"]
    assert caught("x", loses=True).by == ["gate"]


def test_a_fault_has_to_be_caught_and_health_has_not() -> None:
    assert caught(HEALTHY).as_expected
    assert not caught(HEALTHY, first="ssm").as_expected
    assert caught("x", first="ssm").as_expected
    assert not caught("x").as_expected


def test_every_fault_of_the_engine_is_tried() -> None:
    tried = {options[1] for options in FAULTS.values() if options[:1] == ("--fault-engine",)}
    assert tried == set(ENGINE_FAULTS)


def test_faults_are_chosen_by_name() -> None:
    common: dict[str, Any] = {"num_questions": 1, "parallel": 1, "threshold": 0.5, "model_path": "m", "output": Path()}
    assert mutate_options(["wrong-slot"], [], **common).faults == (HEALTHY, "wrong-slot")
    assert mutate_options([], [], **common).faults == tuple(FAULTS)
    with pytest.raises(ConfigError, match="--fault luck: one of none, conv-dropped"):
        mutate_options(["luck"], [], **common)


# -- nightly -------------------------------------------------------------------------------------------------------


def outcome(verdict: Verdict) -> Outcome:
    return Outcome(setting="s", verdict=verdict, reasons=[], accuracy=None, drifts=False)


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [("pass pass", 0), ("pass invalid", 2), ("invalid fail", 1), ("fail pass", 1)],
)
def test_a_failure_outweighs_what_is_invalid(verdicts: str, status: int) -> None:
    assert exit_code([outcome(Verdict(v)) for v in verdicts.split()]) == status


def test_settings_are_chosen_by_name() -> None:
    assert checked_settings([]) == ("extra_buffer", "no_buffer")
    assert checked_settings(["no_buffer"]) == ("no_buffer",)
    with pytest.raises(ConfigError, match="--setting x: one of extra_buffer, no_buffer"):
        checked_settings(["x"])


async def test_a_stack_that_does_not_start_is_invalid_and_the_next_has_its_turn(tmp_path: Path) -> None:
    task = gsm_mini_task(seed=0, count=1, shots=0)
    nights = NightlyOptions(
        settings=("extra_buffer", "no_buffer"),
        node_options=("--model-path", str(tmp_path / "nothing<b>")),
        unified=False,
        start_timeout_s=60.0,
        gate=make_options("http://unused", output=tmp_path / "night"),
    )
    said: list[str] = []
    outcomes = await nightly(task, nights, None, said.append, print)  # type: ignore[arg-type]
    assert [one.verdict for one in outcomes] == [Verdict.INVALID, Verdict.INVALID]
    assert exit_code(outcomes) == 2
    assert "the stack did not start: " in outcomes[0].reasons[0]
    assert any("no such folder" in reason for reason in outcomes[0].reasons), "the node's own words are told"
    assert [one["setting"] for one in json.loads((tmp_path / "night" / "summary.json").read_text())] == [
        "extra_buffer",
        "no_buffer",
    ]
    page = (tmp_path / "night" / "index.html").read_text()
    assert "nothing&lt;b&gt;" in page
    assert "<b>" not in page


def test_nightly_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["gate", "nightly", "--task", "gsm-mini"])
    assert ended.value.code == 2
    assert "--model-path" in capsys.readouterr().err


def test_a_random_checkpoint_is_one_that_nodes_load(tmp_path: Path) -> None:
    config = json.loads((MODEL / "config.json").read_text())
    given = tmp_path / "given.json"
    given.write_text(json.dumps(config | {"vocab_size": 1500}))
    script = [sys.executable, str(REPO / "deploy/nightly/random_checkpoint.py"), str(given), str(tmp_path / "model")]
    subprocess.run(script, check=True, timeout=100)
    assert len(list((tmp_path / "model").glob("model-0000?-of-00004.safetensors"))) == 4
    hybrid = read_config(tmp_path / "model")
    weights = load_weights(tmp_path / "model", hybrid, torch.bfloat16, "cpu")
    assert weights["embeddings.weight"].shape[0] == 1500
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    assert tokenizer.encode("12 hens") == load_tokenizer(str(MODEL)).encode("12 hens")
    assert tokenizer.decode([1499], skip_special_tokens=True) == "<1499>"
