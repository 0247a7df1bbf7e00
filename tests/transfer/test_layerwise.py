"""State that is sent layer by layer: the same as all at once, in any order of the layers, and never in part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from transfer_rig import Decode, Prefill, make_layout, metadata

from common.config import LoopbackFaults, TransferConfig, Verify
from common.errors import AbortedError
from transfer import Committed, Released, RoomFailed, RoomOpened, Sent, TrackState
from transfer.loopback import LoopbackTransport
from transfer.posting import Piece
from transfer.sender import Outgoing
from transfer.transport import Block

Make = Callable[..., Any]
Config = Callable[..., TransferConfig]

HERE, THERE = [7, 8, 9, 2], [3, 4, 11, 20]
SLOT_HERE, SLOT_THERE, TRACK_HERE, TRACK_THERE = 1, 2, 6, 5
KV_LAYERS, STATE_LAYERS = (1, 4), (0, 2, 3)
FIRST, LAST = Piece(0, (7, 8)), Piece(2, (9, 2), SLOT_HERE, TRACK_HERE)


class Spy(LoopbackTransport):
    """Remembers what was written, in its order."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Block] = []

    def write(self, session: str, blocks: Sequence[Block], nth_room: int = 0) -> None:
        self.written += [block for block in blocks if block.part != "greeting"]
        super().write(session, blocks, nth_room)

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.written)


def open_room(p: Prefill, d: Decode, room: int = 1, cached: int = 0) -> None:
    p.transfer.expect(room, "r", 5)
    d.transfer.open(p.address(room), "r", THERE, SLOT_THERE, TRACK_THERE, cached)
    p.wait_for(RoomOpened, room)


def layers_of(d: Decode, p: Prefill) -> set[int]:
    """The layers of which everything is in place at decode."""
    found = set()
    for layer in (*KV_LAYERS, *STATE_LAYERS):
        pools = [i for i, pool in enumerate(d.layout.pools) if pool.layer == layer]
        pairs = list(zip(HERE, THERE, strict=True)) if layer in KV_LAYERS else [(SLOT_HERE, SLOT_THERE), (6, 5)]
        if all((p.pools.item(i, a) == d.pools.item(i, b)).all() for i in pools for a, b in pairs):
            found.add(layer)
    return found


def say(outgoing: Outgoing, layers: Sequence[int]) -> None:
    for layer in layers:
        outgoing.layer_done(layer)


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 4, 0, 3, 1)])
@pytest.mark.parametrize("verify", list(Verify))
def test_layers_may_come_in_any_order(
    config: Config, prefill: Make, decode: Make, verify: Verify, order: Sequence[int]
) -> None:
    p, d = prefill(config(verify=verify)), decode(config(verify=verify))
    open_room(p, d)
    say(p.transfer.announce(1, FIRST), order)
    last = p.transfer.announce(1, LAST)
    for count, layer in enumerate(order, start=1):
        last.layer_done(layer)
        d.until(lambda count=count: layers_of(d, p) == {*order[:count]})
    assert not d.of(Committed, 1)
    p.transfer.commit(1, metadata(1))
    committed = d.wait_for(Committed, 1)
    assert committed.track is TrackState.RECEIVED
    assert committed.bytes_by_part == {"kv": 4 * 4 * 256, "conv": 3 * 144, "ssm": 3 * 1024, "track": 3 * 1168}
    assert p.wait_for(Sent, 1).bytes_by_part == committed.bytes_by_part


def test_a_layer_may_be_far_ahead_of_another(config: Config, prefill: Make, decode: Make) -> None:
    """Pages come in order within a layer, whatever the others have."""
    p, d = prefill(config()), decode(config())
    open_room(p, d)
    first, last = p.transfer.announce(1, FIRST), p.transfer.announce(1, LAST)
    say(first, [4])
    say(last, [4, 0, 2])
    say(first, [1])
    say(last, [3, 1])
    p.transfer.commit(1, metadata(1))
    d.wait_for(Committed, 1)
    assert d.pools.state(THERE, SLOT_THERE) == p.pools.state(HERE, SLOT_HERE)
    assert d.pools.state([], TRACK_THERE) == p.pools.state([], TRACK_HERE)


def test_each_byte_is_written_once_and_layer_by_layer_is_no_more(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config(), transport=Spy()), decode(config())
    open_room(p, d, cached=1)
    for piece in (FIRST, LAST):
        say(p.transfer.announce(1, piece), range(5))
    p.transfer.commit(1, metadata(1))
    d.wait_for(Committed, 1)
    bytes_written = [block.dst + i for block in p.transport.written for i in range(block.nbytes)]
    assert len(bytes_written) == len(set(bytes_written)) == 3 * 4 * 256 + 2 * 3 * 1168


@pytest.mark.parametrize(
    ("what", "left_out"), [*(("last", layer) for layer in range(5)), *(("first", layer) for layer in KV_LAYERS)]
)
def test_a_room_in_which_a_layer_was_left_out_is_not_committed(
    config: Config, prefill: Make, decode: Make, what: str, left_out: int
) -> None:
    p, d = prefill(config()), decode(config())
    open_room(p, d)
    skip = {FIRST: left_out if what == "first" else -1, LAST: left_out}
    for piece, missing in skip.items():
        say(p.transfer.announce(1, piece), [layer for layer in range(5) if layer != missing])
    p.transfer.commit(1, metadata(1))
    error = p.wait_for(RoomFailed, 1).error
    assert error.code == "incomplete" and str(left_out) in error.message
    assert d.wait_for(RoomFailed, 1).error.code == "incomplete"
    d.wait_for(Released, 1)
    assert not d.of(Committed, 1)


def test_a_track_slot_that_came_in_part_is_not_committed(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config()), decode(config())
    open_room(p, d)
    p.transfer.send_pages(1, 0, HERE)
    say(p.transfer.announce(1, Piece(0, (), None, TRACK_HERE)), [0, 3])
    p.transfer.send_state(1, SLOT_HERE)
    p.transfer.commit(1, metadata(1))
    error = p.wait_for(RoomFailed, 1).error
    assert error.code == "incomplete" and "[2]" in error.message


def test_a_saved_state_may_leave_long_before_the_final_one(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config()), decode(config())
    open_room(p, d)
    p.transfer.announce(1, Piece(0, (), None, TRACK_HERE)).all_done()
    d.until(lambda: d.pools.state([], TRACK_THERE) == p.pools.state([], TRACK_HERE))
    p.transfer.send_pages(1, 0, HERE)
    p.transfer.send_state(1, SLOT_HERE)
    p.transfer.commit(1, metadata(1))
    assert d.wait_for(Committed, 1).track is TrackState.RECEIVED


@pytest.mark.parametrize("part", ["kv", "conv", "ssm", "track"])
def test_a_fault_in_one_layer_is_caught(config: Config, prefill: Make, decode: Make, part: str) -> None:
    """The transport flips a byte of every write: of each layer, since each is written by itself here."""
    p, d = prefill(config(LoopbackFaults(flip=part))), decode(config())
    open_room(p, d)
    for piece in (FIRST, LAST):
        outgoing = p.transfer.announce(1, piece)
        for layer in range(5):
            outgoing.layer_done(layer)
            d.until(lambda: not p.transfer._rooms[1].busy)
    p.transfer.commit(1, metadata(1))
    error = d.wait_for(RoomFailed, 1).error
    assert (error.code, error.param) == ("digest_mismatch", part)


def test_decode_hashes_layer_by_layer(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config()), decode(config())
    open_room(p, d)
    incoming = d.transfer._leases[1].incoming
    say(p.transfer.announce(1, FIRST), range(5))
    d.until(lambda: [incoming._next_page[layer] for layer in KV_LAYERS] == [2, 2])
    last = p.transfer.announce(1, LAST)
    say(last, [0, 1])
    d.until(lambda: {(0, False), (0, True)} <= incoming._hashed and incoming._next_page[1] == 4)
    assert incoming._next_page[4] == 2 and {layer for layer, _ in incoming._hashed} == {0, 1}
    say(last, [2, 3, 4])
    d.until(lambda: {(layer, track) for layer in STATE_LAYERS for track in (False, True)} <= incoming._hashed)
    p.transfer.commit(1, metadata(1))
    d.wait_for(Committed, 1)


def test_what_is_said_after_the_end_of_a_room_goes_nowhere(config: Config, prefill: Make, decode: Make) -> None:
    """A step goes on after its request was aborted, and meanwhile the room's number may be another request's."""
    p, d = prefill(config(), transport=Spy()), decode(config())
    open_room(p, d)
    old = p.transfer.announce(1, Piece(0, (30, 31, 29, 28), 7, 4))
    old.layer_done(1)
    d.until(lambda: p.transport.nbytes == 2 * 4 * 256)
    p.transfer.abort(1, AbortedError("the client has gone"))
    for side in (p, d):
        side.wait_for(Released, 1)
        side.events.clear()
    old.layer_done(2)
    open_room(p, d)
    old.layer_done(3)
    old.all_done()
    assert not p.quiet(0.05) and p.transport.nbytes == 2 * 4 * 256
    p.send(1, HERE, SLOT_HERE, TRACK_HERE)
    d.wait_for(Committed, 1)
    assert d.pools.state(THERE, SLOT_THERE) == p.pools.state(HERE, SLOT_HERE)


def test_layers_without_state_are_no_news(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config(), transport=Spy()), decode(config())
    open_room(p, d)
    for layer in (5, 6, 100):
        p.transfer.announce(1, LAST).layer_done(layer)
    assert not p.quiet(0.05) and p.transport.written == []


class Near(Spy):
    def bursts(self, session: str) -> bool:
        return True


@pytest.mark.parametrize(
    ("in_burst", "order", "told"),
    [
        (False, (0, 1, 2, 3, 4), (1, 2, 3, 4, 5)),
        (True, (0, 1, 2, 3, 4), (0, 0, 0, 4, 5)),
        (True, (4, 0, 2, 1, 3), (1, 2, 3, 4, 5)),
    ],
)
def test_in_a_burst_the_first_layers_wait_for_one_of_the_last(
    monkeypatch: pytest.MonkeyPatch, in_burst: bool, order: Sequence[int], told: Sequence[int]
) -> None:
    monkeypatch.setattr("transfer.sender.BURST_FROM", 3 / 4)
    jobs: list[Any] = []
    outgoing = Outgoing(FIRST, make_layout(), jobs.append, lambda: in_burst)
    counts = []
    for layer in order:
        outgoing.layer_done(layer)
        counts.append(len(jobs))
    assert tuple(counts) == tuple(told)
    assert [job.layers.start for job in jobs] == list(order) and all(len(job.layers) == 1 for job in jobs)


def test_what_goes_in_a_burst_is_complete(config: Config, prefill: Make, decode: Make) -> None:
    p, d = prefill(config(), transport=Near()), decode(config())
    open_room(p, d)
    for piece in (FIRST, LAST):
        say(p.transfer.announce(1, piece), range(5))
    p.transfer.commit(1, metadata(1))
    d.wait_for(Committed, 1)
    assert layers_of(d, p) == {0, 1, 2, 3, 4}
