"""What the nodes say of themselves, for the status page: asked only while somebody looks, and not by each of them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from common.errors import WorkerError
from router.client import Network
from router.worker import Worker

_STATE_EVERY_S = 0.9
_CACHE_EVERY_S = 2.4
_LIMIT_S = 2.0
_PATIENCE_S = 0.4
_MAX_FAMILIES = 8
_MAX_NAME = 100
_SUMS = (
    "num_waiting",
    "num_prefilling",
    "num_running",
    "num_reserving",
    "num_receiving",
    "pages_total",
    "pages_free",
    "pages_cached",
    "slots_total",
    "slots_free",
    "slots_cached",
    "slots_main",
    "slots_track",
    "leaks",
)
_CACHE_SUMS = ("hits", "misses", "hit_tokens", "evicted_pages", "evicted_slots")


@dataclass(slots=True)
class Seen:
    """The last that one worker said. state_s, cache_s: when it was asked (of the monotonic clock), 0: never; heard_s:
    when it last told its state. asking: it is being asked."""

    state_s: float = 0.0
    cache_s: float = 0.0
    heard_s: float = 0.0
    state: dict[str, Any] | None = None
    prefixes: list[dict[str, Any]] = field(default_factory=list)
    asking: asyncio.Task[None] | None = None

    @property
    def is_due(self) -> bool:
        is_asked = self.asking is not None and not self.asking.done()
        return not is_asked and time.monotonic() - self.state_s >= _STATE_EVERY_S


class NodeStates:
    """Of the workers of one router, by URL."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._seen: dict[str, Seen] = {}

    async def refresh(self, workers: tuple[Worker, ...]) -> None:
        """Ask those that live, unless somebody has just done it, and wait a little: who answers late is shown late."""
        self._seen = {worker.url: self._seen.get(worker.url) or Seen() for worker in workers}
        for worker in workers:
            seen = self._seen[worker.url]
            if worker.alive and seen.is_due:
                seen.asking = asyncio.create_task(self._ask(worker, seen))
        if tasks := self._tasks():
            await asyncio.wait(tasks, timeout=_PATIENCE_S)

    def of(self, worker: Worker) -> dict[str, Any]:
        """Its latest state, how old that is, and what it has cached; None: it has told nothing, or lives no more."""
        seen = self._seen.get(worker.url)
        if seen is None or not worker.alive:
            return {"node": None, "node_age_s": None, "prefixes": []}
        age_s = None if seen.state is None else round(time.monotonic() - seen.heard_s, 1)
        return {"node": seen.state, "node_age_s": age_s, "prefixes": seen.prefixes}

    async def stop(self) -> None:
        tasks = self._tasks()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _tasks(self) -> set[asyncio.Task[None]]:
        return {seen.asking for seen in self._seen.values() if seen.asking is not None and not seen.asking.done()}

    async def _ask(self, worker: Worker, seen: Seen) -> None:
        seen.state_s = now = time.monotonic()
        info = await self._get(f"{worker.url}/server_info")
        if info is not None:
            seen.state, seen.heard_s = summary(info), time.monotonic()
        if now - seen.cache_s >= _CACHE_EVERY_S:
            seen.cache_s = now
            cache = await self._get(f"{worker.url}/debug/cache?limit={_MAX_FAMILIES}")
            seen.prefixes = seen.prefixes if cache is None else _families(cache)

    async def _get(self, url: str) -> dict[str, Any] | None:
        """None for whatever is no answer."""
        try:
            answer = await self._network.send("GET", url, limit_s=_LIMIT_S)
            found = msgspec.json.decode(await answer.read()) if answer.status == 200 else None
        except (WorkerError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return found if isinstance(found, dict) else None


def summary(info: dict[str, Any]) -> dict[str, Any]:
    """What the page shows of a node's /server_info; numbers are sums over its ranks. Foreign nodes tell less."""
    states = [state for state in _list(info.get("internal_states")) if "error" not in state]
    caches = [state["cache"] for state in states if isinstance(state.get("cache"), dict)]
    transfers = [state["transfer"] for state in states if isinstance(state.get("transfer"), dict)]
    model = info.get("served_model_name")
    return {
        "model": model[:_MAX_NAME] if isinstance(model, str) else None,
        "ranks": len(states),
        "quarantined": _sum(transfers, "quarantined"),
        **{name: _sum(states, name) for name in _SUMS},
        "cache": {name: _sum(caches, name) for name in _CACHE_SUMS} if caches else None,
    }


def _families(cache: dict[str, Any]) -> list[dict[str, Any]]:
    """The largest of all ranks; each has its rank."""
    found = [
        {"rank": rank} | {name: value for name, value in family.items() if isinstance(value, int)}
        for rank, answer in enumerate(_list(cache.get("ranks")))
        for family in _list(answer.get("prefixes"))
    ]
    return sorted(found, key=lambda family: -family.get("tokens", 0))[:_MAX_FAMILIES]


def _list(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _sum(states: list[dict[str, Any]], name: str) -> int | None:
    """None where nobody tells it."""
    found = [state[name] for state in states if isinstance(state.get(name), int)]
    return sum(found) if found else None
