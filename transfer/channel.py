"""One TCP connection that carries messages: 4 bytes of length (big endian), a signature once there is a seal, msgpack.

Reading belongs to an event loop; `send` may be called from any thread and never blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from common.errors import TransferError, WorkerError
from transfer.messages import Message
from transfer.seal import TAG_BYTES, Seal

MAX_GREETING_BYTES = 4096
MAX_FRAME_BYTES = 16 << 20
MAX_OUTBOX_BYTES = 4 * MAX_FRAME_BYTES

_PREFIX = struct.Struct(">I")
_READ_BYTES = 1 << 16


class Channel:
    """limit_bytes: the longest frame taken; small until the peer has proven itself (`trust`)."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.limit_bytes = MAX_GREETING_BYTES
        self.peer_host = str(sock.getpeername()[0])
        self._sock, self._loop = sock, loop
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Message).decode
        self._lock = threading.Lock()
        self._outbox = bytearray()
        self._inbox = bytearray()
        self._closed = False
        self._seal_out: Seal | None = None
        self._seal_in: Seal | None = None

    def trust(self, seal_out: Seal | None = None, seal_in: Seal | None = None) -> None:
        """The peer has proven itself: longer frames are taken from now on. With seals, every further frame is signed
        and those of the peer have to be."""
        self.limit_bytes = MAX_FRAME_BYTES
        self._seal_out, self._seal_in = seal_out, seal_in

    def send(self, message: Message) -> None:
        """Queue a message in order. A closed connection swallows it: whoever reads finds out."""
        body = self._encode(message)
        assert len(body) <= MAX_FRAME_BYTES - TAG_BYTES, f"{type(message).__name__} of {len(body)} bytes"
        with self._lock:
            if self._closed:
                return
            if self._seal_out is not None:
                body = self._seal_out.sign(body)
            waiting = bool(self._outbox)
            self._outbox += _PREFIX.pack(len(body)) + body
            if waiting:
                if len(self._outbox) > MAX_OUTBOX_BYTES:
                    self.shut()
                return
            self._flush()
            if self._outbox:
                self._loop.call_soon_threadsafe(self._watch)

    async def receive(self) -> Message:
        """The next message. Raises WorkerError at the end of the connection, TransferError for what is no message."""
        while (message := self._next()) is None:
            await self._more()
        return message

    async def pump(self, handle: Callable[[Message], None]) -> None:
        """Hand every message to `handle` as soon as it is here, until the connection ends; raises as `receive` does."""
        ended: asyncio.Future[None] = self._loop.create_future()

        def hand_over() -> None:
            while (message := self._next()) is not None:
                handle(message)

        def on_readable() -> None:  # called by the loop itself: a task would only run at the loop's next turn
            try:
                self._read()
                hand_over()
            except Exception as error:
                self._loop.remove_reader(self._sock)
                if not ended.done():
                    ended.set_exception(error)

        hand_over()
        self._loop.add_reader(self._sock, on_readable)
        try:
            await ended
        finally:
            self._loop.remove_reader(self._sock)

    def break_unless_acknowledged(self, within_s: float) -> None:
        """End the connection when the peer's host, not its process, acknowledges nothing for so long. TCP by itself
        tries for a quarter of an hour, ever more rarely, also when the wire has long been mended."""
        with contextlib.suppress(OSError):  # it has ended already
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(1000 * within_s))

    def shut(self) -> None:
        """From any thread: end the connection in both directions; whoever reads gets the end of it, and closes."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the peer was faster

    def close(self) -> None:
        """On the loop's thread, when nobody reads any more."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._loop.remove_writer(self._sock)
            self.shut()
            self._sock.close()

    def _next(self) -> Message | None:
        """The next message if all of it is here."""
        if len(self._inbox) < _PREFIX.size:
            return None
        size = _PREFIX.unpack_from(self._inbox)[0]
        if size > self.limit_bytes:
            raise TransferError(f"a frame of {size} bytes, {self.limit_bytes} allowed", code="protocol_error")
        end = _PREFIX.size + size
        if len(self._inbox) < end:
            return None
        body = bytes(self._inbox[_PREFIX.size : end])
        del self._inbox[:end]
        if self._seal_in is not None:
            body = self._seal_in.open(body)
        try:
            message: Message = self._decode(body)
        except msgspec.MsgspecError as error:
            raise TransferError(f"not a message of this protocol: {error}", code="protocol_error") from error
        return message

    async def _more(self) -> None:
        """Wait for bytes."""
        with self._loss_named():
            self._keep(await self._loop.sock_recv(self._sock, _READ_BYTES))

    def _read(self) -> None:
        """Take the bytes that are here, if any."""
        with self._loss_named(), contextlib.suppress(BlockingIOError):
            self._keep(self._sock.recv(_READ_BYTES))

    def _keep(self, data: bytes) -> None:
        if not data:
            raise WorkerError(f"the peer at {self.peer_host} closed the connection", code="peer_lost")
        self._inbox += data

    @contextlib.contextmanager
    def _loss_named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise WorkerError(f"the connection to {self.peer_host} broke: {error}", code="peer_lost") from error

    def _flush(self) -> None:
        """Give the kernel what it takes now; needs the lock."""
        try:
            while self._outbox:
                del self._outbox[: self._sock.send(self._outbox)]
        except BlockingIOError:
            return
        except OSError:
            self._outbox.clear()

    def _watch(self) -> None:
        with self._lock:
            if not self._closed:
                self._loop.add_writer(self._sock, self._drain)

    def _drain(self) -> None:
        with self._lock:
            self._flush()
            if not self._outbox:
                self._loop.remove_writer(self._sock)


def open_channel(sock: socket.socket, loop: asyncio.AbstractEventLoop) -> Channel:
    """Raises OSError, and then the socket is closed: it was reset before it was looked at."""
    try:
        return Channel(sock, loop)
    except OSError:
        sock.close()
        raise


async def connect(host: str, port: int) -> Channel:
    """The addresses of a host are tried in turn. Raises WorkerError when nobody answers at any of them."""
    loop = asyncio.get_running_loop()
    try:
        addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return open_channel(await _first_to_answer(addresses), loop)
    except (OSError, ValueError, OverflowError) as error:  # the last two: no host name, no port number
        raise WorkerError(f"no prefill node answers at {host}:{port}: {error}", code="peer_unreachable") from error


async def _first_to_answer(addresses: Iterable[tuple[Any, ...]]) -> socket.socket:
    """Raises OSError, with every reason: ConnectionRefusedError when nobody listens at any of them."""
    reasons: list[OSError] = []
    for family, kind, protocol, _, address in addresses:
        try:
            return await _connected(socket.socket(family, kind, protocol), address)
        except OSError as error:
            reasons.append(error)
    refused = all(isinstance(reason, ConnectionRefusedError) for reason in reasons)
    raise (ConnectionRefusedError if refused else OSError)("; ".join(dict.fromkeys(map(str, reasons))))


async def _connected(sock: socket.socket, address: Any) -> socket.socket:
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock
