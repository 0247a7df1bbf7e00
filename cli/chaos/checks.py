"""What must hold when a run is over: everything is free again, no process has grown, nothing was done twice."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import aiohttp

from cli.chaos.fleet import Fleet, Process
from cli.chaos.load import End, Outcome

GROWTH_LIMIT = 0.10
LEAST_RIGHT = 0.5
"""Of the requests that their clients waited for."""

_POLL_S = 0.3
_LIMIT = aiohttp.ClientTimeout(total=10.0)
_FAULT_OF_OURS = re.compile(r"^Traceback|leak: ", re.MULTILINE)
_ENDED = re.compile(r"node\.exchange: (\S+) has ended")


async def wait_settled(fleet: Fleet, limit_s: float) -> list[str]:
    """Wait until nothing is in use anywhere; what still is when the time is over, a line each."""
    deadline = time.monotonic() + limit_s
    async with aiohttp.ClientSession(timeout=_LIMIT) as session:
        while True:
            found = [
                line for lines in await asyncio.gather(*(_in_use(session, m) for m in fleet.members)) for line in lines
            ]
            if not found or time.monotonic() > deadline:
                return found
            await asyncio.sleep(_POLL_S)


async def _in_use(session: aiohttp.ClientSession, member: Process) -> list[str]:
    try:
        async with session.get(f"{member.url}/server_info") as answer:
            info = await answer.json()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return [f"{member.name}: no /server_info ({type(error).__name__})"]
    if member.name == "router":
        running = info["requests_in_flight"]
        return [f"router: {running} requests in flight"] if running else []
    return [f"{member.name}: {line}" for state in info["internal_states"] for line in in_use(state)]


def in_use(state: dict[str, Any]) -> list[str]:
    """What a rank that has nothing to do should not hold. state: its object in `internal_states`."""
    if "error" in state:
        return [str(state["error"])]
    transfer = state["transfer"]
    held = {name: state[name] for name in state if name.startswith("num_") and isinstance(state[name], int)}
    held |= {f"rooms {name}": count for name, count in transfer.get("rooms", {}).items()}
    held |= {f"leases {name}": count for name, count in transfer.get("leases", {}).items()}
    held |= {"quarantined": transfer.get("quarantined", 0), "leaks_total": state["leaks_total"]}
    for kind in ("pages", "slots"):
        held[f"{kind} that nobody can use"] = state[f"{kind}_total"] - state[f"{kind}_free"] - state[f"{kind}_cached"]
    return [f"{name} {count}" for name, count in held.items() if count]


async def second_tries(fleet: Fleet) -> dict[str, int]:
    """How often the router began a request again, and how often it went on with one in mid-answer."""
    async with (
        aiohttp.ClientSession(timeout=_LIMIT) as session,
        session.get(f"{fleet.router.url}/server_info") as answer,
    ):
        info = await answer.json()
    return {name: info["counters"][name] for name in ("retries", "resumes")}


async def flush(fleet: Fleet) -> list[str]:
    """Drop all caches: then every page and slot must be free. What is not, a line each."""
    async with aiohttp.ClientSession(timeout=_LIMIT) as session:
        async with session.post(f"{fleet.router.url}/flush_cache?timeout=5") as answer:
            if answer.status != 200:
                return [f"/flush_cache: {await answer.text()}"]
        return [line for node in fleet.nodes.values() for line in await _cached(session, node)]


async def _cached(session: aiohttp.ClientSession, node: Process) -> list[str]:
    async with session.get(f"{node.url}/server_info") as answer:
        states = (await answer.json())["internal_states"]
    return [
        f"{node.name} rank {state['dp_rank']}: {state[f'{kind}_free']} of {state[f'{kind}_total']} {kind} free"
        for state in states
        for kind in ("pages", "slots")
        if state[f"{kind}_free"] != state[f"{kind}_total"]
    ]


def memory(fleet: Fleet) -> dict[str, int]:
    """Resident bytes of every process that is there."""
    found = {"router": fleet.router.front()}
    for node in fleet.nodes.values():
        found |= {f"{node.name} front": node.front()}
        found |= {f"{node.name} {name}": rank for name, rank in node.ranks().items()}
    return {name: process.memory_info().rss for name, process in found.items() if process is not None}


def grown(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """The processes that grew by more than the limit. The same place in the stack is compared, in whatever life."""
    limit = {name: nbytes * (1 + GROWTH_LIMIT) for name, nbytes in before.items()}
    return [
        f"{name} grew from {before[name] / 1e6:.1f} to {nbytes / 1e6:.1f} MB"
        for name, nbytes in after.items()
        if nbytes > limit.get(name, 0)
    ]


def completions(decode_nodes: Iterable[Process]) -> Counter[str]:
    """How often each request was computed to its end, by rid: what the decode fronts logged."""
    counts: Counter[str] = Counter()
    for node in decode_nodes:
        counts.update(_ENDED.findall(node.log.read_text(errors="replace")))
    return counts


def logged_faults(members: Iterable[Process]) -> list[str]:
    """Who logged an exception that nobody expected, or a leak."""
    counts = [(m, len(_FAULT_OF_OURS.findall(m.log.read_text(errors="replace")))) for m in members]
    return [f"{member.name}: {count} in {member.log}" for member, count in counts if count]


def computed_twice(counts: Counter[str], outcomes: Sequence[Outcome]) -> list[str]:
    """Also names those that have an answer and were not counted: then the count is worth nothing."""
    twice = [f"{rid}: {count} times" for rid, count in counts.items() if count > 1]
    missed = [f"{o.rid}: answered, but not counted" for o in outcomes if o.end is End.RIGHT and not counts[o.rid]]
    return twice + missed


def too_few_right(outcomes: Sequence[Outcome]) -> list[str]:
    """Errors alone would pass every other check."""
    ends = [o.end for o in outcomes if o.end is not End.LEFT and not o.aborted]
    share = ends.count(End.RIGHT) / max(1, len(ends))
    return [] if share >= LEAST_RIGHT else [f"{share:.0%} of {len(ends)}, expected {LEAST_RIGHT:.0%}"]


def wrong_outcomes(outcomes: Sequence[Outcome], *, all_right: bool) -> list[str]:
    """Lines on those that may not be. all_right: nothing was disturbed, so an error may not be either."""
    allowed = (End.RIGHT,) if all_right else (End.RIGHT, End.ERROR, End.LEFT)
    return [f"{o.rid}: {o.end} after {o.seconds:.1f} s: {o.detail}" for o in outcomes if o.end not in allowed]
