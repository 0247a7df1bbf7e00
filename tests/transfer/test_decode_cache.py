"""What a decode node that caches asks of the hand-off: cached pages stay as they are, track slots, declined rooms."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import xxhash
from transfer_rig import Decode, Pools, Prefill, metadata

from common.config import LoopbackFaults, TransferConfig, Verify
from common.errors import AbortedError, RequestError, TransferError
from common.handoff import RoomAddress
from common.layout import StateKind
from transfer import Committed, Released, RoomDeclined, RoomFailed, RoomOpened, Sent, TrackState
from transfer.loopback import LoopbackTransport
from transfer.messages import Commit, Decline, Ranks
from transfer.posting import Posting
from transfer.transport import Block

Make = Callable[..., Any]
Config = Callable[..., TransferConfig]

HERE, THERE = [7, 8, 9, 2], [3, 4, 11, 20]
SLOT_HERE, TRACK_HERE, SLOT_THERE, TRACK_THERE = 1, 6, 2, 5
PAGE_BYTES, SLOT_BYTES = 4 * 256, 3 * (144 + 1024)


class Spy(LoopbackTransport):
    """Remembers what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Block] = []

    def write(self, session: str, blocks: Sequence[Block], nth_room: int = 0) -> None:
        self.written += [block for block in blocks if block.part != "greeting"]
        super().write(session, blocks, nth_room)


def open_room(
    p: Prefill, d: Decode, room: int = 1, *, slot: int = SLOT_THERE, track: int | None = TRACK_THERE, cached: int = 0
) -> None:
    p.transfer.expect(room, "r", 5)
    d.transfer.open(p.address(room), "r", THERE, slot, track, cached)
    p.wait_for(RoomOpened, room)


def commits(d: Decode) -> list[Commit]:
    """Fills with every Commit that decode gets."""
    seen: list[Commit] = []
    handle = d.transfer._commit

    def keep(link: Any, message: Commit) -> None:
        seen.append(message)
        handle(link, message)

    d.transfer._commit = keep
    return seen


def kv(pools: Pools, pages: Sequence[int]) -> list[bytes]:
    """The KV of these pages, pool by pool."""
    return [b"".join(pools.item(pool, page).tobytes() for page in pages) for pool in pools.of(StateKind.KV)]


def kv_digest(pools: Pools, pages: Sequence[int]) -> bytes:
    return xxhash.xxh3_64_digest(b"".join(xxhash.xxh3_64_digest(each) for each in kv(pools, pages)))


def order(side: Prefill | Decode) -> list[str]:
    return [type(event).__name__ for event in side.events]


# Cached pages


@pytest.mark.parametrize("skipped_by", ["transfer", "scheduler"])
@pytest.mark.parametrize("cached", [0, 1, 3, 4])
def test_only_pages_that_decode_lacks_are_written(
    config: Config, prefill: Make, decode: Make, cached: int, skipped_by: str
) -> None:
    """Whether the scheduler sends all pages, or begins after the cached ones as the offer invites it to."""
    p, d = prefill(config(), transport=Spy()), decode(config())
    seen = commits(d)
    before, held = d.pools.bytes.copy(), kv(d.pools, THERE[:cached])
    assert not cached or held != kv(p.pools, HERE[:cached])
    open_room(p, d, cached=cached)
    offer = p.of(RoomOpened, 1)[0].offer
    assert (offer.num_pages, offer.num_cached_pages, offer.num_cached_tokens) == (4, cached, 4 * cached)
    first = 0 if skipped_by == "transfer" else cached
    p.send(1, HERE[first:], SLOT_HERE, TRACK_HERE, first)
    committed = d.wait_for(Committed, 1)
    p.wait_for(Sent, 1)

    sent = (4 - cached) * PAGE_BYTES
    assert committed.bytes_by_part.get("kv", 0) == sent
    assert sum(block.nbytes for block in p.transport.written if block.part == "kv") == sent
    assert sum(block.nbytes for block in p.transport.written) == sent + 2 * SLOT_BYTES
    (commit,) = seen
    assert commit.num_pages == 4
    assert commit.digests["kv"] == kv_digest(p.pools, HERE[cached:]) == kv_digest(d.pools, THERE[cached:])

    assert kv(d.pools, THERE[:cached]) == held, "cached pages are as they were"
    assert kv(d.pools, THERE[cached:]) == kv(p.pools, HERE[cached:])
    assert d.pools.state([], SLOT_THERE) == p.pools.state([], SLOT_HERE)
    assert d.pools.state([], TRACK_THERE) == p.pools.state([], TRACK_HERE)
    untouched(d, before, THERE[cached:], [SLOT_THERE, TRACK_THERE])


def untouched(d: Decode, before: Any, pages: Sequence[int], slots: Sequence[int]) -> None:
    """Nothing but these pages and slots has changed; page 0 is reserved, nobody reads it."""
    after = d.pools.bytes.copy()
    for pool, (layout, offset) in enumerate(zip(d.layout.pools, d.pools.offsets, strict=True)):
        for item in [*pages, 0] if layout.kind is StateKind.KV else slots:
            d.pools.item(pool, item)[:] = before[offset + item * layout.item_bytes :][: layout.item_bytes]
    assert (d.pools.bytes == before).all()
    d.pools.bytes[:] = after


def test_a_prompt_whose_every_page_is_cached_sends_state_alone(config: Config, prefill: Make, decode: Make) -> None:
    """No page is sent, not even announced; conv, ssm and track are, and are checked."""
    p, d = prefill(config(), transport=Spy()), decode(config())
    open_room(p, d, cached=4)
    p.transfer.send_state(1, SLOT_HERE, TRACK_HERE)
    p.transfer.commit(1, metadata(1))
    committed = d.wait_for(Committed, 1)
    assert committed.bytes_by_part == {"conv": 3 * 144, "ssm": 3 * 1024, "track": SLOT_BYTES}
    assert {block.part for block in p.transport.written} == {"conv", "ssm", "track"}
    assert d.pools.state([], SLOT_THERE) == p.pools.state([], SLOT_HERE)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_chunk_may_straddle_the_cached_pages(config: Config, prefill: Make, decode: Make, cut: int) -> None:
    p, d = prefill(config()), decode(config())
    open_room(p, d, cached=2)
    p.transfer.send_pages(1, 0, HERE[:cut])
    p.transfer.send_pages(1, cut, HERE[cut:])
    p.transfer.send_state(1, SLOT_HERE)
    p.transfer.commit(1, metadata(1))
    assert d.wait_for(Committed, 1).bytes_by_part["kv"] == 2 * PAGE_BYTES
    assert kv(d.pools, THERE[2:]) == kv(p.pools, HERE[2:])


@pytest.mark.parametrize("cached", [1, 3])
def test_a_fault_in_the_pages_that_were_sent_is_caught(
    config: Config, prefill: Make, decode: Make, cached: int
) -> None:
    p, d = prefill(config(LoopbackFaults(flip="kv"))), decode(config())
    open_room(p, d, cached=cached)
    p.send(1, HERE, SLOT_HERE)
    assert d.wait_for(RoomFailed, 1).error.param == "kv"


# Track slots


def test_the_track_slot_is_a_part_of_its_own(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config(), transport=Spy()), decode(config())
    seen = commits(d)
    open_room(p, d)
    assert p.of(RoomOpened, 1)[0].offer.wants_track
    p.send(1, HERE, SLOT_HERE, TRACK_HERE)
    committed = d.wait_for(Committed, 1)
    assert committed.track is TrackState.RECEIVED and committed.track == "received"
    assert committed.metadata.tracked_position == 8
    assert committed.bytes_by_part["track"] == SLOT_BYTES
    assert sorted(seen[0].digests) == ["conv", "kv", "metadata", "ssm", "track"]
    assert d.pools.state([], TRACK_THERE) == p.pools.state([], TRACK_HERE)
    assert d.pools.state([], SLOT_THERE) == p.pools.state([], SLOT_HERE)


@pytest.mark.parametrize(
    ("offered", "saved", "position", "track"),
    [
        (None, TRACK_HERE, 8, "none"),  # decode has no use for it
        (None, TRACK_HERE, 11, "none"),
        (TRACK_THERE, TRACK_HERE, -1, "none"),  # nothing was tracked
        (TRACK_THERE, None, -1, "none"),
        (TRACK_THERE, None, 8, "none"),  # it was, but is not there any more
        (TRACK_THERE, TRACK_HERE, 11, "same_as_final"),  # the end of the prompt
        (TRACK_THERE, SLOT_HERE, 11, "same_as_final"),
        (TRACK_THERE, None, 11, "same_as_final"),
    ],
)
@pytest.mark.parametrize("verify", [Verify.OFF, Verify.DIGEST])
def test_no_byte_of_the_track_slot_is_sent(
    config: Config,
    prefill: Make,
    decode: Make,
    verify: Verify,
    offered: int | None,
    saved: int | None,
    position: int,
    track: str,
) -> None:
    p, d = prefill(config(verify=verify), transport=Spy()), decode(config(verify=verify))
    before = d.pools.bytes.copy()
    open_room(p, d, track=offered)
    assert p.of(RoomOpened, 1)[0].offer.wants_track == (offered is not None)
    p.send(1, HERE, SLOT_HERE, saved, tracked_position=position)
    committed = d.wait_for(Committed, 1)
    assert committed.track == track
    assert committed.bytes_by_part == {"kv": 4 * PAGE_BYTES, "conv": 3 * 144, "ssm": 3 * 1024}
    assert sum(block.nbytes for block in p.transport.written) == 4 * PAGE_BYTES + SLOT_BYTES
    assert d.pools.state(THERE, SLOT_THERE) == p.pools.state(HERE, SLOT_HERE)
    untouched(d, before, THERE, [SLOT_THERE])
    p.wait_for(Released, 1)


@pytest.mark.parametrize("verify", [Verify.OFF, Verify.DIGEST])
def test_state_and_commit_may_be_far_apart(config: Config, prefill: Make, decode: Make, verify: Verify) -> None:
    """The state is written at once, whenever the metadata come."""
    p, d = prefill(config(verify=verify), transport=Spy()), decode(config(verify=verify))
    open_room(p, d)
    p.transfer.send_pages(1, 0, HERE)
    p.transfer.send_state(1, SLOT_HERE, TRACK_HERE)
    d.until(lambda: d.pools.state(THERE, SLOT_THERE) == p.pools.state(HERE, SLOT_HERE))
    d.until(lambda: d.pools.state([], TRACK_THERE) == p.pools.state([], TRACK_HERE))
    assert not d.of(Committed, 1)
    p.transfer.commit(1, metadata(1))
    assert d.wait_for(Committed, 1).track is TrackState.RECEIVED
    assert d.pools.state([], TRACK_THERE) == p.pools.state([], TRACK_HERE)


@pytest.mark.parametrize("kind", ["flip", "zero", "drop"])
def test_a_fault_of_the_track_slot_fails_exactly_its_room(
    config: Config, prefill: Make, decode: Make, kind: str
) -> None:
    p, d = prefill(config(LoopbackFaults(**{kind: "track"}, every=2))), decode(config())
    for room, slot in ((10, 2), (11, 4)):
        open_room(p, d, room, slot=slot, track=slot + 1)
        p.send(room, HERE, SLOT_HERE, TRACK_HERE)
    error = d.wait_for(RoomFailed, 10).error
    assert isinstance(error, TransferError)
    assert (error.code, error.param) == ("digest_mismatch", "track")
    assert p.wait_for(RoomFailed, 10).error.code == "digest_mismatch"
    assert d.wait_for(Committed, 11).track is TrackState.RECEIVED
    assert d.pools.state([], 5) == p.pools.state([], TRACK_HERE)
    d.wait_for(Released, 10)
    p.wait_for(Released, 10)
    assert d.transfer.stats()["digest_mismatches"] == {"track": 1}


@pytest.mark.parametrize("kind", ["flip", "zero", "drop"])
def test_a_track_slot_that_is_not_sent_cannot_be_hurt(config: Config, prefill: Make, decode: Make, kind: str) -> None:
    p, d = prefill(config(LoopbackFaults(**{kind: "track"}))), decode(config())
    open_room(p, d)
    p.send(1, HERE, SLOT_HERE, TRACK_HERE, tracked_position=11)
    assert d.wait_for(Committed, 1).track is TrackState.SAME_AS_FINAL
    assert d.pools.state([], SLOT_THERE) == p.pools.state([], SLOT_HERE)


def test_a_wrong_track_slot_arrives_when_nobody_checks(config: Config, prefill: Make, decode: Make) -> None:
    p = prefill(config(LoopbackFaults(zero="track"), verify=Verify.OFF))
    d = decode(config(verify=Verify.OFF))
    open_room(p, d)
    p.send(1, HERE, SLOT_HERE, TRACK_HERE)
    assert d.wait_for(Committed, 1).track is TrackState.RECEIVED
    assert d.pools.state([], TRACK_THERE) == bytes(SLOT_BYTES)
    assert d.pools.state([], SLOT_THERE) == p.pools.state([], SLOT_HERE)


class Swapped(LoopbackTransport):
    """The track states of two requests change places on the way: by where they come from, or by where they go."""

    def __init__(self, end: str, sizes: dict[int, int]) -> None:
        """sizes: bytes of an item by the address that its pool begins at, at the end that is swapped."""
        super().__init__()
        self.end, self.sizes = end, sizes

    def write(self, session: str, blocks: Sequence[Block], nth_room: int = 0) -> None:
        super().write(session, [self._swap(block) if block.part == "track" else block for block in blocks], nth_room)

    def _swap(self, block: Block) -> Block:
        where = getattr(block, self.end)
        base = max(base for base in self.sizes if base <= where)
        item = (where - base) // self.sizes[base]
        return block._replace(**{self.end: base + (item ^ 1) * self.sizes[base]})


def places(side: Prefill | Decode) -> dict[int, int]:
    pairs = zip(side.pools.placements, side.layout.pools, strict=True)
    return {place.base: pool.item_bytes for place, pool in pairs}


@pytest.mark.parametrize("end", ["src", "dst"])
def test_another_requests_track_slot_is_caught(config: Config, prefill: Make, decode: Make, end: str) -> None:
    """Rooms 1 and 2 track in slots 6 and 7 here, 4 and 5 there."""
    transport = Swapped(end, {})
    p, d = prefill(config(), transport=transport), decode(config())
    transport.sizes = places(p if end == "src" else d)
    for room in (1, 2):
        open_room(p, d, room, slot=room, track=3 + room)
    for room in (1, 2):
        p.send(room, HERE, room, 5 + room)
    for room in (1, 2):
        error = d.wait_for(RoomFailed, room).error
        assert (error.code, error.param) == ("digest_mismatch", "track")


@pytest.mark.parametrize("verify", [Verify.OFF, Verify.DIGEST])
@pytest.mark.parametrize(
    ("offered", "position", "claim"),
    [
        (TRACK_THERE, 11, TrackState.NONE),
        (TRACK_THERE, 11, TrackState.RECEIVED),
        (TRACK_THERE, 8, TrackState.SAME_AS_FINAL),
        (TRACK_THERE, -1, TrackState.SAME_AS_FINAL),
        (TRACK_THERE, -1, TrackState.RECEIVED),
        (TRACK_THERE, 12, TrackState.RECEIVED),
        (None, 11, TrackState.SAME_AS_FINAL),
        (None, 8, TrackState.RECEIVED),
    ],
)
def test_a_claim_that_contradicts_the_metadata_is_refused(
    config: Config,
    prefill: Make,
    decode: Make,
    monkeypatch: pytest.MonkeyPatch,
    verify: Verify,
    offered: int | None,
    position: int,
    claim: TrackState,
) -> None:
    p, d = prefill(config(verify=verify)), decode(config(verify=verify))
    commit = Posting.commit

    def claiming(posting: Posting, payload: bytes, seconds: float) -> Commit:
        return msgspec.structs.replace(commit(posting, payload, seconds), track=claim)

    monkeypatch.setattr(Posting, "commit", claiming)
    open_room(p, d, track=offered)
    p.send(1, HERE, SLOT_HERE, TRACK_HERE, tracked_position=position)
    wanted = {"bad_metadata"} if verify is Verify.OFF else {"bad_metadata", "digest_mismatch"}
    assert d.wait_for(RoomFailed, 1).error.code in wanted
    assert not d.of(Committed, 1)


# Declined rooms


@pytest.mark.parametrize("first", ["expect", "decline"])
def test_a_declined_room_ends_at_once(config: Config, prefill: Make, decode: Make, first: str) -> None:
    p, d = prefill(config()), decode(config())
    before = d.pools.bytes.copy()
    if first == "expect":
        p.transfer.expect(1, "r", 5)
        d.transfer.decline(p.address(1), "r")
    else:
        d.transfer.decline(p.address(1), "r")
        d.until(lambda: p.transfer.stats()["rooms"] == {"declined": 1})
        assert p.pump() == []
        p.transfer.expect(1, "r", 5)
    p.wait_for(Released, 1, 1)
    assert p.events == [RoomDeclined(1), Released(1)]
    assert p.transfer.stats()["rooms"] == {}
    assert p.transfer.stats()["rooms_total"]["declined"] == 1
    assert "failed" not in p.transfer.stats()["rooms_total"]
    assert not d.quiet(0.05) and not p.quiet(0)
    assert d.transfer.stats()["rooms_total"] == {"declined": 1}
    assert d.transfer.stats()["leases"] == {}
    untouched(d, before, [], [])


def test_what_was_sent_before_a_room_was_declined_is_dropped(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config(), transport=Spy()), decode(config())
    p.transfer.expect(1, "r", 5)
    p.send(1, HERE, SLOT_HERE, TRACK_HERE)
    d.transfer.decline(p.address(1), "r")
    p.wait_for(Released, 1, 1)
    p.send(1, HERE, SLOT_HERE, TRACK_HERE)
    assert not p.quiet(0.05)
    assert order(p) == ["RoomDeclined", "Released"]
    assert p.transport.written == []


def test_a_declined_room_can_be_used_again(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config()), decode(config())
    for _ in range(2):
        p.transfer.expect(1, "r", 5)
        d.transfer.decline(p.address(1), "r")
        p.wait_for(Released, 1, 1)
        p.events.clear()
    open_room(p, d)
    p.send(1, HERE, SLOT_HERE)
    d.wait_for(Committed, 1)


def test_other_rooms_go_on_beside_declined_ones(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config()), decode(config())
    open_room(p, d, 1)
    for room in range(2, 12):
        p.transfer.expect(room, "r", 5)
        d.transfer.decline(p.address(room), "r")
    p.send(1, HERE, SLOT_HERE)
    d.wait_for(Committed, 1)
    for room in range(2, 12):
        p.wait_for(RoomDeclined, room)
    assert p.transfer.stats()["rooms_total"]["declined"] == 10
    assert len(p.transfer.stats()["peers"]) == 1


def test_a_declined_room_that_nobody_expects_is_forgotten(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config(bootstrap_timeout_s=0.3)), decode(config())
    started = time.monotonic()
    d.transfer.decline(p.address(1), "r")
    d.until(lambda: p.transfer.stats()["rooms"] == {"declined": 1})
    d.until(lambda: p.transfer.stats()["rooms"] == {}, 1)
    assert time.monotonic() - started > 0.25
    assert not p.quiet(0.05) and not d.quiet(0)
    assert p.transfer.stats()["rooms_total"] == {"started": 1}
    open_room(p, d)  # a later use of the number knows nothing of it
    p.send(1, HERE, SLOT_HERE)
    d.wait_for(Committed, 1)


def test_declining_a_room_twice_is_no_fault(config: Config, prefill: Make, decode: Make) -> None:
    p, d, other = prefill(config()), decode(config()), decode(config(), node_id="decode-1")
    for side in (d, d, other):
        side.transfer.decline(p.address(1), "r")
    d.until(lambda: len(p.transfer.stats()["peers"]) == 2)
    p.transfer.expect(1, "r", 5)
    p.wait_for(Released, 1, 1)
    assert order(p) == ["RoomDeclined", "Released"]


def test_declining_a_room_in_use_is_refused(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config()), decode(config())
    open_room(p, d)
    with pytest.raises(RequestError) as refused:
        d.transfer.decline(p.address(1), "s")
    assert (refused.value.code, refused.value.http_status) == ("room_in_use", 400)
    p.send(1, HERE, SLOT_HERE)
    d.wait_for(Committed, 1)
    assert "declined" not in d.transfer.stats()["rooms_total"]


def test_a_declined_room_cannot_be_opened(config: Config, prefill: Make, decode: Make) -> None:
    p, d, other = prefill(config()), decode(config()), decode(config(), node_id="decode-1")
    d.transfer.decline(p.address(1), "r")
    d.until(lambda: p.transfer.stats()["rooms"])
    other.transfer.open(p.address(1), "r", THERE, SLOT_THERE)
    assert other.wait_for(RoomFailed, 1, 1).error.code == "room_in_use"
    other.wait_for(Released, 1)
    p.transfer.expect(1, "r", 5)
    p.wait_for(Released, 1, 1)
    assert order(p) == ["RoomDeclined", "Released"]


@pytest.mark.parametrize("expected", [True, False])
def test_declining_an_open_room_fails_that_room_alone(
    config: Config, prefill: Make, decode: Make, expected: bool
) -> None:
    p, d, other = prefill(config()), decode(config()), decode(config(), node_id="decode-1")
    open_room(p, d, 2)
    if expected:
        open_room(p, d, 1)
    else:
        d.transfer.open(p.address(1), "r", THERE, SLOT_THERE)
        d.until(lambda: p.transfer.stats()["rooms"].get("offered"))
    other.transfer.decline(p.address(1), "r")
    assert d.wait_for(RoomFailed, 1, 1).error.code == "protocol_error"
    d.wait_for(Released, 1, 1)
    if expected:
        assert p.wait_for(RoomFailed, 1, 1).error.code == "protocol_error"
        p.wait_for(Released, 1, 1)
    assert not p.of(RoomDeclined, 1)
    p.send(2, HERE, SLOT_HERE)
    d.wait_for(Committed, 2)
    p.transfer.expect(3, "r", 5)
    other.transfer.decline(p.address(3), "r")  # the connection that said it is as good as before
    p.wait_for(RoomDeclined, 3, 1)
    assert len(p.transfer.stats()["peers"]) == 2


class Gated(LoopbackTransport):
    """Writes of state wait until the gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.reached = threading.Event(), threading.Event()

    def write(self, session: str, blocks: Sequence[Block], nth_room: int = 0) -> None:
        if blocks[0].part != "greeting":
            self.reached.set()
            assert self.gate.wait(5)
        super().write(session, blocks, nth_room)


def test_declining_a_room_that_has_failed_changes_nothing(config: Config, prefill: Make, decode: Make) -> None:
    """While its last write runs, the room is over but not released."""
    p, d, other = prefill(config(), transport=Gated()), decode(config()), decode(config(), node_id="decode-1")
    open_room(p, d)
    p.send(1, HERE, SLOT_HERE)
    assert p.transport.reached.wait(5)
    d.transfer.abort(1, TransferError("no more"))
    p.wait_for(RoomFailed, 1, 0.5)
    other.transfer.decline(p.address(1), "r")
    p.transfer.expect(2, "r", 5)
    other.transfer.decline(p.address(2), "r")
    p.wait_for(RoomDeclined, 2, 1)  # so the first one was heard too
    assert not p.of(Released, 1)
    p.transport.gate.set()
    p.wait_for(Released, 1)
    d.wait_for(Released, 1)
    assert [type(event) for event in p.events if event.room == 1] == [RoomOpened, RoomFailed, Released]
    assert order(d) == ["RoomFailed", "Released"]
    assert p.of(RoomFailed, 1)[0].error.message == "no more"


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 1), ("no.such.host.invalid", 80)])
def test_declining_at_an_address_where_nobody_is(config: Config, decode: Make, host: str, port: int) -> None:
    d = decode(config(bootstrap_timeout_s=0.3))
    started = time.monotonic()
    d.transfer.decline(RoomAddress(host=host, port=port, room=1), "r")
    assert time.monotonic() - started < 0.05
    assert not d.quiet(0.5)
    assert d.transfer.stats()["leases"] == {}


@pytest.mark.parametrize("asked", ["decline", "open"])
def test_a_rank_that_was_replaced_is_found_again(config: Config, prefill: Make, decode: Make, asked: str) -> None:
    """Its old address is known still, and nobody is there: a decline that got lost would cost the leg its time-out."""
    p, d = prefill(config()), decode(config())
    address = p.address(7)
    d.transfer._routes[address.host, address.port] = Ranks(addresses=(("127.0.0.1", 1),))
    p.transfer.expect(7, "r", 5)
    if asked == "decline":
        d.transfer.decline(address, "r")
        p.wait_for(RoomDeclined, 7, 2)
        return
    d.transfer.open(address, "r", THERE, 2)
    p.wait_for(RoomOpened, 7, 2)
    p.transfer.abort(7, AbortedError("no more"))


def test_a_decline_goes_to_the_rooms_rank(config: Config, prefill: Make, decode: Make) -> None:
    """Its frame says the room and nothing of decode's memory."""
    p, d = prefill(config()), decode(config())
    seen: list[Any] = []
    handle = p.transfer._declined
    p.transfer._declined = lambda message: (seen.append(message), handle(message))
    p.transfer.expect(7, "r", 5)
    d.transfer.decline(p.address(7), "some-rid")
    p.wait_for(Released, 7, 1)
    assert seen == [Decline(room=7, rid="some-rid")]
