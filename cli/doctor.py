"""Checks of the machine, a line each: what is there, or what to do about it."""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import os
import resource
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import click

_MIN_PYTHON = (3, 11)
_MODEL_FILES = ("config.json", "tokenizer.json")
_MIN_MEMLOCK_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Check:
    """fix: what to do; None when nothing is wrong."""

    name: str
    found: str
    fix: str | None = None


def run(model_path: str, ports: Iterable[int]) -> int:
    """Print every check; the exit status."""
    checks = [check_python(), check_torch(), check_libibverbs(), check_mooncake(), check_memlock()]
    checks += [check_port(port) for port in ports]
    checks.append(check_model(Path(model_path)))
    for check in checks:
        click.echo(_line(check))
    return int(any(check.fix for check in checks))


def _line(check: Check) -> str:
    mark = "ok     " if check.fix is None else "problem"
    fix = "" if check.fix is None else f"\n         -> {check.fix}"
    return f"{mark}  {check.name}: {check.found}{fix}"


def check_python(version: tuple[int, int] = (sys.version_info.major, sys.version_info.minor)) -> Check:
    found = ".".join(map(str, version))
    return Check("python", found, None if version >= _MIN_PYTHON else "install Python 3.11 or newer")


def check_torch() -> Check:
    return _installed("torch", "pip install -c constraints-cpu.txt -e '.[cpu]'")


def check_mooncake() -> Check:
    """Imports it: a wheel without its system libraries is found but does not load."""
    packages = [
        name
        for name in importlib.metadata.packages_distributions().get("mooncake", [])
        if name.startswith("mooncake-transfer-engine")
    ]
    found = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages) or "not installed"
    if not packages:
        return Check("mooncake", found, "pip install -e '.[cpu]' (or cuda12, cuda13); or use --transport loopback")
    try:
        import mooncake.engine  # noqa: F401
    except ImportError as error:
        return Check("mooncake", f"{found}, does not load ({error})", "sudo apt-get install -y libibverbs1")
    return Check("mooncake", found)


def check_libibverbs() -> Check:
    found = ctypes.util.find_library("ibverbs")
    fix = None if found else "sudo apt-get install -y libibverbs1 (Mooncake does not load without it)"
    return Check("libibverbs", found or "not found", fix)


def check_memlock() -> Check:
    """RDMA registers memory, which counts as locked. Over TCP the limit does not matter."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"
    has_rdma = Path("/sys/class/infiniband").is_dir() and any(Path("/sys/class/infiniband").iterdir())
    enough = soft == resource.RLIM_INFINITY or soft >= _MIN_MEMLOCK_BYTES or os.geteuid() == 0
    return Check("memlock", found, "ulimit -l unlimited, for RDMA" if has_rdma and not enough else None)


def check_port(port: int) -> Check:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            return Check(f"port {port}", str(error), "end what listens there, or choose another with --port")
    return Check(f"port {port}", "free")


def check_model(folder: Path) -> Check:
    if not folder.is_dir():
        return Check("model", f"{folder}: no such folder", "give a Hugging Face model folder with --model-path")
    missing = [name for name in _MODEL_FILES if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        return Check(
            "model", f"{folder}: no {', '.join(missing)}", "give a Hugging Face model folder with --model-path"
        )
    return Check("model", str(folder))


def _installed(name: str, fix: str) -> Check:
    if importlib.util.find_spec(name) is None:
        return Check(name, "not installed", fix)
    return Check(name, importlib.metadata.version(name))
