"""The life of a room, over loopback in one process: success, faults, aborts at every state, time-outs."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from transfer_rig import Decode, Prefill, metadata, wide_layout

from common.config import LoopbackFaults, TransferConfig, Verify
from common.errors import AbortedError, RequestError, TransferError, WorkerError
from common.handoff import RoomAddress
from common.layout import StateKind
from transfer import Committed, Released, RoomFailed, RoomOpened, Sent
from transfer.digest import StateDigests
from transfer.loopback import LoopbackTransport
from transfer.transport import Block

Make = Callable[..., Any]
Config = Callable[..., TransferConfig]

HERE, THERE = [7, 8, 9, 2], [3, 4, 11, 20]


def start(prefill: Prefill, decode: Decode, room: int, *, pages: Sequence[int] = THERE, slot: int = 2) -> None:
    prefill.transfer.expect(room, "r", 5)
    decode.transfer.open(prefill.address(room), "r", pages, slot)
    prefill.wait_for(RoomOpened, room)


@pytest.mark.parametrize("room", [0, 5, 2**63 - 1])
@pytest.mark.parametrize("verify", list(Verify))
def test_bytes_arrive_as_they_were(config: Config, prefill: Make, decode: Make, room: int, verify: Verify) -> None:
    p, d = prefill(config(verify=verify)), decode(config(verify=verify))
    before = d.pools.bytes.copy()
    p.transfer.expect(room, "r", 5)
    d.transfer.open(p.address(room), "r", THERE, 2, 5)
    opened = p.wait_for(RoomOpened, room)
    assert (opened.offer.num_pages, opened.offer.num_cached_tokens, opened.offer.wants_track) == (4, 0, True)
    p.send(room, HERE, 1, 6)
    committed = d.wait_for(Committed, room)
    assert committed.metadata == metadata(room)
    assert committed.bytes_by_part == {"kv": 4 * 4 * 256, "conv": 3 * 144, "ssm": 3 * 1024, "track": 3 * 1168}
    assert p.wait_for(Sent, room).bytes_by_part == committed.bytes_by_part
    p.wait_for(Released, room)
    assert d.pools.state(THERE, 2) == p.pools.state(HERE, 1)
    assert d.pools.state([], 5) == p.pools.state([], 6)
    for pool in range(len(d.layout.pools)):  # nothing else was touched
        kv = d.layout.pools[pool].kind is StateKind.KV
        for item in [*THERE, 0] if kv else [2, 5]:  # page 0 is reserved, nobody reads it
            size = d.layout.pools[pool].item_bytes
            d.pools.item(pool, item)[:] = before[d.pools.offsets[pool] + item * size :][:size]
    assert (d.pools.bytes == before).all()
    assert not d.quiet(0.05) and not p.quiet(0)


def test_open_may_come_first(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config()), decode(config())
    d.transfer.open(p.address(1), "r", THERE, 2)
    d.until(lambda: p.transfer.stats()["rooms"] == {"offered": 1})
    assert p.pump() == []
    p.transfer.expect(1, "r", 5)
    p.wait_for(RoomOpened, 1)
    p.send(1, HERE, 1)
    d.wait_for(Committed, 1)


def test_what_is_sent_before_decode_opens_is_kept(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config()), decode(config())
    p.transfer.expect(1, "r", 5)
    p.send(1, HERE, 1)
    d.transfer.open(p.address(1), "r", THERE, 2)
    d.wait_for(Committed, 1)
    p.wait_for(Released, 1)
    assert [type(event) for event in p.events] == [RoomOpened, Sent, Released]
    assert d.pools.state(THERE, 2) == p.pools.state(HERE, 1)


def test_pages_that_decode_holds_stay_off_the_wire(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config()), decode(config())
    held = d.pools.state(THERE[:3], 2)[: 4 * 3 * 256]
    p.transfer.expect(1, "r", 5)
    d.transfer.open(p.address(1), "r", THERE, 2, None, 3)
    assert p.wait_for(RoomOpened, 1).offer.num_cached_tokens == 12
    p.send(1, HERE, 1)
    assert d.wait_for(Committed, 1).bytes_by_part["kv"] == 4 * 256
    assert d.pools.state(THERE[:3], 2)[: 4 * 3 * 256] == held
    assert d.pools.state(THERE[3:], 2) == p.pools.state(HERE[3:], 1)


def test_many_rooms_at_once(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config()), decode(config())
    for room in range(7):
        p.transfer.expect(room, "r", 5)
        d.transfer.open(p.address(room), "r", [1 + 4 * room, 2 + 4 * room], 1 + room)
    for room in range(7):
        p.wait_for(RoomOpened, room)
        p.send(room, [20 - room, 30 - room], 7 - room)
    for room in range(7):
        d.wait_for(Committed, room)
        assert d.pools.state([1 + 4 * room, 2 + 4 * room], 1 + room) == p.pools.state([20 - room, 30 - room], 7 - room)
    assert len(p.transfer.stats()["peers"]) == 1


@pytest.mark.parametrize("part", ["kv", "conv", "ssm", "metadata"])
@pytest.mark.parametrize("kind", ["flip", "zero"])
def test_a_fault_fails_exactly_its_room(config: Config, prefill: Make, decode: Make, kind: str, part: str) -> None:
    faulty = config(LoopbackFaults(**{kind: part}, every=3))
    p, d = prefill(faulty), decode(config())
    for room in (10, 11, 12):
        start(p, d, room, pages=[room, room + 10], slot=room - 8)
        p.send(room, [1, 2], 1)
    error = d.wait_for(RoomFailed, 10).error
    assert isinstance(error, TransferError)
    assert (error.code, error.param) == ("digest_mismatch", part)
    assert p.wait_for(RoomFailed, 10).error.code == "digest_mismatch"
    for room in (11, 12):
        d.wait_for(Committed, room)
        assert d.pools.state([room, room + 10], room - 8) == p.pools.state([1, 2], 1)
    d.wait_for(Released, 10)
    p.wait_for(Released, 10)
    assert d.transfer.stats()["digest_mismatches"] == {part: 1}


def test_a_flipped_track_slot_is_named(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config(LoopbackFaults(flip="track"))), decode(config())
    p.transfer.expect(1, "r", 5)
    d.transfer.open(p.address(1), "r", THERE, 2, 3)
    p.send(1, HERE, 1, 6)
    assert d.wait_for(RoomFailed, 1).error.param == "track"


@pytest.mark.parametrize("part", ["kv", "conv", "ssm"])
def test_a_dropped_part_is_named(config: Config, prefill: Make, decode: Make, part: str) -> None:
    p, d = prefill(config(LoopbackFaults(drop=part))), decode(config())
    start(p, d, 1)
    p.send(1, HERE, 1)
    assert d.wait_for(RoomFailed, 1).error.param == part


def test_a_lost_commit_times_out_on_both_sides(config: Config, prefill: Make, decode: Make) -> None:
    p = prefill(config(LoopbackFaults(drop="metadata"), transfer_timeout_s=0.3))
    d = decode(config())
    start(p, d, 1)
    p.send(1, HERE, 1)
    assert p.wait_for(RoomFailed, 1).error.code == "transfer_timeout"
    assert d.wait_for(RoomFailed, 1).error.code == "transfer_timeout"
    d.wait_for(Released, 1)


def test_zeros_arrive_when_nobody_checks(config: Config, prefill: Make, decode: Make) -> None:
    p = prefill(config(LoopbackFaults(zero="ssm"), verify=Verify.OFF))
    d = decode(config(verify=Verify.OFF))
    start(p, d, 1)
    p.send(1, HERE, 1)
    d.wait_for(Committed, 1)
    for pool in d.pools.of(StateKind.SSM):
        assert not d.pools.item(pool, 2).any()
    for pool in d.pools.of(StateKind.CONV):
        assert (d.pools.item(pool, 2) == p.pools.item(pool, 1)).all()


class SwappedSlots(LoopbackTransport):
    """Writes each SSM state to the slot after the one that was asked for."""

    def write(self, session: str, blocks: Sequence[Block], nth_room: int = 0) -> None:
        shifted = [block._replace(dst=block.dst + block.nbytes) if block.part == "ssm" else block for block in blocks]
        super().write(session, shifted, nth_room)


def test_another_requests_slot_is_caught(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config(), transport=SwappedSlots()), decode(config())
    for room, slot in ((1, 2), (2, 3)):
        start(p, d, room, pages=[room], slot=slot)
        p.send(room, [room], room)
    for room in (1, 2):
        error = d.wait_for(RoomFailed, room).error
        assert (error.code, error.param) == ("digest_mismatch", "ssm")


# Rooms in use


def test_a_room_in_use_is_refused(config: Config, prefill: Make, decode: Make) -> None:
    p, d, other = prefill(config()), decode(config()), decode(config(), node_id="decode-1")
    start(p, d, 1)
    with pytest.raises(RequestError) as expected_twice:
        p.transfer.expect(1, "s", 5)
    with pytest.raises(RequestError) as opened_twice:
        d.transfer.open(p.address(1), "s", [1], 1)
    other.transfer.open(p.address(1), "s", [1], 1)
    refused = other.wait_for(RoomFailed, 1).error
    other.wait_for(Released, 1)
    assert {expected_twice.value.code, opened_twice.value.code, refused.code} == {"room_in_use"}
    p.send(1, HERE, 1)  # the first one goes on undisturbed
    d.wait_for(Committed, 1)


def test_a_room_can_be_used_again(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config()), decode(config())
    for _ in range(3):
        p.events.clear()
        d.events.clear()
        start(p, d, 1)
        p.send(1, HERE, 1)
        d.wait_for(Committed, 1)
        p.wait_for(Released, 1)


def test_an_offer_outside_the_pools_is_refused(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config()), decode(config())
    for room, pages, slot in ((1, [40], 1), (2, [1], 99)):
        d.transfer.open(p.address(room), "r", pages, slot)
        assert d.wait_for(RoomFailed, room).error.code == "bad_offer"
        d.wait_for(Released, room)


def test_more_pages_than_reserved_fail_the_room(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config()), decode(config())
    start(p, d, 1, pages=[3])
    p.send(1, HERE, 1)
    assert d.wait_for(RoomFailed, 1).error.code == "too_many_pages"
    d.wait_for(Released, 1)
    p.wait_for(Released, 1)


# Aborts


def order(side: Prefill | Decode) -> list[str]:
    return [type(event).__name__ for event in side.events]


def test_abort_while_reserved_frees_at_once(config: Config, decode: Make) -> None:
    d = decode(config())
    d.transfer.open(RoomAddress(host="127.0.0.1", port=1, room=1), "r", THERE, 2)
    d.transfer.abort(1, AbortedError("no more"))
    d.wait_for(Released, 1, 0.5)
    assert not d.quiet(0.1)
    assert order(d) == ["RoomFailed", "Released"]


@pytest.mark.parametrize("expected", [True, False])
def test_abort_by_decode_before_the_first_write(config: Config, prefill: Make, decode: Make, expected: bool) -> None:
    p, d = prefill(config()), decode(config())
    if expected:
        start(p, d, 1)
    else:
        d.transfer.open(p.address(1), "r", THERE, 2)
        d.until(lambda: p.transfer.stats()["rooms"])
    d.transfer.abort(1, AbortedError("no more"))
    d.wait_for(Released, 1, 1)
    assert order(d) == ["RoomFailed", "Released"]
    if expected:
        p.wait_for(Released, 1, 1)
        assert order(p) == ["RoomOpened", "RoomFailed", "Released"]
        assert p.of(RoomFailed, 1)[0].error.code == "aborted"
    else:
        assert p.pump() == []
    assert p.transfer.stats()["rooms"] == {}


@pytest.mark.parametrize("by", ["decode", "prefill"])
def test_abort_while_writing_waits_for_the_write(config: Config, prefill: Make, decode: Make, by: str) -> None:
    """4 MB at 8 MB/s: told at once, released only when the write has ended, and nothing lands after that."""
    layout = wide_layout(4 << 20)
    slow = config(LoopbackFaults(bandwidth_bytes_s=8e6))
    p, d = prefill(slow, layout), decode(config(), layout)
    start(p, d, 1)
    p.send(1, HERE, 1)
    target = d.pools.item(2, 2)
    untouched = target.copy()
    d.until(lambda: (target != untouched).any())
    started = time.monotonic()
    (p if by == "prefill" else d).transfer.abort(1, AbortedError("no more"))
    p.wait_for(RoomFailed, 1, 0.2)
    d.wait_for(RoomFailed, 1, 0.2)
    assert time.monotonic() - started < 0.2
    assert not p.of(Released, 1) and not d.of(Released, 1)
    d.wait_for(Released, 1)
    assert time.monotonic() - started > 0.2
    landed = target.copy()
    p.wait_for(Released, 1)
    assert (landed == p.pools.item(2, 1)).all(), "the posted write was complete when the lease was released"
    assert not d.quiet(0.1) and not p.quiet(0)
    assert (target == landed).all()
    assert order(d) == ["RoomFailed", "Released"]
    assert order(p) == ["RoomOpened", "RoomFailed", "Released"]
    assert d.transfer.stats()["leases"] == {} and p.transfer.stats()["rooms"] == {}


def test_abort_after_commit_is_no_fault(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config()), decode(config())
    start(p, d, 1)
    p.send(1, HERE, 1)
    d.wait_for(Committed, 1)
    d.transfer.abort(1, AbortedError("too late"))
    p.wait_for(Released, 1)
    p.transfer.abort(1, AbortedError("too late"))
    assert not d.quiet(0.1) and not p.quiet(0)
    assert order(d) == ["Committed"]


def test_sending_to_a_failed_room_is_no_fault(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config()), decode(config())
    start(p, d, 1)
    d.transfer.abort(1, AbortedError("no more"))
    p.wait_for(Released, 1)
    p.send(1, HERE, 1)
    assert not p.quiet(0.1)


def test_abort_before_decode_opens(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config(bootstrap_timeout_s=0.3)), decode(config())
    p.transfer.expect(1, "r", 5)
    p.transfer.abort(1, AbortedError("no more"))
    p.wait_for(Released, 1)
    assert order(p) == ["RoomFailed", "Released"]
    d.transfer.open(p.address(1), "r", THERE, 2)
    assert d.wait_for(RoomFailed, 1).error.code == "aborted"
    d.transfer.open(p.address(1), "r", THERE, 3)  # it was told once
    d.wait(lambda _: len(d.of(RoomFailed, 1)) == 2)
    assert d.of(RoomFailed, 1)[1].error.code == "bootstrap_timeout"


def test_a_sender_that_is_connected_is_offered_a_room_at_once(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config()), decode(config())
    start(p, d, 1)
    hold = threading.Event()
    d.transfer._thread.call(hold.wait, 10)  # whatever decode's loop is busy with
    p.transfer.expect(2, "r", 5)
    d.transfer.open(p.address(2), "r", THERE, 2)
    p.wait_for(RoomOpened, 2, 5)
    hold.set()


class FailingTransport(LoopbackTransport):
    def write(self, session: str, blocks: Sequence[Block], nth_room: int = 0) -> None:
        raise TransferError("the link is down", code="write_failed")

    def reopen(self) -> bool:
        return False


def test_a_failed_write_that_cannot_be_ended_leaves_the_lease_in_quarantine(
    config: Config, prefill: Make, decode: Make
) -> None:
    """As over RDMA: nobody can say what of it still lands before the sender is gone."""
    p, d = prefill(config(), transport=FailingTransport()), decode(config())
    start(p, d, 1)
    p.send(1, HERE, 1)
    assert p.wait_for(RoomFailed, 1).error.code == "write_failed"
    p.wait_for(Released, 1)
    assert d.wait_for(RoomFailed, 1).error.code == "write_failed"
    assert not d.quiet(0.2)
    assert d.transfer.stats()["leases"] == {"draining": 1}
    p.transfer.close()
    d.wait_for(Released, 1)


class MendedTransport(FailingTransport):
    def reopen(self) -> bool:
        return True


def test_after_a_failed_write_its_connections_must_be_gone(config: Config, prefill: Make, decode: Make) -> None:
    """The sender has closed them; those that it has now are not waited for, nor are those of another one."""
    p, d = prefill(config(), transport=MendedTransport()), decode(config())
    closed, current = "192.0.2.1:9", "192.0.2.1:10"
    d.transport.inbound = lambda: frozenset({closed, current})
    p.transport.outbound = lambda: frozenset({current})
    start(p, d, 1)
    p.send(1, HERE, 1)
    p.wait_for(Released, 1)
    d.wait_for(RoomFailed, 1)
    d.until(lambda: d.transfer._leases[1].connections == {closed})
    assert not d.quiet(0.2)
    d.transport.inbound = lambda: frozenset({current})
    d.wait_for(Released, 1, 1)


class HeldTransport(LoopbackTransport):
    """Bytes land in the second half of a write, when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting, self.land, self.fails = threading.Event(), threading.Event(), False
        self.reopened = False

    def reopen(self) -> bool:
        self.reopened = True
        return True

    def begin(self, session: str, blocks: Sequence[Block], nth_room: int = 0) -> Callable[[], None]:
        def wait() -> None:
            self.waiting.set()
            assert self.land.wait(5)
            if self.fails:
                raise TransferError("the link broke", code="write_failed")
            self.write(session, blocks, nth_room)

        return wait


def test_commit_waits_for_what_is_on_its_way(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config(), transport=HeldTransport()), decode(config())
    start(p, d, 1)
    p.send(1, HERE, 1)
    assert p.transport.waiting.wait(5)
    assert not d.quiet(0.1)
    p.transport.land.set()
    d.wait_for(Committed, 1)
    assert d.pools.state(THERE, 2) == p.pools.state(HERE, 1)


@pytest.mark.parametrize("by", ["link", "hash"])
def test_what_breaks_while_bytes_are_on_their_way(
    config: Config, prefill: Make, decode: Make, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """A write that broke is ended for certain; when our own code broke, the write is waited for."""
    p, d = prefill(config(), transport=HeldTransport()), decode(config())
    if by == "hash":
        monkeypatch.setattr(StateDigests, "pages", lambda *_: 1 / 0)
    start(p, d, 1)
    p.transport.fails = by == "link"
    p.send(1, HERE, 1)
    assert p.transport.waiting.wait(5)
    assert not p.quiet(0.1), "the write still reads these pages"
    p.transport.land.set()
    code = "write_failed" if by == "link" else "internal"
    assert p.wait_for(RoomFailed, 1).error.code == code
    p.wait_for(Released, 1)
    assert d.wait_for(RoomFailed, 1).error.code == code
    d.wait_for(Released, 1)
    assert (p.transport.reopened, d.transfer.stats()["leases"]) == (by == "link", {})


def test_earlier_chunks_are_hashed_before_the_commit(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config()), decode(config())
    start(p, d, 1)
    incoming = d.transfer._leases[1].incoming
    for first, end in ((0, 2), (2, 3)):
        p.transfer.send_pages(1, first, HERE[first:end])
        d.until(lambda end=end: {incoming._next_page[layer] for layer in (1, 4)} == {end})
    p.transfer.send_pages(1, 3, HERE[3:])
    p.transfer.send_state(1, 1, None)
    d.until(lambda: incoming._hashed == {(layer, False) for layer in range(5)})
    p.transfer.commit(1, metadata(1))
    d.wait_for(Committed, 1)


class StaleTransport(LoopbackTransport):
    """As Mooncake does where a dead process had the same session: the first write to it fails."""

    failed = False

    def write(self, session: str, blocks: Sequence[Block], nth_room: int = 0) -> None:
        if not self.failed:
            self.failed = True
            raise TransferError("broken pipe", code="write_failed")
        super().write(session, blocks, nth_room)


def test_a_stale_session_costs_no_room(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config(), transport=StaleTransport()), decode(config())
    start(p, d, 1)
    p.send(1, HERE, 1)
    d.wait_for(Committed, 1)


class SlowGreeting(LoopbackTransport):
    def __init__(self) -> None:
        super().__init__()
        self.begun, self.ended = threading.Event(), threading.Event()

    def write(self, session: str, blocks: Sequence[Block], nth_room: int = 0) -> None:
        self.begun.set()
        time.sleep(0.2)
        super().write(session, blocks, nth_room)
        self.ended.set()


def test_close_waits_for_a_greeting(config: Config, prefill: Make, decode: Make) -> None:
    """The memory that it reads may go after that."""
    p, d = prefill(config(), transport=SlowGreeting()), decode(config())
    d.transfer.open(p.address(1), "r", THERE, 2)
    assert p.transport.begun.wait(5)
    p.transfer.close()
    assert p.transport.ended.is_set()


# Time-outs


def test_a_room_that_nobody_expects(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config(bootstrap_timeout_s=0.3)), decode(config())
    d.transfer.open(p.address(1), "r", THERE, 2)
    assert d.wait_for(RoomFailed, 1, 1).error.code == "bootstrap_timeout"
    d.wait_for(Released, 1)
    assert p.pump() == []


@pytest.mark.parametrize("first", ["the room's limit", "the handshake's limit"])
def test_a_node_that_does_not_answer_is_one_error(config: Config, decode: Make, first: str) -> None:
    """Two limits end at the same time; whichever is looked at first, the client is told the same."""
    d = decode(config(bootstrap_timeout_s=0.3))
    with socket.create_server(("127.0.0.1", 0)) as mute:
        d.transfer.open(RoomAddress(host="127.0.0.1", port=mute.getsockname()[1], room=1), "r", THERE, 2)
        if first == "the room's limit":
            with d.transfer._lock:
                d.transfer._check_clocks(time.monotonic() + 1)
        error = d.wait_for(RoomFailed, 1, 1).error
    assert (type(error), error.code, error.http_status) == (WorkerError, "bootstrap_timeout", 503)


def test_a_room_that_nobody_opens(config: Config, prefill: Make) -> None:
    p = prefill(config())
    p.transfer.expect(1, "r", 0.3)
    assert p.wait_for(RoomFailed, 1, 1).error.code == "bootstrap_timeout"
    p.wait_for(Released, 1)


def test_a_first_token_that_never_comes(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config()), decode(config(first_token_timeout_s=0.2, transfer_timeout_s=0.1))
    start(p, d, 1)
    assert d.wait_for(RoomFailed, 1, 1).error.code == "first_token_timeout"
    assert p.wait_for(RoomFailed, 1, 1).error.code == "first_token_timeout"
    d.wait_for(Released, 1)


def test_a_transfer_that_takes_too_long(config: Config, prefill: Make, decode: Make) -> None:
    layout = wide_layout(2 << 20)
    p = prefill(config(LoopbackFaults(bandwidth_bytes_s=2e6), transfer_timeout_s=0.2), layout)
    d = decode(config(), layout)
    start(p, d, 1)
    p.send(1, HERE, 1)
    assert p.wait_for(RoomFailed, 1, 0.7).error.code == "transfer_timeout"
    assert d.wait_for(RoomFailed, 1, 0.7).error.code == "transfer_timeout"
    assert not d.of(Released, 1)
    d.wait_for(Released, 1)


@pytest.mark.parametrize(
    ("host", "port"), [("127.0.0.1", 1), ("no.such.host.invalid", 80), ("a" * 300, 80), ("::1", 99999)]
)
def test_nobody_at_the_bootstrap_address(config: Config, decode: Make, host: str, port: int) -> None:
    d = decode(config())
    d.transfer.open(RoomAddress(host=host, port=port, room=1), "r", THERE, 2)
    assert d.wait_for(RoomFailed, 1, 1).error.code == "peer_unreachable"
    d.wait_for(Released, 1)
