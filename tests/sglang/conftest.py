"""A Python that has `sglang`: the stub, found as an installed package of any version."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
FakePython = Callable[..., str]


def make_python(folder: Path, version: str = "0.5.17", **environment: str) -> str:
    """A script that runs this interpreter with a package `sglang` of that version. environment: of that process."""
    site = folder / f"site-{version}"
    (site / "sglang").mkdir(parents=True, exist_ok=True)
    (site / "sglang" / "__init__.py").touch()
    (site / "sglang" / "launch_server.py").write_text(
        "import sys\nfrom tests.sglang.stub_server import main\nmain(sys.argv[1:])\n"
    )
    info = site / f"sglang-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    script = folder / f"python-{version}"
    path = ":".join(filter(None, [str(site), str(REPO), os.environ.get("PYTHONPATH")]))
    settings = {"PYTHONPATH": path, "STUB_VERSION": version} | environment
    lines = [f"export {name}='{value}'" for name, value in settings.items()]
    script.write_text("\n".join(["#!/bin/sh", *lines, f'exec {sys.executable} "$@"', ""]))
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def fake_python(tmp_path: Path) -> FakePython:
    return lambda version="0.5.17", **environment: make_python(tmp_path, version, **environment)
