"""The pages and slots that decode lends to one room, and who may touch them.

RESERVED ──► WRITING ──► COMMITTED ──► RELEASED      RESERVED: the sender does not know them yet
    │           │                         ▲          WRITING: the sender may write at any moment
    └───────────┴──────► DRAINING ────────┘          DRAINING: failed, but a write may still land
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from common.handoff import RoomAddress
from transfer.digest import Incoming
from transfer.messages import Open


class LeaseState(enum.StrEnum):
    RESERVED = "reserved"
    WRITING = "writing"
    COMMITTED = "committed"
    DRAINING = "draining"
    RELEASED = "released"


_NEXT: dict[LeaseState, frozenset[LeaseState]] = {
    LeaseState.RESERVED: frozenset({LeaseState.WRITING, LeaseState.DRAINING}),
    LeaseState.WRITING: frozenset({LeaseState.COMMITTED, LeaseState.DRAINING}),
    LeaseState.COMMITTED: frozenset({LeaseState.RELEASED}),
    LeaseState.DRAINING: frozenset({LeaseState.RELEASED}),
    LeaseState.RELEASED: frozenset(),
}


@dataclass(slots=True)
class Lease:
    """address: of the bootstrap endpoint. deadline_s: on the monotonic clock.

    writer: the instance of the sender that was told of the pages; None while none was. incoming: the digests of what is
    here already; None when verify is off. connections: what is left of those that the sender has closed because a write
    of it failed; None unless it says so.
    """

    address: RoomAddress
    open: Open
    deadline_s: float
    state: LeaseState = LeaseState.RESERVED
    writer: str | None = None
    incoming: Incoming | None = None
    waiting_for: str = "the prefill node"
    connections: set[str] | None = None

    @property
    def room(self) -> int:
        return self.open.room

    @property
    def live(self) -> bool:
        """Whether the request may still succeed."""
        return self.state in (LeaseState.RESERVED, LeaseState.WRITING)

    def move(self, state: LeaseState) -> None:
        """Go to `state`; a step that the picture does not show is a bug of ours."""
        assert state in _NEXT[self.state], f"room {self.room}: {self.state} cannot become {state}"
        self.state = state
