"""Which rank of a node gets a sequence that nobody has chosen one for: where its beginning is cached, if that one has
hardly more to do than the others, or else where the fewest run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

BLOCK_TOKENS = 64
MAX_BLOCKS = 1 << 16
SPARE_SHARE = 0.1  # of the mean load: how much more a rank may have for the sake of its cache; one sequence at least


class RankChoice:
    """Remembers, of the last MAX_BLOCKS blocks, which rank was given the prompt that they began."""

    def __init__(self) -> None:
        self._ranks: OrderedDict[int, int] = OrderedDict()

    def choose(self, token_ids: Sequence[int], extra_key: str | None, loads: Mapping[int, int]) -> int:
        """The rank for this prompt, which is remembered. loads: sequences of each rank that may be chosen."""
        hashes = list(_hashes(token_ids, extra_key))
        least = min(loads.values())
        spare = max(1.0, SPARE_SHARE * sum(loads.values()) / len(loads))
        chosen = self._owner(hashes)
        if chosen is None or loads.get(chosen, least + spare + 1) > least + spare:
            chosen = min(loads, key=lambda rank: loads[rank])
        for found in hashes:
            self._ranks[found] = chosen
            self._ranks.move_to_end(found)
        while len(self._ranks) > MAX_BLOCKS:
            self._ranks.popitem(last=False)
        return chosen

    def forget(self, rank: int) -> None:
        """Its cache is gone."""
        self._ranks = OrderedDict((found, owner) for found, owner in self._ranks.items() if owner != rank)

    def _owner(self, hashes: Sequence[int]) -> int | None:
        """Of the longest beginning that is known."""
        known = None
        for found in hashes:
            owner = self._ranks.get(found)
            if owner is None:
                break
            known = owner
        return known


def _hashes(token_ids: Sequence[int], extra_key: str | None) -> Iterator[int]:
    """Of each beginning of whole blocks, the shortest first."""
    found = hash(extra_key)
    for end in range(BLOCK_TOKENS, len(token_ids) + 1, BLOCK_TOKENS):
        found = hash((found, tuple(token_ids[end - BLOCK_TOKENS : end])))
        yield found
