"""The faults of a run: which, where and when. The same seed and settings give the same plan."""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from common.config import LoopbackFaults, Role, TransportName

PREFILL = ("prefill-1", "prefill-2")
DECODE = ("decode-1", "decode-2")
ROLE_OF = dict.fromkeys(PREFILL, Role.PREFILL) | dict.fromkeys(DECODE, Role.DECODE)

_START_S = 8.0  # for a node to come back
_GAP_S = (1.0, 3.0)
_SLOW = LoopbackFaults(bandwidth_bytes_s=2e6)
_PARTS = ("kv", "conv", "ssm", "track", "metadata")


class Kind(enum.StrEnum):
    """What can be done to a run. LEAVE and ABORT are the clients', the others have a time and a node in the plan."""

    KILL_FRONT = "kill-front"
    KILL_RANK = "kill-rank"
    KILL_TWICE = "kill-twice"
    STOP_FRONT = "stop-front"
    STOP_RANK = "stop-rank"
    RESTART = "restart"
    CORRUPT = "corrupt"
    WRITE_ERROR = "write-error"
    DELAY = "delay"
    STOP_WRITING = "stop-writing"
    LEAVE = "leave"
    ABORT = "abort"


OF_CLIENTS = frozenset({Kind.LEAVE, Kind.ABORT})
OF_TRANSPORT = frozenset({Kind.CORRUPT, Kind.WRITE_ERROR, Kind.DELAY, Kind.STOP_WRITING})
"""Injected by the loopback transport, at prefill nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """at_s: after the beginning. last_s: how long it stays. injected: what the node's transport does meanwhile."""

    at_s: float
    kind: Kind
    node: str
    last_s: float = 0.0
    injected: LoopbackFaults | None = None

    def __str__(self) -> str:
        lasting = f" for {self.last_s:.1f} s" if self.last_s else ""
        return f"{self.at_s:7.1f} s  {self.node:10} {self.kind}{lasting}{self._how()}"

    def _how(self) -> str:
        if self.injected is None:
            return ""
        default = LoopbackFaults()
        changed = {name: getattr(self.injected, name) for name in self.injected.__struct_fields__}
        shown = [f"{name} {value}" for name, value in changed.items() if value != getattr(default, name)]
        return f": {', '.join(shown)}"


def possible_kinds(transport: TransportName) -> frozenset[Kind]:
    """Only the loopback transport injects faults."""
    return frozenset(Kind) - (frozenset() if transport is TransportName.LOOPBACK else OF_TRANSPORT)


def make_plan(seed: int, seconds: float, kinds: frozenset[Kind], liveness_s: float) -> list[Fault]:
    """In order of time. At most one node of each role is dead or stopped at any moment, as far as can be foreseen."""
    rng = random.Random(seed)
    deck = _deck(rng, sorted(kinds - OF_CLIENTS))
    free_at = dict.fromkeys(ROLE_OF, 0.0)
    faults: list[Fault] = []
    now, kind = rng.uniform(0.5, 1.5), next(deck, None)
    while kind is not None and now < seconds:
        nodes = [node for node in _candidates(kind) if _is_free(node, kind, free_at, now)]
        if not nodes:
            now += 0.5
            continue
        fault = _draw(rng, now, kind, rng.choice(nodes), liveness_s)
        free_at[fault.node] = now + fault.last_s + _recovery_s(kind)
        faults.append(fault)
        now, kind = now + rng.uniform(*_GAP_S), next(deck)
    return faults


def twins_of(fault: Fault) -> tuple[str, ...]:
    """The nodes that must serve while this fault lasts."""
    return _twins(fault.node, fault.kind)


def _deck(rng: random.Random, kinds: Sequence[Kind]) -> Iterator[Kind]:
    """Each kind once in random order, then again."""
    while kinds:
        yield from rng.sample(kinds, len(kinds))


def _candidates(kind: Kind) -> tuple[str, ...]:
    return PREFILL if kind in OF_TRANSPORT else PREFILL + DECODE


def _is_free(node: str, kind: Kind, free_at: dict[str, float], now: float) -> bool:
    return all(free_at[needed] <= now for needed in (node, *_twins(node, kind)))


def _twins(node: str, kind: Kind) -> tuple[str, ...]:
    """Bytes that go wrong leave the node in service; anything else takes it out, so its twin must be there."""
    if kind in (Kind.CORRUPT, Kind.DELAY):
        return ()
    return tuple(other for other in ROLE_OF if ROLE_OF[other] is ROLE_OF[node] and other != node)


def _recovery_s(kind: Kind) -> float:
    match kind:
        case Kind.CORRUPT | Kind.DELAY:
            return 0.0
        case Kind.STOP_FRONT | Kind.STOP_RANK | Kind.STOP_WRITING:
            return 2.0
        case _:
            return _START_S


def _draw(rng: random.Random, at_s: float, kind: Kind, node: str, liveness_s: float) -> Fault:
    last_s, injected = 0.0, None
    match kind:
        case Kind.KILL_TWICE:
            last_s = rng.uniform(0.7, 4)
        case Kind.STOP_FRONT | Kind.STOP_RANK:
            last_s = rng.choice((0.2, 0.7, 1.5, 2.5)) * liveness_s
        case Kind.STOP_WRITING:
            last_s, injected = rng.uniform(1.5, 2.5) * liveness_s, _SLOW
        case Kind.CORRUPT:
            last_s, how = rng.uniform(3, 6), rng.choice(("flip", "zero", "drop"))
            injected = replace(LoopbackFaults(every=rng.randint(1, 3)), **{how: rng.choice(_PARTS)})
        case Kind.WRITE_ERROR:
            last_s = rng.uniform(2, 4)
            injected = LoopbackFaults(fail=rng.choice(_PARTS[:3]), every=rng.randint(2, 3))
        case Kind.DELAY:
            last_s = rng.uniform(3, 6)
            injected = LoopbackFaults(delay_s=rng.uniform(0.01, 0.2), bandwidth_bytes_s=rng.uniform(10e6, 100e6))
    return Fault(at_s=at_s, kind=kind, node=node, last_s=last_s, injected=injected)
