"""Which rooms and request ids are taken. A room belongs to one sequence from the opening of its legs to their end."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Set

from common.errors import RequestError

_ROOM_BITS = 63
RID_IN_USE = "rid_in_use"
"""Code of the error for an id that another request has, here and at the nodes."""


def random_room() -> int:
    """0 .. 2**63 - 1."""
    return secrets.randbits(_ROOM_BITS)


class InFlight:
    """Of one router. draw: makes a candidate room."""

    def __init__(self, draw: Callable[[], int] = random_room) -> None:
        self._draw = draw
        self.rooms: set[int] = set()
        self.rids: set[str] = set()

    def claim(self, rids: Set[str], num_rooms: int) -> list[int]:
        """Take the ids and as many new rooms. Raises RequestError when an id is taken: an abort would hit both."""
        taken = self.rids & rids
        if taken:
            raise RequestError(f"rid {min(taken)!r}: in use by a request that runs", param="rid", code=RID_IN_USE)
        self.rids.update(rids)
        return self.more_rooms(num_rooms)

    def more_rooms(self, num_rooms: int, rank: tuple[int, int] = (0, 1)) -> list[int]:
        """For another try: a room is never used twice. rank: (a rank, of how many): whose rooms they are to be."""
        return [self._new_room(*rank) for _ in range(num_rooms)]

    def release(self, rids: Set[str], rooms: Iterable[int]) -> None:
        self.rids.difference_update(rids)
        self.rooms.difference_update(rooms)

    def _new_room(self, rank: int, num_ranks: int) -> int:
        while (room := _room_of(rank, num_ranks, self._draw())) in self.rooms:
            pass
        self.rooms.add(room)
        return room


def _room_of(rank: int, num_ranks: int, room: int) -> int:
    """The largest one up to this room that is the rank modulo the number of ranks; of the smallest rooms one above."""
    found = room - (room - rank) % num_ranks
    return found if found >= 0 else found + num_ranks
