"""The Makefile, with a Python that only notes what it is asked to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

FAKE_PYTHON = """#!/bin/sh
case "$*" in
    "-m venv .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
    "-m pip config list") echo "$FAKE_PIP_CONFIG" ;;
    "-m pip install"*) echo "$*" > installed ;;
    *urllib*) echo asked > probed; [ -z "$FAKE_OFFLINE" ] || { echo Traceback >&2; kill -ALRM $$; sleep 5; } ;;
esac
"""
FAKE_PYTEST = "#!/bin/sh\nexit $FAKE_STATUS\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("Makefile", "constraints-cpu.txt", "pyproject.toml"):
        shutil.copy(REPO / name, tmp_path)
    for name, text in (("python", FAKE_PYTHON), ("pytest", FAKE_PYTEST)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def make(folder: Path, *arguments: str, **fakes: str) -> subprocess.CompletedProcess[str]:
    """`system`, which looks at the machine, is left out."""
    command = ["make", f"PYTHON={folder}/python", "--old-file=system", *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "TORCH_INDEX")}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30, env={**environment, **fakes})


def installed(folder: Path) -> str:
    return (folder / "installed").read_text()


def test_torch_without_cuda_is_the_default(folder: Path) -> None:
    done = make(folder, ".venv/.installed")
    assert done.returncode == 0, done.stderr
    assert (folder / "probed").exists()
    assert f"--extra-index-url {CPU_INDEX} -c constraints-cpu.txt" in installed(folder)


def test_without_an_answer_from_the_index_it_says_what_that_means(folder: Path) -> None:
    done = make(folder, ".venv/.installed", FAKE_OFFLINE="1")
    assert done.returncode == 0
    assert f"no answer from {CPU_INDEX}: torch comes from PyPI, with CUDA" in done.stdout
    assert done.stderr == ""
    assert "--extra-index-url" not in installed(folder)


@pytest.mark.parametrize(
    ("index", "pip_config", "added"),
    [
        ("none", "", None),
        ("https://example.org/whl", "", "https://example.org/whl"),
        ("", "global.find-links='/wheels'", None),
        ("", ":env:.no-index='1'", None),
    ],
)
def test_nobody_is_asked_where_it_is_settled(folder: Path, index: str, pip_config: str, added: str | None) -> None:
    done = make(folder, ".venv/.installed", f"TORCH_INDEX={index}", FAKE_PIP_CONFIG=pip_config)
    assert done.returncode == 0, done.stderr
    assert not (folder / "probed").exists()
    assert (f"--extra-index-url {added} " in installed(folder)) if added else ("--extra" not in installed(folder))


@pytest.mark.parametrize(("status", "ends"), [("0", 0), ("1", 2)])
def test_gpu_tests_decide_how_make_ends(folder: Path, status: str, ends: int) -> None:
    (folder / ".venv/bin").mkdir(parents=True)
    shutil.move(folder / "pytest", folder / ".venv/bin/pytest")
    done = make(folder, "--old-file=.venv/.installed", "test-gpu", FAKE_STATUS=status)
    assert done.returncode == ends, done.stderr
