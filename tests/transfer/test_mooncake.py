"""The Mooncake transport by itself: writes in two halves, refusals as typed errors, how long it may sleep."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator

import pytest

from common.config import TransferConfig, TransportName
from common.errors import TransferError
from transfer.mooncake import PACE_BYTES, MooncakeTransport, Pace
from transfer.transport import Block, Transport, open_transport

NBYTES = 1 << 16


def address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


@pytest.fixture
def ends(config: Callable[..., TransferConfig]) -> Iterator[tuple[Transport, Transport]]:
    sender, receiver = (open_transport(config(transport=TransportName.MOONCAKE)) for _ in range(2))
    yield sender, receiver
    sender.close()
    receiver.close()


def test_a_write_in_two_halves(ends: tuple[Transport, Transport]) -> None:
    sender, receiver = ends
    source, target = sender.host_buffer(NBYTES), receiver.host_buffer(NBYTES)
    source[:] = bytes(range(256)) * (NBYTES // 256)
    blocks = [Block(address(source) + i, address(target) + i, 4096, "kv") for i in range(0, NBYTES, 8192)]
    wait = sender.begin(receiver.session, blocks)
    wait()
    for i in range(0, NBYTES, 8192):
        assert target[i : i + 4096] == source[i : i + 4096]
        assert target[i + 4096 : i + 8192] == bytes(4096)
    sender.begin(receiver.session, [])()


def test_a_refused_write_is_a_typed_error_and_the_next_one_works(
    ends: tuple[Transport, Transport], capfd: pytest.CaptureFixture[str]
) -> None:
    sender, receiver = ends
    source, target = sender.host_buffer(NBYTES), receiver.host_buffer(NBYTES)
    source[:] = b"\x07" * NBYTES
    good = Block(address(source), address(target), NBYTES, "kv")
    for blocks in ([good._replace(dst=4096)], [good, good._replace(dst=4096)]):
        wait = sender.begin(receiver.session, blocks)
        with pytest.raises(TransferError, match="refused") as failed:
            wait()
        assert failed.value.code == "write_failed"
    with pytest.raises(TransferError, match="could not be reached"):
        sender.begin("127.0.0.1:1", [good])
    sender.write(receiver.session, [good])
    assert target == source
    capfd.readouterr()  # what Mooncake says about it


def test_it_never_sleeps_longer_than_the_quickest_write_would_take() -> None:
    pace = Pace()
    assert pace.at_least_s(1 << 30) == 0, "nothing is known yet"
    pace.note(PACE_BYTES - 1, 1e-9)
    assert pace.at_least_s(1 << 30) == 0, "too small to tell"
    pace.note(2 * PACE_BYTES, 1.0)
    pace.note(2 * PACE_BYTES, 0.5)
    pace.note(2 * PACE_BYTES, 4.0)
    assert 0.25 < pace.at_least_s(2 * PACE_BYTES) < 0.5
    assert pace.at_least_s(4 * PACE_BYTES) == 2 * pace.at_least_s(2 * PACE_BYTES)


def test_it_sleeps_before_it_waits(ends: tuple[Transport, Transport], monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for small writes, whose duration is nobody's guess."""
    sender, receiver = ends
    assert isinstance(sender, MooncakeTransport)
    source, target = sender.host_buffer(2 * PACE_BYTES), receiver.host_buffer(2 * PACE_BYTES)
    slept: list[float] = []
    monkeypatch.setattr("transfer.mooncake.time.sleep", slept.append)
    for nbytes in (2 * PACE_BYTES, 2 * PACE_BYTES, 64):
        sender.write(receiver.session, [Block(address(source), address(target), nbytes, "ssm")])
        sender._pace.note(PACE_BYTES, 1.0)
    assert len(slept) <= 1
    sender._pace = Pace()
    sender._pace.note(PACE_BYTES, 10.0)
    sender.write(receiver.session, [Block(address(source), address(target), PACE_BYTES, "ssm")])
    assert 0.5 * 10 < slept[-1] < 10


def test_it_begins_anew_with_the_same_memory(ends: tuple[Transport, Transport]) -> None:
    sender, receiver = ends
    source, target = sender.host_buffer(NBYTES), receiver.host_buffer(NBYTES)
    block = Block(address(source), address(target), NBYTES, "kv")
    for value, side in ((1, None), (2, sender), (3, receiver)):
        session, connections = receiver.session, receiver.inbound()
        if side is not None:
            assert side.reopen()
        if side is sender:
            assert receiver.session == session and connections
            until(lambda before=connections: not before & receiver.inbound())
        source[:] = bytes([value]) * NBYTES
        sender.write(receiver.session, [block])
        assert target == source


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_where_connections_cannot_be_seen_it_does_not_begin_anew(ends: tuple[Transport, Transport]) -> None:
    sender, _ = ends
    assert isinstance(sender, MooncakeTransport)
    session, sender._data_port = sender.session, None  # as over RDMA
    assert not sender.reopen() and sender.session == session
