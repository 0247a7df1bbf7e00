"""The router's HTTP client against a server that answers whatever bytes a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from common.config import RouterConfig
from common.errors import WorkerError
from router import http_client
from router.http_client import HttpNetwork

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n"


class Wire:
    """A server of raw bytes and a client. num_connections: opened so far."""

    def __init__(self, config: RouterConfig, serve: Serve) -> None:
        self.network = HttpNetwork(config)
        self.num_connections = 0
        self.url = ""
        self.heads: list[bytes] = []
        self.tasks: set[asyncio.Task[None] | None] = set()
        self._serve = serve

    async def on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.tasks.add(asyncio.current_task())
        try:
            while True:
                self.heads.append(await read_request(reader))
                await self._serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().splitlines() if line.startswith(b"content-length:"))
    return head + await reader.readexactly(int(length.partition(b":")[2]))


@contextlib.asynccontextmanager
async def wire(serve: Serve, config: RouterConfig | None = None) -> AsyncIterator[Wire]:
    found = Wire(config or RouterConfig(), serve)
    server = await asyncio.start_server(found.on_connection, "127.0.0.1", 0)
    found.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x"
    try:
        yield found
    finally:
        await found.network.close()
        server.close()
        await server.wait_closed()
        for task in found.tasks:
            assert task is not None
            task.cancel()
            await asyncio.wait([task])
        await asyncio.sleep(0.01)  # the transports close


def sends(*parts: bytes, closes: bool = False) -> Serve:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        if closes:
            writer.close()

    return serve


@pytest.mark.parametrize(
    ("parts", "closes", "body"),
    [
        ([HEAD, b"content-length: 5\r\n\r\nhe", b"llo"], False, b"hello"),
        ([HEAD, b"content-length: 0\r\n\r\n"], False, b""),
        ([HEAD + b"transfer-encoding: chunked\r\n\r\n", b"3\r\nhel\r\n2\r\nl", b"o\r\n0\r\n\r\n"], False, b"hello"),
        ([b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"content-length: 2\r\n\r\nok"], False, b"ok"),
        ([HEAD + b"\r\nup to ", b"the end"], True, b"up to the end"),
        ([b"HTTP/1.1 102 Soon\r\ncontent-length: 9\r\n\r\n", HEAD + b"\r\nup to ", b"the end"], True, b"up to the end"),
        ([HEAD + b"connection: close\r\ncontent-length: 2\r\n\r\nok"], True, b"ok"),
    ],
)
async def test_a_body_is_whole_however_it_is_framed(parts: list[bytes], closes: bool, body: bytes) -> None:
    async with wire(sends(*parts, closes=closes)) as found:
        for _ in range(2):
            answer = await found.network.send("POST", found.url, b"{}")
            assert (answer.status, answer.content_type) == (200, "text/plain")
            assert await answer.read() == body
        assert found.num_connections == (2 if closes else 1)


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([b"SSH-2.0-OpenSSH\r\n"], "bad_answer"),
        ([b""], "worker_lost"),
        ([HEAD], "worker_lost"),
        ([HEAD + b"content-length: 5\r\n\r\nhe"], "worker_lost"),
        ([HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\nhel\r\n"], "worker_lost"),
        ([b"HTTP/1.1 099 Odd\r\n\r\n"], "bad_answer"),
        ([HEAD + b"x: " + b"a" * 300_000], "bad_answer"),
    ],
)
async def test_an_answer_that_is_none_or_breaks_off_is_an_error(parts: list[bytes], code: str) -> None:
    async with wire(sends(*parts, closes=True)) as found:
        with pytest.raises(WorkerError) as caught:
            await (await found.network.send("POST", found.url, b"{}")).read()
        assert caught.value.code == code


async def test_silence_in_the_middle_of_a_body_ends_it_and_the_connection() -> None:
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"content-length: 9\r\n\r\nhello")
        await reader.read()
        closed.set()

    async with wire(serve, RouterConfig(idle_timeout_s=0.2)) as found:
        answer = await found.network.send("POST", found.url, b"{}")
        assert await answer.next() == b"hello"
        with pytest.raises(WorkerError) as caught:
            await answer.next()
        assert caught.value.code == "worker_timeout"
        await asyncio.wait_for(closed.wait(), 10)


async def test_a_limit_counts_for_head_and_body_together() -> None:
    async with wire(sends(HEAD + b"content-length: 9\r\n\r\nhello")) as found:
        answer = await found.network.send("GET", found.url, limit_s=0.2)
        with pytest.raises(WorkerError) as caught:
            await answer.read()
        assert caught.value.code == "worker_timeout"


async def test_no_more_is_read_than_the_consumer_takes_and_a_slow_consumer_is_not_the_workers_silence() -> None:
    size, sent = 64 * 2**20, 0

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % size)
        for _ in range(size // 2**16):
            writer.write(bytes(2**16))
            await writer.drain()
            sent += 2**16

    async with wire(serve, RouterConfig(idle_timeout_s=0.2)) as found:
        answer = await found.network.send("GET", found.url)
        await asyncio.sleep(0.6)  # three times the silence that is allowed
        assert sent < size / 2
        received = 0
        while part := await answer.next():
            received += len(part)
        assert received == size


async def test_giving_up_closes_the_connection_and_the_next_request_gets_another() -> None:
    async with wire(sends(HEAD + b"content-length: 9\r\n\r\nhello")) as found:
        answer = await found.network.send("GET", found.url)
        answer.close()
        answer.close()
        with pytest.raises(WorkerError):
            while await answer.next():
                pass
        other = await found.network.send("GET", found.url)
        assert await other.next() == b"hello"
        assert found.num_connections == 2


async def test_cancelling_closes_the_connection() -> None:
    asked, closed = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        closed.set()

    async with wire(serve) as found:
        task = asyncio.create_task(found.network.send("GET", found.url))
        await asked.wait()
        task.cancel()
        await asyncio.wait_for(closed.wait(), 10)


async def test_every_address_of_a_name_is_tried_and_a_refusal_is_told_from_the_rest() -> None:
    async with wire(sends(HEAD + b"content-length: 2\r\n\r\nok")) as found:
        by_name = found.url.replace("127.0.0.1", "localhost")
        assert await (await found.network.send("GET", by_name)).read() == b"ok"
    network = HttpNetwork(RouterConfig())
    for url, code, said in (
        (by_name, "worker_unavailable", "refused"),
        ("http://nowhere.invalid/", "worker_unreachable", "its host name does not resolve"),
    ):
        with pytest.raises(WorkerError, match=said) as caught:
            await network.send("GET", url)
        assert caught.value.code == code
    await network.close()


async def test_a_listener_that_ends_while_one_connects_is_nobody_who_listens() -> None:
    """What waits to be accepted is reset then; that it is gone the second try says."""
    network = HttpNetwork(RouterConfig())
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        asking = asyncio.create_task(network.send("GET", f"http://127.0.0.1:{listener.getsockname()[1]}/"))
        for _ in range(10):  # until it is connecting, and no longer
            await asyncio.sleep(0)
            if select.select([listener], [], [], 0)[0]:
                break
    with pytest.raises(WorkerError, match="refused") as caught:
        await asking
    assert caught.value.code == "worker_unavailable"
    await network.close()


async def test_headers_are_sent_beside_those_of_the_body() -> None:
    async with wire(sends(HEAD + b"content-length: 2\r\n\r\nok")) as found:
        await (await found.network.send("POST", found.url, b"{}", headers={"traceparent": "00-1"})).read()
        await (await found.network.send("POST", found.url, b"{}")).read()
    assert b"traceparent: 00-1\r\n" in found.heads[0]
    assert b"content-length: 2\r\n" in found.heads[0]
    assert b"traceparent" not in found.heads[1]


async def test_what_comes_unasked_on_an_idle_connection_is_nobodys_answer() -> None:
    async with wire(sends(HEAD + b"content-length: 2\r\n\r\nok", HEAD + b"content-length: 3\r\n\r\nbad")) as found:
        for _ in range(3):
            assert await (await found.network.send("GET", found.url)).read() == b"ok"
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("more", [b"HTTP/1.1 500 Oops\r\nx: ", b"H", HEAD + b"content-length: 300\r\n\r\nno"])
async def test_what_follows_an_answer_is_not_taken_for_the_next_one(more: bytes) -> None:
    async with wire(sends(HEAD + b"content-length: 2\r\n\r\nok" + more)) as found:
        for count in range(1, 4):
            answer = await found.network.send("GET", found.url, limit_s=10)
            assert (answer.status, await answer.read()) == (200, b"ok")
            assert found.num_connections == count


async def test_closed_connections_are_forgotten_and_idle_ones_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "_KEEP_ALIVE_S", 0.2)
    async with wire(sends(HEAD + b"content-length: 2\r\n\r\nok")) as found:
        for _ in range(3):
            answers = [await found.network.send("GET", found.url) for _ in range(5)]
            assert [await answer.read() for answer in answers] == [b"ok"] * 5
        broken = await found.network.send("GET", found.url)
        broken.close()
        async with asyncio.timeout(10):
            while found.network._open:  # noqa: ASYNC110 - the loop tells nobody
                await asyncio.sleep(0.02)
        assert not any(found.network._idle.values())


async def test_an_answer_that_does_not_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "_MAX_ORDER_BYTES", 100_000)
    async with wire(
        sends(HEAD + b"transfer-encoding: chunked\r\n\r\n", *[b"8000\r\n" + b"a" * 32768 + b"\r\n"] * 9)
    ) as found:
        answer = await found.network.send("GET", found.url, limit_s=10)
        with pytest.raises(WorkerError) as caught:
            await answer.read()
        assert caught.value.code == "bad_answer"


async def test_long_urls_are_not_remembered_and_names_that_are_none_are_told() -> None:
    http_client._known_target.cache_clear()
    async with wire(sends(HEAD + b"content-length: 2\r\n\r\nok")) as found:
        for path in ("short", "a" * 5000):
            assert await (await found.network.send("GET", f"{found.url}/{path}")).read() == b"ok"
        assert http_client._known_target.cache_info().currsize == 1
        with pytest.raises(WorkerError) as caught:
            await found.network.send("GET", "http://a..b:80/")
        assert caught.value.code == "worker_unreachable"
