"""Ties a process to the one that started it, so that nothing outlives `tandem up`, not even after kill -9."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

import click

parent_pid_option = click.option("--parent-pid", type=int, hidden=True, help="End when this process, our parent, ends")

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int | None) -> None:
    """Have the kernel send this process SIGTERM when its parent ends (Linux). Does nothing for None.

    parent_pid: who the parent should be; when it has ended already, so does this process.
    """
    if parent_pid is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(0)
