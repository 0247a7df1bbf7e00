"""The disk of a small Debian with Soft-RoCE, made once: its kernel, its initrd and its root file system.

    .cache/rdma-guest/<digest of this file and of the wheels' versions>/{root.img,vmlinuz,initrd}

What changes with every run, the project's own code, is not in it. Making it needs root (debootstrap) and a minute or
two; after that anybody can boot it. `python -m tests.rdma.image` makes it, if need be, and prints where it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
CACHE = REPO / ".cache" / "rdma-guest"

SUITE, PYTHON_VERSION = "bookworm", "3.11"
PACKAGES = (
    "linux-image-amd64",  # the cloud kernel has no rdma_rxe
    "kmod",
    "iproute2",
    "rdma-core",
    "ibverbs-providers",
    "python3",
    "libcurl4",  # these two: Mooncake
    "libnuma1",
)
WHEELS = ("mooncake-transfer-engine-non-cuda", "msgspec", "numpy", "xxhash")
PLATFORMS = ("manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux_2_28_x86_64", "manylinux_2_35_x86_64")
NOT_NEEDED = ("usr/share/doc", "usr/share/locale", "usr/share/man", "var/cache/apt", "var/lib/apt/lists")
NO_SUCH_HARDWARE = ("drivers/gpu", "drivers/media", "drivers/net/wireless", "drivers/scsi", "drivers/staging", "sound")
TOOLS = {"qemu-system-x86_64": "qemu-system-x86", "debootstrap": "debootstrap", "mke2fs": "e2fsprogs"}
FIRST_PROCESS = """#!/bin/sh
# The project's code comes as a tar on the second disk.
mount -t tmpfs tmpfs /tmp && mkdir /tmp/project && cd /tmp/project || exit
tar -x -f /dev/vdb && sh tests/rdma/in_guest/run.sh
"""
DISK_BYTES = 2 << 30
STEP_TIMEOUT_S = 900
SYSTEM_PATH = os.environ["PATH"] + ":/usr/sbin:/sbin"


def image() -> Path:
    """The folder of the image, made first if there is none. Raises RuntimeError, saying what to install or run."""
    folder = CACHE / _digest()
    _need_tools()
    if folder.exists():
        return folder
    _check_root()
    CACHE.mkdir(parents=True, exist_ok=True)
    with _alone():
        if not folder.exists():
            for old in CACHE.iterdir():
                if old.is_dir():
                    shutil.rmtree(old)
            with tempfile.TemporaryDirectory(dir=CACHE, prefix="making-") as scratch:
                _make(Path(scratch)).rename(folder)
    return folder


def _digest() -> str:
    recipe = [Path(__file__).read_text(), *(f"{name}=={version(name)}" for name in WHEELS)]
    return hashlib.sha256("\n".join(recipe).encode()).hexdigest()[:16]


def _need_tools() -> None:
    """As in the Makefile: root on Debian gets them, anybody else is told what to run."""
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool, path=SYSTEM_PATH) is None]
    if not missing:
        return
    install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *missing]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise RuntimeError(f"missing on this machine: {' '.join(missing)}. Run:\n    sudo {' '.join(install)}")
    _run(["apt-get", "update", "-q"])
    _run(install)


def _check_root() -> None:
    if os.geteuid() != 0:
        raise RuntimeError(f"debootstrap needs root, once. Run:\n    sudo {sys.executable} -m tests.rdma.image")


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One process at a time makes the image; the others find it made."""
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(scratch: Path) -> Path:
    root, made = scratch / "root", scratch / "made"
    made.mkdir()
    print("Making the guest's disk (a few minutes, once)", flush=True)
    _run(["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, str(root)])
    _install_wheels(root)
    (root / "sbin" / "init").write_text(FIRST_PROCESS)
    (root / "sbin" / "init").chmod(0o755)
    (kernel,) = (root / "boot").glob("vmlinuz-*")
    (initrd,) = (root / "boot").glob("initrd.img-*")
    shutil.copy(kernel, made / "vmlinuz")
    shutil.copy(initrd, made / "initrd")
    (modules,) = (root / "lib" / "modules").iterdir()
    for name in [
        *NOT_NEEDED,
        "boot",
        *(str((modules / "kernel" / each).relative_to(root)) for each in NO_SUCH_HARDWARE),
    ]:
        shutil.rmtree(root / name)
    disk = made / "root.img"
    with disk.open("wb") as file:
        file.truncate(DISK_BYTES)
    _run(["mke2fs", "-q", "-t", "ext4", "-d", str(root), str(disk)])
    return made


def _install_wheels(root: Path) -> None:
    """The versions that this environment has, for the guest's Python."""
    target = root / "usr/local/lib" / f"python{PYTHON_VERSION}" / "dist-packages"
    _run(
        [
            *(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--root-user-action=ignore"),
            *("--only-binary=:all:", f"--python-version={PYTHON_VERSION}", *(f"--platform={p}" for p in PLATFORMS)),
            *(f"--target={target}", *(f"{name}=={version(name)}" for name in WHEELS)),
        ]
    )


def _run(command: Sequence[str]) -> None:
    """Raises RuntimeError with the end of what the command said."""
    done = subprocess.run(
        command,
        env=os.environ | {"PATH": SYSTEM_PATH},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=STEP_TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed ({done.returncode}):\n{done.stdout[-3000:]}")


if __name__ == "__main__":
    try:
        print(image())
    except RuntimeError as error:
        sys.exit(str(error))
