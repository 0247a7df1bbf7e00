"""A listening socket whose clients have to pass the handshake: a bootstrap endpoint, or a prefill rank."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from common.errors import ConfigError, ServingError, WorkerError
from transfer.channel import Channel, connect, open_channel
from transfer.handshake import brief, introduce, welcome
from transfer.messages import Hello

log = logging.getLogger(__name__)

ACCEPT_PAUSE_S = 0.05
MAX_GREETINGS = 64
"""Connections that have not proven themselves yet: a handshake is over in milliseconds, so of more the oldest goes."""

Serve = Callable[[Channel, Hello], Awaitable[None]]


class FrameServer:
    """Calls `serve` with each connection that passed and its hello; closes the connection when `serve` is done."""

    def __init__(
        self, host: str, port: int, key: bytes | None, hello: Callable[[], Hello], timeout_s: float, serve: Serve
    ) -> None:
        self._host, self._port, self._key = host, port, key
        self._hello, self._timeout_s, self._serve = hello, timeout_s, serve
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._greetings: dict[asyncio.Task[Any], None] = {}  # the oldest first

    @property
    def address(self) -> tuple[str, int]:
        assert self._listeners, "the server was not started"
        return self._host, int(self._listeners[0].getsockname()[1])

    async def start(self) -> None:
        """Listen. Raises ConfigError when the address cannot be had."""
        try:
            self._listeners = listen(self._host, self._port)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {self._host}:{self._port}: {error.strerror or error}", code="port_taken"
            ) from error
        for listener in self._listeners:
            listener.setblocking(False)
            self._spawn(self._accept(listener))

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        """Take connections for as long as the server lives, whatever one of them does to itself."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # too many open files, or a connection that was gone already
                log.warning("a connection could not be taken: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            with suppress(OSError):
                self._talk_apart(open_channel(sock, loop))

    def _talk_apart(self, channel: Channel) -> None:
        """The connection ends with the task, also with one that is cancelled before it has begun."""
        self._spawn(self._talk(channel)).add_done_callback(lambda _: channel.close())

    async def _talk(self, channel: Channel) -> None:
        mine, theirs = self._hello(), None
        try:
            async with asyncio.timeout(self._timeout_s):
                with self._greeting():
                    theirs = await welcome(channel, self._key, mine)
            await self._serve(channel, theirs)
        except TimeoutError:
            log.warning("%s did not finish the handshake in %s s", channel.peer_host, self._timeout_s)
        except ServingError as error:
            # Without a session of our own nobody writes here: we answer, and then the client leaves.
            is_normal = theirs is not None and not mine.session and error.code == "peer_lost"
            level = logging.DEBUG if is_normal else logging.INFO
            log.log(level, "connection from %s ended: %s", channel.peer_host, brief(error))

    @contextmanager
    def _greeting(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._greetings[task] = None
        if len(self._greetings) > MAX_GREETINGS:
            oldest = next(iter(self._greetings))
            del self._greetings[oldest]
            oldest.cancel()
        try:
            yield
        finally:
            self._greetings.pop(task, None)

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a connection's task failed", exc_info=task.exception())


def listen(host: str, port: int) -> list[socket.socket]:
    """A listening socket for each address of `host`, all with one port; port 0: any. "::" is IPv4 too. Raises OSError.

    An address that this machine does not have is left out, unless there is no other.
    """
    both = host == "::" and socket.has_dualstack_ipv6()
    listeners: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, address in _addresses(host, port):
            number = listeners[0].getsockname()[1] if listeners else port
            try:
                listeners.append(
                    socket.create_server((address, number), family=family, backlog=256, dualstack_ipv6=both)
                )
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                missing = error
        if missing is not None and not listeners:
            raise missing
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    """The address families and addresses of `host` ("": all of this machine), each once."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


async def dial(host: str, port: int, key: bytes | None, hello: Hello, timeout_s: float) -> tuple[Channel, Hello]:
    """Connect and pass the handshake. Raises WorkerError, ConfigError or TransferError."""
    channel: Channel | None = None
    try:
        async with asyncio.timeout(timeout_s):
            channel = await connect(host, port)
            return channel, await introduce(channel, key, hello)
    except BaseException as error:
        if channel is not None:
            channel.close()
        if isinstance(error, TimeoutError):
            raise WorkerError(f"{host}:{port} did not answer in {timeout_s} s", code="bootstrap_timeout") from error
        raise
