"""What the transfer tells the scheduler, and the queue between its threads and the scheduler's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from common.errors import ServingError
from common.handoff import HandoffMetadata
from transfer.messages import TrackState


class Offer(NamedTuple):
    """What decode offered: pages of its own for num_pages pages of the prompt, the first ones filled already."""

    num_pages: int
    num_cached_pages: int
    num_cached_tokens: int
    wants_track: bool


class RoomOpened(NamedTuple):
    """Prefill side: both legs are here."""

    room: int
    offer: Offer


class RoomDeclined(NamedTuple):
    """Prefill side: decode serves this request alone, nothing is to be computed. `Released` follows at once."""

    room: int


class Sent(NamedTuple):
    """Prefill side: decode has everything and found it right. seconds: from `commit` to decode's word."""

    room: int
    bytes_by_part: dict[str, int]
    seconds: float


class Committed(NamedTuple):
    """Decode side: the state is here and right; its pages and slots are the scheduler's again.

    transfer_s: what the hand-off added after compute: last writes and check. track: what is in the track slot; when it
    is SAME_AS_FINAL, the scheduler copies the slot if it wants the tracked state to live on.
    """

    room: int
    metadata: HandoffMetadata
    bytes_by_part: dict[str, int]
    transfer_s: float
    track: TrackState


class RoomFailed(NamedTuple):
    """The request is over; its client may be told. Its pages and slots are not free before `Released`."""

    room: int
    error: ServingError


class Released(NamedTuple):
    """The last event of a room (decode side: of one that failed): nothing touches its pages and slots any more."""

    room: int


PrefillEvent = RoomOpened | RoomDeclined | Sent | RoomFailed | Released
DecodeEvent = Committed | RoomFailed | Released

E = TypeVar("E")


class EventQueue(Generic[E]):
    """Filled by the transfer's threads, drained by the scheduler; `wake` is called after each event."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._events: deque[E] = deque()
        self._wake = wake

    def put(self, event: E) -> None:
        self._events.append(event)
        self._wake()

    def drain(self) -> list[E]:
        drained: list[E] = []
        while self._events:
            drained.append(self._events.popleft())
        return drained
