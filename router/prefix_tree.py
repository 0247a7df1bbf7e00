"""What was sent where: for each target the beginnings of prompts that it should have cached.

A tree of prompts' blocks whose nodes are named by the hash of the path to them (`Affinity.path`), so that it needs no
links: a target has a node when (its salt, the hash) is in one table. The least recently used entry is given up first; a
path is used from its end to its start, so that a node is never given up before what hangs below it. Hence a target has
all of a path up to some block and nothing after it, and that block is found by halving.
"""

from __future__ import annotations

from collections import OrderedDict

from router.affinity import Path

ENTRY_BYTES = 272
"""What an entry takes: a number of 64 bits and its place in an `OrderedDict` of CPython, measured after all have been
replaced several times, which leaves its tables half empty."""
MAX_TREE_BYTES = 64 * 2**20


class PrefixTree:
    def __init__(self, max_bytes: int = MAX_TREE_BYTES) -> None:
        self._max_entries = max_bytes // ENTRY_BYTES
        self._entries: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def match(self, path: Path, salt: int) -> int:
        """How many of the path's first blocks this target has."""
        hashes, entries = path.hashes, self._entries
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] ^ salt in entries:
                low = middle + 1
            else:
                high = middle
        return low

    def add(self, path: Path, salt: int) -> None:
        """The target is about to compute this prompt."""
        entries = self._entries
        for number in reversed(path.hashes):
            key = number ^ salt
            entries[key] = None
            entries.move_to_end(key)
        while len(entries) > self._max_entries:
            entries.popitem(last=False)
