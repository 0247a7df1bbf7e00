"""Several processes that are one router (`--workers N`): each can ask the others for what only they have counted.

They listen at sockets in a folder that only their user can enter. A question is one line with a name, the answer is the
rest of the connection. One that does not answer in time, because it is just being started again, is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from common.config import SiblingConfig

_LIMIT_S = 2.0
_MAX_LINE_BYTES = 64 * 1024 * 1024

Answers = Mapping[str, Callable[[str], bytes]]
"""What is told to a question, given what follows its name."""


class Siblings:
    """The others of one process. config None: there are none."""

    def __init__(self, config: SiblingConfig | None) -> None:
        self._config = config
        self._answers: Answers = {}
        self._server: asyncio.AbstractServer | None = None

    async def start(self, answers: Answers) -> None:
        self._answers = answers
        if self._config is not None:
            path = _path(self._config, self._config.number)
            path.unlink(missing_ok=True)  # of a process that was killed
            self._server = await asyncio.start_unix_server(self._serve, path, limit=_MAX_LINE_BYTES)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def ask(self, question: str) -> list[bytes]:
        """question: a name, and what else it takes. What each of the others answers, in no order."""
        if self._config is None:
            return []
        config = self._config
        paths = [_path(config, number) for number in range(config.count) if number != config.number]
        said = await asyncio.gather(*(_ask(path, question) for path in paths))
        return [answer for answer in said if answer is not None]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            name, _, rest = (await reader.readline()).decode().strip().partition(" ")
            if name in self._answers:
                writer.write(self._answers[name](rest))
                await writer.drain()
        except (ConnectionError, ValueError):
            pass  # whoever asked has left, or was none of us
        finally:
            writer.close()


def _path(config: SiblingConfig, number: int) -> Path:
    return Path(config.folder) / f"{number}.sock"


async def _ask(path: Path, question: str) -> bytes | None:
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_LIMIT_S):
            reader, writer = await asyncio.open_unix_connection(path, limit=_MAX_LINE_BYTES)
            try:
                writer.write(question.encode() + b"\n")
                return await reader.read()
            finally:
                writer.close()
    return None
