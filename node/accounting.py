"""Who owns what in a rank, since when, and what is owned by nobody.

Everything in use must be reachable from one of these roots: the scheduler's queues and its step in flight, the rooms of
the role, the prefix cache. What is not is a leak, once it has stayed so for `LEAK_AFTER_S` (a moment of it is normal:
events of a transfer wait to be taken in).

The rank's own thread calls it. Prompts and answers do not appear here: ids, numbers and times only.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.allocator import Holding
from engine.radix_cache import CACHE_OWNER
from engine.scheduler import Scheduler
from engine.sequence import Sequence

log = logging.getLogger(__name__)

LEAK_AFTER_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomView:
    """One hand-off as its role knows it, since `since_s`. state: what the transfer says of it, None when it is over
    there; `reserving` when it waits for memory and has not begun there. failed: the client has been told.
    """

    room: int
    sequence: Sequence
    since_s: float
    state: str | None
    failed: bool
    track_slot: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rooms:
    """All hand-offs of a rank. strays: rooms that only the transfer knows, with their states."""

    views: Seq[RoomView]
    strays: Mapping[int, str]


NO_ROOMS = Rooms(views=(), strays={})


class Item(NamedTuple):
    """Something that is owned: a page, slot, sequence, room, lease or lock. since_s tells uses of one number apart."""

    kind: str
    number: int | str
    owner: str
    since_s: float


class Accounts:
    """sequences: those that the front waits for, by rid."""

    def __init__(self, scheduler: Scheduler, sequences: Mapping[str, Sequence]) -> None:
        self._scheduler = scheduler
        self._memory = scheduler.memory
        self._sequences = sequences

    # -- who is there --------------------------------------------------------------------------------

    def places(self, rooms: Rooms) -> dict[Sequence, str]:
        """Every sequence that something will still happen to, and where it stands."""
        scheduler = self._scheduler
        places = {share.sequence: "in flight" for share in scheduler.shares_in_flight}
        places |= {view.sequence: f"room {view.state or 'over'}" for view in rooms.views}
        for name in ("waiting", "prefilling", "running"):
            places |= dict.fromkeys(getattr(scheduler, name), name)
        return places

    def track_slots(self, rooms: Rooms) -> set[int]:
        """Slots for saved states that the cache does not have: being written, or read by a hand-off."""
        slots = {share.track.slot for share in self._scheduler.shares_in_flight if share.track is not None}
        slots |= {view.track_slot for view in rooms.views if view.track_slot is not None}
        return slots.union(*(sequence.spare_slots for sequence in self.places(rooms)))

    # -- gauges --------------------------------------------------------------------------------------

    def sizes(self, rooms: Rooms) -> dict[str, int]:
        """Numbers of pages and slots by use; what is left of the total is free, cached or owned by nobody."""
        failed = {view.sequence for view in rooms.views if view.failed}
        in_rooms = {view.sequence for view in rooms.views} - failed
        places = self.places(rooms)
        return {
            "pages_in_requests": sum(len(s.own_pages) for s in places.keys() - in_rooms - failed),
            "pages_in_rooms": sum(len(s.own_pages) for s in in_rooms),
            "pages_draining": sum(len(s.own_pages) for s in failed),
            "slots_main": sum(s.slot is not None for s in places),
            "slots_track": len(self.track_slots(rooms)),
        }

    # -- leaks ---------------------------------------------------------------------------------------

    def unowned(self, rooms: Rooms) -> set[Item]:
        """What no live request, cache, room or lease owns at this moment."""
        memory, cache, places = self._memory, self._memory.cache, self.places(rooms)
        pages = {page for sequence in places for page in sequence.own_pages}
        slots = {sequence.slot for sequence in places if sequence.slot is not None} | self.track_slots(rooms)
        if cache is not None:
            pages |= cache.cached_pages
            slots |= cache.cached_slots
        return {
            *_items("page", memory.pages.holdings(), pages),
            *_items("slot", memory.slots.holdings(), slots),
            *self._unowned_locks(places),
            *(Item("sequence", s.rid, s.rid, s.arrival_s) for s in self._sequences.values() if s not in places),
            *(Item("room", v.room, v.sequence.rid, v.since_s) for v in rooms.views if v.state is None),
            *(Item("lease", room, state, 0.0) for room, state in rooms.strays.items()),
        }

    def _unowned_locks(self, places: Iterable[Sequence]) -> list[Item]:
        """Locks keep cached pages from eviction; one whose holder is gone does so for ever."""
        cache = self._memory.cache
        if cache is None:
            return []
        held = {lock for sequence in places for lock in sequence.locks}
        held |= {sequence.checkpoint.lock for sequence in places if sequence.checkpoint is not None}
        return [Item("lock", id(lock), f"a prefix of {lock.node.end} tokens", 0.0) for lock in cache.locks - held]

    # -- /debug/state ----------------------------------------------------------------------------------

    def listing(self, rooms: Rooms, now: float) -> dict[str, list[dict[str, Any]]]:
        """Every sequence, page range, slot and room with its owner and age in seconds."""
        places = self.places(rooms)
        places |= {s: "lost" for s in self._sequences.values() if s not in places}
        by_rid = {sequence.rid: place for sequence, place in places.items()}
        return {
            "sequences": [
                _sequence(s, place, now) for s, place in sorted(places.items(), key=lambda e: e[0].arrival_s)
            ],
            "rooms": [_room(view, now) for view in sorted(rooms.views, key=lambda view: view.since_s)],
            "pages": self._page_ranges(by_rid, now),
            "slots": self._slots(rooms, by_rid, now),
        }

    def _page_ranges(self, by_rid: Mapping[str, str], now: float) -> list[dict[str, Any]]:
        """Pages that follow each other and came to their owner together."""
        cached = set() if self._memory.cache is None else self._memory.cache.cached_pages
        held = sorted(self._memory.pages.holdings().items())
        groups = itertools.groupby(enumerate(held), key=lambda e: (e[1][0] - e[0], e[1][1], e[1][0] in cached))
        ranges = []
        for (_, holding, is_cached), members in groups:
            numbers = [page for _, (page, _) in members]
            ranges.append({"first": numbers[0], "last": numbers[-1], **_owner(holding, is_cached, by_rid, now)})
        return ranges

    def _slots(self, rooms: Rooms, by_rid: Mapping[str, str], now: float) -> list[dict[str, Any]]:
        cached = set() if self._memory.cache is None else self._memory.cache.cached_slots
        tracks, slots = self.track_slots(rooms), self._memory.slots
        return [
            {
                "slot": slot,
                "use": "cache" if slot in cached else "track" if slot in tracks else "main",
                "generation": slots.generation(slot),
                **_owner(holding, slot in cached, by_rid, now),
            }
            for slot, holding in sorted(slots.holdings().items())
        ]


def _items(kind: str, holdings: Mapping[int, Holding], known: set[int]) -> list[Item]:
    if holdings.keys() <= known:
        return []
    return [Item(kind, number, *holdings[number]) for number in holdings.keys() - known]


def _owner(holding: Holding, is_cached: bool, by_rid: Mapping[str, str], now: float) -> dict[str, Any]:
    """owner: a rid, or null for the cache, which is no rid."""
    place = "cache" if is_cached else by_rid.get(holding.owner, "nobody")
    owner = None if is_cached and holding.owner == CACHE_OWNER else holding.owner
    return {"owner": owner, "phase": place, "age_s": _age(holding.since_s, now)}


def _sequence(sequence: Sequence, place: str, now: float) -> dict[str, Any]:
    return {
        "rid": sequence.rid,
        "phase": place,
        "age_s": _age(sequence.arrival_s, now),
        "prompt_tokens": sequence.num_prompt_tokens,
        "output_tokens": len(sequence.output_ids),
        "computed_tokens": sequence.num_computed_tokens,
        "pages": len(sequence.page_table),
        "own_pages": len(sequence.own_pages),
        "slot": sequence.slot,
        "steps_in_flight": sequence.in_flight,
        "released": sequence.released,
    }


def _room(view: RoomView, now: float) -> dict[str, Any]:
    return {
        "room": view.room,
        "owner": view.sequence.rid,
        "phase": view.state or "over",
        "age_s": _age(view.since_s, now),
        "failed": view.failed,
        "own_pages": len(view.sequence.own_pages),
        "slot": view.sequence.slot,
        "track_slot": view.track_slot,
    }


def _age(since_s: float, now: float) -> float:
    return round(max(0.0, now - since_s), 3)


class LeakDetector:
    """Counts, once each, the items that stay owned by nobody for `LEAK_AFTER_S`, and logs them."""

    def __init__(self) -> None:
        self.total = 0
        self._seen_s: dict[Item, float] = {}
        self._leaks: set[Item] = set()

    @property
    def num_now(self) -> int:
        """Those that are still there."""
        return len(self._leaks)

    def look(self, unowned: set[Item], now: float) -> None:
        """unowned: as it is now, seconds on the monotonic clock."""
        self._seen_s = {item: self._seen_s.get(item, now) for item in unowned}
        self._leaks &= unowned
        fresh = {i for i, seen_s in self._seen_s.items() if now - seen_s >= LEAK_AFTER_S and i not in self._leaks}
        self._leaks |= fresh
        self.total += len(fresh)
        for (kind, owner, since_s), items in _by_owner(fresh):
            age = f", owned for {now - since_s:.0f} s" if since_s else ""
            log.error("leak: %s %s (owner %s%s) in use by nobody", kind, _numbers(items), owner, age)

    def listing(self, now: float) -> list[dict[str, Any]]:
        """The leaks that are there now, for /debug/state."""
        return [
            {"kind": item.kind, "number": item.number, "owner": item.owner, "unowned_s": _age(self._seen_s[item], now)}
            for item in sorted(self._leaks, key=lambda item: (item.kind, str(item.number)))
        ]


def _by_owner(items: set[Item]) -> Iterable[tuple[tuple[str, str, float], list[Item]]]:
    def key(item: Item) -> tuple[str, str, float]:
        return item.kind, item.owner, item.since_s

    in_order = sorted(items, key=lambda item: (*key(item), item.number))
    return ((what, list(group)) for what, group in itertools.groupby(in_order, key=key))


def _numbers(items: Seq[Item]) -> str:
    shown = ", ".join(str(item.number) for item in items[:8])
    return shown if len(items) <= 8 else f"{shown} and {len(items) - 8} more"
