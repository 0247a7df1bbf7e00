"""The router's side of the wire to workers: one pooled HTTP client behind a seam of two methods.

Failures of the HTTP library become `WorkerError` here and nowhere else. Knows nothing of legs, rooms or workers.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Protocol

import aiohttp

from common.config import RouterConfig
from common.errors import WorkerError

REFUSED = "worker_unavailable"
"""Code of the error when nobody listens."""
UNREACHABLE = "worker_unreachable"
"""Code of the error when no connection could be opened for another reason. In both cases the request was not seen."""
LOST = "worker_lost"
"""Code of the error when the connection broke. The request may have been seen."""

_READ_BUFFER_BYTES = 64 * 1024
# Below the 5 s after which uvicorn closes an idle connection, so that no request is sent into a closing one.
_KEEP_ALIVE_S = 4.0


class Answer(Protocol):
    """A worker's answer whose head has arrived. Read it once, by either verb, or close it.

    Both verbs raise WorkerError when the connection breaks or stays silent for too long.
    """

    status: int
    content_type: str

    async def read(self) -> bytes:
        """The whole body; the connection returns to the pool."""

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Nothing more is read from the worker than the consumer takes, but for one buffer."""

    def close(self) -> None:
        """Give up what was not read: closes the connection. Does nothing after the body has ended."""


class Network(Protocol):
    """What the router needs of a network."""

    async def send(self, method: str, url: str, body: bytes | None = None, *, limit_s: float | None = None) -> Answer:
        """Open an exchange. limit_s: for all of it, the body included. Cancelling closes the connection.

        Raises WorkerError: code `worker_unavailable` or `worker_unreachable` (503) when no connection could be opened,
        `worker_lost` (502) when it broke, `worker_timeout` (504) when the worker stayed silent.
        """

    async def close(self) -> None:
        """Close every connection."""


class AiohttpNetwork:
    """`Network` over aiohttp. To be made inside a running event loop."""

    def __init__(self, config: RouterConfig) -> None:
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=config.connect_timeout_s, sock_read=config.idle_timeout_s
        )
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            headers={"content-type": "application/json"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("Accept-Encoding", "User-Agent"),
            read_bufsize=_READ_BUFFER_BYTES,
            timeout=self._timeout,
        )

    async def send(self, method: str, url: str, body: bytes | None = None, *, limit_s: float | None = None) -> Answer:
        timeout = self._timeout
        if limit_s is not None:
            timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=timeout.sock_connect)
        with _translated():
            response = await self._session.request(method, url, data=body, timeout=timeout, allow_redirects=False)
        return _AiohttpAnswer(response)

    async def close(self) -> None:
        await self._session.close()


class _AiohttpAnswer:
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.content_type = response.headers.get("content-type", "application/json")

    async def read(self) -> bytes:
        with _translated():
            return await self._response.read()

    async def chunks(self) -> AsyncIterator[bytes]:
        with _translated():
            async for chunk in self._response.content.iter_any():
                yield chunk

    def close(self) -> None:
        self._response.close()


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
        cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
        code = REFUSED if isinstance(cause, ConnectionRefusedError) else UNREACHABLE
        raise WorkerError(f"no connection ({_reason(error)})", code=code) from error
    except (TimeoutError, aiohttp.ServerTimeoutError) as error:
        raise WorkerError("no answer in time", code="worker_timeout", status=504) from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise WorkerError(f"the connection broke ({_reason(error)})", code=LOST, status=502) from error


def _reason(error: BaseException) -> str:
    """Of the foreign exception only what names no address: clients see this."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    number = cause.errno if isinstance(cause, OSError) else None
    return os.strerror(number) if number and number > 0 else type(cause).__name__
