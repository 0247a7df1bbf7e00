"""Connections: messages however their bytes arrive, every address of a host, who counts as this host."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import msgspec
import pytest

from common.errors import TransferError, WorkerError
from common.net import is_loopback
from transfer.channel import Channel, connect, open_channel
from transfer.messages import Drained, Message, Ping
from transfer.server import FrameServer, listen

LOOPBACKS = [(socket.AF_INET6, ("::1", 0, 0, 0)), (socket.AF_INET, ("127.0.0.1", 0))]


def frame(message: Message) -> bytes:
    body = msgspec.msgpack.encode(message)
    return struct.pack(">I", len(body)) + body


async def test_messages_are_handed_over_however_their_bytes_arrive() -> None:
    channel, far = connected()
    heard: list[Message] = []
    sent = [Drained(room=room, lease=0) for room in range(5)]
    pump = asyncio.create_task(channel.pump(heard.append))
    try:
        stream = b"".join(map(frame, sent))
        for start, end in ((0, 1), (1, 3), (3, len(stream) - 2), (len(stream) - 2, len(stream))):
            far.sendall(stream[start:end])
            await asyncio.sleep(0.01)
        assert heard == sent
        far.close()
        with pytest.raises(WorkerError, match="closed"):
            await asyncio.wait_for(pump, 2)
    finally:
        channel.close()


async def test_a_connection_that_is_reset_before_it_is_looked_at_is_closed() -> None:
    with listen("127.0.0.1", 0)[0] as listener:
        sock = socket.create_connection(listener.getsockname())
    with pytest.raises(OSError):
        open_channel(sock, asyncio.get_running_loop())
    assert sock.fileno() == -1


async def test_a_server_that_ends_closes_what_it_has_just_accepted() -> None:
    async def never(channel: Channel, hello: object) -> None:
        raise AssertionError

    server = FrameServer("127.0.0.1", 0, None, never, 5.0, never)  # type: ignore[arg-type]
    channel, far = connected()
    server._talk_apart(channel)
    await server.close()
    assert channel._sock.fileno() == -1
    far.close()


async def test_what_came_with_the_greeting_is_handed_over_too() -> None:
    channel, far = connected()
    heard: list[Message] = []
    far.sendall(frame(Ping()) + frame(Ping(lanes=True)))
    assert await channel.receive() == Ping()
    pump = asyncio.create_task(channel.pump(heard.append))
    await asyncio.sleep(0.01)
    assert heard == [Ping(lanes=True)]
    pump.cancel()
    await asyncio.gather(pump, return_exceptions=True)
    far.sendall(frame(Ping()))
    await asyncio.sleep(0.01)
    assert len(heard) == 1, "nobody listens any more"
    channel.close()
    far.close()


@pytest.mark.parametrize("garbage", [b"\x00\x00\x00\x01\xc1", struct.pack(">I", 1 << 30)])
async def test_what_is_no_message_ends_the_pump(garbage: bytes) -> None:
    channel, far = connected()
    far.sendall(frame(Ping()) + garbage)
    heard: list[Message] = []
    with pytest.raises(TransferError) as failed:
        await asyncio.wait_for(channel.pump(heard.append), 2)
    assert (failed.value.code, heard) == ("protocol_error", [Ping()])
    channel.close()
    far.close()


async def test_what_the_handler_raises_ends_the_pump() -> None:
    channel, far = connected()
    far.sendall(frame(Ping()))

    def handle(message: Message) -> None:
        raise TransferError("not now", code="protocol_error")

    with pytest.raises(TransferError, match="not now"):
        await asyncio.wait_for(channel.pump(handle), 2)
    channel.close()
    far.close()


@pytest.mark.parametrize("order", [LOOPBACKS, LOOPBACKS[::-1]])
@pytest.mark.parametrize("here", ["127.0.0.1", "::1"])
async def test_every_address_of_a_host_is_tried(monkeypatch: pytest.MonkeyPatch, order: Any, here: str) -> None:
    (listener,) = listen(here, 0)
    port = listener.getsockname()[1]
    resolve(monkeypatch, order)
    channel = await connect("both.test", port)
    assert channel.peer_host == here
    channel.close()
    listener.close()
    with pytest.raises(WorkerError, match="no prefill node answers at both") as failed:
        await connect("both.test", port)
    assert failed.value.code == "peer_unreachable"


def test_a_name_is_listened_on_at_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(monkeypatch, LOOPBACKS)
    listeners = listen("both.test", 0)
    hosts, ports = zip(*(listener.getsockname()[:2] for listener in listeners), strict=True)
    assert hosts == ("::1", "127.0.0.1") and len(set(ports)) == 1
    with pytest.raises(OSError, match="in use"):
        listen("both.test", ports[0])
    for listener in listeners:
        listener.close()


def test_an_address_that_this_machine_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = (socket.AF_INET, ("192.0.2.1", 0))
    resolve(monkeypatch, [elsewhere, LOOPBACKS[1]])
    (listener,) = listen("both.test", 0)
    assert listener.getsockname()[0] == "127.0.0.1"
    listener.close()
    resolve(monkeypatch, [elsewhere])
    with pytest.raises(OSError, match="assign requested address"):
        listen("both.test", 0)


async def test_all_of_this_machine_is_both_families() -> None:
    (listener,) = listen("::", 0)
    for host in ("127.0.0.1", "::1"):
        channel = await connect(host, listener.getsockname()[1])
        accepted, far = listener.accept()
        assert is_loopback(str(far[0]))
        accepted.close()
        channel.close()
    listener.close()


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("192.0.2.1", False),
        ("::ffff:192.0.2.1", False),
        ("fe80::1%eth0", False),
        ("example.test", False),
    ],
)
def test_who_is_on_this_host(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def connected() -> tuple[Channel, socket.socket]:
    """A channel and the far end of its connection."""
    (listener,) = listen("127.0.0.1", 0)
    with listener:
        near = socket.create_connection(listener.getsockname())
        return Channel(near, asyncio.get_running_loop()), listener.accept()[0]


def resolve(monkeypatch: pytest.MonkeyPatch, found: list[tuple[int, Any]]) -> None:
    """Let every name but a numeric one stand for these addresses."""
    real = socket.getaddrinfo

    def fake(host: Any, port: Any, *arguments: Any, **keywords: Any) -> Any:
        if host != "both.test":
            return real(host, port, *arguments, **keywords)
        return [(family, socket.SOCK_STREAM, 6, "", (where[0], port, *where[2:])) for family, where in found]

    monkeypatch.setattr(socket, "getaddrinfo", fake)
