"""The router's HTTP/1.1 client: pooled connections, and a body handed over as it arrives.

What a general client does for every chunk (a timer, a reader, a generator of its own) costs more than passing the chunk
on, so this one does less: llhttp parses, the body waits in a list, and one timer an exchange looks now and then whether
the worker has been silent for too long. No redirects, no cookies, no compression, no proxies. Knows nothing of legs.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools

from common.config import RouterConfig
from common.errors import WorkerError
from router.client import LOST, REFUSED, REFUSED_KEY, UNREACHABLE

_BUFFER_BYTES = 64 * 1024
"""Of one body that the consumer has not taken; beyond it nothing more is read from the worker."""
_MAX_HEAD_BYTES = 256 * 1024
_MAX_ANSWER_BYTES = 512 * 2**20
_MAX_ORDER_BYTES = 64 * 2**20
"""Of a body that is read as a whole: of an answer to a client, and of one that has a time limit (health, orders)."""
_MAX_KNOWN_URL = 256
"""Characters; longer URLs, which clients may have a part in, are taken apart anew each time."""
_KEY_REFUSALS = {
    401: "--worker-api-key-file is missing or its key is unknown there",
    403: "the key of --worker-api-key-file may not ask this there",
}
# Below the 5 s after which uvicorn closes an idle connection, so that no request is sent into a closing one.
_KEEP_ALIVE_S = 4.0


class _Origin(NamedTuple):
    host: str
    port: int
    is_tls: bool


class _Target(NamedTuple):
    """head: of a request, up to the values of the header content-length."""

    origin: _Origin
    head: bytes


def _target(method: str, url: str) -> _Target:
    return _known_target(method, url) if len(url) <= _MAX_KNOWN_URL else _new_target(method, url)


def _new_target(method: str, url: str) -> _Target:
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    head = f"{method} {path} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\ncontent-length: "
    origin = _Origin(parts.hostname or "", parts.port or (443 if is_tls else 80), is_tls)
    return _Target(origin, head.encode("latin-1"))


_known_target = lru_cache(maxsize=4096)(_new_target)


class HttpNetwork:
    """`Network` (router/client.py). To be made inside a running event loop.

    tls: for workers with https URLs. authorization: the header's value, for every request.
    """

    def __init__(
        self, config: RouterConfig, tls: ssl.SSLContext | None = None, authorization: str | None = None
    ) -> None:
        self._connect_timeout_s = config.connect_timeout_s
        self._idle_timeout_s = config.idle_timeout_s
        self._tls = tls
        self._authorization = b"" if authorization is None else f"authorization: {authorization}\r\n".encode("latin-1")
        self._loop = asyncio.get_running_loop()
        self._idle: defaultdict[_Origin, deque[_Connection]] = defaultdict(deque)  # the one used last is the last
        self._open: set[_Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    async def send(
        self,
        method: str,
        url: str,
        body: bytes | None = None,
        *,
        limit_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> _Answer:
        target = _target(method, url)
        deadline = None if limit_s is None else self._loop.time() + limit_s
        with _translated():
            async with asyncio.timeout_at(deadline):
                connection = self._pooled(target.origin) or await self._connect(target.origin)
                answer = _Answer(self, connection, deadline)
                lines = self._authorization + _lines(headers) if headers else self._authorization
                connection.request(answer, _request(target.head, body or b"", lines))
                await answer.head()
        if answer.status in _KEY_REFUSALS:
            answer.close()
            what = f"{urlsplit(url).path} answered {answer.status}: {_KEY_REFUSALS[answer.status]}"
            raise WorkerError(what, code=REFUSED_KEY, status=502)
        return answer

    def _pooled(self, origin: _Origin) -> _Connection | None:
        """The connection that was used last, if it is young enough."""
        idle = self._idle[origin]
        while idle:
            connection = idle.pop()
            if connection.is_usable and not self._is_stale(connection):
                return connection
            connection.close()
        return None

    def _is_stale(self, connection: _Connection) -> bool:
        return self._loop.time() - connection.heard_s >= _KEEP_ALIVE_S

    def _sweep(self) -> None:
        """Close what has been idle for too long."""
        self._sweeper = None
        for idle in self._idle.values():
            while idle and (self._is_stale(idle[0]) or not idle[0].is_usable):
                idle.popleft().close()
        if any(self._idle.values()):
            self._sweeper = self._loop.call_later(_KEEP_ALIVE_S, self._sweep)

    async def _connect(self, origin: _Origin) -> _Connection:
        """Raises WorkerError when no address of the host takes it."""
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                addresses = await self._loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
                connection = await self._connect_first(origin, [address[4][0] for address in addresses])
        except UnicodeError as error:
            raise WorkerError("no connection (its name is no name of a host)", code=UNREACHABLE) from error
        except OSError as error:  # a time-out is one too
            code = REFUSED if isinstance(error, ConnectionRefusedError) else UNREACHABLE
            raise WorkerError(f"no connection ({_reason(error)})", code=code) from error
        connection.origin = origin
        self._open.add(connection)
        return connection

    async def _connect_first(self, origin: _Origin, hosts: Sequence[str | int]) -> _Connection:
        """Raises the first error when there is no connection; one that is not a refusal if there is one."""
        errors: list[OSError] = []
        for host in hosts:
            try:
                try:
                    return await self._connect_to(str(host), origin)
                except ConnectionResetError:  # who listened is just ending: asked again, the port is closed
                    return await self._connect_to(str(host), origin)
            except OSError as error:
                errors.append(error)
        raise min(errors, key=lambda error: isinstance(error, ConnectionRefusedError))

    async def _connect_to(self, host: str, origin: _Origin) -> _Connection:
        tls, name = ((self._tls or True), origin.host) if origin.is_tls else (None, None)
        _, connection = await self._loop.create_connection(
            self._make_connection, host, origin.port, ssl=tls, server_hostname=name
        )
        return connection

    def _make_connection(self) -> _Connection:
        return _Connection(self._loop, self._idle_timeout_s, self._open.discard)

    def give_back(self, connection: _Connection) -> None:
        """Its answer has been received to the end, or it is closed."""
        if connection.is_usable:
            self._idle[connection.origin].append(connection)
            if self._sweeper is None:
                self._sweeper = self._loop.call_later(_KEEP_ALIVE_S, self._sweep)

    async def close(self) -> None:
        for connection in list(self._open):
            connection.close()
        self._idle.clear()
        if self._sweeper is not None:
            self._sweeper.cancel()
        await asyncio.sleep(0)


def _request(head: bytes, body: bytes, lines: bytes) -> bytes:
    return b"%s%d\r\n%s\r\n%s" % (head, len(body), lines, body)


def _lines(headers: Mapping[str, str]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1")


class _Connection(asyncio.Protocol):
    """One connection, one exchange at a time. heard_s: when its last bytes came. on_lost: told when it is gone.

    The parser calls the methods on_*, from inside data_received.
    """

    origin: _Origin

    def __init__(
        self, loop: asyncio.AbstractEventLoop, idle_timeout_s: float, on_lost: Callable[[_Connection], None]
    ) -> None:
        self._loop = loop
        self._idle_timeout_s = idle_timeout_s
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: _Answer | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._is_paused = False
        self._ends_with_connection = False
        self._head_bytes = 0
        self.heard_s = 0.0

    @property
    def is_usable(self) -> bool:
        return self._answer is None and self._transport is not None and not self._transport.is_closing()

    def request(self, answer: _Answer, data: bytes) -> None:
        assert self._transport is not None
        self._answer = answer
        self._head_bytes = 0
        self.heard_s = self._loop.time()
        self._watch = self._loop.call_later(self._idle_timeout_s, self._check_silence)
        self._transport.write(data)

    def close(self) -> None:
        """Nothing more is heard of it; an answer that waits is told."""
        if self._transport is not None:
            self._transport.abort()
        self._end(WorkerError("the connection broke (closed)", code=LOST, status=502))

    def pause(self) -> None:
        if not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self.heard_s = self._loop.time()
            self._transport.resume_reading()

    def _check_silence(self) -> None:
        """A worker whose consumer is behind is not silent: nobody listens."""
        if self._is_paused:
            self.heard_s = self._loop.time()
        left = self.heard_s + self._idle_timeout_s - self._loop.time()
        if left > 0:
            self._watch = self._loop.call_later(left, self._check_silence)
            return
        self._fail(WorkerError("no answer in time", code="worker_timeout", status=504))

    def _fail(self, error: WorkerError) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._end(error)

    def _end(self, error: WorkerError | None) -> None:
        """The exchange is over. Does nothing the second time."""
        answer, self._answer = self._answer, None
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if answer is not None:
            answer.end(error)

    # Of the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one but for its base class

    def data_received(self, data: bytes) -> None:
        self.heard_s = self._loop.time()
        if self._answer is None:  # nobody has asked
            self.close()
            return
        if not self._answer.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail(WorkerError("its answer is no HTTP", code="bad_answer", status=502))
            return
        if self._head_bytes > _MAX_HEAD_BYTES and self._answer is not None and not self._answer.status:
            self._fail(WorkerError("the head of its answer is too long", code="bad_answer", status=502))

    def connection_lost(self, error: Exception | None) -> None:
        answer = self._answer
        is_whole = error is None and answer is not None and answer.status > 0 and self._ends_with_connection
        reason = "closed" if error is None else _reason(error)
        self._end(None if is_whole else WorkerError(f"the connection broke ({reason})", code=LOST, status=502))
        self._transport = None
        self._on_lost(self)

    # Of the parser

    def on_message_begin(self) -> None:
        self._ends_with_connection = True
        if self._answer is None:  # more than was asked for: whose answer it is nobody can say
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False
        elif name == b"content-type" and self._answer is not None:
            self._answer.content_type = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 100:
            raise ValueError("no status")  # an error of the parser, by way of it
        if self._answer is not None:
            self._answer.on_head(status)

    def on_body(self, body: bytes) -> None:
        if self._answer is not None:
            self._answer.feed(body)

    def on_message_complete(self) -> None:
        if self._answer is None or self._answer.status == 0:  # an interim answer
            return
        if not self._parser.should_keep_alive() and self._transport is not None:
            self._transport.close()
        self.resume()
        self._end(None)


class _Answer:
    """`Answer` (router/client.py). deadline: of the whole exchange, in the loop's time."""

    def __init__(self, network: HttpNetwork, connection: _Connection, deadline: float | None) -> None:
        self._network = network
        self._connection = connection
        self._deadline = deadline
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._is_over = False
        self._error: WorkerError | None = None
        self._news: asyncio.Future[None] | None = None
        self.status = 0
        self.content_type = "application/json"

    # Of the connection

    def on_head(self, status: int) -> None:
        """1xx: another head follows."""
        if status >= 200:
            self.status = status
            self._tell()

    def feed(self, body: bytes) -> None:
        self._parts.append(body)
        self._num_bytes += len(body)
        if self._num_bytes > _BUFFER_BYTES:
            self._connection.pause()
        self._tell()

    def end(self, error: WorkerError | None) -> None:
        self._is_over, self._error = True, error
        self._network.give_back(self._connection)
        self._tell()

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    # Of the consumer

    async def _wait(self) -> None:
        self._news = asyncio.get_running_loop().create_future()
        try:
            await self._news
        except asyncio.CancelledError:
            self.close()
            raise

    async def head(self) -> None:
        """Wait for it. Raises WorkerError."""
        while not (self.status or self._is_over):
            await self._wait()
        if self._error is not None and not self._parts:
            raise self._error

    async def next(self) -> bytes:
        """What has arrived since, at least a byte; empty at the end. Raises WorkerError."""
        while not (self._parts or self._is_over):
            await self._wait()
        if self._parts:
            found = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts.clear()
            self._num_bytes = 0
            self._connection.resume()
            return found
        if self._error is not None:
            raise self._error
        return b""

    async def read(self) -> bytes:
        limit = _MAX_ANSWER_BYTES if self._deadline is None else _MAX_ORDER_BYTES
        parts: list[bytes] = []
        with _translated():
            async with asyncio.timeout_at(self._deadline):
                while part := await self.next():
                    parts.append(part)
                    limit -= len(part)
                    if limit < 0:
                        self.close()
                        raise WorkerError("its answer is too long", code="bad_answer", status=502)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        if not self._is_over:
            self._connection.close()


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise WorkerError("no answer in time", code="worker_timeout", status=504) from error


def _reason(error: BaseException) -> str:
    """Of the foreign exception only what names no address: clients see this."""
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or type(error).__name__}"
    if isinstance(error, socket.gaierror):
        return "its host name does not resolve"
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number) if number and number > 0 else type(error).__name__
