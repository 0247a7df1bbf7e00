"""Two nodes that computed the same prompt have recorded the same state; another prompt's is told apart."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from common.config import EngineConfig, Role
from node.messages import Query, Submit
from node.state_log import DIRECTIONS, describe
from node.unified import UnifiedRole
from tests.support.ranks import Request, node_config

ENGINE = EngineConfig(max_total_tokens=4096, max_state_slots=12, max_running_requests=4)
PROMPT = list(range(3, 150))


@pytest.fixture
def role() -> Iterator[UnifiedRole]:
    yield UnifiedRole(node_config(Role.UNIFIED, engine=ENGINE), 0)


def run(role: UnifiedRole, rid: str, prompt: list[int]) -> None:
    request = Request(prompt=prompt, max_new_tokens=3)
    role.submit(
        Submit(
            rid=rid,
            token_ids=prompt,
            sampling=request.params(),
            logprobs=request.logprobs,
            room=None,
            arrival_s=0.0,
        )
    )
    while role.step():
        role.take_outbox()


def by_part(record: dict[str, object]) -> dict[tuple[str, int], dict[str, object]]:
    return {(p["part"], p["layer"]): p for p in record["parts"]}  # type: ignore[attr-defined]


def test_nothing_is_recorded_until_asked_for(role: UnifiedRole) -> None:
    run(role, "a", PROMPT)
    assert role.host.states.listing() == []
    role.query(Query(ticket=1, what="record", limit=1))
    run(role, "b", PROMPT)
    assert [(r["rid"], r["event"]) for r in role.host.states.listing()] == [("b", "prefill"), ("b", "end")]
    role.query(Query(ticket=2, what="record", limit=0))
    assert role.host.states.listing() == []


def test_equal_states_have_equal_records(role: UnifiedRole) -> None:
    role.host.states.switch(True)
    run(role, "a", PROMPT)
    role.query(Query(ticket=1, what="flush"))
    run(role, "b", PROMPT)
    first, end, second, _ = role.host.states.listing()
    assert first["parts"] == second["parts"]
    assert (first["tokens"], first["tracked"], end["tokens"]) == (147, 128, 149)
    assert first["parts"] != end["parts"]
    parts = by_part(first)
    assert {part for part, _ in parts} == {"kv", "conv", "ssm", "track conv", "track ssm"}
    assert len(parts) == 2 + 4 * len(role.host.runner.pools.state_layers), "the model has two attention layers"


@pytest.mark.parametrize("distance", [1e-6, 1e-3, 0.5])
def test_the_sketch_tells_how_far_apart_states_are(distance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(8, 64, 64, generator=generator, dtype=torch.float64)
    noise = torch.randn(8, 64, 64, generator=generator, dtype=torch.float64)
    moved = state + noise * (distance * state.norm() / noise.norm())
    one, other = describe("ssm", 0, state), describe("ssm", 0, moved)
    assert one["digest"] != other["digest"]
    squares = sum((x - y) ** 2 for x, y in zip(one["sketch"], other["sketch"], strict=True))
    found = (squares / DIRECTIONS) ** 0.5 / one["norm"]
    assert distance / 2 < found < distance * 2
