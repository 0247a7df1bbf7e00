"""Who is let in: keys, layouts, versions, addresses, and what is no client at all."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transfer_rig import Decode, Prefill, make_layout

from common.config import TransferConfig, TransportName, Verify
from common.errors import ConfigError, ServingError
from transfer import BootstrapServer, Committed, Released, RoomFailed, open_transport
from transfer.channel import MAX_GREETING_BYTES
from transfer.handshake import read_key
from transfer.lease import Lease, LeaseState
from transfer.messages import PROTOCOL_VERSION, Answer, Challenge, Hello, Message, Open, Refused
from transfer.rendezvous import look_up
from transfer.server import FrameServer, dial

Make = Callable[..., Any]
Config = Callable[..., TransferConfig]


def key_file(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def refused(prefill: Prefill, decode: Decode) -> ServingError:
    decode.transfer.open(prefill.address(1), "r", [3], 2)
    error: ServingError = decode.wait_for(RoomFailed, 1, 1).error
    decode.wait_for(Released, 1)
    assert prefill.pump() == []
    return error


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"page_size": 8}, ("page_size", "4 ", "8 ")),
        ({"model": "other"}, ("model", "tiny", "other")),
        ({"revision": "r2"}, ("revision", "r1", "r2")),
        ({"pools": make_layout().pools[:-1]}, ("pools", "10 ", "9 ")),
        (
            {"pools": tuple(msgspec.structs.replace(pool, dtype="bfloat16") for pool in make_layout().pools)},
            ("float32", "bfloat16"),
        ),
    ],
)
def test_another_layout_is_refused_naming_both_values(
    config: Config, prefill: Make, decode: Make, change: dict[str, Any], values: tuple[str, ...]
) -> None:
    error = refused(prefill(config()), decode(config(), make_layout(**change)))
    assert isinstance(error, ConfigError)
    assert error.code == "layout_mismatch"
    for value in values:
        assert value in error.message


def test_another_verify_mode_is_refused(config: Config, prefill: Make, decode: Make) -> None:
    error = refused(prefill(config()), decode(config(verify=Verify.OFF)))
    assert error.message == "--verify: digest here, off there"


def test_the_same_key_is_let_in(config: Config, prefill: Make, decode: Make, tmp_path: Path) -> None:
    one, same = key_file(tmp_path, "one", "0123456789abcdef"), key_file(tmp_path, "same", "0123456789abcdef\n")
    p, d = prefill(config(cluster_key_file=one)), decode(config(cluster_key_file=same))
    p.transfer.expect(1, "r", 5)
    d.transfer.open(p.address(1), "r", [3], 2)
    p.send(1, [4], 1)
    d.wait_for(Committed, 1)


@pytest.mark.parametrize(("mine", "theirs"), [("k" * 16, "w" * 16), ("k" * 16, None), (None, "w" * 16)])
def test_another_key_is_refused(
    config: Config, prefill: Make, decode: Make, tmp_path: Path, mine: str | None, theirs: str | None
) -> None:
    p = prefill(config(cluster_key_file=mine and key_file(tmp_path, "mine", mine)))
    d = decode(config(cluster_key_file=theirs and key_file(tmp_path, "theirs", theirs)))
    error = refused(p, d)
    assert error.code == "unauthorized"


def test_the_rank_checks_the_key_itself(config: Config, prefill: Make, tmp_path: Path) -> None:
    """A client that skips the bootstrap endpoint gains nothing."""
    p = prefill(config(cluster_key_file=key_file(tmp_path, "mine", "k" * 16)))
    with pytest.raises(ConfigError) as error:
        asyncio.run(dial(*p.transfer.control_address, b"w" * 16, hello(), 5))
    assert error.value.code == "unauthorized"


@pytest.mark.parametrize("proof", [b"", b"x" * 32])
def test_a_client_that_skips_its_own_check_is_refused(
    config: Config, prefill: Make, tmp_path: Path, proof: bytes
) -> None:
    p = prefill(config(cluster_key_file=key_file(tmp_path, "mine", "k" * 16)))
    for address in (p.transfer.control_address, (p.config.host, p.bootstrap.port)):
        with socket.create_connection(address, timeout=2) as stranger:
            read_frame(stranger)
            stranger.sendall(frame(msgspec.msgpack.encode(Answer(nonce=b"n" * 32, proof=proof))))
            answer = msgspec.msgpack.decode(read_frame(stranger), type=Message)
            assert isinstance(answer, Refused) and answer.error.code == "unauthorized"
            assert stranger.recv(1) == b""


def test_without_a_key_only_this_host_may_come(config: Config, monkeypatch: pytest.MonkeyPatch, prefill: Make) -> None:
    p = prefill(config())
    monkeypatch.setattr("transfer.handshake.is_loopback", lambda host: False)
    with pytest.raises(ConfigError) as client:
        asyncio.run(dial(*p.transfer.control_address, None, hello(), 5))
    with pytest.raises(ConfigError) as server:
        asyncio.run(dial(*p.transfer.control_address, b"k" * 16, hello(), 5))
    assert client.value.code == server.value.code == "unauthorized"


def test_key_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 16"):
        read_key(key_file(tmp_path, "short", "abc"))
    with pytest.raises(ConfigError, match="No such file"):
        read_key(str(tmp_path / "none"))


def hello(**changes: Any) -> Hello:
    fields: dict[str, Any] = {
        "version": PROTOCOL_VERSION,
        "role": "decode",
        "node_id": "d",
        "instance": "i",
        "verify": Verify.DIGEST,
        "layout": make_layout(),
    }
    return Hello(**(fields | changes))


def test_another_protocol_version_is_refused(config: Config, prefill: Make) -> None:
    p = prefill(config())
    with pytest.raises(ConfigError, match=f"protocol: {PROTOCOL_VERSION} here, {PROTOCOL_VERSION + 1} there"):
        asyncio.run(dial(*p.transfer.control_address, None, hello(version=PROTOCOL_VERSION + 1), 5))


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_an_address_that_peers_cannot_reach_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="peers cannot reach it"):
        open_transport(TransferConfig(transport=TransportName.LOOPBACK, host=host))
    with pytest.raises(ConfigError, match="peers cannot reach it"):
        BootstrapServer("127.0.0.1", 0, [(host, 1)], make_layout(), None)


def test_a_port_in_use_is_named(config: Config, prefill: Make) -> None:
    p = prefill(config())
    with pytest.raises(ConfigError, match=f"127.0.0.1:{p.bootstrap.port}: Address already in use"):
        prefill(config(), bootstrap_port=p.bootstrap.port)


async def test_lookup_names_every_rank() -> None:
    addresses = [("127.0.0.1", 5001), ("127.0.0.1", 5002)]
    server = BootstrapServer("127.0.0.1", 0, addresses, make_layout(), None)
    await server.start()
    try:
        ranks = await look_up("127.0.0.1", server.port, None, hello(), 5)
    finally:
        await server.close()
    assert list(ranks.addresses) == addresses


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        frame(b"\xc1" * 10),
        struct.pack(">I", MAX_GREETING_BYTES + 1),
        struct.pack(">I", 2**32 - 1) + b"x" * 100,
        frame(msgspec.msgpack.encode(hello())),
        frame(
            msgspec.msgpack.encode(Open(room=1, lease=0, rid="", pages=(), slot=0, track_slot=None, num_cached_pages=0))
        ),
        frame(msgspec.msgpack.encode(Answer(nonce=b"", proof=b"x"))),
        b"",
    ],
)
def test_strangers_are_cut_off_and_nobody_else_notices(
    config: Config, prefill: Make, decode: Make, garbage: bytes
) -> None:
    p, d = prefill(config()), decode(config())
    for address in (p.transfer.control_address, (p.config.host, p.bootstrap.port)):
        with socket.create_connection(address, timeout=2) as stranger:
            challenge = msgspec.msgpack.decode(read_frame(stranger), type=Message)
            assert isinstance(challenge, Challenge)
            stranger.sendall(garbage)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
    p.transfer.expect(1, "r", 5)
    d.transfer.open(p.address(1), "r", [3], 2)
    p.send(1, [4], 1)
    d.wait_for(Committed, 1)


def test_a_stranger_that_says_nothing_is_cut_off(config: Config, prefill: Make) -> None:
    p = prefill(config(bootstrap_timeout_s=0.2))
    with socket.create_connection(p.transfer.control_address, timeout=2) as stranger:
        read_frame(stranger)
        assert stranger.recv(1) == b""


def read_frame(sock: socket.socket) -> bytes:
    (size,) = struct.unpack(">I", sock.recv(4, socket.MSG_WAITALL))
    return sock.recv(size, socket.MSG_WAITALL)


def test_lease_steps_that_the_picture_lacks_are_bugs() -> None:
    legal = {
        ("reserved", "writing"),
        ("reserved", "draining"),
        ("writing", "committed"),
        ("writing", "draining"),
        ("committed", "released"),
        ("draining", "released"),
    }
    offer = Open(room=1, lease=0, rid="r", pages=(), slot=0, track_slot=None, num_cached_pages=0)
    for before in LeaseState:
        for after in LeaseState:
            lease = Lease(None, offer, 0.0, before)  # type: ignore[arg-type]
            if (before.value, after.value) in legal:
                lease.move(after)
                assert lease.state is after
            else:
                with pytest.raises(AssertionError):
                    lease.move(after)


async def test_connections_that_are_reset_at_once_do_not_end_the_server() -> None:
    def hello() -> Hello:
        return Hello(
            version=PROTOCOL_VERSION, role="prefill", node_id="p", instance="i", verify=Verify.OFF, layout=make_layout()
        )

    async def hold(channel: object, peer: Hello) -> None:
        await asyncio.sleep(5)

    server = FrameServer("127.0.0.1", 0, None, hello, 5.0, hold)
    await server.start()
    try:
        for _ in range(50):
            sock = socket.create_connection(server.address)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
            await asyncio.sleep(0)
        channel, _ = await dial(*server.address, None, hello(), 2.0)
        channel.close()
    finally:
        await server.close()
