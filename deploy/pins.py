"""Prints constraints.txt: the installed version of everything that the extras cpu and otel bring in.

    .venv/bin/python deploy/pins.py > deploy/constraints.txt

Left out is what differs between CPU and GPU; constraints-cpu.txt and constraints-gpu.txt have it.
"""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("cpu", "otel")
ELSEWHERE = frozenset(("torch", "triton", "mooncake-transfer-engine-non-cuda", "setuptools", "tandem-serve"))


def closure(distribution: str, extras: tuple[str, ...]) -> set[str]:
    """Names of everything installed that `distribution` needs, itself included."""
    found: set[str] = set()
    todo = [(distribution, extras)]
    while todo:
        name, wanted = todo.pop()
        found.add(canonicalize_name(name))
        for text in metadata.requires(name) or ():
            need = Requirement(text)
            asked = need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *wanted))
            if asked and canonicalize_name(need.name) not in found:
                todo.append((need.name, tuple(need.extras)))
    return found


if __name__ == "__main__":
    print("# Versions that images install; made by deploy/pins.py.")
    for name in sorted(closure("tandem-serve", EXTRAS) - ELSEWHERE):
        print(f"{name}=={metadata.version(name)}")
