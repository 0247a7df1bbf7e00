"""The rank processes of a node: started with their configuration on stdin, watched, stopped.

What a rank prints goes where the front prints. The end of its stderr is kept, for the message about its death. Its pipe
is ours, not asyncio's, whose `wait` would wait for whatever else holds it open.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from common.config import NodeConfig, Role, rank_config
from common.errors import WorkerError

log = logging.getLogger(__name__)

KEPT_STDERR_BYTES = 4096
SHOWN_STDERR_LINES = 8
STDERR_READ_BYTES = 65536
LAST_OUTPUT_S = 0.1

# Of the prepared products that torch (ideep) and oneDNN keep for each number of tokens. With their own limits, 1024, a
# rank's memory grows for hours by hundreds of MB; with these it stays, at the same speed.
PRODUCT_CACHES = {"LRU_CACHE_CAPACITY": "64", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}

RANK_MODULES = {Role.UNIFIED: "node.rank", Role.PREFILL: "prefill_node.rank", Role.DECODE: "decode_node.rank"}


def rank_command(role: Role) -> list[str]:
    return [sys.executable, "-m", RANK_MODULES[role]]


class _Printed(NamedTuple):
    """The end of a pipe from which a rank's stderr is read."""

    reader: asyncio.StreamReader
    pipe: asyncio.ReadTransport


class RankProcess:
    """One rank. Made by `start_rank`, ended by `stop`."""

    def __init__(self, rank: int, process: asyncio.subprocess.Process, printed: _Printed, passed_to: BinaryIO) -> None:
        self.rank = rank
        self._process = process
        self._printed = printed
        self._stderr_tail = b""
        self._stderr_reader = asyncio.create_task(self._pass_stderr(passed_to))

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> WorkerError:
        """Return once the process has ended, with the error that says how."""
        code = await self._process.wait()
        await asyncio.wait([self._stderr_reader], timeout=LAST_OUTPUT_S)  # a grandchild may hold the pipe open
        return WorkerError(f"rank {self.rank} (pid {self.pid}) {how_ended(code)}{self._last_lines()}", code="rank_died")

    async def stop(self, *, grace_s: float, level: int) -> None:
        """Wait for it to end by itself, then SIGTERM, then SIGKILL; grace_s seconds before each.

        level: at which it is logged that it did not end by itself.
        """
        if not await self._ended_within(grace_s):
            log.log(level, "rank %d (pid %d) does not end by itself", self.rank, self.pid)
            self._signal(signal.SIGTERM)
            if not await self._ended_within(grace_s):
                self.kill()
                await self._process.wait()
        await asyncio.wait([self._stderr_reader], timeout=0.5)
        self.close()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """Of one that has ended: read no more of what its own children may print."""
        self._stderr_reader.cancel()
        self._printed.pipe.close()

    async def _ended_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._process.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _signal(self, number: signal.Signals) -> None:
        try:
            self._process.send_signal(number)
        except ProcessLookupError:
            log.debug("rank %d was gone before %s", self.rank, number.name)

    async def _pass_stderr(self, passed_to: BinaryIO) -> None:
        """To the end, also when nobody reads the front's own any more: a rank must not wait for that."""
        is_read = True
        while chunk := await self._printed.reader.read(STDERR_READ_BYTES):
            self._stderr_tail = (self._stderr_tail + chunk)[-KEPT_STDERR_BYTES:]
            is_read = is_read and _passed(chunk, passed_to)

    def _last_lines(self) -> str:
        lines = self._stderr_tail.decode(errors="replace").strip().splitlines()[-SHOWN_STDERR_LINES:]
        return "".join(f"\n  {line}" for line in lines)


def _passed(chunk: bytes, passed_to: BinaryIO) -> bool:
    try:
        passed_to.write(chunk)
        passed_to.flush()
    except OSError:
        return False
    return True


async def start_rank(
    config: NodeConfig, command: list[str], ipc_dir: Path, rank: int, shared_weights: str | None = None
) -> RankProcess:
    """Start one rank in a session of its own, so that Ctrl-C in a terminal reaches the front alone. shared_weights: see
    `weights_file`. Raises WorkerError when there are no processes, threads or descriptors left, or no memory."""
    settings = msgspec.json.encode(rank_config(config, rank, shared_weights))
    try:
        async with _stderr_pipe() as (prints, printed):
            with _file_of(settings) as stdin:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    "--ipc",
                    str(ipc_dir),
                    "--front",
                    str(os.getpid()),
                    "--rank",
                    str(rank),
                    env=PRODUCT_CACHES | os.environ,
                    stdin=stdin,
                    stderr=prints,
                    start_new_session=True,
                )
    except (OSError, RuntimeError, MemoryError) as error:
        raise WorkerError(f"rank {rank} cannot be started: {error}", code="rank_died") from error
    return RankProcess(rank, process, printed, sys.stderr.buffer)


@asynccontextmanager
async def _stderr_pipe() -> AsyncIterator[tuple[int, _Printed]]:
    """Yields the end to print to, closed on leaving, and the one to read, which an error closes too."""
    readable, prints = os.pipe()
    file, reader = os.fdopen(readable, "rb", 0), asyncio.StreamReader()
    try:
        loop = asyncio.get_running_loop()
        pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
    except BaseException:
        os.close(prints)
        file.close()
        raise
    try:
        yield prints, _Printed(reader, pipe)
    except BaseException:
        pipe.close()
        raise
    finally:
        os.close(prints)


@contextmanager
def _file_of(content: bytes) -> Iterator[int]:
    """A file in memory to read it from."""
    with os.fdopen(os.memfd_create("tandem-settings"), "wb+", 0) as file:
        file.write(content)
        file.seek(0)
        yield file.fileno()


@contextmanager
def weights_file(config: NodeConfig) -> Iterator[str | None]:
    """The path of a file in memory, gone at the end, for weights that ranks on the CPU share; None for others."""
    if config.engine.dp_size == 1 or config.model.device != "cpu":
        yield None
        return
    file = os.memfd_create("tandem-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        yield f"/proc/{os.getpid()}/fd/{file}"
    finally:
        os.close(file)


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used, all its threads together; 0 when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0.0
    user, system = stat.rpartition(b")")[2].split()[11:13]  # fields 14 and 15; the name before them may hold anything
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def how_ended(code: int) -> str:
    """code: as `subprocess` gives it, minus the signal for a process that one killed."""
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"ended with exit code {code}"
