"""Python and the packages that matter: which are there, whether they load, and which do not go together."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib
import importlib.metadata
import re
import sys

from cli.doctor.checks import Check, error, not_applicable, ok, warning
from common.config import NodeConfig, Role, TransportName, chosen_transport

MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 6)
MIN_TRITON = (3, 6)
MIN_MOONCAKE = (0, 3, 13)
_WHEELS = "mooncake-transfer-engine"
_FOR_CARDS = (
    "pip uninstall -y mooncake-transfer-engine-non-cuda; pip install -c deploy/constraints-gpu.txt -e '.[cuda13,gpu]'"
)


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Check:
    found = ".".join(map(str, version))
    if version >= MIN_PYTHON:
        return ok("python", found)
    return error("python", found, "install Python 3.11 or newer")


def check_tandem() -> Check:
    return ok("tandem", importlib.metadata.version("tandem-serve"))


def check_torch(on_card: bool) -> Check:
    """on_card: ranks compute on CUDA."""
    found = installed("torch")
    if found is None:
        return error("torch", "not installed", "pip install -c constraints-cpu.txt -e '.[cpu]' (or cuda12, cuda13)")
    if numbers(found) < MIN_TORCH:
        return error("torch", found, "pip install 'torch>=2.6'")
    if on_card and found.endswith("+cpu"):
        return error("torch", f"{found}, built without CUDA", _FOR_CARDS)
    return ok("torch", found)


def check_triton(on_card: bool) -> Check:
    found = installed("triton")
    if not on_card:
        return not_applicable("triton", f"{found or 'not installed'}; only --device cuda needs it")
    if found is None or numbers(found) < MIN_TRITON:
        return error("triton", found or "not installed", "pip install 'triton>=3.6' (the extra gpu)")
    if (pinned := _pinned_triton()) not in (None, found):
        return warning("triton", f"{found}, torch was released with {pinned}", f"pip install triton=={pinned}")
    return ok("triton", found)


def _pinned_triton() -> str | None:
    """What the installed torch asks for; None when that is no one version."""
    asked = (re.match(r"triton\s*==\s*([\w.]+)", text) for text in importlib.metadata.requires("torch") or ())
    return next((match[1] for match in asked if match), None)


def check_mooncake(config: NodeConfig) -> Check:
    """Imports it: a wheel without its system libraries is found but does not load."""
    wheels = sorted(
        {name for name in importlib.metadata.packages_distributions().get("mooncake", []) if _WHEELS in name}
    )
    found = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in wheels) or "not installed"
    reason = not_needed(config)
    if reason is not None:
        return not_applicable("mooncake", f"{found}; {reason}")
    on_card = config.model.device.startswith("cuda")
    extra = "cuda12 or cuda13" if on_card else "cpu"
    if not wheels:
        told = warning if optional(config) else error
        return told(
            "mooncake", found, f"pip install -e '.[{extra}]'" + ("" if on_card else "; or --transport loopback")
        )
    if numbers(importlib.metadata.version(wheels[0]), 3) < MIN_MOONCAKE:
        return error("mooncake", f"{found}: too old", f"pip install '{wheels[0]}>={'.'.join(map(str, MIN_MOONCAKE))}'")
    if len(wheels) > 1:
        return error(
            "mooncake", f"{found}: they overwrite each other's files", "pip uninstall all, install one of them"
        )
    if (broken := _does_not_load()) is not None:
        return error("mooncake", f"{found}: {broken}", "sudo apt-get install -y libibverbs1 libnuma1 libcurl4")
    if on_card and wheels[0].endswith("non-cuda"):
        told = warning if optional(config) else error
        return told(
            "mooncake",
            f"{found} does not carry a card's memory",
            "pip uninstall it, then pip install -e '.[cuda13]' (or cuda12); peers on other hosts need it",
        )
    return ok("mooncake", found)


def not_needed(config: NodeConfig) -> str | None:
    """Why Mooncake is of no use here."""
    if config.role is Role.UNIFIED:
        return "a unified node hands nothing over"
    asked = config.transfer.transport
    return f"--transport {asked.value}" if asked in (TransportName.LOOPBACK, TransportName.CUDA_IPC) else None


def optional(config: NodeConfig) -> bool:
    """Whether a node would go on without it: auto on a card has cuda_ipc for peers of this host."""
    return chosen_transport(config.transfer.transport, config.model.device) is TransportName.AUTO


def _does_not_load() -> str | None:
    try:
        importlib.import_module("mooncake.engine")
    except ImportError as reason:
        verbs = "" if ctypes.util.find_library("ibverbs") else "; libibverbs is not installed"
        return f"does not load ({reason}{verbs})"
    return None


def installed(name: str) -> str | None:
    """Its version."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version: str, count: int = 2) -> tuple[int, ...]:
    """Of "2.13.0+cpu" the first `count`."""
    return tuple(int(word) for word in re.findall(r"\d+", version)[:count])
