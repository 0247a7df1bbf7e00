"""Blocks that go by way of slots: the same bytes over a real Mooncake, whatever else holds the slots."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from common.config import TransferConfig, TransportName
from common.errors import TransferError
from transfer.mooncake import MooncakeTransport
from transfer.narrow import address_of
from transfer.pinned import Slots
from transfer.transport import Block, open_transport

SLOT_BYTES = 1 << 14
NBYTES = 1 << 16


class Way:
    """A sender with slots, whose copies are a twin's, and a receiver. made: slots so far; copied: bytes."""

    def __init__(self, config: TransferConfig, num_slots: int) -> None:
        self.sender, self.receiver = (self._open(config) for _ in range(2))
        self.slots = Slots(SLOT_BYTES, num_slots, self._allocate, self._copy)
        self.sender._slots = self.slots
        self.made = self.copied = 0
        self.broken = False
        self.source, self.target = self.sender.host_buffer(NBYTES), self.receiver.host_buffer(NBYTES)
        self.source[:] = bytes(i * 31 % 251 for i in range(NBYTES))

    def _open(self, config: TransferConfig) -> MooncakeTransport:
        found = open_transport(config)
        assert isinstance(found, MooncakeTransport)
        return found

    def _allocate(self, nbytes: int) -> int:
        self.made += 1
        return address_of(self.sender.host_buffer(nbytes))

    def _copy(self, blocks: Sequence[Block]) -> None:
        if self.broken:
            raise TransferError("the copy broke", code="write_failed")
        for block in blocks:
            ctypes.memmove(block.dst, block.src, block.nbytes)
            self.copied += block.nbytes

    def blocks(self, *spans: tuple[int, int]) -> list[Block]:
        """From each place in the source to the same one in the target: (first byte, how many)."""
        source, target = address_of(self.source), address_of(self.target)
        return [Block(source + first, target + first, nbytes, "kv") for first, nbytes in spans]

    def begin(self, *spans: tuple[int, int]) -> Callable[[], None]:
        return self.sender.begin(self.receiver.session, self.blocks(*spans))

    def arrived(self, *spans: tuple[int, int]) -> bool:
        """These bytes, and no others, are at the target."""
        wanted = bytearray(NBYTES)
        for first, nbytes in spans:
            wanted[first : first + nbytes] = self.source[first : first + nbytes]
        return self.target == wanted

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def way(config: Callable[..., TransferConfig]) -> Iterator[Callable[[int], Way]]:
    made: list[Way] = []

    def make(num_slots: int) -> Way:
        made.append(Way(config(transport=TransportName.MOONCAKE), num_slots))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("whole", [SLOT_BYTES - 4, SLOT_BYTES, SLOT_BYTES + 4])
def test_what_fits_goes_by_way_of_a_slot(whole: int, way: Callable[[int], Way]) -> None:
    made = way(2)
    spans = [(100, 4), (8, 64), (SLOT_BYTES, whole - 68)]
    made.begin(*spans)()
    assert made.arrived(*spans)
    fits = whole <= SLOT_BYTES
    assert (made.copied, made.made) == ((whole, 1) if fits else (0, 0))
    made.begin(*spans)()
    assert made.made == fits, "a slot is used again"


def test_what_is_on_its_way_is_not_overwritten_and_nobody_waits_for_a_slot(way: Callable[[int], Way]) -> None:
    """The third write finds no slot and goes straight. What is changed in the source after `begin` does not matter to
    those that have one; each write lands where it belongs."""
    made = way(2)
    spans = [(i * 4096, 4096) for i in range(4)]
    waits = [made.begin(span) for span in spans[:3]]
    assert made.copied == 2 * 4096 and made.made == 2
    for wait in waits:
        wait()
    made.begin(spans[3])()
    assert made.copied == 3 * 4096 and made.arrived(*spans)


def test_a_slot_comes_back_when_the_write_fails(way: Callable[[int], Way], capfd: pytest.CaptureFixture[str]) -> None:
    made = way(1)
    (block,) = made.blocks((0, 4096))
    for _ in range(3):
        with pytest.raises(TransferError, match="could not be reached"):
            made.sender.begin("127.0.0.1:1", [block])
        with pytest.raises(TransferError, match="refused"):
            made.sender.begin(made.receiver.session, [block._replace(dst=4096)])()
    made.broken = True
    with pytest.raises(TransferError, match="the copy broke"):
        made.begin((0, 4096))
    made.broken = False
    before = made.copied
    made.begin((0, 4096))()
    assert made.copied == before + 4096 and made.made == 1 and made.arrived((0, 4096))
    capfd.readouterr()  # what Mooncake says about it


def test_where_no_slot_can_be_made_writes_leave_straight(way: Callable[[int], Way]) -> None:
    made = way(2)

    def refuse(nbytes: int) -> int:
        raise TransferError("no memory", code="register_failed")

    first = made.begin((0, 64))
    made.slots._allocate = refuse
    made.begin((64, 64))()
    assert made.slots._to_make == 0, "it is not tried with every write"
    first()
    made.begin((128, 64))()
    assert made.copied == 128 and made.arrived((0, 192))


def test_slots_go_on_after_it_began_anew(way: Callable[[int], Way]) -> None:
    made = way(1)
    made.begin((0, 64))()
    assert made.sender.reopen()
    made.begin((64, 64))()
    assert made.made == 1 and made.copied == 128 and made.arrived((0, 128))


def test_many_threads_share_the_slots(way: Callable[[int], Way]) -> None:
    made = way(3)
    spans = [(i * 512, 512) for i in range(NBYTES // 512)]

    def write(mine: list[tuple[int, int]]) -> None:
        for first, second in zip(mine[::2], mine[1::2], strict=True):
            waits = [made.begin(first), made.begin(second)]
            for wait in waits:
                wait()

    threads = [threading.Thread(target=write, args=(spans[i::8],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert made.arrived((0, NBYTES)) and made.made <= 3 and made.copied > 0
