"""Which part of the state is not what it should be, and where on its way it was last right.

One prompt is asked of the router and of a unified node, cold, warm, and once more with empty decode caches. All native
nodes record what the state looked like (`/debug/states`): after prefill, after the hand-off was committed, and when the
answer has ended. What should be equal is compared part by part, layer by layer.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from accuracy.client import Api, Client
from accuracy.paired import first_difference
from accuracy.prompts import Prompt
from common.errors import ConfigError

RUNS = ("cold", "warm", "warm, decode emptied")
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.05}
"""Relative distance, by the dtype of KV and conv state, within which two states count as equal up to rounding."""

States = dict[str, dict[str, Any]]
"""What a node has recorded of one request, by event."""


class PartFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One part of one layer at one stage. distance: relative to the norm, 0 where the bytes are equal."""

    run: str
    stage: str
    part: str
    layer: int
    distance: float
    equal_bytes: bool
    differs: bool


class Bisection(msgspec.Struct, frozen=True, kw_only=True):
    """findings: in the order in which things happen. notes: what could not be compared, and why. first_tokens: by run,
    where the first token is that is not the unified node's, None where all are equal."""

    tolerance: float
    findings: list[PartFinding]
    notes: list[str]
    first_tokens: dict[str, int | None]

    @property
    def first(self) -> PartFinding | None:
        return next((found for found in self.findings if found.differs), None)

    @property
    def differs(self) -> bool:
        return self.first is not None or any(token is not None for token in self.first_tokens.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """router: in front of `prefill` and `decode`. unified: the reference."""

    router: Client
    unified: Client
    prefill: tuple[Client, ...]
    decode: tuple[Client, ...]

    @property
    def native(self) -> tuple[Client, ...]:
        return (self.unified, *self.prefill, *self.decode)


@asynccontextmanager
async def open_nodes(url: str, unified: str, timeout_s: float) -> AsyncIterator[Nodes]:
    """The router tells its workers. Raises ConfigError when it has none, WorkerError when it does not answer."""
    async with AsyncExitStack() as exits:

        async def client(address: str) -> Client:
            return await exits.enter_async_context(Client(url=address, api=Api.GENERATE, timeout_s=timeout_s))

        router = await client(url)
        workers = (await router.get_json("/server_info")).get("workers") or []
        urls = {role: [w["url"] for w in workers if w["role"] == role] for role in ("prefill", "decode")}
        if not all(urls.values()):
            raise ConfigError(f"--url {url}: no router of prefill and decode nodes", param="url")
        yield Nodes(
            router=router,
            unified=await client(unified),
            prefill=tuple([await client(address) for address in urls["prefill"]]),
            decode=tuple([await client(address) for address in urls["decode"]]),
        )


async def bisect(
    nodes: Nodes, prompt: Prompt, *, max_tokens: int, stop: Sequence[str], tolerance: float | None = None
) -> Bisection:
    """tolerance None: by the dtype of the unified node. Raises WorkerError when a node does not do its part."""
    if tolerance is None:
        tolerance = TOLERANCES[(await nodes.unified.get_json("/server_info"))["dtype"]]
    sampling = {"temperature": 0, "max_new_tokens": max_tokens, "stop": list(stop)}
    await _record(nodes.native, True)
    findings, notes, tokens = list[PartFinding](), list[str](), dict[str, int | None]()
    try:
        for run in RUNS:
            await _prepare(nodes, run)
            rid = f"bisect-{uuid.uuid4().hex}"
            body = {**prompt, "sampling_params": sampling, "rid": rid}
            expected, found = await nodes.unified.generate(body), await nodes.router.generate(body)
            tokens[run] = first_difference(found["output_ids"], expected["output_ids"])
            for stage, one, other in _stages(await _states(nodes, rid), notes, run):
                findings += compare_states(run, stage, one, other, tolerance, notes)
    finally:
        await _record(nodes.native, False)
    return Bisection(tolerance=tolerance, findings=findings, notes=notes, first_tokens=tokens)


async def _record(clients: Sequence[Client], on: bool) -> None:
    for client in clients:
        await client.call("/debug/states", {"record": on})


async def _prepare(nodes: Nodes, run: str) -> None:
    emptied = {"cold": (nodes.unified, nodes.router), "warm": ()}.get(run, nodes.decode)
    for client in emptied:
        await client.flush()


async def _states(nodes: Nodes, rid: str) -> dict[str, States]:
    """Of this request, by role."""
    roles = {"unified": (nodes.unified,), "prefill": nodes.prefill, "decode": nodes.decode}
    found: dict[str, States] = {}
    for role, clients in roles.items():
        ranks = [rank for client in clients for rank in (await client.get_json("/debug/states"))["ranks"]]
        found[role] = {state["event"]: state for rank in ranks for state in rank["states"] if state["rid"] == rid}
    return found


Stage = tuple[str, dict[str, Any], dict[str, Any]]


def _stages(states: dict[str, States], notes: list[str], run: str) -> Iterator[Stage]:
    """(what has happened, the state there, the unified node's), in order."""
    reference = states["unified"]
    wanted = (
        ("after prefill", states["prefill"].get("prefill"), reference.get("prefill")),
        ("after commit", states["decode"].get("commit"), reference.get("prefill")),
        ("after prefill on decode", states["decode"].get("prefill"), reference.get("prefill")),
        ("at the end", states["decode"].get("end"), reference.get("end")),
    )
    for stage, found, expected in wanted:
        if found is None or expected is None:
            continue
        if found["tokens"] != expected["tokens"]:
            notes.append(
                f"{run}, {stage}: the state is of {found['tokens']} tokens, the unified node's of {expected['tokens']}"
            )
            continue
        yield stage, found, expected


def compare_states(
    run: str, stage: str, found: dict[str, Any], expected: dict[str, Any], tolerance: float, notes: list[str]
) -> list[PartFinding]:
    """Layer by layer, what both have; saved states only when they are of the same position."""
    if found["tracked"] != expected["tracked"] and -1 not in (found["tracked"], expected["tracked"]):
        notes.append(f"{run}, {stage}: saved at {found['tracked']}, by the unified node at {expected['tracked']}")
    theirs = {(part["part"], part["layer"]): part for part in expected["parts"]}
    pairs = [
        (part, theirs[key])
        for part in found["parts"]
        if (key := (part["part"], part["layer"])) in theirs
        and (found["tracked"] == expected["tracked"] or not part["part"].startswith("track"))
    ]
    order = {"kv": 0, "conv": 1, "ssm": 2}
    pairs.sort(key=lambda pair: (pair[0]["part"].startswith("track"), pair[0]["layer"], order.get(pair[0]["part"], 0)))
    return [_finding(run, stage, one, other, tolerance) for one, other in pairs]


def _finding(run: str, stage: str, one: dict[str, Any], other: dict[str, Any], tolerance: float) -> PartFinding:
    equal = one["digest"] == other["digest"]
    distance = 0.0 if equal else _distance(one, other)
    return PartFinding(
        run=run,
        stage=stage,
        part=one["part"],
        layer=one["layer"],
        distance=distance,
        equal_bytes=equal,
        differs=not distance <= tolerance,  # NaN differs
    )


def _distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Estimated from the sketches: projections on vectors of plus and minus one."""
    squares = [(a - b) ** 2 for a, b in zip(one["sketch"], other["sketch"], strict=True)]
    norm = max(one["norm"], other["norm"])
    return math.sqrt(sum(squares) / len(squares)) / norm if norm else 0.0
