"""Rank processes as the front sees them."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from common.config import Role
from common.errors import WorkerError
from node.processes import RankProcess, start_rank
from tests.node.conftest import node_config

HELD_OPEN = ["/bin/sh", "-c", "echo last words >&2; sleep 60 & exec sleep 60"]
"""Its child holds its stderr and lives on."""


async def start(tmp_path: Path, *command: str) -> RankProcess:
    return await start_rank(node_config("/nowhere", Role.UNIFIED), list(command), tmp_path, 0)


def wait_for_child(pid: int) -> None:
    while not psutil.Process(pid).children():
        time.sleep(0.01)


def test_a_death_is_seen_at_once_whoever_holds_its_stderr(tmp_path: Path) -> None:
    async def run() -> None:
        rank = await start(tmp_path, *HELD_OPEN)
        try:
            wait_for_child(rank.pid)
            os.kill(rank.pid, signal.SIGKILL)
            error = await asyncio.wait_for(rank.wait(), 10)
            assert error.code == "rank_died" and "was killed by SIGKILL" in error.message
            started_s = time.monotonic()
            await rank.stop(grace_s=5, level=0)
            assert time.monotonic() - started_s < 5
        finally:
            os.killpg(rank.pid, signal.SIGKILL)

    asyncio.run(run())


def test_a_rank_does_not_wait_for_who_no_longer_reads_the_front_s_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(io.BytesIO):
        def write(self, _: object) -> int:
            raise BrokenPipeError

    class Stderr:
        buffer = Broken()

    async def run() -> WorkerError:
        monkeypatch.setattr("node.processes.sys.stderr", Stderr())
        rank = await start(tmp_path, "/bin/sh", "-c", "head -c 300000 /dev/zero >&2; echo the end >&2; exit 3")
        return await asyncio.wait_for(rank.wait(), 20)

    error = asyncio.run(run())
    assert "exit code 3" in error.message and error.message.endswith("the end")


def test_a_program_that_is_not_there_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"rank 0 cannot be started: .*No such file"):
        asyncio.run(start(tmp_path, "/no/such/program"))
