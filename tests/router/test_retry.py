"""A request that fails is tried at another pair of workers when that is safe, and only then."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest
from aiohttp import web

from common.config import PolicyName
from tests.router.mocks import (
    MockWorker,
    RunningRouter,
    answer_at_once,
    answer_object,
    break_connection,
    breaks,
    config_of,
    event,
    fails,
    never,
    run_router,
    streams,
)


def error_body(code: str, *, retryable: bool) -> bytes:
    return json.dumps({"error": {"message": "m", "type": "t", "code": code, "retryable": retryable}}).encode()


AGAIN = error_body("rank_died", retryable=True)
PARTIAL = {"text": "a", "output_ids": [7], "meta_info": {"id": "x", "finish_reason": None}}
WHOLE = {"text": "ab", "output_ids": [7, 8], "meta_info": {"id": "x", "finish_reason": {"type": "stop"}}}
DONE = event(b"[DONE]")


class Workers:
    """Two of each role. The first ones that are picked fail in the way of the test, the others serve."""

    def __init__(self) -> None:
        self.prefill = [MockWorker("prefill"), MockWorker("prefill")]
        self.decode = [MockWorker("decode"), MockWorker("decode")]

    @property
    def all(self) -> list[MockWorker]:
        return self.prefill + self.decode

    def of(self, role: str, rid: str) -> int:
        """Which one the last request went to."""
        workers = self.prefill if role == "prefill" else self.decode
        return next(n for n, worker in enumerate(workers) if worker.bodies and worker.bodies[-1]["rid"] == rid)

    def first(self, role: str, script: Any, then: Any = answer_at_once) -> None:
        """The first leg of this role runs `script`, every later one `then`, wherever they go."""
        scripts = iter([script])

        async def run(worker: MockWorker, *rest: Any) -> web.StreamResponse:
            response: web.StreamResponse = await next(scripts, then)(worker, *rest)
            return response

        for worker in self.prefill if role == "prefill" else self.decode:
            worker.script = run

    def legs(self, role: str) -> list[dict[str, Any]]:
        workers = self.prefill if role == "prefill" else self.decode
        return [body for worker in workers for body in worker.bodies]


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    found = Workers()
    for worker in found.all:
        worker.resumes = True
        await worker.start()
    yield found
    for worker in found.all:
        await worker.stop()


@pytest.fixture
async def router(workers: Workers) -> AsyncIterator[RunningRouter]:
    async with run_router(config_of(workers.prefill, workers.decode)) as running:
        await running.until_alive()
        yield running


def moves(router: RunningRouter) -> tuple[int, int]:
    counters = router.state.dispatcher.counters
    return counters.retries, counters.resumes


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    "failure", [fails(503, AGAIN), fails(502, AGAIN, delay_s=0.05), breaks], ids=["503", "502", "reset"]
)
async def test_another_pair_serves_what_one_could_not(
    router: RunningRouter, workers: Workers, role: str, failure: Any, stream: bool
) -> None:
    good = streams(event(WHOLE), DONE) if stream else answer_at_once
    workers.first("decode", failure if role == "decode" else never, good)
    workers.first("prefill", failure if role == "prefill" else never)
    answer = await router.generate(stream=stream, rid="r")
    assert (answer.status_code, moves(router)) == (200, (1, 0))
    first, second = workers.legs("decode")
    assert first["bootstrap_room"] != second["bootstrap_room"]
    assert first["rid"] == second["rid"] == "r"
    assert [len(worker.bodies) for worker in workers.all] == [1, 1, 1, 1]
    info = (await router.client.get("/server_info")).json()
    assert info["counters"] == {"requests": 1, "retries": 1, "resumes": 0}


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_does_not_listen(router: RunningRouter, workers: Workers, role: str) -> None:
    group = workers.prefill if role == "prefill" else workers.decode
    await group[0].stop()
    for worker in router.state.workers.all:  # as before the next health check
        worker.alive = True
    for worker in workers.all:
        worker.script = answer_at_once
    assert [(await router.generate()).status_code for _ in range(3)] == [200, 200, 200]


@pytest.mark.parametrize(
    "failure",
    [
        fails(400, error_body("invalid_request", retryable=True)),
        fails(499, error_body("aborted", retryable=True)),
        fails(500, error_body("internal", retryable=False)),
        fails(503, error_body("rank_silent", retryable=True)),
        fails(503, error_body("peer_silent", retryable=True)),
        fails(503, b"<html>"),
    ],
    ids=["400", "499", "final", "rank silent", "peer silent", "foreign"],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_is_not_tried_again(router: RunningRouter, workers: Workers, role: str, failure: Any) -> None:
    """A request that is wrong is wrong everywhere; one that a silent rank has may still run there."""
    workers.first(role, failure)
    workers.first("prefill" if role == "decode" else "decode", never)
    answer = await router.generate()
    assert answer.status_code >= 400
    assert moves(router) == (0, 0)
    assert (len(workers.legs("prefill")), len(workers.legs("decode"))) == (1, 1)


async def test_it_is_tried_so_often_and_no_more(workers: Workers) -> None:
    for worker in workers.all:
        worker.script = fails(503, AGAIN) if worker.role == "decode" else never
    for max_retries, tries in ((0, 1), (1, 2), (2, 3)):
        for worker in workers.all:
            worker.bodies.clear()
        async with run_router(config_of(workers.prefill, workers.decode, max_retries=max_retries)) as router:
            await router.until_alive()
            answer = await router.generate()
            assert (answer.status_code, answer.content) == (503, AGAIN)
            assert len(workers.legs("decode")) == tries


async def test_no_pair_is_tried_twice(workers: Workers) -> None:
    for worker in workers.all:
        worker.script = fails(503, AGAIN) if worker.role == "decode" else never
    async with run_router(config_of(workers.prefill, workers.decode[:1], max_retries=9)) as router:
        await router.until_alive()
        assert (await router.generate()).status_code == 503
        assert [len(worker.bodies) for worker in workers.prefill] == [1, 1]


async def test_without_another_pair_the_error_comes_at_once(workers: Workers) -> None:
    """It does not wait for the end of legs that nothing follows."""
    prefill, decode = workers.prefill[:1], workers.decode[:1]
    prefill[0].script, prefill[0].abort_delay_s = never, 60
    decode[0].script = streams(event(PARTIAL), then=break_connection)
    async with run_router(config_of(prefill, decode)) as router:
        await router.until_alive()
        begin = time.monotonic()
        lines = (await router.generate(stream=True)).text.split("\n\n")
        assert time.monotonic() - begin < 1
        assert json.loads(lines[1].removeprefix("data: "))["error"]["code"] == "worker_lost"
        assert lines[2:] == ["data: [DONE]", ""]


async def test_half_a_json_answer_is_none(router: RunningRouter, workers: Workers) -> None:
    async def half(_: MockWorker, request: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-length": "100", "content-type": "application/json"})
        await response.prepare(request)
        await response.write(b'{"text": "ha')
        break_connection(request)
        return response

    workers.first("decode", half)
    answer = await router.generate()
    assert (answer.json()["text"], moves(router)) == ("from decode", (1, 0))


async def test_several_sequences_are_tried_again_as_a_whole(router: RunningRouter, workers: Workers) -> None:
    async def both(*_: Any) -> web.StreamResponse:
        return web.json_response([answer_object("a"), answer_object("b")])

    workers.first("decode", breaks, both)
    answer = await router.generate(text=["a", "b"], rid=["r1", "r2"])
    assert [item["text"] for item in answer.json()] == ["a", "b"]
    first, second = workers.legs("decode")
    assert set(first["bootstrap_room"]).isdisjoint(second["bootstrap_room"])
    assert len(second["bootstrap_room"]) == 2


# A request id never runs twice at once


async def test_the_second_try_waits_until_the_first_has_ended(router: RunningRouter, workers: Workers) -> None:
    """Here the prefill worker takes its time to confirm the abort."""
    aborted_at: list[int] = []

    async def second(worker: MockWorker, *rest: Any) -> web.StreamResponse:
        aborted_at.append(sum(len(one.aborts) for one in workers.prefill))
        return await answer_at_once(worker, *rest)

    for worker in workers.prefill:
        worker.abort_delay_s = 0.3
    workers.first("prefill", never)
    workers.first("decode", fails(503, AGAIN), second)
    assert (await router.generate()).status_code == 200
    assert aborted_at == [1]


@pytest.mark.parametrize("why", ["does not answer", "says that it runs", "refuses"])
async def test_without_a_confirmed_end_there_is_no_second_try(
    router: RunningRouter, workers: Workers, why: str
) -> None:
    for worker in workers.prefill:
        worker.abort_delay_s = 60 if why == "does not answer" else 0
        worker.abort_ended = False if why == "says that it runs" else None
        worker.abort_status = 500 if why == "refuses" else 200
    workers.first("prefill", never)
    workers.first("decode", fails(503, AGAIN))
    answer = await router.generate()
    assert (answer.status_code, answer.content) == (503, AGAIN)
    assert len(workers.legs("decode")) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_silent_worker_has_is_not_given_to_another(workers: Workers, stream: bool) -> None:
    async with run_router(config_of(workers.prefill, workers.decode, liveness_timeout_s=0.4)) as router:
        await router.until_alive()
        for worker in workers.decode:
            worker.script = streams(event(PARTIAL), gap_s=30) if stream else never
        request = asyncio.create_task(router.generate(stream=stream))
        await router.until(lambda: len(workers.legs("decode")) == 1)
        next(worker for worker in workers.decode if worker.bodies).stopped = True
        assert "worker_silent" in (await request).text
        assert len(workers.legs("decode")) == 1


async def test_a_client_that_leaves_between_two_tries(router: RunningRouter, workers: Workers) -> None:
    for worker in workers.prefill:
        worker.abort_delay_s = 1.5
    workers.first("prefill", never)
    workers.first("decode", fails(503, AGAIN))
    request = asyncio.create_task(router.generate())
    await router.until(lambda: len(workers.legs("decode")) == 1)
    await asyncio.sleep(0.1)
    request.cancel()
    in_flight = router.state.dispatcher.in_flight
    await router.until(lambda: not in_flight.rids, limit_s=10)
    assert len(workers.legs("decode")) == 1


async def test_an_abort_between_two_tries_ends_the_request(router: RunningRouter, workers: Workers) -> None:
    for worker in workers.prefill:
        worker.abort_delay_s = 1.5
    workers.first("prefill", never)
    workers.first("decode", fails(503, AGAIN))
    request = asyncio.create_task(router.generate(rid="r"))
    await router.until(lambda: len(workers.legs("decode")) == 1)
    await router.client.post("/abort_request", json={"rid": "r"})
    assert (await request).json()["error"]["code"] == "aborted"
    assert len(workers.legs("decode")) == 1


# Streams that go on


CUTS = {
    "reset": streams(event(PARTIAL), then=break_connection),
    "half an event": streams(event(PARTIAL), b'data: {"text": "ab", "outp', then=break_connection),
    "clean end": streams(event(PARTIAL)),
    "error event": streams(event(PARTIAL), event(AGAIN) + DONE),
    "error in the same bytes": streams(event(PARTIAL) + event(AGAIN) + DONE),
}


@pytest.mark.parametrize("cut", CUTS)
async def test_a_stream_goes_on_at_another_decode_worker(router: RunningRouter, workers: Workers, cut: str) -> None:
    workers.first("decode", CUTS[cut], streams(event(WHOLE), DONE))
    answer = await router.generate(stream=True, rid="r", logprob_start_len=0)
    assert answer.content == event(PARTIAL) + event(WHOLE) + DONE
    second = next(body for body in workers.legs("decode") if "resume" in body)
    assert (second["resume"], second["logprob_start_len"]) == ({"output_ids": [7]}, -1)
    assert next(body for body in workers.legs("prefill") if "resume" in body)["resume"] == second["resume"]
    assert moves(router) == (0, 1)


async def test_logprobs_go_along_and_the_prompts_stay(router: RunningRouter, workers: Workers) -> None:
    own, prompt = [[-1.0, 7, "a"]], [[None, 1, "p"]]
    partial = PARTIAL | {"meta_info": PARTIAL["meta_info"] | {"output_token_logprobs": own}}  # type: ignore[operator]
    workers.first("prefill", fails(200, json.dumps(answer_object(input_token_logprobs=prompt)).encode()), never)
    workers.first("decode", streams(event(partial), then=break_connection), streams(event(WHOLE), DONE))
    text = (await router.generate(stream=True, return_logprob=True)).text
    objects = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:2]]
    assert [item["meta_info"]["input_token_logprobs"] for item in objects] == [prompt, prompt]
    second = next(body for body in workers.legs("decode") if "resume" in body)
    assert second["resume"] == {"output_ids": [7], "output_token_logprobs": own}


async def test_a_stream_that_broke_after_its_last_token_is_complete(router: RunningRouter, workers: Workers) -> None:
    workers.first("decode", streams(event(PARTIAL), event(WHOLE), then=break_connection))
    assert (await router.generate(stream=True)).content == event(PARTIAL) + event(WHOLE) + DONE
    workers.first("decode", streams(event(WHOLE) + DONE, then=break_connection))
    assert (await router.generate(stream=True)).content == event(WHOLE) + DONE
    assert moves(router) == (0, 0)


NOT_RESUMED: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "switched off": ({"resume_on_decode_failure": False}, PARTIAL, {}),
    "several sequences": ({}, PARTIAL | {"index": 0}, {"text": ["a", "b"]}),
    "no ids": ({}, {"text": "a", "meta_info": {}}, {}),
    "no object": ({}, b": a comment", {}),
    "too long": ({"max_body_bytes": 2000}, PARTIAL | {"output_ids": [7] * 1000}, {}),
}


@pytest.mark.parametrize("case", NOT_RESUMED)
async def test_streams_that_end_with_the_error(workers: Workers, case: str) -> None:
    settings, last, fields = NOT_RESUMED[case]
    async with run_router(config_of(workers.prefill, workers.decode, **settings)) as router:
        await router.until_alive()
        workers.first("decode", streams(event(last), then=break_connection))
        *_, error, done, _ = (await router.generate(stream=True, **fields)).text.split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "worker_lost"
        assert done == "data: [DONE]"
        assert moves(router) == (0, 0)


async def test_workers_that_cannot_go_on_with_an_answer_are_not_asked_to(workers: Workers) -> None:
    """A foreign server would take the field for an unknown one, or begin anew."""
    for worker in workers.decode:
        worker.resumes = False
    async with run_router(config_of(workers.prefill, workers.decode)) as router:
        await router.until_alive()
        workers.first("decode", streams(event(PARTIAL), then=break_connection))
        assert "worker_lost" in (await router.generate(stream=True)).text
        workers.first("decode", breaks)
        assert (await router.generate()).status_code == 200  # from the start it may


async def test_that_a_node_cannot_go_on_is_no_fault_of_the_request(router: RunningRouter, workers: Workers) -> None:
    refusal = fails(400, error_body("too_many_tokens", retryable=False))
    workers.first("decode", streams(event(PARTIAL), then=break_connection), refusal)
    *_, error, _, _ = (await router.generate(stream=True)).text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "worker_lost"


# Workers that come and go


async def test_pairs_are_not_fixed(workers: Workers) -> None:
    """Both sides take turns, but not in step: every prefill worker meets every decode worker."""
    met: set[tuple[int, int]] = set()
    config = config_of(workers.prefill, workers.decode, policy=PolicyName.ROUND_ROBIN)
    async with run_router(config) as router:
        await router.until_alive()
        for i in range(40):
            await router.generate(rid=f"r{i}")
            met.add((workers.of("prefill", f"r{i}"), workers.of("decode", f"r{i}")))
    assert len(met) == 4
    assert [len(worker.bodies) for worker in workers.all] == [20, 20, 20, 20]


async def one_that_waits(router: RunningRouter, workers: Workers) -> tuple[asyncio.Task[Any], asyncio.Event]:
    """A request that decode has, and what lets it be answered."""
    release = asyncio.Event()

    async def slow(worker: MockWorker, *rest: Any) -> web.StreamResponse:
        await release.wait()
        return await answer_at_once(worker, *rest)

    workers.first("decode", slow)
    request = asyncio.create_task(router.generate())
    await router.until(lambda: len(workers.legs("decode")) == 1)
    return request, release


async def test_a_draining_worker_gets_no_new_requests_and_ends_its_own(router: RunningRouter, workers: Workers) -> None:
    request, release = await one_that_waits(router, workers)
    draining = next(worker for worker in workers.decode if worker.bodies)
    draining.healthy, draining.health_error = False, {"code": "draining"}
    known = next(worker for worker in router.state.workers.decode if worker.url == draining.url)
    await router.until(lambda: not known.alive)
    assert known.describe()["reason"] == "/health answered 503 draining"
    assert [(await router.generate()).status_code for _ in range(4)] == [200] * 4
    assert len(draining.bodies) == 1
    release.set()
    assert (await request).status_code == 200


async def test_a_worker_that_refuses_is_asked_how_it_is_at_once(workers: Workers) -> None:
    async with run_router(config_of(workers.prefill, workers.decode, health_interval_s=60)) as router:
        await router.until_alive()
        draining = workers.decode[0]
        draining.script = fails(503, error_body("draining", retryable=True))
        draining.healthy = False
        assert [(await router.generate()).status_code for _ in range(6)] == [200] * 6
        assert len(draining.bodies) == 1


async def test_a_worker_that_came_back_unnoticed_as_another_is_asked_what_it_is(
    router: RunningRouter, workers: Workers
) -> None:
    """It was away for less than the interval of the checks."""
    worker = workers.decode[0]
    worker.instance, worker.fingerprint = "second", "f1"
    known = router.state.workers.decode[0]
    await router.until(lambda: known.fingerprint == "f1" and known.alive)
    for _ in range(4):
        assert (await router.generate()).status_code == 200
    assert worker.bodies == []


# The router's own end


async def test_a_draining_router_refuses_new_requests_and_ends_what_runs(
    router: RunningRouter, workers: Workers
) -> None:
    request, release = await one_that_waits(router, workers)
    draining = asyncio.create_task(router.state.dispatcher.drain(10))
    await asyncio.sleep(0)
    for answer in (await router.generate(), await router.client.get("/health")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
    assert not draining.done()
    release.set()
    assert (await request).status_code == 200
    await asyncio.wait_for(draining, 5)


async def test_a_request_that_waited_for_its_id_does_not_begin_when_the_router_drains(
    router: RunningRouter, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatcher = router.state.dispatcher

    async def wait_meanwhile(_: object) -> None:
        await dispatcher.drain(5)

    monkeypatch.setattr(dispatcher, "_let_end", wait_meanwhile)
    answer = await router.generate(rid="r")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
    assert workers.legs("decode") == []


class CountedEvent(asyncio.Event):
    waits = 0

    async def wait(self) -> Literal[True]:
        self.waits += 1
        assert self.waits < 10, "it spins"
        return await super().wait()


async def test_a_request_that_began_after_the_last_one_ended_is_waited_for(
    router: RunningRouter, workers: Workers
) -> None:
    """That nothing ran any more for a moment must be seen anew every time."""
    dispatcher = router.state.dispatcher
    dispatcher._idle = CountedEvent()
    workers.first("decode", never)
    request = asyncio.create_task(router.generate())
    await router.until(lambda: len(workers.legs("decode")) == 1)
    draining = asyncio.create_task(dispatcher.drain(0.5))
    await router.until(lambda: dispatcher._idle.waits == 1)
    dispatcher._idle.set()
    await draining
    assert dispatcher.num_running == 1
    dispatcher.end_all()
    assert (await request).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
async def test_what_does_not_end_in_time_ends_with_an_error(
    router: RunningRouter, workers: Workers, stream: bool
) -> None:
    workers.first("decode", streams(event(PARTIAL), gap_s=30) if stream else never)
    request = asyncio.create_task(router.generate(stream=stream))
    await router.until(lambda: len(workers.legs("decode")) == 1)
    dispatcher = router.state.dispatcher
    if stream:
        await router.until(lambda: any(exchange._sent.last for exchange in dispatcher._exchanges))
    await dispatcher.drain(0.1)
    dispatcher.end_all()
    assert "shutting_down" in (await request).text
    assert moves(router) == (0, 0)
