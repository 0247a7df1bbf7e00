"""What the interpreter takes must fit a card too: the layers of real models, compiled for an H100 or H200."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.stack import REPO

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are run on the card"),
    pytest.mark.timeout(400),
]
PROGRAM_BYTES = 227 * 1024
ALWAYS = {
    "_embed",
    "_conv_step",
    "_conv",
    "_save_windows",
    "_attend_part",
    "_combine_parts",
    "_attend_rows",
    "_gated_silu",
}
OWN = {
    "falcon_h1_34b": {"_scan", "_scan_step", "_turn_and_write"},
    "granite_4_small": {"_scan", "_scan_step", "_gated_rms_norm", "_write_kv"},
    "qwen3_next_80b": {"_turn_and_write", "_prepare", "_advance", "_step", "_head_rms_norm_gated"},
}


def compiled(cache: Path, model: str, dtype: str) -> dict[str, int]:
    """Kernel -> the most shared memory of a program of it."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.dry", model, dtype]
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = {}
    for line in done.stdout.splitlines():
        _, _, kernel, nbytes = line.split()
        found[kernel] = max(int(nbytes), found.get(kernel, 0))
    return found


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("falcon_h1_34b", "bfloat16"),
        *(pytest.param(model, "bfloat16", marks=pytest.mark.slow) for model in ("granite_4_small", "qwen3_next_80b")),
        *(pytest.param(model, "float32", marks=pytest.mark.slow) for model in OWN),
    ],
)
def test_programs_have_room_on_a_card(model: str, dtype: str, tmp_path: Path) -> None:
    found = compiled(tmp_path, model, dtype)
    assert set(found) >= ALWAYS | OWN[model]
    assert max(found.values()) <= PROGRAM_BYTES, found
