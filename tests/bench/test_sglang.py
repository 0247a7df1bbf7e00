"""The benchmark with SGLang, tried on the CPU with a stub in its place, so that nothing is first tried on a card."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import tokenizers

from bench import sglang
from bench.sglang_servers import Models, card, dry
from bench.sglang_speed import Stream, ratios, step
from tests.support.stack import MODEL, REPO


def command(out: Path, *arguments: str) -> list[str]:
    return [sys.executable, "bench/sglang.py", "--dry-run", "--out", str(out), *arguments]


def run(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(out, *arguments), cwd=REPO, capture_output=True, text=True, timeout=500)


def figures(out: Path) -> dict[str, Any]:
    path = out / "sglang.json"
    found: dict[str, Any] = json.loads(path.read_text())["figures"] if path.is_file() else {}
    return found


@pytest.mark.timeout(300)
def test_a_row_runs_from_start_to_table(tmp_path: Path) -> None:
    done = run(tmp_path, "--rows", "extra_buffer")
    assert done.returncode == 0, done.stdout + done.stderr
    found = figures(tmp_path)["extra_buffer"]
    assert found["parity"]["answers"] == {"cold equal": 12, "warm equal": 12}
    assert found["parity"]["prefix_hits"] > 0, "states were resumed from"
    assert 0 <= found["abort_free_s"] < 10 and 0 <= found["disconnect_free_s"] < 10
    assert done.stdout.splitlines()[-1].split()[:2] == ["extra_buffer", "True"]
    assert "--prefill-max-requests 1" in (tmp_path / "sglang.log").read_text()
    assert "in all 115 s" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_row_also_after_a_kill(tmp_path: Path) -> None:
    """Killed as soon as the first row is written: no server is left, and the rest is made by --resume."""
    process = subprocess.Popen(command(tmp_path), cwd=REPO, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not figures(tmp_path) and process.poll() is None:
        time.sleep(0.1)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert len(family) > 10 and not alive
    first = figures(tmp_path)["no_buffer"]
    done = run(tmp_path, "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    found = figures(tmp_path)
    assert {*found} == {"no_buffer", "extra_buffer", "detector", "gate", "native", "speed_sglang", "speed_native"}
    assert found["no_buffer"] == first, "not made again"
    assert found["detector"]["extra_buffer"]["exit"] == 1 and found["detector"]["extra_buffer"]["different_hits"] > 5
    assert any("prefix hit" in reason for reason in found["gate"]["extra_buffer"]["reasons"])
    assert found["native"]["holds"] and found["native"]["compare"]["kl"] < 0.002
    assert "decode 2 step_ms" in done.stdout.splitlines()[-2]


def test_what_is_asked_wrongly_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for words, status in (
        (["--dry-run", "--rows", "native,nonsense"], 2),
        ([], 0),
        (["--dry-run", "--python", "p"], 0),
    ):
        monkeypatch.setattr(sys, "argv", ["bench/sglang.py", "--out", str(tmp_path), *words])
        if status:
            with pytest.raises(SystemExit, match=str(status)):
                sglang.main()
        else:
            assert sglang.main() == 0
    said = capsys.readouterr()
    assert "nonsense: no such row" in said.err and said.out.count("give --bundle, --python or --dry-run") == 2
    assert not [*tmp_path.iterdir()]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Without a tokenizer, as the bundle's are."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = json.loads((MODEL / "config.json").read_text()) | {"n_groups": 1, "mamba_n_groups": 1, "vocab_size": 50}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_our_nodes_get_a_tokenizer_beside_the_folder_that_sglang_reads(model: Path, tmp_path: Path) -> None:
    (made := tmp_path / "made").mkdir()
    models = Models(made, tiny=model, large=model)
    assert [file.name for file in model.iterdir()] == ["config.json"]
    found = tokenizers.Tokenizer.from_file(str(models.native_tiny / "tokenizer.json"))
    assert found.get_vocab_size() == 50 and found.encode("t7 t49 x").ids == [7, 49, 0]
    assert (models.native_tiny / "config.json").read_bytes() == (model / "config.json").read_bytes()
    config = json.loads((models.mini / "config.json").read_text())
    assert config["mamba_n_groups"] == config["n_groups"] == 2
    assert "mamba_n_groups" not in json.loads((MODEL / "config.json").read_text())


@pytest.mark.parametrize("scale", ["card", "dry"])
def test_every_row_names_servers_that_can_be_started(scale: str, model: Path, tmp_path: Path) -> None:
    (made := tmp_path / "made").mkdir()
    models = Models(made, tiny=model, large=model)
    found = card("/usr/bin/python3", models) if scale == "card" else dry(made, models)
    rows = sglang.rows(found)
    for row in rows.values():
        assert {*row.servers} <= found.specs.keys()
        assert all(spec.router in (None, *row.servers) for name in row.servers if (spec := found.specs[name]))
    assert {name for row in rows.values() for name in row.servers} == found.specs.keys()
    total = sum(row.estimate_s for row in rows.values()) + sum(sglang.GROUP_START_S.values())
    assert total < 540, "of ten minutes"


def test_a_step_is_timed_while_all_streams_run() -> None:
    """Two tokens in one event count as two."""
    one = Stream(0.0, [(1.0, 1), (2.0, 2), (2.1, 3), (2.2, 4), (2.4, 6), (2.5, 7)])
    other = Stream(0.0, [(2.0, 1), (2.1, 2), (2.2, 3), (2.3, 4), (2.4, 5)])
    found = step(2, [one, other])
    assert found == {"decode 2 step_ms": 100.0, "decode 2 itl_p50_ms": 100.0}
    with pytest.raises(AssertionError, match="never ran together"):
        step(2, [one, Stream(0.0, [(3.0, 1), (3.1, 2), (3.2, 3)])])


def test_a_ratio_is_above_one_where_native_is_better() -> None:
    native = {"decode 1 step_ms": 5.0, "prefill 1x8 tokens_s": 30.0, "handoff 1x8 ms": -0.5, "took_s": 1.0}
    other = {"decode 1 step_ms": 6.0, "prefill 1x8 tokens_s": 20.0, "handoff 1x8 ms": 4.0, "took_s": 1.0}
    assert [line.split()[-1] for line in ratios(native, other)][1:] == ["1.20", "1.50", "-"]
    assert [*ratios(native, {"failed": "no memory"})] == []
