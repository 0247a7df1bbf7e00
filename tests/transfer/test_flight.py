"""Writes on their way: waited for in order, all of them whatever happens; doubt where one did not end well."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from common.errors import TransferError
from transfer.flight import Flight
from transfer.loopback import LoopbackTransport
from transfer.room import Room, RoomState
from transfer.transport import Block


class Slow(LoopbackTransport):
    """log: what was begun and waited for, by size. fails: sizes whose writes end in an error; -size: begin with one."""

    def __init__(self, *fails: int) -> None:
        super().__init__()
        self.fails, self.log = fails, list[str]()

    def begin(self, session: str, blocks: Sequence[Block], nth_room: int = 0) -> Callable[[], None]:
        size = blocks[0].nbytes
        self.log.append(f"begin {size}")
        if -size in self.fails:
            raise TransferError("cannot begin", code="write_failed")

        def wait() -> None:
            self.log.append(f"land {size}")
            if size in self.fails:
                raise TransferError("lost", code="write_failed")

        return wait


def start(*fails: int) -> tuple[Room, Slow, Flight]:
    room = Room(1, 0, RoomState.OPEN, None, "")
    transport = Slow(*fails)
    return room, transport, Flight(room, transport, "session")


def blocks(size: int) -> list[Block]:
    return [Block(0, 0, size, "kv")]


def test_the_oldest_lands_first_and_doubt_ends_with_the_last() -> None:
    room, transport, flight = start()
    with flight:
        for size in (1, 2, 3):
            flight.begin(blocks(size))
            assert room.unsure
        flight.land(left=1)
        assert transport.log == ["begin 1", "begin 2", "begin 3", "land 1", "land 2"] and room.unsure
        flight.land()
        assert transport.log[-1] == "land 3" and not room.unsure


@pytest.mark.parametrize("lost", [1, 2])
def test_a_write_that_fails_leaves_doubt_and_the_others_are_waited_for(lost: int) -> None:
    room, transport, flight = start(lost)
    with pytest.raises(TransferError), flight:
        flight.begin(blocks(1))
        flight.begin(blocks(2))
        flight.land()
    assert transport.log[2:] == ["land 1", "land 2"] and room.unsure


def test_a_write_that_cannot_begin_leaves_doubt() -> None:
    room, transport, flight = start(-2)
    with pytest.raises(TransferError), flight:
        flight.begin(blocks(1))
        flight.begin(blocks(2))
    assert transport.log == ["begin 1", "begin 2", "land 1"] and room.unsure


@pytest.mark.parametrize(("lost", "unsure"), [((), False), ((1,), True), ((2,), True), ((1, 2), True)])
def test_what_was_given_up_is_waited_for_in_silence(lost: tuple[int, ...], unsure: bool) -> None:
    """The room is over for another reason."""
    room, transport, flight = start(*lost)
    with flight:
        flight.begin(blocks(1))
        flight.begin(blocks(2))
    assert transport.log[2:] == ["land 1", "land 2"] and room.unsure == unsure


def test_a_bug_of_ours_meanwhile_leaves_no_doubt() -> None:
    room, transport, flight = start()
    with pytest.raises(ZeroDivisionError), flight:
        flight.begin(blocks(1))
        raise ZeroDivisionError
    assert transport.log == ["begin 1", "land 1"] and not room.unsure


def test_the_time_of_a_write_is_divided_by_the_bytes_of_its_parts() -> None:
    _, _, flight = start()
    with flight:
        flight.begin([Block(0, 0, 100, "kv"), Block(0, 0, 200, "ssm"), Block(0, 0, 100, "ssm")])
        flight.begin(blocks(0))
        flight.land()
    assert flight.seconds.keys() == {"kv", "ssm"} and flight.seconds["kv"] > 0
    assert flight.seconds["ssm"] == pytest.approx(3 * flight.seconds["kv"])
