"""Prints what pyproject.toml asks for, a requirement a line, so that an image installs it before the sources change.

    python requirements.py pyproject.toml EXTRA,EXTRA
    python requirements.py pyproject.toml EXTRA,EXTRA --router

With --router what only nodes import is left out: the router needs no torch.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

NODES_ONLY = frozenset(
    {
        *("aiohttp", "jinja2", "llguidance", "numpy"),
        *("pyzmq", "safetensors", "tokenizers", "torch"),
    }
)


def requirements(pyproject: Path, extras: list[str], *, router: bool) -> list[str]:
    """Raises KeyError naming an extra that is not there."""
    project = tomllib.loads(pyproject.read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    return [line for line in wanted if not (router and name(line) in NODES_ONLY)]


def name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0].lower()


if __name__ == "__main__":
    file, extras, *flags = sys.argv[1:]
    print("\n".join(requirements(Path(file), [each for each in extras.split(",") if each], router="--router" in flags)))
