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
_LIMIT_S = 1.5
_MAX_FAMILIES = 8
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
    """The last that one worker said. state_s, cache_s: when it was asked (of the monotonic clock); 0: never."""

    state_s: float = 0.0
    cache_s: float = 0.0
    state: dict[str, Any] | None = None
    prefixes: list[dict[str, Any]] = field(default_factory=list)


class NodeStates:
    """Of the workers of one router, by URL."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._seen: dict[str, Seen] = {}
        self._asking: asyncio.Task[None] | None = None

    async def refresh(self, workers: tuple[Worker, ...]) -> None:
        """Ask those that live, unless somebody has just done it. Who comes meanwhile waits for the same answers."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_all(workers))
        await asyncio.shield(self._asking)

    def of(self, worker: Worker) -> dict[str, Any]:
        """Its latest state, and what it has cached; state None: it has told nothing, or lives no more."""
        seen = self._seen.get(worker.url)
        if seen is None or not worker.alive:
            return {"node": None, "prefixes": []}
        return {"node": seen.state, "prefixes": seen.prefixes}

    async def stop(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask_all(self, workers: tuple[Worker, ...]) -> None:
        kept = {worker.url: self._seen.get(worker.url, Seen()) for worker in workers}
        self._seen = kept
        await asyncio.gather(*(self._ask(worker, kept[worker.url]) for worker in workers if worker.alive))

    async def _ask(self, worker: Worker, seen: Seen) -> None:
        now = time.monotonic()
        if now - seen.state_s >= _STATE_EVERY_S:
            seen.state_s = now
            info = await self._get(f"{worker.url}/server_info")
            seen.state = None if info is None else summary(info)
        if now - seen.cache_s >= _CACHE_EVERY_S:
            seen.cache_s = now
            cache = await self._get(f"{worker.url}/debug/cache?limit={_MAX_FAMILIES}")
            seen.prefixes = [] if cache is None else _families(cache)

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
        "model": model if isinstance(model, str) else None,
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
