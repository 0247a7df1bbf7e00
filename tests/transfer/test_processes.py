"""Two real processes: bytes over Mooncake TCP and loopback, kill -9, stop, restart."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from transfer_rig import Decode, metadata, wide_layout

from common.config import LoopbackFaults, TransferConfig, TransportName
from common.errors import WorkerError
from common.handoff import RoomAddress
from transfer import Committed, Released, RoomDeclined, RoomFailed, RoomOpened, Sent, TrackState

Make = Callable[..., Any]
Config = Callable[..., TransferConfig]

HERE, THERE = [7, 8, 9, 2], [3, 4, 11, 20]
TRANSPORTS = [TransportName.MOONCAKE, TransportName.LOOPBACK]  # of host memory


def address(process: Any, room: int) -> RoomAddress:
    return RoomAddress(host="127.0.0.1", port=process.port, room=room)


def send(process: Any, room: int, slot: int = 1) -> None:
    process.say("send_pages", room, 0, HERE[:3])
    process.say("send_pages", room, 3, HERE[3:])
    process.say("send_state", room, slot, None)
    process.say("metadata", room)


def hand_off(process: Any, decode: Decode, room: int) -> None:
    process.say("expect", room, "r", 5)
    decode.transfer.open(address(process, room), "r", THERE, 2)
    process.wait_for("RoomOpened", room)
    send(process, room)
    assert decode.wait_for(Committed, room).metadata == metadata(room)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bytes_arrive_from_another_process(
    config: Config, process: Make, decode: Make, transport: TransportName
) -> None:
    settings = config(transport=transport)
    p, d = process("prefill", settings), decode(settings)
    assert d.transport.name == {"mooncake": "mooncake-tcp", "loopback": "loopback"}[transport.value]
    for room in range(3):
        hand_off(p, d, room)
        p.say("state", HERE, 1)
        assert d.pools.state(THERE, 2).hex() == p.wait_for("state")[1]
        p.wait_for("Released", room)
        d.pools.bytes[:] = 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_a_caching_decode_asks_for(config: Config, process: Make, decode: Make, transport: TransportName) -> None:
    """Pages that it holds, a track slot, one that is the final state, a room that it declines."""
    settings = config(transport=transport)
    p, d = process("prefill", settings), decode(settings)
    fresh = d.pools.bytes.copy()
    p.say("state", HERE[3:], 1)
    final = p.wait_for("state")[1]
    p.events.clear()
    p.say("state", [], 6)
    tracked = p.wait_for("state")[1]
    for room, position, track in (
        (1, 8, TrackState.RECEIVED),
        (2, 11, TrackState.SAME_AS_FINAL),
        (3, -1, TrackState.NONE),
    ):
        d.pools.bytes[:] = fresh
        held, before = d.pools.state(THERE[:3], 0), d.pools.state([], 5)
        p.say("expect", room, "r", 5)
        d.transfer.open(address(p, room), "r", THERE, 2, 5, 3)
        p.wait_for("RoomOpened", room)
        p.say("send_pages", room, 0, HERE)
        p.say("send_state", room, 1, 6 if track is TrackState.RECEIVED else None)
        p.say("metadata", room, "r", position)
        committed = d.wait_for(Committed, room)
        assert committed.track is track
        assert committed.bytes_by_part["kv"] == 4 * 256
        assert ("track" in committed.bytes_by_part) == (track is TrackState.RECEIVED)
        assert d.pools.state(THERE[:3], 0) == held, "cached pages are as they were"
        assert d.pools.state(THERE[3:], 2).hex() == final
        assert d.pools.state([], 5).hex() == (tracked if track is TrackState.RECEIVED else before.hex())
        p.wait_for("Released", room)
    p.say("expect", 4, "r", 5)
    d.transfer.decline(address(p, 4), "r")
    p.wait_for("RoomDeclined", 4, 1)
    p.wait_for("Released", 4, 1)
    assert not d.quiet(0.05)


@pytest.mark.parametrize("kind", ["flip", "zero", "drop"])
def test_a_fault_of_the_track_slot_from_another_process(config: Config, process: Make, decode: Make, kind: str) -> None:
    p, d = process("prefill", config(LoopbackFaults(**{kind: "track"}))), decode(config())
    p.say("expect", 1, "r", 5)
    d.transfer.open(address(p, 1), "r", THERE, 2, 5)
    p.say("send_pages", 1, 0, HERE)
    p.say("send_state", 1, 1, 6)
    p.say("metadata", 1)
    error = d.wait_for(RoomFailed, 1).error
    assert (error.code, error.param) == ("digest_mismatch", "track")
    assert p.wait_for("RoomFailed", 1)[2] == "digest_mismatch"
    d.wait_for(Released, 1)


def test_decode_in_a_process_of_its_own_declines(config: Config, process: Make, prefill: Make) -> None:
    settings = config(transport=TransportName.MOONCAKE)
    p, d = prefill(settings), process("decode", settings)
    p.transfer.expect(1, "r", 5)
    d.say("decline", {"host": "127.0.0.1", "port": p.bootstrap.port, "room": 1}, "r")
    p.wait_for(Released, 1)
    assert p.events == [RoomDeclined(1), Released(1)]
    d.signal(signal.SIGKILL)  # once it has said so, it may go
    assert not p.quiet(0.2)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_kill_of_prefill_ends_decode_within_a_second(
    config: Config, process: Make, decode: Make, transport: TransportName
) -> None:
    settings = config(transport=transport)
    p, d = process("prefill", settings), decode(settings)
    hand_off(p, d, 1)  # data connections are up
    for room in (2, 3):
        p.say("expect", room, "r", 5)
        d.transfer.open(address(p, room), "r", THERE, 2)
        p.wait_for("RoomOpened", room)
    p.signal(signal.SIGKILL)
    for room in (2, 3):
        error = d.wait_for(RoomFailed, room, 1).error
        assert isinstance(error, WorkerError) and error.code == "peer_lost"
        d.wait_for(Released, room, 3)
    assert not d.quiet(0.1)
    assert d.transfer.stats()["quarantined"] == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_kill_of_decode_ends_prefill_within_a_second(
    config: Config, process: Make, prefill: Make, transport: TransportName
) -> None:
    settings = config(transport=transport)
    p, d = prefill(settings), process("decode", settings)
    p.transfer.expect(1, "r", 5)
    d.say("open", {"host": "127.0.0.1", "port": p.bootstrap.port, "room": 1}, "r", THERE, 2)
    p.wait_for(RoomOpened, 1)
    p.transfer.send_pages(1, 0, HERE[:2])
    d.signal(signal.SIGKILL)
    noticed_first = ("peer_lost", "write_failed", "peer_unreachable")
    assert p.wait_for(RoomFailed, 1, 1).error.code in noticed_first
    p.wait_for(Released, 1, 3)
    p.send(1, HERE, 1)
    assert not p.quiet(0.1)


def test_kill_of_prefill_in_the_middle_of_a_write(config: Config, process: Make, decode: Make) -> None:
    layout = wide_layout(8 << 20)
    slow = config(LoopbackFaults(bandwidth_bytes_s=8e6))
    p, d = process("prefill", slow, layout), decode(config(), layout)
    p.say("expect", 1, "r", 5)
    d.transfer.open(address(p, 1), "r", THERE, 2)
    target = d.pools.item(2, 2)
    before = target.copy()
    send(p, 1)
    d.until(lambda: (target != before).any())
    p.signal(signal.SIGKILL)
    d.wait_for(Released, 1, 3)
    landed = target.copy()
    time.sleep(0.1)
    assert (target == landed).all()


def test_kill_of_prefill_with_another_one_connected(config: Config, process: Make, decode: Make) -> None:
    """The living sender's data connections do not hold back what the dead one's leases held."""
    settings = config(transport=TransportName.MOONCAKE)
    dying, living, d = process("prefill", settings), process("prefill", settings), decode(settings)
    hand_off(living, d, 1)
    hand_off(dying, d, 2)
    assert d.transport.inbound()
    dying.say("expect", 3, "r", 5)
    d.transfer.open(address(dying, 3), "r", THERE, 2)
    dying.wait_for("RoomOpened", 3)
    dying.signal(signal.SIGKILL)
    d.wait_for(Released, 3, 3)
    assert d.transport.inbound(), "the living one is still connected"
    hand_off(living, d, 4)


def test_a_stopped_prefill_is_found_and_frees_nothing_until_it_wakes(
    config: Config, process: Make, decode: Make
) -> None:
    settings = config(liveness_timeout_s=0.5, bootstrap_timeout_s=1.0)
    p, d = process("prefill", settings), decode(settings)
    p.say("expect", 1, "r", 5)
    d.transfer.open(address(p, 1), "r", THERE, 2)
    p.wait_for("RoomOpened", 1)
    p.signal(signal.SIGSTOP)
    error = d.wait_for(RoomFailed, 1, 1.5).error
    assert isinstance(error, WorkerError) and error.code == "peer_silent"
    d.transfer.open(address(p, 2), "r", THERE, 2)  # refused at once where nothing but silence is known
    d.wait_for(RoomFailed, 2, 6)
    d.wait_for(Released, 2)
    assert not d.of(Released, 1)
    assert d.transfer.stats()["leases"] == {"draining": 1}
    p.signal(signal.SIGCONT)
    d.wait_for(Released, 1, 3)
    hand_off(p, d, 3)


def test_a_stopped_decode_is_found(config: Config, process: Make, prefill: Make) -> None:
    settings = config(liveness_timeout_s=0.5)
    p, d = prefill(settings), process("decode", settings)
    p.transfer.expect(1, "r", 5)
    d.say("open", {"host": "127.0.0.1", "port": p.bootstrap.port, "room": 1}, "r", THERE, 2)
    p.wait_for(RoomOpened, 1)
    d.signal(signal.SIGSTOP)
    assert p.wait_for(RoomFailed, 1, 1.5).error.code == "peer_silent"
    p.wait_for(Released, 1, 3)
    d.signal(signal.SIGCONT)
    assert d.wait_for("RoomFailed", 1)[2] == "peer_silent"
    d.wait_for("Released", 1)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_prefill_comes_back_on_the_same_port(
    config: Config, process: Make, decode: Make, transport: TransportName
) -> None:
    settings = config(transport=transport)
    p, d = process("prefill", settings), decode(settings)
    hand_off(p, d, 1)
    p.signal(signal.SIGKILL)
    p.close()
    d.until(lambda: not d.transfer.stats()["peers"])
    again = process("prefill", settings, port=p.port)
    assert again.port == p.port
    hand_off(again, d, 1001)


def test_a_lost_connection_between_living_processes(config: Config, prefill: Make, decode: Make) -> None:
    """The sender is asked again over a new connection, and only its word frees what it may still write to."""
    layout = wide_layout(4 << 20)
    p = prefill(config(LoopbackFaults(bandwidth_bytes_s=8e6)), layout)
    d = decode(config(liveness_timeout_s=0.4), layout)
    p.transfer.expect(1, "r", 5)
    d.transfer.open(p.address(1), "r", THERE, 2)
    p.wait_for(RoomOpened, 1)
    p.send(1, HERE, 1)
    target = d.pools.item(2, 2)
    before = target.copy()
    d.until(lambda: (target != before).any())
    (link,) = d.transfer._links.values()
    link.channel.shut()
    assert d.wait_for(RoomFailed, 1, 1).error.code == "peer_lost"
    assert p.wait_for(RoomFailed, 1, 1).error.code == "peer_lost"
    assert not d.of(Released, 1)
    d.wait_for(Released, 1, 3)
    landed = target.copy()
    assert p.wait_for(Released, 1, 0.1)
    time.sleep(0.1)
    assert (target == landed).all()


def abandoned(process: Any, decode: Decode) -> None:
    """Room 1 is open, its sender is killed, its client has been told."""
    process.say("expect", 1, "r", 5)
    decode.transfer.open(address(process, 1), "r", THERE, 2)
    process.wait_for("RoomOpened", 1)
    process.signal(signal.SIGKILL)
    decode.wait_for(RoomFailed, 1, 1)


def test_where_connections_cannot_be_seen_a_dead_sender_frees_nothing(
    config: Config, process: Make, prefill: Make, decode: Make
) -> None:
    """As over RDMA and NVLink: what it sent may still be on its way."""
    settings = config(liveness_timeout_s=0.4, transfer_timeout_s=0.5)
    d = decode(settings)
    d.transport.inbound = lambda: None
    abandoned(process("prefill", settings), d)
    d.until(lambda: any(fence.dead for fence in d.transfer._fences.values()))
    assert not d.quiet(0.3)
    assert d.transfer.stats()["leases"] == {"draining": 1} and d.transfer.stats()["quarantined"] == 1
    other = prefill(config())
    other.transfer.expect(2, "r", 5)
    d.transfer.open(other.address(2), "r", [5, 6], 3)  # what is not in quarantine is of use
    other.wait_for(RoomOpened, 2)
    other.send(2, HERE[:2], 1)
    d.wait_for(Committed, 2)


def test_a_dead_senders_connections_must_be_gone(config: Config, process: Make, prefill: Make, decode: Make) -> None:
    """Those that a living one claims are not waited for."""
    settings = config(liveness_timeout_s=0.4)
    d, other = decode(settings), prefill(settings)
    theirs, unread = "192.0.2.1:10", "192.0.2.1:9"
    d.transport.inbound = lambda: frozenset({theirs, unread})
    other.transport.outbound = lambda: frozenset({theirs})
    other.transfer.expect(2, "r", 5)
    d.transfer.open(other.address(2), "r", [5, 6], 3)
    other.wait_for(RoomOpened, 2)
    abandoned(process("prefill", settings), d)
    d.until(lambda: [fence.connections for fence in d.transfer._fences.values()] == [{unread}])
    assert not d.quiet(0.3)
    d.transport.inbound = lambda: frozenset({theirs})
    d.wait_for(Released, 1, 1)


def test_another_process_at_its_address_proves_that_a_sender_is_dead(
    config: Config, process: Make, prefill: Make, decode: Make
) -> None:
    settings = config(liveness_timeout_s=0.4)
    d = decode(settings)
    d.transfer._seek = _nowhere  # it has not been looked for yet
    abandoned(process("prefill", settings), d)
    assert not d.quiet(0.3) and d.transfer.stats()["quarantined"] == 1
    (rank,) = (fence.rank for fence in d.transfer._fences.values())
    successor = prefill(config(), control_port=rank[1])
    successor.transfer.expect(2, "r", 5)
    d.transfer.open(successor.address(2), "r", [5, 6], 3)
    d.wait_for(Released, 1, 3)


async def _nowhere(fence: object) -> None:
    """Finds nobody."""


def test_the_scheduler_keeps_running_during_a_write(config: Config, process: Make, prefill: Make) -> None:
    """50 MB over Mooncake: the calling thread never pauses for long, the write does not hold the interpreter."""
    layout = wide_layout(50 << 20)
    settings = config(transport=TransportName.MOONCAKE)
    p, d = prefill(settings, layout), process("decode", settings, layout)
    p.transfer.expect(1, "r", 5)
    d.say("open", {"host": "127.0.0.1", "port": p.bootstrap.port, "room": 1}, "r", THERE, 2)
    p.wait_for(RoomOpened, 1)
    p.send(1, HERE, 1)
    gaps, last, started = [], time.perf_counter(), time.perf_counter()
    while not p.of(Sent, 1):
        time.sleep(0.0002)
        p.pump()
        gaps.append(time.perf_counter() - last)
        last = time.perf_counter()
        assert last - started < 10
    took = last - started
    assert len(gaps) > 10 and sorted(gaps)[len(gaps) // 2] < 0.01
    assert max(gaps) < max(0.05, took / 2), f"paused {max(gaps):.3f} of {took:.3f} s"
