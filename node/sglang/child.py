"""One SGLang server, on its leash: started, its output passed on, watched for its end, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import deque

from common.errors import WorkerError
from node.processes import how_ended
from node.sglang.flags import Launch

_SHOWN_LINES = 8
_LINE_BYTES = 1 << 16
_LAST_OUTPUT_S = 1.0
PREFIX = b"sglang | "


class SglangChild:
    """Made by `start_child`, ended by `stop`. hold: write end of the leash's standard input."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        hold: int,
        output: asyncio.StreamReader,
        pipe: asyncio.ReadTransport,
    ) -> None:
        self._process, self._hold, self._output, self._pipe = process, hold, output, pipe
        self._last: deque[str] = deque(maxlen=_SHOWN_LINES)
        self._reader = asyncio.create_task(self._pass_output())

    @property
    def pid(self) -> int:
        """Of its leash."""
        return self._process.pid

    async def wait(self) -> WorkerError:
        """Return once it has ended, with the error that says how."""
        code = await self._process.wait()
        await asyncio.wait([self._reader], timeout=_LAST_OUTPUT_S)
        return WorkerError("\n  ".join([f"sglang.launch_server {how_ended(code)}", *self._last]), code="engine_died")

    async def stop(self, at_once: asyncio.Event) -> None:
        """It drains for as long as its leash lets it, unless `at_once` comes. To be called once, also when it has
        ended."""
        os.close(self._hold)
        ended = asyncio.create_task(self._process.wait())
        hurried = asyncio.create_task(at_once.wait())
        await asyncio.wait([ended, hurried], return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not ended.done():
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
        await ended
        await asyncio.wait([self._reader], timeout=_LAST_OUTPUT_S)
        self._reader.cancel()
        self._pipe.close()

    async def _pass_output(self) -> None:
        """Line by line; a line without an end goes out in pieces."""
        while True:
            try:
                line = await self._output.readuntil(b"\n")
            except asyncio.IncompleteReadError as rest:
                line = rest.partial
            except asyncio.LimitOverrunError as over:
                line = await self._output.read(over.consumed)
            if not line:
                return
            self._last.append(line.decode(errors="replace").rstrip())
            sys.stderr.buffer.write(PREFIX + line.rstrip(b"\n") + b"\n")
            sys.stderr.buffer.flush()


async def start_child(python: str, launch: Launch, grace_s: float) -> SglangChild:
    """In a session of its own, so that Ctrl-C in a terminal reaches the supervisor alone.

    The pipes are ours, not asyncio's, whose `wait` would wait for what has escaped the leash and holds one open.
    """
    held, hold = os.pipe()
    printed, prints = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "node.sglang.leash", str(grace_s)),
            *(python, "-m", "sglang.launch_server", *launch.arguments),
            env=launch.environment(os.environ),
            stdin=held,
            stdout=prints,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    finally:
        os.close(held)
        os.close(prints)
    output = asyncio.StreamReader(limit=_LINE_BYTES)
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(output), os.fdopen(printed, "rb", 0)
    )
    return SglangChild(process, hold, output, pipe)
