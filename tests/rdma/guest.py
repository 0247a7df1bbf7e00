"""Boots guests in QEMU, without KVM, gives them the project's code, and brings back what their scenarios say.

The code goes in as a tar on a second disk, reports come out of the second serial line; the first one is the console.
Nothing of a run is written to the image. A guest's clock counts its instructions (icount), so that on a busy machine
its kernel measures its timers right and its time-outs wait: with the host's clock it did not always boot.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.rdma.image import REPO

CODE = ("common", "transfer", "tests/transfer/transfer_rig.py", "tests/rdma/in_guest")
MEMORY_MB = 1024
CONSOLE_CHARS = 6000
MAC_ADDRESSES = {"prefill": "52:54:00:00:00:01", "decode": "52:54:00:00:00:02"}
KERNEL_COMMAND_LINE = "root=/dev/vda rw console=ttyS0 panic=-1 quiet net.ifnames=0 guest="


def run_alone(image: Path, folder: Path, timeout_s: float) -> dict[str, Any]:
    """The report of each scenario of a guest with both ranks, by its name. folder: for what is written meanwhile.

    Raises RuntimeError with the end of the console when there is none, or when a rank has died.
    """
    code = _pack(folder)
    deadline = time.monotonic() + timeout_s
    with _booted("alone", image, folder, code) as qemu:
        return _end(qemu, "alone", folder, deadline)


def run_pair(image: Path, folder: Path, timeout_s: float) -> dict[str, Any]:
    """The reports of two guests with a rank each and a wire between them that loses packets. Raises RuntimeError."""
    code = _pack(folder)
    deadline = time.monotonic() + timeout_s
    left, right = socket.socketpair()
    with (
        left,
        right,
        _booted("prefill", image, folder, code, left) as prefill,
        _booted("decode", image, folder, code, right) as decode,
    ):
        return _end(prefill, "prefill", folder, deadline) | _end(decode, "decode", folder, deadline)


@contextlib.contextmanager
def _booted(
    guest: str, image: Path, folder: Path, code: Path, wire: socket.socket | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """When the first process ends the kernel panics, reboots at once (panic=-1), and QEMU ends instead (-no-reboot)."""
    command = [
        *("qemu-system-x86_64", "-accel", "tcg", "-icount", "shift=0"),
        *("-cpu", "max", "-smp", "1", "-m", str(MEMORY_MB)),
        *("-nodefaults", "-no-user-config", "-nographic", "-no-reboot"),
        *("-kernel", str(image / "vmlinuz"), "-initrd", str(image / "initrd"), "-append", KERNEL_COMMAND_LINE + guest),
        *("-drive", f"file={image / 'root.img'},format=raw,if=virtio,snapshot=on"),
        *("-drive", f"file={code},format=raw,if=virtio,readonly=on"),
        *("-serial", "stdio", "-serial", f"file:{folder / guest}.reports"),
    ]
    if wire is not None:
        command += ["-netdev", f"socket,id=wire,fd={wire.fileno()}"]
        command += ["-device", f"virtio-net-pci,netdev=wire,romfile=,mac={MAC_ADDRESSES[guest]}"]
    with (folder / f"{guest}.console").open("wb") as console:
        qemu = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            pass_fds=[] if wire is None else [wire.fileno()],
        )
    try:
        yield qemu
    finally:
        qemu.kill()
        qemu.wait()


def _end(qemu: subprocess.Popen[bytes], guest: str, folder: Path, deadline: float) -> dict[str, Any]:
    """The guest's reports by scenario, when it has ended."""
    console, reports = folder / f"{guest}.console", folder / f"{guest}.reports"
    try:
        qemu.wait(max(0.0, deadline - time.monotonic()))
        lines = [json.loads(line) for line in reports.read_text().splitlines()] if reports.exists() else []
        wrong = "did not report" if not lines else "lost a rank" if any(None in line.values() for line in lines) else ""
    except subprocess.TimeoutExpired:
        wrong = "did not end in time"
    if wrong:
        tail = console.read_text(errors="replace")[-CONSOLE_CHARS:]
        raise RuntimeError(f"guest {guest} {wrong}; the end of {console}:\n{tail}")
    return {line.pop("scenario"): line for line in lines}


def _pack(folder: Path) -> Path:
    """The code that the guests run."""
    code = folder / "code.tar"
    with tarfile.open(code, "w") as tar:
        for name in CODE:
            tar.add(REPO / name, name, filter=lambda entry: None if entry.name.endswith("__pycache__") else entry)
    return code
