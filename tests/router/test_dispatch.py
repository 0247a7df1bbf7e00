"""Both legs of a request: opened together, answered from decode, ended together."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest
from aiohttp import web

from tests.router.mocks import (
    BOOTSTRAP_PORT,
    MockWorker,
    RunningRouter,
    answer_at_once,
    answer_object,
    break_connection,
    breaks,
    event,
    fails,
    never,
    streams,
)

REFUSAL = b'{"error": {"message": "text: empty",  "type": "invalid_request_error"}}'


async def drained(router: RunningRouter) -> None:
    """Nothing is left of any request in the router."""
    in_flight = router.state.dispatcher.in_flight
    await router.until(lambda: not in_flight.rids and not in_flight.rooms)


async def test_both_legs_are_open_at_the_same_time(
    router: RunningRouter, prefill: MockWorker, decode: MockWorker
) -> None:
    both = asyncio.Barrier(2)

    async def script(worker: MockWorker, *rest: Any) -> web.StreamResponse:
        async with asyncio.timeout(2):
            await both.wait()
        return await answer_at_once(worker, *rest)

    prefill.script = decode.script = script
    answer = await router.generate()
    assert (answer.status_code, answer.json()["text"]) == (200, "from decode")
    await drained(router)


async def test_legs_get_the_same_body_with_a_room_in_it(
    router: RunningRouter, prefill: MockWorker, decode: MockWorker
) -> None:
    await router.generate(sampling_params={"temperature": 0.25}, unknown=[None, 1e-7, 2**70])
    assert prefill.raw == decode.raw
    body = decode.bodies[0]
    assert 0 <= body.pop("bootstrap_room") < 2**63
    assert len(body.pop("rid")) == 32
    assert body == {
        "text": "hi",
        "sampling_params": {"temperature": 0.25},
        "unknown": [None, 1e-7, 2**70],
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": BOOTSTRAP_PORT,
    }


async def test_the_prefill_leg_never_streams(router: RunningRouter, prefill: MockWorker, decode: MockWorker) -> None:
    decode.script = streams(event(b"[DONE]"))
    await router.generate(stream=True)
    assert (prefill.bodies[0]["stream"], decode.bodies[0]["stream"]) == (False, True)
    assert prefill.bodies[0]["bootstrap_room"] == decode.bodies[0]["bootstrap_room"]


SEQUENCES: list[tuple[dict[str, Any], int | None, int | None]] = [
    ({"text": "a"}, None, None),
    ({"text": ["a"]}, 1, 1),
    ({"text": ["a", "b", "c"]}, 3, 3),
    ({"text": None, "input_ids": [1, 2]}, None, None),
    ({"text": None, "input_ids": [[1, 2], [3]]}, 2, 2),
    ({"text": "a", "sampling_params": {"n": 3}}, 3, None),
    ({"text": ["a", "b"], "sampling_params": {"n": 3}}, 6, 2),
    ({"text": ["a", "b"], "sampling_params": [{"n": 2}, {"n": 2}]}, 4, 2),
]


async def test_one_room_a_sequence(router: RunningRouter, decode: MockWorker) -> None:
    for fields, rooms, rids in SEQUENCES:
        await router.generate(**fields)
        body = decode.bodies[-1]
        for value, count in ((body["bootstrap_room"], rooms), (body["rid"], rids)):
            if count is None:
                assert not isinstance(value, list)
            else:
                assert len(set(value)) == len(value) == count


async def test_an_answer_passes_byte_by_byte(router: RunningRouter, decode: MockWorker) -> None:
    body = b'{ "text" :\t"\\u00e9\xc3\xa9",\n "x": 1.50, "x": 2 }\n'
    decode.script = fails(200, body)
    answer = await router.generate(rid="mine")
    assert answer.content == body
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
async def test_a_stream_passes_byte_by_byte(router: RunningRouter, decode: MockWorker, end: bytes) -> None:
    events = b'data: {"a":  1}' + end + b": comment" + end + b"data: [DONE]" + end + b"no end"
    decode.script = streams(*(events[i : i + 7] for i in range(0, len(events), 7)), gap_s=0.001)
    answer = await router.generate(stream=True)
    assert (answer.content, answer.headers["content-type"]) == (events, "text/event-stream")


async def test_tokens_arrive_as_they_are_made(router: RunningRouter, prefill: MockWorker, decode: MockWorker) -> None:
    """Even while the prefill leg has not ended."""
    more = asyncio.Event()

    async def script(_: MockWorker, request: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(event({"text": "a"}))
        await more.wait()
        await response.write(event(b"[DONE]"))
        return response

    async def late(worker: MockWorker, *rest: Any) -> web.StreamResponse:
        await more.wait()
        return await answer_at_once(worker, *rest)

    prefill.script, decode.script = late, script
    async with router.client.stream("POST", "/generate", json={"text": "a", "stream": True}) as answer:
        parts = answer.aiter_bytes()
        assert await anext(parts) == event({"text": "a"})
        more.set()
        assert await anext(parts) == event(b"[DONE]")


async def test_a_slow_client_slows_the_worker(router: RunningRouter, decode: MockWorker) -> None:
    sent = 0
    part = event(b"x" * 65536)

    async def script(_: MockWorker, request: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(1000):
            await response.write(part)
            sent += len(part)
        return response

    decode.script = script
    async with router.client.stream("POST", "/generate", json={"text": "a", "stream": True}):
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.3)
        assert sent < 500 * len(part)
    await router.until(lambda: decode.cut_off == 1)


# Failures


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 503])
@pytest.mark.parametrize("failing", ["prefill", "decode"])
async def test_an_error_of_a_leg_reaches_the_client_and_ends_the_other(
    router: RunningRouter, prefill: MockWorker, decode: MockWorker, failing: str, status: int, stream: bool
) -> None:
    bad, other = (prefill, decode) if failing == "prefill" else (decode, prefill)
    bad.script, other.script = fails(status, REFUSAL, delay_s=0.05), never
    answer = await router.generate(stream=stream, rid="r1")
    assert (answer.status_code, answer.content) == (status, REFUSAL)
    await router.until(lambda: other.cut_off == 1 and bool(other.aborts), limit_s=1)
    assert other.aborts == [{"rid": "r1", "abort_all": False}]
    assert bad.aborts == []
    await drained(router)


async def test_each_request_id_of_a_batch_is_aborted(
    router: RunningRouter, prefill: MockWorker, decode: MockWorker
) -> None:
    prefill.script, decode.script = fails(400, REFUSAL), never
    await router.generate(text=["a", "b"], rid=["r1", "r2"])
    await router.until(lambda: len(decode.aborts) == 2, limit_s=1)
    assert [abort["rid"] for abort in decode.aborts] == ["r1", "r2"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failing", ["prefill", "decode"])
async def test_a_worker_that_does_not_listen(
    router: RunningRouter, prefill: MockWorker, decode: MockWorker, failing: str, stream: bool
) -> None:
    bad, other = (prefill, decode) if failing == "prefill" else (decode, prefill)
    other.script = never
    await bad.stop()
    for worker in router.state.workers.all:  # as before the next health check
        worker.alive = True
    answer = await router.generate(stream=stream)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["retryable"]) == (503, "worker_error", True)
    assert failing in error["message"]
    assert "127.0.0.1" not in answer.text
    await bad.start()
    other.script = answer_at_once
    await router.until_alive()
    assert (await router.generate()).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failing", ["prefill", "decode"])
async def test_a_leg_whose_connection_breaks_ends_everything_within_a_second(
    router: RunningRouter, prefill: MockWorker, decode: MockWorker, failing: str, stream: bool
) -> None:
    bad, other = (prefill, decode) if failing == "prefill" else (decode, prefill)
    bad.script, other.script = breaks, never
    begin = time.monotonic()
    answer = await router.generate(stream=stream)
    assert time.monotonic() - begin < 1
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "worker_lost"
    await router.until(lambda: other.cut_off == 1, limit_s=1)
    await drained(router)


async def test_a_stream_whose_decode_breaks_ends_with_an_error_line(
    router: RunningRouter, prefill: MockWorker, decode: MockWorker
) -> None:
    """And never inside an event: the half that had come is left out."""
    decode.script = streams(event({"text": "a"}), b'data: {"text": "ha', then=break_connection)
    lines = (await router.generate(stream=True)).text.split("\n\n")
    assert lines[0] == 'data: {"text": "a"}'
    assert json.loads(lines[1].removeprefix("data: "))["error"]["code"] == "worker_lost"
    assert lines[2:] == ["data: [DONE]", ""]


async def test_a_stream_outlives_its_prefill(router: RunningRouter, prefill: MockWorker, decode: MockWorker) -> None:
    """When decode's answer flows it has the whole state."""
    prefill.script = fails(500, b"boom", delay_s=0.1)
    decode.script = streams(event({"text": "a"}), event(b"[DONE]"), gap_s=0.3)
    answer = await router.generate(stream=True)
    assert answer.content == event({"text": "a"}) + event(b"[DONE]")
    await drained(router)
    assert decode.aborts == prefill.aborts == []


async def test_a_decode_answer_counts_although_prefill_ends_later(
    router: RunningRouter, prefill: MockWorker, decode: MockWorker
) -> None:
    prefill.script = fails(500, b"boom", delay_s=0.2)
    assert (await router.generate()).status_code == 200
    await drained(router)
    assert decode.aborts == prefill.aborts == []


# Clients that leave


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_both_legs(
    router: RunningRouter, prefill: MockWorker, decode: MockWorker, stream: bool
) -> None:
    prefill.script = never
    decode.script = streams(event({"text": "a"}), gap_s=30) if stream else never
    with pytest.raises(httpx.ReadTimeout):
        await router.client.post("/generate", json={"text": "a", "rid": "r1", "stream": stream}, timeout=0.2)
    await router.until(lambda: prefill.cut_off == decode.cut_off == 1, limit_s=1)
    await router.until(lambda: bool(prefill.aborts) and bool(decode.aborts), limit_s=1)
    assert prefill.aborts == decode.aborts == [{"rid": "r1", "abort_all": False}]
    await drained(router)


async def test_a_late_prefill_leg_is_ended_with_the_router(
    router: RunningRouter, prefill: MockWorker, decode: MockWorker
) -> None:
    prefill.script = never
    assert (await router.generate()).status_code == 200
    await router.state.dispatcher.stop()
    await router.until(lambda: prefill.cut_off == 1)


# Logprobs


def with_prompt(*prompts: str) -> Any:
    items = [
        answer_object(input_token_logprobs=[[None, 1, p]], input_top_logprobs=[None, [[-1.0, 2, p]]]) for p in prompts
    ]
    return fails(200, json.dumps(items if len(items) > 1 else items[0]).encode())


async def test_the_prompts_logprobs_come_first(router: RunningRouter, prefill: MockWorker, decode: MockWorker) -> None:
    prefill.script = with_prompt("p")
    decode.script = fails(200, json.dumps(answer_object(input_token_logprobs=[[-0.5, 9, "d"]])).encode())
    plain = (await router.generate()).json()["meta_info"]
    assert plain["input_token_logprobs"] == [[-0.5, 9, "d"]]
    merged = (await router.generate(return_logprob=True)).json()
    assert merged["text"] == "ok"
    assert merged["meta_info"]["input_token_logprobs"] == [[None, 1, "p"], [-0.5, 9, "d"]]
    assert merged["meta_info"]["input_top_logprobs"] == [None, [[-1.0, 2, "p"]]]


async def test_a_batch_merges_item_by_item(router: RunningRouter, prefill: MockWorker, decode: MockWorker) -> None:
    prefill.script = with_prompt("p0", "p1")
    decode.script = fails(200, json.dumps([answer_object("d0"), answer_object("d1")]).encode())
    answer = (await router.generate(text=["a", "b"], return_logprob=[True, False])).json()
    found = [(item["text"], item["meta_info"]["input_token_logprobs"][0][2]) for item in answer]
    assert found == [("d0", "p0"), ("d1", "p1")]


async def test_every_event_of_a_stream_is_merged(
    router: RunningRouter, prefill: MockWorker, decode: MockWorker
) -> None:
    prefill.script = with_prompt("p0", "p1")
    events = [event(answer_object("a") | {"index": 1}), event(answer_object("b") | {"index": 0})]
    failure = event({"error": {"message": "x"}, "index": 7})
    decode.script = streams(events[0][:20], events[0][20:] + events[1], failure, event(b"[DONE]"))
    lines = (await router.generate(text="a", sampling_params={"n": 2}, stream=True, return_logprob=True)).text
    first, second, third, *rest = lines.split("\n\n")
    prompts = [json.loads(line.removeprefix("data: "))["meta_info"]["input_token_logprobs"] for line in (first, second)]
    assert prompts == [[[None, 1, "p1"]], [[None, 1, "p0"]]]
    assert "error" in third
    assert rest == ["data: [DONE]", ""]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefill_error_while_logprobs_are_awaited(
    router: RunningRouter, prefill: MockWorker, decode: MockWorker, stream: bool
) -> None:
    prefill.script = fails(400, REFUSAL, delay_s=0.1)
    decode.script = streams(event(answer_object())) if stream else answer_at_once
    answer = await router.generate(return_logprob=True, stream=stream)
    assert (answer.status_code, answer.content) == (400, REFUSAL)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefill_answer_that_is_not_json(
    router: RunningRouter, prefill: MockWorker, decode: MockWorker, stream: bool
) -> None:
    prefill.script = fails(200, b"<html>")
    decode.script = streams(event(answer_object())) if stream else answer_at_once
    answer = await router.generate(return_logprob=True, stream=stream)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "bad_answer")


# Ids


async def test_a_request_id_that_runs_is_refused(
    router: RunningRouter, prefill: MockWorker, decode: MockWorker
) -> None:
    decode.script = never
    first = asyncio.create_task(router.generate(rid="same"))
    await router.until(lambda: len(decode.bodies) == 1)
    second = await router.generate(text=["a", "b"], rid=["other", "same"])
    assert (second.status_code, second.json()["error"]["param"]) == (400, "rid")
    assert second.json()["error"]["code"] == "rid_in_use"
    assert len(decode.bodies) == 1
    assert decode.aborts == []
    first.cancel()
    await drained(router)
    decode.script = answer_at_once
    assert (await router.generate(rid="same")).status_code == 200


FAMILIES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"rid": "x", "sampling_params": {"n": 2}}, {"rid": "x_1"}),
    ({"rid": "x_1"}, {"rid": "x", "sampling_params": {"n": 2}}),
    ({"rid": "x", "text": ["a", "b"]}, {"rid": "x_1"}),
    ({"rid": "x", "text": ["a"]}, {"rid": "x_0"}),
    ({"rid": ["x", "y"], "text": ["a", "b"], "sampling_params": {"n": 3}}, {"rid": "y_2"}),
    ({"rid": "x_1_0", "sampling_params": {"n": 2}}, {"rid": "x_1", "sampling_params": {"n": 2}}),
]


@pytest.mark.parametrize(("first", "second"), FAMILIES)
async def test_the_ids_of_single_sequences_are_taken_too(
    router: RunningRouter, decode: MockWorker, first: dict[str, Any], second: dict[str, Any]
) -> None:
    """The nodes name them `rid_0`, `rid_1`, ...: an abort of the one would end the other."""
    decode.script = never
    running = asyncio.create_task(router.generate(**first))
    await router.until(lambda: len(decode.bodies) == 1)
    answer = await router.generate(**second)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "rid_in_use")
    assert len(decode.bodies) == 1
    assert decode.aborts == []
    running.cancel()
    await drained(router)


@pytest.mark.parametrize("fields", [{"rid": "x"}, {"rid": ["x", "y"], "text": ["a", "b"]}])
async def test_an_id_of_one_sequence_takes_no_other_name(
    router: RunningRouter, decode: MockWorker, fields: dict[str, Any]
) -> None:
    decode.script = never
    running = asyncio.create_task(router.generate(**fields))
    await router.until(lambda: len(decode.bodies) == 1)
    decode.script = answer_at_once
    assert (await router.generate(rid="x_0")).status_code == 200
    running.cancel()
    await drained(router)


async def test_an_abort_of_one_sequence_ends_the_tries_of_all(router: RunningRouter, decode: MockWorker) -> None:
    decode.script = never
    running = asyncio.create_task(router.generate(rid="x", sampling_params={"n": 2}))
    await router.until(lambda: len(decode.bodies) == 1)
    await router.client.post("/abort_request", json={"rid": "x_0"})
    assert all(exchange._stopped is not None for exchange in router.state.dispatcher._exchanges)
    running.cancel()
    await drained(router)


async def test_an_id_that_another_has_at_a_worker_is_not_aborted_there(
    router: RunningRouter, prefill: MockWorker, decode: MockWorker
) -> None:
    """The other leg has not said yet that the id is taken there too."""
    prefill.script = fails(400, b'{"error": {"message": "rid: r", "code": "rid_in_use"}}', delay_s=0.05)
    decode.script = never
    answer = await router.generate(rid="r")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "rid_in_use")
    await router.until(lambda: decode.cut_off == 1)
    await drained(router)
    assert prefill.aborts == decode.aborts == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_left_may_send_the_same_id_again_at_once(
    router: RunningRouter, prefill: MockWorker, decode: MockWorker, stream: bool
) -> None:
    """It is taken again only when both workers have answered the aborts, or those would hit the new request."""
    aborts_seen: list[int] = []

    async def script(worker: MockWorker, *rest: Any) -> web.StreamResponse:
        aborts_seen.append(len(worker.aborts))
        return await answer_at_once(worker, *rest)

    prefill.abort_delay_s = decode.abort_delay_s = 0.3
    for round_ in range(1, 4):
        prefill.script = decode.script = never
        with pytest.raises(httpx.ReadTimeout):
            await router.client.post("/generate", json={"text": "a", "rid": "r", "stream": stream}, timeout=0.1)
        prefill.script = decode.script = script
        assert (await router.generate(rid="r")).status_code == 200
        assert aborts_seen == [round_, round_]
        aborts_seen.clear()
    await drained(router)


async def test_a_worker_that_does_not_answer_aborts_holds_no_id_for_long(
    router: RunningRouter, prefill: MockWorker, decode: MockWorker
) -> None:
    decode.script, decode.abort_delay_s = never, 60
    with pytest.raises(httpx.ReadTimeout):
        await router.client.post("/generate", json={"text": "a", "rid": "r"}, timeout=0.1)
    decode.script = answer_at_once
    assert (await router.generate(rid="r")).status_code == 200


@pytest.mark.parametrize("status", [204, 301, 600])
async def test_a_worker_status_that_is_no_error_becomes_one(
    router: RunningRouter, decode: MockWorker, status: int
) -> None:
    decode.script = fails(status, b"")
    assert (await router.generate()).status_code == 502


async def test_many_requests_side_by_side(router: RunningRouter, prefill: MockWorker, decode: MockWorker) -> None:
    async def echo(_: MockWorker, __: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.01)
        return web.json_response(answer_object(body["text"]))

    decode.script = echo
    answers = await asyncio.gather(*(router.generate(text=f"t{i}") for i in range(40)))
    assert [answer.json()["text"] for answer in answers] == [f"t{i}" for i in range(40)]
    assert len({body["bootstrap_room"] for body in decode.bodies}) == 40
    await drained(router)
