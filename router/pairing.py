"""Which two workers serve a request, and which rank of each: those that may, then one of each role by its policy."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from common.config import Role, RouterConfig
from router.affinity import RANK_FIELDS, Affinity
from router.policies import Decisions, make_policy
from router.targets import Target
from router.worker import Worker


class Pair(NamedTuple):
    """Two workers, and a rank of each. is_spread: the request has several sequences, which go to all ranks by their
    rooms."""

    prefill: Worker
    decode: Worker
    prefill_target: Target
    decode_target: Target
    is_spread: bool = False

    def rank_fields(self, fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(prefill, decode): what a leg's body has besides, where the ranks have to be told. The client's own rank is
        that of decode, whose node judges it. A prefill rank is named by its rooms too (`room_rank`)."""
        is_given = any(fields.get(name) is not None for name in RANK_FIELDS)
        prefill: dict[str, Any] = dict.fromkeys(RANK_FIELDS) if is_given else {}
        if len(self.prefill.targets) > 1 and not self.is_spread:
            prefill["routed_dp_rank"] = self.prefill_target.rank
        tells_decode = len(self.decode.targets) > 1 and not is_given and not self.is_spread
        return prefill, {"routed_dp_rank": self.decode_target.rank} if tells_decode else {}

    @property
    def where(self) -> str:
        """For logs; with ranks where a node has several."""
        sides = ((self.prefill, self.prefill_target), (self.decode, self.decode_target))
        several = [len(worker.targets) > 1 and not self.is_spread for worker, _ in sides]
        names = [target.name if ranks else worker.url for (worker, target), ranks in zip(sides, several, strict=True)]
        return " and ".join(names)

    @property
    def room_rank(self) -> tuple[int, int]:
        """(rank, ranks) of prefill: a room belongs to the rank that it is modulo the number of ranks."""
        return (0, 1) if self.is_spread else (self.prefill_target.rank, len(self.prefill.targets))


class Pairing:
    """Chooses. decisions: how often and how well, of each role."""

    def __init__(self, config: RouterConfig) -> None:
        rng = random.Random()
        names = {Role.PREFILL: config.prefill_policy, Role.DECODE: config.decode_policy}
        self.decisions = {role: Decisions() for role in names}
        self._policies = {
            role: make_policy(name or config.policy, role, self.decisions[role], rng) for role, name in names.items()
        }

    def pick(self, possible: Possible, request: Affinity) -> Pair:
        prefill = self._choose(Role.PREFILL, possible.targets(possible.prefill()), request)
        decode = self._choose(Role.DECODE, possible.targets(possible.partners(prefill.worker)), request)
        is_spread = request.num_sequences > 1 and all(target.alive for target in prefill.worker.targets)
        return Pair(prefill.worker, decode.worker, prefill, decode, is_spread=is_spread)

    def _choose(self, role: Role, targets: list[Target], request: Affinity) -> Target:
        if role is Role.DECODE and request.rank is not None:
            targets = [target for target in targets if target.rank == request.rank] or targets
        self.decisions[role].total += 1
        return self._policies[role].choose(targets, request)


class Possible:
    """The pairs that may serve a request: both take requests, they fit together, and it has not failed there.

    failed: pairs that are not to be picked, unless one of the two has other ranks; workers of none of them come first.
    resumes: only workers that go on with answers that others began.
    """

    def __init__(
        self,
        prefill: Iterable[Worker],
        decode: Iterable[Worker],
        failed: Collection[Pair] = (),
        *,
        resumes: bool = False,
    ) -> None:
        self._failed = {(pair.prefill, pair.decode) for pair in failed if not _has_other_ranks(pair)}
        self._tried = {worker for pair in failed for worker in (pair.prefill, pair.decode)}
        self._tried_targets = {target for pair in failed for target in (pair.prefill_target, pair.decode_target)}
        self._decode = [worker for worker in decode if worker.takes_requests and worker.resumes >= resumes]
        layouts = {worker.layout for worker in self._decode}
        may = [p for p in prefill if p.layout in layouts and p.takes_requests and p.resumes >= resumes]
        self._prefill = [p for p in may if self._partners(p)] if self._failed else may

    def __bool__(self) -> bool:
        return bool(self._prefill)

    def prefill(self) -> list[Worker]:
        return self._untried(self._prefill)

    def partners(self, prefill: Worker) -> list[Worker]:
        return self._untried(self._partners(prefill))

    def targets(self, workers: Iterable[Worker]) -> list[Target]:
        """Their ranks: those that live and were not tried, as far as there are any."""
        every = [target for worker in workers for target in worker.targets]
        alive = [target for target in every if target.alive] or every
        return [target for target in alive if target not in self._tried_targets] or alive

    def _partners(self, prefill: Worker) -> list[Worker]:
        return [d for d in self._decode if d.fits(prefill) and (prefill, d) not in self._failed]

    def _untried(self, workers: list[Worker]) -> list[Worker]:
        """Those that were not tried; all when there are none."""
        return [worker for worker in workers if worker not in self._tried] or workers


def _has_other_ranks(pair: Pair) -> bool:
    return len(pair.prefill.targets) > 1 or len(pair.decode.targets) > 1
