"""What the router is told of its legs: each begins once, ends once, and says how."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from router.leg_outcome import LegOutcome
from router.legs import Leg
from router.workers import Workers
from tests.router.mocks import (
    MockWorker,
    RunningRouter,
    answer_object,
    break_connection,
    event,
    fails,
    never,
    streams,
)

ERROR = b'{"error": {"message": "m", "type": "worker_error", "code": "rank_died", "retryable": false}}'


class Seen:
    """begun: roles. ends: (role, end, code), in order. outcomes: the same, whole."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ends: list[tuple[str, str, str | None]] = []
        self.outcomes: list[LegOutcome] = []


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen, begin, end = Seen(), Workers.on_leg_begin, Workers.on_leg_end

    def on_begin(self: Workers, leg: Leg) -> None:
        seen.begun.append(leg.worker.role.value)
        begin(self, leg)

    def on_end(self: Workers, leg: Leg, outcome: LegOutcome) -> None:
        seen.ends.append((leg.worker.role.value, outcome.end.value, outcome.code))
        seen.outcomes.append(outcome)
        end(self, leg, outcome)

    monkeypatch.setattr(Workers, "on_leg_begin", on_begin)
    monkeypatch.setattr(Workers, "on_leg_end", on_end)
    return seen


async def ended(router: RunningRouter, seen: Seen) -> list[tuple[str, str, str | None]]:
    """All ends, when every leg has ended. No worker has one any more."""
    await router.until(lambda: router.state.dispatcher.num_running == 0, limit_s=10)
    assert len(seen.ends) == len(seen.begun)
    assert [worker.num_legs for worker in router.state.workers.all] == [0, 0]
    return sorted(seen.ends)


async def test_a_json_answer(router: RunningRouter, seen: Seen) -> None:
    assert (await router.generate()).status_code == 200
    assert await ended(router, seen) == [("decode", "ok", None), ("prefill", "ok", None)]
    for outcome in seen.outcomes:
        assert outcome.first_byte_s is not None and 0 < outcome.first_byte_s <= outcome.seconds


async def test_a_stream_has_gaps(router: RunningRouter, seen: Seen, decode: MockWorker) -> None:
    decode.script = streams(*[event(answer_object())] * 4, event(b"[DONE]"), gap_s=0.02)
    assert (await router.generate(stream=True)).status_code == 200
    assert await ended(router, seen) == [("decode", "ok", None), ("prefill", "ok", None)]
    outcome = next(o for o, (role, _, _) in zip(seen.outcomes, seen.ends, strict=True) if role == "decode")
    assert outcome.gap_s is not None and outcome.gap_s > 0.005


@pytest.mark.parametrize(
    ("status", "expected"), [(400, "client_error"), (429, "client_error"), (499, "aborted"), (503, "worker_error")]
)
async def test_a_refusal(
    router: RunningRouter, seen: Seen, decode: MockWorker, prefill: MockWorker, status: int, expected: str
) -> None:
    decode.script, prefill.script = fails(status, ERROR), never
    assert (await router.generate()).status_code == status
    assert await ended(router, seen) == [("decode", expected, "rank_died"), ("prefill", "aborted", None)]


ENDS = {
    "invalid_request_error": (400, "client_error"),
    "capacity_error": (503, "worker_error"),
    "worker_error": (503, "worker_error"),
    "transfer_error": (502, "worker_error"),
    "aborted_error": (499, "aborted"),
    "config_error": (500, "worker_error"),
    "serving_error": (500, "worker_error"),
}
"""Of docs/operations.md, but for access_error, which is the router's own fault."""


def error_of(kind: str) -> bytes:
    return json.dumps({"error": {"message": "m", "type": kind, "code": "why", "retryable": False}}).encode()


@pytest.mark.parametrize("kind", ENDS)
async def test_the_kind_of_an_error_decides_in_a_head_and_in_a_stream(
    router: RunningRouter, seen: Seen, decode: MockWorker, kind: str
) -> None:
    status, end = ENDS[kind]
    breaker = router.state.workers.decode[0].breaker
    decode.script = fails(status, error_of(kind))
    assert (await router.generate()).status_code == status
    assert ("decode", end, "why") in await ended(router, seen)
    bad = breaker.describe()["failures_in_a_row"]
    assert bad == (end == "worker_error" and kind != "capacity_error")

    for events in ([], [event(answer_object(finish_reason=None))]):  # before the first token, and after it
        seen.ends.clear()
        seen.begun.clear()
        breaker.reset()
        decode.script = streams(*events, event(error_of(kind)), event(b"[DONE]"))
        answer = await router.generate(stream=True)
        assert answer.status_code == (200 if events else status) and b'"why"' in answer.content
        assert ("decode", end, "why") in await ended(router, seen)
        assert breaker.describe()["failures_in_a_row"] == bad


@pytest.mark.parametrize(("status", "kind"), [(504, "aborted_error"), (503, "invalid_request_error")])
async def test_an_unusual_status_changes_nothing(
    router: RunningRouter, seen: Seen, decode: MockWorker, status: int, kind: str
) -> None:
    decode.script = fails(status, error_of(kind))
    assert (await router.generate()).status_code == status
    assert ("decode", ENDS[kind][1], "why") in await ended(router, seen)


async def test_an_error_of_sglang_in_a_stream_has_its_status_for_a_code(
    router: RunningRouter, seen: Seen, decode: MockWorker
) -> None:
    error = b'{"error": {"object": "error", "message": "m", "type": "BadRequestError", "param": null, "code": 400}}'
    decode.script = streams(event(error), event(b"[DONE]"))
    assert (await router.generate(stream=True)).status_code == 400
    assert ("decode", "client_error", None) in await ended(router, seen)


@pytest.mark.parametrize("status", [204, 301, 999])
async def test_a_status_that_is_no_answer(router: RunningRouter, seen: Seen, decode: MockWorker, status: int) -> None:
    decode.script = fails(status, b"")
    answer = await router.generate()
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "bad_answer")
    assert ("decode", "worker_error", "bad_answer") in await ended(router, seen)


async def test_an_error_in_a_stream(router: RunningRouter, seen: Seen, decode: MockWorker) -> None:
    decode.script = streams(event(answer_object()), event(ERROR), event(b"[DONE]"))
    await router.generate(stream=True)
    assert ("decode", "worker_error", "rank_died") in await ended(router, seen)


@pytest.mark.parametrize("chunks", [(), (event(answer_object()),)])
async def test_a_stream_that_breaks(router: RunningRouter, seen: Seen, decode: MockWorker, chunks: Any) -> None:
    decode.script = streams(*chunks, then=break_connection)
    await router.generate(stream=True)
    assert ("decode", "lost", "worker_lost") in await ended(router, seen)


async def test_a_stream_that_ends_before_its_end(router: RunningRouter, seen: Seen, decode: MockWorker) -> None:
    decode.script = streams(event(answer_object()))
    await router.generate(stream=True)
    assert ("decode", "lost", "worker_lost") in await ended(router, seen)


async def test_a_client_that_leaves(router: RunningRouter, seen: Seen, decode: MockWorker, prefill: MockWorker) -> None:
    decode.script = prefill.script = never
    asking = asyncio.create_task(router.generate())
    await router.until(lambda: bool(decode.bodies and prefill.bodies))
    assert [worker.num_legs for worker in router.state.workers.all] == [1, 1]
    asking.cancel()
    assert await ended(router, seen) == [("decode", "aborted", None), ("prefill", "aborted", None)]


async def test_nobody_listens(router: RunningRouter, seen: Seen, decode: MockWorker, prefill: MockWorker) -> None:
    prefill.script = never
    await decode.stop()
    assert (await router.generate()).status_code == 503
    assert await ended(router, seen) == [("decode", "lost", "worker_unavailable"), ("prefill", "aborted", None)]
