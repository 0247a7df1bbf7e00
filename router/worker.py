"""One worker as the router sees it, and how it is described."""

from __future__ import annotations

import asyncio
import enum
import hashlib
import time
from dataclasses import dataclass, field
from typing import Any

from common.config import Role, WorkerAddress
from common.errors import ConfigError
from common.urls import url_host
from router.breaker import Breaker, BreakerState
from router.targets import Target, make_targets

NOT_CHECKED = "not checked yet"
ASKED = "asked what it is"
"""Reasons of a worker that has just come."""


class Source(enum.StrEnum):
    """How a worker came: named on the command line, added by an administrator, or registered by itself."""

    FLAG = "flag"
    ADDED = "added"
    SELF = "self"


MAX_WORKERS = 1024


@dataclass(slots=True, eq=False, weakref_slot=True)
class Worker:
    """One node as the router sees it.

    host: what the other leg calls it by (of a prefill worker: where its rooms are opened). fingerprint: of its state
    layout, state_layout: that in words, handoff: how it hands state over; None while unknown or when it publishes none;
    declared: a fingerprint with which it was registered, of a server that publishes none. resumes: whether it goes on
    with answers that others began. is_sglang: a server of SGLang's own (router/sglang.py). instance: of the process,
    None when it tells none. reason: why it is not alive.
    unanswered: checks in a row. num_legs: that run there; used_s: when the last one began or ended. is_leaving: it gets
    no requests and is removed when it has no leg any more. heard_s: when it last registered, if it does that itself.
    ejected_until_s: it is much slower than its peers and gets no requests until then; ejections: how often, of late.
    targets: its ranks, to be chosen from.
    """

    role: Role
    url: str
    host: str
    bootstrap_port: int | None
    source: Source = Source.FLAG
    since_unix_s: float = field(default_factory=time.time)
    alive: bool = False
    fingerprint: str | None = None
    state_layout: str | None = None
    handoff: str | None = None
    declared: str | None = None
    resumes: bool = False
    is_sglang: bool = False
    num_ranks: int = 1
    instance: str | None = None
    reason: str = NOT_CHECKED
    unanswered: int = 0
    num_legs: int = 0
    used_s: float = field(default_factory=time.monotonic)
    is_leaving: bool = False
    heard_s: float = field(default_factory=time.monotonic)
    ejected_until_s: float = 0.0
    ejections: int = 0
    breaker: Breaker = field(default_factory=Breaker)
    check_now: asyncio.Event = field(default_factory=asyncio.Event)
    targets: tuple[Target, ...] = ()

    def __post_init__(self) -> None:
        self.renew_targets()

    def renew_targets(self) -> None:
        """What was known of its load and its caches is no longer true."""
        self.targets = make_targets(self, self.num_ranks)

    def forget_prefixes(self) -> None:
        """It has flushed its caches."""
        for target in self.targets:
            target.forget_prefixes()

    @property
    def id(self) -> str:
        """For paths, where a URL does not fit."""
        return hashlib.sha256(self.url.encode()).hexdigest()[:12]

    @property
    def num_ranks_alive(self) -> int:
        """Ranks that take requests, as the worker says."""
        return sum(target.alive for target in self.targets) if self.alive else 0

    @property
    def is_ejected(self) -> bool:
        return time.monotonic() < self.ejected_until_s

    @property
    def is_in_service(self) -> bool:
        """Whether it is meant to get requests."""
        is_open = self.breaker.state is BreakerState.OPEN
        return self.alive and not self.is_leaving and not self.is_ejected and not is_open

    @property
    def takes_requests(self) -> bool:
        """Whether a leg may be opened there now: a half-open one tries one at a time."""
        return self.is_in_service and self.breaker.allows

    @property
    def state(self) -> str:
        """draining, joining, dead, open, half_open, ejected or alive."""
        if self.is_leaving:
            return "draining"
        if not self.alive:
            return "joining" if self.reason in (NOT_CHECKED, ASKED) else "dead"
        if self.breaker.state is not BreakerState.CLOSED:
            return self.breaker.state.value
        return "ejected" if self.is_ejected else "alive"

    @property
    def layout(self) -> tuple[str | None, str | None]:
        return self.fingerprint, self.handoff

    @property
    def told_layout(self) -> str:
        """The fingerprint and, where it is known, what stands behind it."""
        return f"{self.fingerprint} ({self.state_layout})" if self.state_layout else str(self.fingerprint)

    def fits(self, other: Worker) -> bool:
        """Whether these two can hand over state."""
        return self.layout == other.layout

    def describe(self) -> dict[str, Any]:
        state = {"role": self.role.value, "url": self.url, "alive": self.alive, "fingerprint": self.fingerprint}
        return state if self.alive else state | {"reason": self.reason}

    def details(self) -> dict[str, Any]:
        """All of it, for an administrator."""
        return self.describe() | {
            "id": self.id,
            "state": self.state,
            "source": self.source.value,
            "since": round(self.since_unix_s, 3),
            "bootstrap_port": self.bootstrap_port,
            "ranks": self.num_ranks,
            "ranks_alive": self.num_ranks_alive,
            "requests": self.num_legs,
            "loads": [round(target.load.tokens) for target in self.targets],
            "handoff": self.handoff,
            "state_layout": self.state_layout,
            "instance": self.instance,
            "breaker": self.breaker.describe(),
        }


def make_worker(role: Role, address: WorkerAddress) -> Worker:
    """Raises ConfigError for what is no http URL, and for what is no port."""
    host, port = url_host(address.url), address.bootstrap_port
    if host is None:
        raise ConfigError(f"--{role.value} {address.url}: a URL such as http://127.0.0.1:30001", param=role.value)
    if port is not None and not is_port(port):
        raise ConfigError(f"--{role.value} {address.url} {port}: a bootstrap port from 1 to 65535", param=role.value)
    return Worker(role, address.url.rstrip("/"), host, address.bootstrap_port)


def is_port(number: int) -> bool:
    return 0 < number < 65536
