"""A hostile client that can reach a prefill node's ports, knows its rooms, and has listened; but has no cluster key."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from transfer_rig import Decode, Prefill, make_layout

from common.config import TransferConfig, Verify
from common.errors import ConfigError, ErrorRecord, TransferError
from transfer import BootstrapServer, Committed, RoomFailed
from transfer.channel import Channel
from transfer.handshake import introduce
from transfer.messages import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Answer,
    Challenge,
    Decline,
    Hello,
    Lookup,
    Message,
    Open,
    Ping,
    Proof,
    Refused,
)
from transfer.seal import Seal
from transfer.server import MAX_GREETINGS, dial

Make = Callable[..., Any]
Config = Callable[..., TransferConfig]
KEY = b"k" * 32
ROOM = 71


@pytest.fixture
def pair(config: Config, prefill: Make, decode: Make, tmp_path: Path) -> tuple[Prefill, Decode]:
    path = tmp_path / "key"
    path.write_bytes(KEY)
    settings = config(cluster_key_file=str(path))
    return prefill(settings), decode(settings)


def addresses(p: Prefill) -> list[tuple[str, int]]:
    return [p.transfer.control_address, (p.config.host, p.bootstrap.port)]


def frame(message: Message) -> bytes:
    body = msgspec.msgpack.encode(message)
    return struct.pack(">I", len(body)) + body


def read(sock: socket.socket) -> tuple[bytes, Message]:
    """The frame, and what it says."""
    head = sock.recv(4, socket.MSG_WAITALL)
    body = sock.recv(struct.unpack(">I", head)[0], socket.MSG_WAITALL)
    return head + body, msgspec.msgpack.decode(body, type=Message)


def rest(sock: socket.socket) -> bytes:
    """What still comes until the other end closes."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(65536):
            parts.append(part)
    return b"".join(parts)


def hello() -> Hello:
    return Hello(
        version=PROTOCOL_VERSION,
        role="decode",
        node_id="d",
        instance="i",
        verify=Verify.DIGEST,
        layout=make_layout(),
        session="mine",
    )


ERROR = ErrorRecord(type="aborted_error", code="aborted", message="m", status=499, retryable=False)
ORDERS: list[Message] = [
    hello(),
    Lookup(),
    Open(room=ROOM, lease=0, rid="r", pages=(3,), slot=2, track_slot=None, num_cached_pages=0),
    Decline(room=ROOM, rid="r"),
    Abort(room=ROOM, lease=0, error=ERROR),
    Accepted(room=ROOM, lease=0),
    Ping(lanes=True),
    Proof(proof=b""),
]


def works(p: Prefill, d: Decode, room: int) -> None:
    """One hand-off from its beginning to its end."""
    p.transfer.expect(room, "r", 5)
    d.transfer.open(p.address(room), "r", [3], 2)
    p.send(room, [4], 1)
    d.wait_for(Committed, room)


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_a_room_number_is_no_key(pair: tuple[Prefill, Decode], order: Message) -> None:
    """While the room is open: whatever the stranger says in place of a proof, he gets a refusal at most, and the room
    goes on."""
    p, d = pair
    p.transfer.expect(ROOM, "r", 5)
    d.transfer.open(p.address(ROOM), "r", [3], 2)
    for address in addresses(p):
        for first in (b"", frame(Answer(nonce=b"n" * 32, proof=b"x" * 32))):
            with socket.create_connection(address, timeout=5) as stranger:
                read(stranger)
                stranger.sendall(first + frame(order) * 3)
                said = rest(stranger)
                assert b"addresses" not in said and b"placements" not in said and len(said) < 400
    p.send(ROOM, [4], 1)
    d.wait_for(Committed, ROOM)


class Wire:
    """Carries one connection between a client and a server at a time, and keeps what it has heard of each."""

    def __init__(self, to: tuple[str, int], change: Callable[[int, bytes], bytes] = lambda n, data: data) -> None:
        self._to, self._change = to, change
        self.frames: list[bytes] = []  # of the client
        self.heard = b""  # of the server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def _carry(self) -> None:
        client, _ = self._listener.accept()
        with client, socket.create_connection(self._to, timeout=10) as server:
            back = threading.Thread(target=self._back, args=(server, client), daemon=True)
            back.start()
            with contextlib.suppress(OSError):
                while len(head := client.recv(4, socket.MSG_WAITALL)) == 4:
                    body = client.recv(struct.unpack(">I", head)[0], socket.MSG_WAITALL)
                    self.frames.append(head + body)
                    server.sendall(self._change(len(self.frames) - 1, head + body))
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_WR)
            back.join(10)

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                self.heard += data
                client.sendall(data)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()
        self._thread.join(10)


@contextlib.contextmanager
def wire(*arguments: Any) -> Iterator[Wire]:
    carried = Wire(*arguments)
    try:
        yield carried
    finally:
        carried.close()


def test_what_was_recorded_is_worth_nothing(pair: tuple[Prefill, Decode]) -> None:
    """The whole of a good connection, said again from its first frame on."""
    p, d = pair
    for address in addresses(p):
        with wire(address) as carried:
            asyncio.run(greet("127.0.0.1", carried.port))
        assert len(carried.frames) >= 2
        with socket.create_connection(address, timeout=5) as stranger:
            read(stranger)
            stranger.sendall(b"".join(carried.frames))
            _, answer = read(stranger)
            assert isinstance(answer, Refused) and answer.error.code == "unauthorized"
            assert rest(stranger) == b""
    works(p, d, ROOM)


async def greet(host: str, port: int) -> None:
    channel, theirs = await dial(host, port, KEY, hello(), 5)
    assert theirs.role == "prefill"
    channel.close()


def test_a_proof_is_not_the_other_ends(pair: tuple[Prefill, Decode]) -> None:
    """A server without the key that gives a client its own proof back is no server of the cluster."""

    def serve(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            sock.sendall(frame(Challenge(version=PROTOCOL_VERSION, nonce=b"n" * 32, keyed=True)))
            _, answer = read(sock)
            assert isinstance(answer, Answer)
            sock.sendall(frame(Proof(proof=answer.proof)))
            heard.append(rest(sock))

    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        with pytest.raises(ConfigError) as refused:
            asyncio.run(greet("127.0.0.1", listener.getsockname()[1]))
        thread.join(5)
    assert refused.value.code == "unauthorized"
    assert heard == [b""], "and it learns nothing of where the client's memory is"


@pytest.mark.parametrize("nonce", [b"", b"n" * 31, b"n" * 64])
async def test_a_nonce_has_its_length(nonce: bytes) -> None:
    """Otherwise what was signed for one split of the two nonces would hold for another."""
    near, far = socket.socketpair()
    with near, far:
        far.sendall(frame(Challenge(version=PROTOCOL_VERSION, nonce=nonce, keyed=True)))
        with pytest.raises(TransferError, match="a nonce of"):
            async with asyncio.timeout(5):
                await introduce(channel_on(near), KEY, hello())


def channel_on(sock: socket.socket) -> Channel:
    class Named:
        """A socket pair has no peer's name."""

        def __getattr__(self, name: str) -> Any:
            return getattr(sock, name)

        def getpeername(self) -> tuple[str, int]:
            return "127.0.0.1", 1

        def setsockopt(self, *_: Any) -> None:
            pass

    return Channel(Named(), asyncio.get_running_loop())  # type: ignore[arg-type]


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "an order of its own": lambda data: data + frame(Lookup()),
    "the last one again": lambda data: data + data,
    "a changed bit": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "none of its signature": lambda data: struct.pack(">I", len(data) - 20) + data[20:],
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("number", [1, 2])
def test_whoever_carries_a_connection_adds_and_changes_nothing(
    pair: tuple[Prefill, Decode], what: str, number: int
) -> None:
    """A stranger between two ends that have the key, for example one whom a decode node was told to ask for a room. He
    lets the handshake through; but what he says himself, after the client's frame 1 (its hello) or 2 (its question),
    ends the connection."""
    p, d = pair
    change = CHANGES[what]
    for address in addresses(p):
        with wire(address, lambda n, data: change(data) if n == number else data) as carried:
            asyncio.run(ask(carried.port))
        assert carried.heard.count(b"addresses") <= (number == 2), "an answer to its own question at most"
    works(p, d, ROOM)


async def ask(port: int) -> None:
    """A hello, then a question; whatever comes of it."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(5):
            channel, _ = await dial("127.0.0.1", port, KEY, hello(), 5)
            try:
                channel.send(Lookup())
                while True:
                    await channel.receive()
            finally:
                channel.close()


def test_a_seal_takes_every_frame_once_and_in_order() -> None:
    out, into = Seal(b"1" * 32), Seal(b"1" * 32)
    first, second = out.sign(b"a"), out.sign(b"b")
    assert into.open(first) == b"a"
    for wrong in (first, second[:-1] + b"c", b"", b"x" * 15):
        with pytest.raises(TransferError, match="not signed"):
            into.open(wrong)
    assert out.sign(b"a") != first and Seal(b"2" * 32).sign(b"a") != Seal(b"1" * 32).sign(b"a")


def test_many_strangers_who_say_nothing_do_not_keep_others_out(pair: tuple[Prefill, Decode]) -> None:
    p, d = pair
    before = psutil.Process().num_fds()
    with contextlib.ExitStack() as exits:
        strangers = [
            exits.enter_context(socket.create_connection(address, timeout=5))
            for address in addresses(p)
            for _ in range(3 * MAX_GREETINGS)
        ]
        works(p, d, ROOM)
        p.until(lambda: psutil.Process().num_fds() - before < len(strangers) + 2 * MAX_GREETINGS + 40)
    works(p, d, ROOM + 1)


async def test_the_port_is_at_its_own_address_only() -> None:
    server = BootstrapServer("127.0.0.2", 0, [("127.0.0.2", 1)], make_layout(), KEY)
    await server.start()
    try:
        (await asyncio.open_connection("127.0.0.2", server.port))[1].close()
        for elsewhere in ("127.0.0.1", "::1"):
            with pytest.raises(OSError, match="Connect call failed"):
                await asyncio.open_connection(elsewhere, server.port)
    finally:
        await server.close()


def test_a_stranger_who_dribbles_is_cut_off(config: Config, prefill: Make, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(KEY)
    p = prefill(config(cluster_key_file=str(path), bootstrap_timeout_s=0.3))
    with socket.create_connection(p.transfer.control_address, timeout=5) as stranger:
        read(stranger)
        with contextlib.suppress(ConnectionError):
            for byte in frame(Answer(nonce=b"n" * 32, proof=b"x" * 32)) * 4:
                stranger.sendall(bytes([byte]))
                stranger.settimeout(0.02)
                with contextlib.suppress(TimeoutError):
                    if stranger.recv(1) == b"":
                        break
            else:
                pytest.fail("it could go on for ever")


def test_a_wrong_key_fails_the_decode_ranks_request_and_no_other(
    pair: tuple[Prefill, Decode], config: Config, decode: Make, tmp_path: Path
) -> None:
    p, d = pair
    wrong = tmp_path / "wrong"
    wrong.write_bytes(b"w" * 32)
    other = decode(config(cluster_key_file=str(wrong)))
    p.transfer.expect(ROOM, "r", 5)
    other.transfer.open(p.address(ROOM), "r", [3], 2)
    assert other.wait_for(RoomFailed, ROOM).error.code == "unauthorized"
    d.transfer.open(p.address(ROOM), "r", [3], 2)
    p.send(ROOM, [4], 1)
    d.wait_for(Committed, ROOM)
