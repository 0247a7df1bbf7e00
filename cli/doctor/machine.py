"""Cores, memory, limits and cards of this machine, or of the container that this runs in."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from cli.doctor.checks import Check, error, gib, mib, not_applicable, ok, warning
from common.config import NodeConfig, Protocol, Role, rank_devices

if TYPE_CHECKING:
    from node.preflight import Card, Cuda

_CGROUP = Path("/sys/fs/cgroup")
_CAP_IPC_LOCK = 14
_FEW_FILES, _TOO_FEW_FILES = 4096, 256
_SOCKET_PATH_BYTES = 80
"""What the folder of temporary files may be long: a Unix socket's whole path is at most 107."""
_UNLIMITED = 1 << 60


def check_cores(config: NodeConfig | None) -> Check:
    """config None: of a router, which has no ranks."""
    cores = available_cores()
    found = f"{cores:g} cores"
    if config is None or config.model.device.startswith("cuda"):
        return ok("cpu", found, cores=cores)
    asked = config.engine.threads * config.engine.dp_size
    if asked > cores:
        fix = f"--threads and --dp-size multiply to {asked}: lower them, or give this process more cores"
        return warning("cpu", f"{found}, threads that compute: {asked}", fix, cores=cores)
    return ok("cpu", f"{found}, threads that compute: {asked}", cores=cores)


def available_cores(cgroup: Path = _CGROUP) -> float:
    cores = float(len(os.sched_getaffinity(0)))
    quota, _, period = read(cgroup / "cpu.max").partition(" ")
    return min(cores, int(quota) / int(period)) if quota.isdecimal() and period.isdecimal() else cores


def available_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes that can still be had: of the machine, and within the container's bound."""
    free = psutil.virtual_memory().available
    bound, used = read(cgroup / "memory.max"), read(cgroup / "memory.current")
    if bound.isdecimal() and used.isdecimal():
        cached = re.search(r"^inactive_file (\d+)$", read(cgroup / "memory.stat"), re.MULTILINE)
        free = min(free, int(bound) - int(used) + (int(cached[1]) if cached else 0))
    return max(0, int(free))


def check_memory() -> Check:
    total, free = psutil.virtual_memory().total, available_memory()
    return ok("memory", f"{gib(free)} of {gib(total)} available", free_bytes=free, total_bytes=total)


def check_shm() -> Check:
    """Of no use to the native engine, whose ranks talk over sockets; to SGLang's and NCCL's processes it is."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as reason:
        return not_applicable("shm", f"/dev/shm: {reason.strerror}; nothing here needs it")
    return ok("shm", f"/dev/shm {mib(usage.free)} free (not needed by native ranks)", free_bytes=usage.free)


def check_temporary_folder() -> Check:
    """Front and ranks, and the processes of a router, talk over sockets in it."""
    try:
        folder = tempfile.gettempdir()
        with tempfile.TemporaryDirectory():
            pass
    except OSError as reason:
        return error("temporary_folder", str(reason), "make /tmp writable (in a container: a tmpfs), or set TMPDIR")
    if len(folder) > _SOCKET_PATH_BYTES:
        return error("temporary_folder", f"{folder}: too long a path for sockets", "set TMPDIR to a shorter one")
    return ok("temporary_folder", folder)


def check_open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    count = _UNLIMITED if soft == resource.RLIM_INFINITY else soft
    if count >= _FEW_FILES:
        return ok("open_files", found, limit=soft)
    can = "" if hard == resource.RLIM_INFINITY or hard >= _FEW_FILES else " (the hard limit is lower: ask its owner)"
    fix = f"ulimit -n {_FEW_FILES}{can}: each request has a connection at every process it passes"
    return (error if count < _TOO_FEW_FILES else warning)("open_files", found, fix, limit=soft)


def check_memlock(config: NodeConfig, pool_bytes: int | None) -> Check:
    """Only RDMA locks memory: all of the pools. pool_bytes None: not known."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else mib(soft)
    if config.role is Role.UNIFIED or config.transfer.protocol is not Protocol.RDMA:
        return not_applicable("memlock", f"{found}; only --transfer-protocol rdma locks memory", limit_bytes=soft)
    if unlimited:
        return ok("memlock", found, limit_bytes=soft)
    if may_lock():
        return ok("memlock", f"{found}, which CAP_IPC_LOCK lifts", limit_bytes=soft)
    if pool_bytes is not None and soft >= pool_bytes:
        return ok("memlock", f"{found}; pages and slots are {mib(pool_bytes)}", limit_bytes=soft)
    needed = "" if pool_bytes is None else f", pages and slots are {mib(pool_bytes)}"
    fix = "ulimit -l unlimited (container: ulimits: memlock: -1; systemd: LimitMEMLOCK=infinity)"
    return error("memlock", f"{found}{needed}, and RDMA locks all of them", fix, limit_bytes=soft)


def may_lock(status: Path = Path("/proc/self/status")) -> bool:
    """Whether this process holds CAP_IPC_LOCK, which the limit does not bind."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", read(status), re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> _CAP_IPC_LOCK & 1)


def check_cuda(config: NodeConfig, find: Callable[[], Cuda]) -> list[Check]:
    """Cards that the ranks are to have, and whether the driver is new enough for this torch."""
    if not config.model.device.startswith("cuda"):
        return [not_applicable("cuda", f"--device {config.model.device}")]
    driver = driver_version()
    if driver is None:
        fix = "install NVIDIA's driver (container: --gpus all, or the NVIDIA container toolkit), or --device cpu"
        return [error("cuda", f"--device {config.model.device}: no driver (libcuda.so.1) here", fix)]
    cuda = find()
    if cuda.runtime is None or not cuda.cards:
        fix = "install torch with CUDA; make cards visible (nvidia-smi, CUDA_VISIBLE_DEVICES); or --device cpu"
        return [error("cuda", f"driver for CUDA {driver}: {cuda.reason}", fix)]
    wanted = {int(name.partition(":")[2] or 0) for name in rank_devices(config)}
    known = {card.number: card for card in cuda.cards}
    return [_check_driver(driver, cuda.runtime), *(_check_card(number, known.get(number)) for number in sorted(wanted))]


def _check_driver(driver: str, runtime: str) -> Check:
    found = f"driver for CUDA {driver}, torch for CUDA {runtime}"
    if int(driver.partition(".")[0]) < int(runtime.partition(".")[0]):
        return error("cuda", found, "update NVIDIA's driver, or install a torch for the driver's CUDA version")
    return ok("cuda", found)


def _check_card(number: int, card: Card | None) -> Check:
    if card is None:
        return error(f"cuda.{number}", "no such card", "--device and --dp-size: cards that are there (nvidia-smi -L)")
    found = f"{card.name}, compute {card.capability}, {gib(card.free_bytes)} of {gib(card.total_bytes)} free"
    sizes = {"free_bytes": card.free_bytes, "total_bytes": card.total_bytes}
    if card.free_bytes < card.total_bytes // 2:
        return warning(f"cuda.{number}", found, "another process has much of it: see nvidia-smi", **sizes)
    return ok(f"cuda.{number}", found, **sizes)


def driver_version() -> str | None:
    """The newest CUDA that the driver knows; None without a driver."""
    try:
        library, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        if library.cuDriverGetVersion(ctypes.byref(version)):
            return None
    except OSError:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def read(path: Path) -> str:
    """Empty when it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
