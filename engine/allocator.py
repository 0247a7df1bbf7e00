"""Who owns which page and which slot. A page or slot has one owner from `allocate` to `free`, and none in between;
`transfer` hands it to another one.

Number 0 of each is reserved: padding rows read and write it, no sequence ever owns it. An owner is any string, as a
rid; with the time since when, it serves `/debug/state` and the search for leaks, and decides nothing. Lowest numbers
go first, so that a rank with little to do touches little memory. Two structures know what is free, the free list and
the owners; `check_integrity` compares them. Freeing what nobody owns, or taking what is not there, is a bug of this
project: AssertionError, and nothing is changed.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np


class Holding(NamedTuple):
    """Who owns an item, and since when (`time.monotonic()`)."""

    owner: str
    since_s: float


class _Owners:
    """Item → who holds it, for the items 1 … count - 1."""

    def __init__(self, count: int) -> None:
        assert count >= 2, f"{count} items: number 0 is reserved, so there must be at least 2"
        self.num_usable = count - 1
        self._held: dict[int, Holding] = {}

    @property
    def num_free(self) -> int:
        return self.num_usable - len(self._held)

    def claim(self, items: Iterable[int], owner: str) -> None:
        holding = Holding(owner, time.monotonic())
        for item in items:
            assert item not in self._held, f"{item} is free and owned by {self._held[item].owner!r}"
            self._held[item] = holding

    def release(self, items: Sequence[int]) -> None:
        self._check_owned(items, "freed")
        for item in items:
            del self._held[item]

    def transfer(self, items: Sequence[int], owner: str) -> None:
        self._check_owned(items, "transferred")
        self._held.update(dict.fromkeys(items, Holding(owner, time.monotonic())))

    def holdings(self) -> Mapping[int, Holding]:
        return MappingProxyType(self._held)

    def owned(self) -> dict[str, list[int]]:
        by_owner: dict[str, list[int]] = {}
        for item in sorted(self._held):
            by_owner.setdefault(self._held[item].owner, []).append(item)
        return by_owner

    def _check_owned(self, items: Sequence[int], done: str) -> None:
        assert 0 not in items, f"0 is reserved: never {done}"
        assert len(set(items)) == len(items), f"{done} twice in one call: {sorted(items)}"
        missing = [item for item in items if item not in self._held]
        assert not missing, f"{done} without an owner: {missing}"

    def check(self, free: Sequence[int]) -> None:
        assert len(set(free)) == len(free), f"free more than once: {sorted(free)}"
        both = sorted(set(free) & self._held.keys())
        assert not both, f"free and owned: {both}"
        known = sorted([*free, *self._held])
        assert known == list(range(1, self.num_usable + 1)), f"of 1 … {self.num_usable} only {known} are free or owned"


class PageAllocator:
    """KV pages 1 … num_pages - 1. Adjacent pages are preferred, because adjacent pages cross the wire as one write."""

    def __init__(self, num_pages: int) -> None:
        self._owners = _Owners(num_pages)
        self._free = np.ones(num_pages, dtype=np.int8)  # 1: free
        self._free[0] = 0

    @property
    def num_usable(self) -> int:
        return self._owners.num_usable

    @property
    def num_free(self) -> int:
        return self._owners.num_free

    def can_allocate(self, count: int) -> bool:
        return count <= self.num_free

    def allocate(self, count: int, owner: str, *, after: int | None = None) -> list[int]:
        """Take `count` pages, in the order in which they should be filled. The caller has asked `can_allocate`.

        after: the owner's last page; what follows it is taken first, as far as it is free. The rest is the lowest run
        of free pages that holds it, or, when no run is long enough, the longest runs.
        """
        assert 0 <= count <= self.num_free, f"{count} pages asked of {self.num_free} free ones"
        pages = [] if after is None else self._take_following(after, count)
        while len(pages) < count:
            pages += self._take_run(count - len(pages))
        self._owners.claim(pages, owner)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Give back pages of any owners, in any order."""
        self._owners.release(pages)
        self._free[list(pages)] = 1

    def transfer(self, pages: Sequence[int], owner: str) -> None:
        """Make `owner` the owner of pages that anybody owns."""
        self._owners.transfer(pages, owner)

    def holdings(self) -> Mapping[int, Holding]:
        """Page → who holds it; a view, good until the next call that changes anything."""
        return self._owners.holdings()

    def owned(self) -> dict[str, list[int]]:
        """Owner → its pages, ascending."""
        return self._owners.owned()

    def check_integrity(self) -> None:
        """Every page but 0 is either free or owned, and not both: AssertionError if not."""
        self._owners.check(np.flatnonzero(self._free).tolist())

    def _take_following(self, page: int, count: int) -> list[int]:
        taken = self._free[page + 1 : page + 1 + count]
        length = len(taken) if taken.all() else int(taken.argmin())
        taken[:length] = 0
        return list(range(page + 1, page + 1 + length))

    def _take_run(self, count: int) -> list[int]:
        edges = np.flatnonzero(np.diff(self._free, prepend=0, append=0))  # start and end of each run of free pages
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        enough = lengths >= count
        run = int(enough.argmax() if enough.any() else lengths.argmax())
        start, length = int(starts[run]), min(count, int(lengths[run]))
        self._free[start : start + length] = 0
        return list(range(start, start + length))


class SlotAllocator:
    """State slots 1 … num_slots - 1, each with a generation that tells its present owner from the ones before."""

    def __init__(self, num_slots: int) -> None:
        self._owners = _Owners(num_slots)
        self._free = list(range(1, num_slots))  # ascending
        self._generations = [0] * num_slots

    @property
    def num_usable(self) -> int:
        return self._owners.num_usable

    @property
    def num_free(self) -> int:
        return self._owners.num_free

    @property
    def highest_free(self) -> int:
        """0 when none is free."""
        return self._free[-1] if self._free else 0

    def can_allocate(self, count: int = 1) -> bool:
        return count <= self.num_free

    def allocate(self, owner: str, *, highest: bool = False) -> int:
        """Take the lowest or highest free slot and begin its next generation. The caller has asked `can_allocate`.

        Saved states take the highest, so that the slots of what runs stay one run: those a step reads as one view.
        """
        assert self._free, "a slot asked and none free"
        slot = self._free.pop(-1 if highest else 0)
        self._owners.claim([slot], owner)
        self._generations[slot] += 1
        return slot

    def generation(self, slot: int) -> int:
        """How many owners this slot has had: `/debug/state` tells a slot's uses apart by it."""
        return self._generations[slot]

    def free(self, slot: int) -> None:
        self._owners.release([slot])
        bisect.insort(self._free, slot)

    def transfer(self, slot: int, owner: str) -> None:
        """Make `owner` the owner of a slot that anybody owns, and begin the slot's next generation."""
        self._owners.transfer([slot], owner)
        self._generations[slot] += 1

    def holdings(self) -> Mapping[int, Holding]:
        """Slot → who holds it; a view, good until the next call that changes anything."""
        return self._owners.holdings()

    def owned(self) -> dict[str, list[int]]:
        """Owner → its slots, ascending."""
        return self._owners.owned()

    def check_integrity(self) -> None:
        """Every slot but 0 is either free or owned, and not both: AssertionError if not."""
        self._owners.check(self._free)
