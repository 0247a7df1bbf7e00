"""Runs the scripts of bench/, each in a process of its own."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from common.errors import ConfigError

BENCH_FOLDER = Path(__file__).resolve().parents[1] / "bench"
_HELPERS = ("results", "load", "fleet", "links", "gpu_handoff", "gpu_router")


def scripts(folder: Path = BENCH_FOLDER) -> dict[str, Path]:
    """Raises ConfigError."""
    found = sorted(folder.glob("*.py"))
    if not found:
        raise ConfigError(f"{folder}: no benchmarks here; they come with the sources, not with an installed package")
    return {path.stem: path for path in found if path.stem not in _HELPERS and path.stem[0] != "_"}


def list_scripts(folder: Path = BENCH_FOLDER) -> None:
    for name, path in scripts(folder).items():
        about = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
        click.echo(f"{name:20} {about}")


def run_scripts(name: str | None, arguments: Sequence[str], folder: Path = BENCH_FOLDER) -> int:
    """All of them when name is None. The first exit status that is not 0, after all have run. Raises ConfigError."""
    found = scripts(folder)
    if name is not None and name not in found:
        raise ConfigError(f"bench {name}: one of {', '.join(found)}", param="name")
    statuses = []
    for chosen in [name] if name is not None else list(found):
        click.echo(f"== {chosen}", err=True)
        command = [sys.executable, str(found[chosen]), *arguments]
        statuses.append(subprocess.run(command, cwd=folder.parent, check=False).returncode)
    return next((status for status in statuses if status), 0)
