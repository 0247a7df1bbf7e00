"""What a policy chooses: one rank of a worker."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from router.loads import Load

if TYPE_CHECKING:
    from router.workers import Worker

MAX_RANKS = 4096


@dataclass(slots=True, eq=False)
class Target:
    """One rank of one life of a worker: when the worker starts again it gets new ones, and what was known is gone.

    name: the same in every life and in every router. salt: under which the prefix tree knows it. dealt: it had its turn
    in this round (`RoundRobin`). recent: work that it was lately given, in tokens, None before its first
    (`PrefixAware`). alive: the node says that it takes requests; a rank may be dead while others serve.
    """

    worker: Worker
    rank: int
    name: str
    load: Load = field(default_factory=Load)
    salt: int = field(default_factory=lambda: secrets.randbits(64))
    dealt: bool = False
    recent: float | None = None
    alive: bool = True

    def on_report(self, alive: bool) -> None:
        if self.alive and not alive:
            self.forget_prefixes()
        self.alive = alive

    def forget_prefixes(self) -> None:
        """Nothing is cached there any more."""
        self.salt = secrets.randbits(64)


def make_targets(worker: Worker, num_ranks: int) -> tuple[Target, ...]:
    """num_ranks: as the worker tells it; nonsense counts as one."""
    count = num_ranks if 0 < num_ranks <= MAX_RANKS else 1
    return tuple(Target(worker, rank, f"{worker.url}#{rank}") for rank in range(count))
