"""One room as the prefill rank sees it, and how far it has come.

EXPECTED ─┐                                             EXPECTED: the prefill leg is here, decode has not opened it
          ├─► OPEN ──► CONFIRMING ──► RELEASED          OFFERED: decode has opened it, the prefill leg is not here
OFFERED ──┘     │           │            ▲              DECLINED: decode does not need it, the prefill leg is not here
DECLINED ───────┼───────────┼────────────┤              OPEN: what the scheduler sends is written
any of them ────┴───────────┴► DRAINING ─┘              CONFIRMING: all is in place, decode has the last word
                                                        DRAINING: failed, but its worker still writes
"""

from __future__ import annotations

import enum
import queue
from dataclasses import dataclass, field
from typing import TypeAlias

from transfer.link import Link
from transfer.messages import Open
from transfer.narrow import Staging
from transfer.posting import Job, Posting


class RoomState(enum.StrEnum):
    EXPECTED = "expected"
    OFFERED = "offered"
    DECLINED = "declined"
    OPEN = "open"
    CONFIRMING = "confirming"
    DRAINING = "draining"
    RELEASED = "released"


_NEXT: dict[RoomState, frozenset[RoomState]] = {
    RoomState.EXPECTED: frozenset({RoomState.OPEN, RoomState.DRAINING, RoomState.RELEASED}),
    RoomState.OFFERED: frozenset({RoomState.OPEN, RoomState.DRAINING}),
    RoomState.DECLINED: frozenset({RoomState.DRAINING, RoomState.RELEASED}),
    RoomState.OPEN: frozenset({RoomState.CONFIRMING, RoomState.DRAINING}),
    RoomState.CONFIRMING: frozenset({RoomState.DRAINING, RoomState.RELEASED}),
    RoomState.DRAINING: frozenset({RoomState.RELEASED}),
    RoomState.RELEASED: frozenset(),
}


Lane: TypeAlias = "queue.SimpleQueue[tuple[Room, Job] | None]"


@dataclass(slots=True)
class Peer:
    """One decode rank: its connection and what its workers have to do, a lane for each. A room keeps to one lane.

    staging: where the worker narrows states; there is only one then. at_work: workers that have not ended.
    """

    link: Link
    lanes: tuple[Lane, ...]
    staging: Staging | None = None
    at_work: int = 0

    def put(self, room: Room, job: Job) -> None:
        self.lanes[room.nth % len(self.lanes)].put((room, job))


@dataclass(slots=True)
class Room:
    """rid: of the prefill leg, once it expects the room. open, peer: once decode has opened it.

    waiting: jobs that came before that. busy: the worker is at it. unsure: a write was begun and not seen to end well,
    so some of it may still land. nth: counts rooms, for injected faults.
    """

    room: int
    nth: int
    state: RoomState
    deadline_s: float | None
    waiting_for: str
    rid: str | None = None
    open: Open | None = None
    peer: Peer | None = None
    waiting: list[Job] = field(default_factory=list)
    busy: bool = False
    unsure: bool = False
    posting: Posting | None = None
    compute_end_s: float = 0.0

    @property
    def live(self) -> bool:
        """Whether the request may still succeed."""
        return self.state not in (RoomState.DRAINING, RoomState.RELEASED)

    def move(self, state: RoomState) -> None:
        """Go to `state`; a step that the picture does not show is a bug of ours."""
        assert state in _NEXT[self.state], f"room {self.room}: {self.state} cannot become {state}"
        self.state = state

    def is_lease(self, instance: str, lease: int) -> bool:
        """Whether the room was opened by this decode rank, under this lease."""
        if self.peer is None or self.open is None:
            return False
        return self.peer.link.peer.instance == instance and self.open.lease == lease
