"""Places, the line before them, and rates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from common.config import RouterConfig
from common.errors import AbortedError, CapacityError, ServingError, WorkerError
from router.admission import Admission, Buckets, Turn
from tests.router.mocks import MockWorker, RunningRouter, answer_at_once, config_of, run_router


class Gate:
    """A worker's script that answers when it is let."""

    def __init__(self) -> None:
        self._open = asyncio.Semaphore(0)

    def let(self, number: int = 1) -> None:
        for _ in range(number):
            self._open.release()

    async def __call__(self, worker: MockWorker, request: Any, body: dict[str, Any]) -> Any:
        await self._open.acquire()
        return await answer_at_once(worker, request, body)


@pytest.fixture
def gate(decode: MockWorker) -> Gate:
    decode.script = gate = Gate()
    return gate


Running = Callable[..., Awaitable[RunningRouter]]


@pytest.fixture
async def narrow(prefill: MockWorker, decode: MockWorker) -> AsyncIterator[RunningRouter]:
    """One runs, two may wait."""
    async with run_router(config_of([prefill], [decode], max_concurrent_requests=1, queue_size=2)) as router:
        await router.until_alive()
        yield router


def admission(router: RunningRouter) -> Admission:
    found: Admission = router.state.dispatcher.admission
    return found


async def ask_and_wait(
    router: RunningRouter, running: int, waiting: int, **fields: Any
) -> asyncio.Task[httpx.Response]:
    task = asyncio.create_task(router.generate(**fields))
    await router.until(lambda: (admission(router).num_running, admission(router).num_waiting) == (running, waiting))
    return task


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": "x"}),
    ("/generate", {"text": "x", "stream": True}),
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True}),
]


async def test_what_is_beyond_places_and_line_is_refused_at_once(
    narrow: RunningRouter, decode: MockWorker, gate: Gate
) -> None:
    asked = [await ask_and_wait(narrow, 1, i, rid=f"r{i}") for i in range(3)]
    for path, body in BODIES:
        refused = await narrow.client.post(path, json=body)
        error = refused.json()["error"]
        assert set(error) == {"message", "type", "param", "code", "retryable"}, "OpenAI's shape, and one word more"
        assert (refused.status_code, error["code"], error["type"]) == (429, "queue_full", "capacity_error")
        assert error["retryable"] and refused.headers["retry-after"] == "1"
    for i in range(3):
        await narrow.until(lambda i=i: len(decode.bodies) == i + 1)  # one after the other, in order of arrival
        assert decode.bodies[i]["rid"] == f"r{i}"
        gate.let()
    assert [(await task).status_code for task in asked] == [200] * 3
    await narrow.until(lambda: (admission(narrow).num_running, admission(narrow).num_waiting) == (0, 0))
    assert admission(narrow).rejected == {"queue_full": len(BODIES)}


async def test_whoever_leaves_the_line_leaves_no_trace(narrow: RunningRouter, decode: MockWorker, gate: Gate) -> None:
    first = await ask_and_wait(narrow, 1, 0)
    second = await ask_and_wait(narrow, 1, 1, rid="gone")
    second.cancel()
    await narrow.until(lambda: admission(narrow).num_waiting == 0)
    await narrow.until(lambda: "gone" not in narrow.state.dispatcher.in_flight.rids)
    third = await ask_and_wait(narrow, 1, 1, rid="gone")
    gate.let(2)
    assert [(await first).status_code, (await third).status_code] == [200, 200]
    assert len(decode.bodies) == 2
    await narrow.until(lambda: (admission(narrow).num_running, narrow.state.dispatcher.num_running) == (0, 0))


async def test_a_failed_request_gives_its_place_back(narrow: RunningRouter, decode: MockWorker) -> None:
    for body in ({"text": "x", "sampling_params": {"n": 0}}, {"text": "x", "rid": ""}):
        assert (await narrow.client.post("/generate", json=body)).status_code == 400
    decode.healthy = False
    await narrow.until(lambda: not narrow.state.workers.has_pair())
    assert [(await narrow.generate()).status_code for _ in range(3)] == [503] * 3
    assert (admission(narrow).num_running, admission(narrow).num_waiting) == (0, 0)


async def test_whoever_waits_can_be_aborted(narrow: RunningRouter, decode: MockWorker, gate: Gate) -> None:
    first = await ask_and_wait(narrow, 1, 0)
    second = await ask_and_wait(narrow, 1, 1, rid="second")
    assert (await narrow.client.post("/abort_request", json={"rid": "second"})).status_code == 200
    assert (await second).status_code == 499
    gate.let()
    assert (await first).status_code == 200
    assert len(decode.bodies) == 1


async def test_the_deadline_holds_in_the_line_too(narrow: RunningRouter, decode: MockWorker, gate: Gate) -> None:
    first = await ask_and_wait(narrow, 1, 0)
    for path, body in BODIES:
        late = await narrow.client.post(path, json=body, headers={"x-request-timeout-s": "0.1"})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert admission(narrow).num_waiting == 0
    gate.let()
    assert (await first).status_code == 200
    assert len(decode.bodies) == 1


async def test_waiting_has_an_end(prefill: MockWorker, decode: MockWorker, gate: Gate) -> None:
    config = config_of([prefill], [decode], max_concurrent_requests=1, queue_timeout_s=0.2)
    async with run_router(config) as router:
        await router.until_alive()
        first = await ask_and_wait(router, 1, 0)
        late = await router.generate()
        assert (late.status_code, late.json()["error"]["code"]) == (429, "queue_timeout")
        assert late.headers["retry-after"] == "1"
        gate.let()
        assert (await first).status_code == 200


async def test_a_drain_refuses_who_waits_and_lets_end_what_runs(narrow: RunningRouter, gate: Gate) -> None:
    first = await ask_and_wait(narrow, 1, 0)
    second = await ask_and_wait(narrow, 1, 1)
    draining = asyncio.create_task(narrow.state.dispatcher.drain(10))
    refused = await second
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    gate.let()
    assert (await first).status_code == 200
    await draining


# Without a network


def turn(caller: str | None = None) -> Turn:
    return Turn(caller, asyncio.Event().wait)  # type: ignore[arg-type]


class Line:
    """Requests that hold a place until they are told to end."""

    def __init__(self, **settings: Any) -> None:
        self.admission = Admission(RouterConfig(**settings))
        self.got: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.turns: dict[str, Turn] = {}

    async def join(self, name: str, caller: str | None = None) -> None:
        self._ends[name], self.turns[name] = asyncio.Event(), turn(caller)
        self.tasks[name] = asyncio.create_task(self._hold(name))
        await asyncio.sleep(0)

    async def _hold(self, name: str) -> None:
        async with self.admission.place(self.turns[name]):
            self.got.append(name)
            await self._ends[name].wait()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self.tasks[name]
        await asyncio.sleep(0.01)

    @property
    def numbers(self) -> tuple[int, int]:
        return self.admission.num_running, self.admission.num_waiting


async def test_callers_take_turns() -> None:
    line = Line(max_concurrent_requests=1)
    for name, caller in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("c1", "c"), ("b2", "b")):
        await line.join(name, caller)
    for name in ("a1", "a2", "b1", "c1", "a3", "b2"):
        assert line.got[-1] == name
        await line.end(name)
    assert line.numbers == (0, 0)


async def test_whoever_fills_the_line_keeps_nobody_else_out() -> None:
    line = Line(max_concurrent_requests=1, queue_size=3)
    for name in ("a0", "a1", "a2", "a3"):
        await line.join(name, "a")
    for name, loser in (("a4", "a4"), ("b1", "a3"), ("c1", "a2"), ("d1", "d1"), ("a5", "a5"), ("b2", "b2")):
        await line.join(name, name[0])
        with pytest.raises(CapacityError) as refused:
            await line.tasks[loser]
        assert refused.value.code == "queue_full"
        assert line.numbers == (1, 3)
    for name in ("a0", "a1", "b1", "c1"):
        assert line.got[-1] == name
        await line.end(name)
    assert line.numbers == (0, 0)


async def test_a_place_that_comes_with_the_cancellation_goes_to_the_next() -> None:
    line = Line(max_concurrent_requests=1)
    for name in ("first", "second", "third"):
        await line.join(name)
    line._ends["first"].set()
    await line.tasks["first"]  # the second has its place and does not know it yet
    line.tasks["second"].cancel()
    await asyncio.gather(line.tasks["second"], return_exceptions=True)
    await asyncio.sleep(0.01)
    assert line.got == ["first", "third"] and line.numbers == (1, 0)
    await line.end("third")
    assert line.numbers == (0, 0)


@pytest.mark.parametrize("error", [WorkerError("w"), AbortedError("a")])
async def test_a_refused_turn_is_out_of_the_line(error: ServingError) -> None:
    line = Line(max_concurrent_requests=1)
    for name in ("first", "second", "third"):
        await line.join(name)
    line.turns["second"].refuse(error)
    line.turns["first"].refuse(error)  # it runs: too late
    with pytest.raises(type(error)):
        await line.tasks["second"]
    assert line.numbers == (1, 1)
    await line.end("first")
    await line.end("third")
    assert line.got == ["first", "third"] and line.numbers == (0, 0)


async def test_places_and_line_over_many_arrivals_and_departures() -> None:
    """Whatever comes and goes, no place is lost and none is given twice."""
    line = Line(max_concurrent_requests=3, queue_size=1000)
    for i in range(60):
        await line.join(str(i), str(i % 4))
        if i % 7 == 3:
            line.tasks[str(i)].cancel()
        if i % 5 == 4 and line.got:
            line._ends[line.got[-1]].set()
        await asyncio.sleep(0)
        assert line.admission.num_running <= 3
    for event in line._ends.values():
        event.set()
    await asyncio.gather(*line.tasks.values(), return_exceptions=True)
    assert line.numbers == (0, 0)
    assert len(line.got) == len(set(line.got)) >= 50


async def test_without_a_bound_nobody_waits() -> None:
    line = Line(queue_size=0)
    for i in range(50):
        await line.join(str(i))
    assert line.numbers == (50, 0)
    for i in range(50):
        line._ends[str(i)].set()
    await asyncio.gather(*line.tasks.values())


async def test_a_line_of_none_refuses_at_once() -> None:
    line = Line(max_concurrent_requests=1, queue_size=0)
    await line.join("first")
    await line.join("second")
    with pytest.raises(CapacityError) as error:
        await line.tasks["second"]
    assert (error.value.code, error.value.http_status) == ("queue_full", 429)
    await line.end("first")


def test_a_bucket_fills_steadily_and_not_beyond_its_size() -> None:
    now = 100.0
    buckets = Buckets(30, lambda: now)

    def take(name: str) -> float:
        wait_s = buckets.wait_s(name)
        if wait_s == 0:
            buckets.spend(name, 1)
        return wait_s

    assert [take("a") for _ in range(30)] == [0.0] * 30
    assert take("a") == pytest.approx(2.0)
    assert take("b") == 0.0
    now += 1.0
    assert take("a") == pytest.approx(1.0)
    now += 1.001
    assert take("a") == 0.0
    now += 3600
    assert [take("a") > 0 for _ in range(31)] == [False] * 30 + [True]
    buckets.spend("a", 60)
    assert take("a") == pytest.approx(122.0), "what is owed comes first"
