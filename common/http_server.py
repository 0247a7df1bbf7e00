"""What router and nodes share as HTTP servers: how much of a request they take and how errors look."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from typing import Any

import httptools
import msgspec
import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from common.errors import AbortedError, ErrorRecord, RequestError, ServingError

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 128
HEAD_TIMEOUT_S = 60.0
"""For a request's line and headers, from its first byte on, and for the first byte of a new connection."""

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol; a request line and headers that are too much get 431 as soon as that shows, and a connection
    whose request does not come is closed.

    Like uvicorn's, it takes the end of the client's sending for the end of the client: a connection of which one half
    was closed looks the same as one that was closed, and whoever waits for nothing must not keep a rank at work.
    """

    _head_bytes = 0
    _in_head = True
    _is_too_much = False
    _late: asyncio.TimerHandle | None = None  # while a head is awaited

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._await_no_head()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._late = self.loop.call_later(HEAD_TIMEOUT_S, self._on_late_head)

    def _on_late_head(self) -> None:
        """Whoever has begun the next request too early may read the answer to the one before."""
        if self.has_open_answer:
            self._await_head()
        else:
            self.transport.close()

    def _await_no_head(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def data_received(self, data: bytes) -> None:
        was_in_head = self._in_head
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._in_head and self._late is None:
            self._await_head()
        if was_in_head and self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._is_too_much = True
                self.send_400_response("")

    def _parse(self, data: bytes) -> None:
        try:
            while data:
                data = self._parse_to_upgrade(data)
        except httptools.HttpParserError:
            self.send_400_response("it cannot be parsed")

    def _parse_to_upgrade(self, data: bytes) -> bytes:
        """Returns what is still to be parsed.

        The parser takes what follows a header Upgrade for another protocol, so the request comes again without it: a
        server that speaks no other protocol ignores the header (RFC 9110, 7.8).
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._start_without_upgrade() + data[upgrade.args[0] :]
        return b""

    def _start_without_upgrade(self) -> bytes:
        """Take a new parser; returns the head that it begins with: the old one's, without its header Upgrade."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refuse_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._await_no_head()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._refuse_head()
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("no proxy")  # a 400, by way of the parser
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    @property
    def has_open_answer(self) -> bool:
        """A request has come in whole, and its answer has not been written to the client's connection."""
        is_answering = self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete
        return is_answering or self.transport.get_write_buffer_size() > 0

    def _refuse_head(self) -> None:
        """Raises what the parser turns into a call of `send_400_response`."""
        self._is_too_much = True
        raise ValueError("too much")

    def send_400_response(self, msg: str) -> None:
        """The answer to what is no request, and the end of the connection."""
        error = _head_too_large() if self._is_too_much else RequestError(f"no HTTP request: {msg}", code="bad_http")
        response = error_response(error)
        head = [b"HTTP/1.1 %d \r\n" % response.status_code, b"connection: close\r\n"]
        head += [b"%s: %s\r\n" % header for header in response.raw_headers]
        self.transport.write(b"".join([*head, b"\r\n", response.body]))
        self.transport.close()


def num_open_answers(server: uvicorn.Server) -> int:
    """Connections of this server, whose protocol is LimitedProtocol, with an answer that is not written to its end."""
    return sum(getattr(connection, "has_open_answer", False) for connection in server.server_state.connections)


def _head_too_large() -> RequestError:
    message = f"the request line and headers have more than {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers"
    return RequestError(message, code="headers_too_large", status=431)


# Bodies


async def read_body(scope: Scope, receive: Receive, *, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body of a request. What is refused is not read: the server drops what still comes of it.

    Raises RequestError: 413 when it is, or says that it is, longer than max_bytes; 408 when it is not complete within
    timeout_s; 415 when it is compressed. Raises AbortedError when the client leaves.
    """
    _check_encoding(scope["headers"])
    _check_declared_length(scope["headers"], max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(receive, max_bytes)
    except TimeoutError:
        message = f"the body was not complete within {timeout_s:g} s"
        raise RequestError(message, code="upload_timeout", status=408) from None


async def _read(receive: Receive, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise AbortedError("the client left before its request was complete", code="client_disconnected")
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise _body_too_large(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _check_encoding(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """A body is taken as it is: what it unpacks to would be bounded by nothing."""
    for name, value in headers:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise RequestError("content-encoding: send the body as it is", code="unsupported_encoding", status=415)


def _check_declared_length(headers: Iterable[tuple[bytes, bytes]], max_bytes: int) -> None:
    """The HTTP parser has seen to it that a length is a number."""
    for name, value in headers:
        if name == b"content-length" and int(value) > max_bytes:
            raise _body_too_large(max_bytes)


def _body_too_large(max_bytes: int) -> RequestError:
    return RequestError(f"the body has more than {max_bytes} bytes", code="body_too_large", status=413)


# Errors


def json_response(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def error_response(error: ServingError) -> Response:
    response = record_response(error.record())
    response.headers.update(error_headers(error))
    return response


def error_headers(error: ServingError) -> dict[str, str]:
    """What goes with an error in the answer's head."""
    headers = {"www-authenticate": "Bearer"} if error.http_status == 401 else {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return headers


def record_response(record: ErrorRecord) -> Response:
    """A client that is too slow to send its request loses its connection with the answer."""
    headers = {"connection": "close"} if record.status == 408 else None
    return Response(msgspec.json.encode(record.body()), record.status, headers, media_type="application/json")


def http_error_response(request: Request, error: HTTPException) -> Response:
    """For a path that is not there or does not take the method."""
    path = request.url.path
    known = {404: f"no such path: {path}", 405: f"{path} does not take {request.method}"}
    code = _HTTP_CODES.get(error.status_code, "http_error")
    message = known.get(error.status_code, str(error.detail))
    response = error_response(RequestError(message, code=code, status=error.status_code))
    response.headers.update(error.headers or {})
    return response
