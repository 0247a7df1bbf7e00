"""Which target of a role serves a request. Each policy is one rule over the targets that may; at least one may.

| policy | rule |
|---|---|
| round_robin | by turns, in random order |
| random | any |
| least_load | the fewest tokens in flight |
| power_of_two | of two at random the one with fewer tokens in flight |
| prefix_aware | the longest cached prefix, weighed against load |
| sticky | requests of one routing key to one target; without a key as least_load |
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, assert_never

from xxhash import xxh3_64_intdigest

from common.config import PolicyName, Role
from router.affinity import Affinity
from router.prefix_tree import PrefixTree
from router.targets import Target

Targets = Sequence[Target]


class Policy(Protocol):
    def choose(self, targets: Targets, request: Affinity) -> Target:
        """targets: at least one."""


@dataclass(slots=True)
class Decisions:
    """Of one role since the start. prompt_tokens, hit_tokens: of what the prefix tree was asked for, and what it had of
    it at the target that was chosen; estimates."""

    total: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0


def make_policy(name: PolicyName, role: Role, decisions: Decisions, rng: random.Random) -> Policy:
    match name:
        case PolicyName.ROUND_ROBIN:
            return RoundRobin(rng)
        case PolicyName.RANDOM:
            return Random(rng)
        case PolicyName.LEAST_LOAD:
            return LeastLoad(rng)
        case PolicyName.POWER_OF_TWO:
            return PowerOfTwo(rng)
        case PolicyName.PREFIX_AWARE:
            return PrefixAware(PrefixTree(), decisions, rng, hits_save_work=role is Role.PREFILL)
        case PolicyName.STICKY:
            return Sticky(rng)
        case unknown:
            assert_never(unknown)


class RoundRobin:
    """Everybody once before anybody twice. The order is another one in each round, so that every prefill target meets
    every decode target."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, targets: Targets, request: Affinity) -> Target:
        waiting = [target for target in targets if not target.dealt]
        if not waiting:
            for target in targets:
                target.dealt = False
            waiting = list(targets)
        chosen = self._rng.choice(waiting)
        chosen.dealt = True
        return chosen


class Random:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, targets: Targets, request: Affinity) -> Target:
        return self._rng.choice(targets)


class LeastLoad:
    """Of several with the same load any: otherwise an idle fleet would use its first worker alone."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, targets: Targets, request: Affinity) -> Target:
        loads = [target.load.tokens for target in targets]
        least = min(loads)
        return self._rng.choice([target for target, load in zip(targets, loads, strict=True) if load == least])


class PowerOfTwo:
    """Nearly as even as the least load, and routers whose reports are equally old do not all choose the same target."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, targets: Targets, request: Affinity) -> Target:
        if len(targets) == 1:
            return targets[0]
        first, second = self._rng.sample(targets, 2)
        return first if first.load.tokens <= second.load.tokens else second


class PrefixAware:
    """The best of: part of the prompt that is cached there − what runs there − what it was lately given.

    The latter two are in tokens, and measured against their mean over all targets. What runs there counts in full: half
    a mean more of it costs what a whole prompt is worth that is cached. Recent work does what loads cannot do where
    they are small: it brings new prompts to all targets, or one of them would get everything that begins alike while
    the caches of the others stay empty. It is never worth more than half of a prompt, so that a conversation stays
    where it is in a fleet that is idle.

    hits_save_work: what is cached need not be computed (prefill); otherwise a request is as much work as it is long.
    """

    _LOAD_WEIGHT = 2.0
    _MOST_FOR_RECENT_WORK = 0.25
    """Either way: above the mean, and below it."""
    _SLACK_REQUESTS = 4
    """The mean is taken to be so much more: with little to compare, differences mean little."""
    _INDIFFERENCE = 0.05
    """Scores so close are equal, and any of them is taken: or the targets of two roles would go in step."""
    _MEMORY_REQUESTS = 64
    """Of each target: about as many of its last requests are its recent work."""

    def __init__(self, tree: PrefixTree, decisions: Decisions, rng: random.Random, *, hits_save_work: bool) -> None:
        self.tree = tree
        self._rng = rng
        self._decisions = decisions
        self._hits_save_work = hits_save_work

    def choose(self, targets: Targets, request: Affinity) -> Target:
        if len(targets) == 1:
            return targets[0]
        path, most = request.path, self._MOST_FOR_RECENT_WORK
        hits = [path.shared(self.tree.match(path, target.salt)) for target in targets]
        loads, recent = [target.load.tokens for target in targets], self._recent_work(targets)
        mean_load, mean_recent = sum(loads) / len(targets), sum(recent) / len(targets)
        scale = self._LOAD_WEIGHT / (mean_load + mean_recent + self._SLACK_REQUESTS * request.weight)
        scores = [
            hit - scale * load - min(max(scale * (work - mean_recent), -most), most)
            for hit, load, work in zip(hits, loads, recent, strict=True)
        ]
        nearly_best = max(scores) - self._INDIFFERENCE
        best = self._rng.choice([place for place, score in enumerate(scores) if score >= nearly_best])
        self._give(targets[best], request, hits[best])
        return targets[best]

    def _recent_work(self, targets: Targets) -> list[float]:
        """Fades with every decision. A target that is new begins with as much as the others have on average, or it
        would get every new prompt for a while."""
        known = [target.recent for target in targets if target.recent is not None]
        start = sum(known) / len(known) if known else 0.0
        keep = 1 - 1 / (self._MEMORY_REQUESTS * len(targets))
        for target in targets:
            target.recent = keep * (start if target.recent is None else target.recent)
        return [target.recent or 0.0 for target in targets]

    def _give(self, target: Target, request: Affinity, hit: float) -> None:
        self.tree.add(request.path, target.salt)
        self._decisions.prompt_tokens += request.num_tokens
        self._decisions.hit_tokens += int(hit * request.num_tokens)
        saved = hit * request.num_tokens if self._hits_save_work else 0.0
        target.recent = (target.recent or 0.0) + request.weight - saved


class Sticky:
    """The target with the highest hash of (key, target): the same in every router, and when one is lost its keys alone
    move (rendezvous hashing)."""

    def __init__(self, rng: random.Random) -> None:
        self._keyless = LeastLoad(rng)

    def choose(self, targets: Targets, request: Affinity) -> Target:
        key = request.routing_key
        if key is None:
            return self._keyless.choose(targets, request)
        seed = xxh3_64_intdigest(key.encode("utf-8", "replace"))
        return max(targets, key=lambda target: xxh3_64_intdigest(target.name.encode(), seed))
