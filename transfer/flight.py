"""The writes of one room that are on their way."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from types import TracebackType

from common.errors import TransferError
from transfer.handshake import brief
from transfer.room import Room
from transfer.transport import Block, Transport

log = logging.getLogger(__name__)


class Flight:
    """Begins writes and waits for them, the oldest first. After a `with` none is on its way.

    seconds: that writes were on their way, one after the other, divided among the parts by their bytes.

    The room is `unsure` from the begin of a write on, until all of them were seen to end well.
    """

    def __init__(self, room: Room, transport: Transport, session: str) -> None:
        self._room, self._transport, self._session = room, transport, session
        self._waits: deque[tuple[Callable[[], None], float, Counter[str]]] = deque()
        self._lost = False
        self._landed_s = 0.0
        self.seconds: dict[str, float] = {}

    def begin(self, blocks: Sequence[Block]) -> None:
        """Raises TransferError."""
        self._room.unsure, lost, self._lost = True, self._lost, True
        began_s = time.monotonic()
        wait = self._transport.begin(self._session, blocks, self._room.nth)
        self._waits.append((wait, began_s, _bytes_by_part(blocks)))
        self._lost = lost

    def land(self, left: int = 0) -> None:
        """Wait until at most `left` writes are on their way. Raises TransferError."""
        while len(self._waits) > left:
            wait, began_s, parts = self._waits.popleft()
            lost, self._lost = self._lost, True
            wait()
            self._lost = lost
            self._note(began_s, parts)
        self._room.unsure = self._lost or bool(self._waits)

    def _note(self, began_s: float, parts: Counter[str]) -> None:
        """The oldest write has landed; before the one in front of it had, it waited for that."""
        now = time.monotonic()
        share = (now - max(began_s, self._landed_s)) / max(1, parts.total())
        self._landed_s = now
        for part, count in parts.items():
            self.seconds[part] = self.seconds.get(part, 0.0) + share * count

    def __enter__(self) -> Flight:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """The room is over, or its writes have landed already: an error here fails nothing more."""
        while self._waits:
            try:
                self.land()
            except TransferError as late:
                log.warning("room %s: a write that was given up failed: %s", self._room.room, brief(late))


def _bytes_by_part(blocks: Sequence[Block]) -> Counter[str]:
    parts: Counter[str] = Counter()
    for block in blocks:
        parts[block.part] += block.nbytes
    return parts
