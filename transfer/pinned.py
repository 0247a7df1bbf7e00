"""Page-locked memory of the host, for blocks on their way from a card to a network.

Mooncake copies a card's memory through memory of the host that is not page-locked, and while such a copy is made every
other call of the driver waits, launches of the prompt's kernels among them. So a card's blocks are copied to slots of
page-locked memory first, on a stream of their own, and are written from there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from common.errors import TransferError
from transfer.transport import Block

log = logging.getLogger(__name__)


class Slots:
    """At most `count` slots of `slot_bytes`, made when they are first needed. Any thread may call.

    allocate(nbytes): the address of page-locked memory that can be written from; after its first TransferError no more
    are made. copy(blocks): copies blocks to the host and returns when they are there. Raises TransferError.
    """

    def __init__(
        self,
        slot_bytes: int,
        count: int,
        allocate: Callable[[int], int],
        copy: Callable[[Sequence[Block]], None],
    ) -> None:
        self._slot_bytes = slot_bytes
        self._allocate, self._copy = allocate, copy
        self._lock = threading.Lock()
        self._to_make = count
        self._free: list[int] = []

    def take(self, blocks: Sequence[Block]) -> int | None:
        """The address of a slot for these blocks; None when they do not fit, or no slot is free or can be made. Nobody
        waits for one: who holds a slot may be waiting for a second."""
        if sum(block.nbytes for block in blocks) > self._slot_bytes:
            return None
        with self._lock:
            if self._free:
                return self._free.pop()
            if not self._to_make:
                return None
            self._to_make -= 1
        try:
            return self._allocate(self._slot_bytes)
        except TransferError as error:
            log.warning("writes leave straight from the card: %s", error.message)
            with self._lock:
                self._to_make = 0
            return None

    def fill(self, slot: int, blocks: Sequence[Block]) -> list[Block]:
        """Copy the blocks to the slot, one behind the other; what is to be written from there."""
        inward, outward, address = [], [], slot
        for block in blocks:
            inward.append(block._replace(dst=address))
            outward.append(block._replace(src=address))
            address += block.nbytes
        self._copy(inward)
        return outward

    def give_back(self, slot: int) -> None:
        """Nothing is read from it any more, or what is read is wanted by nobody."""
        with self._lock:
            self._free.append(slot)
