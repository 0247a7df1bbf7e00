"""The load generator: when requests arrive, what is made of the answers' events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import pytest
from aiohttp import web

from bench import load

EVENTS = [json.dumps({"output_ids": [1], "meta_info": {"id": "a"}})] * 2
LAST = json.dumps({"output_ids": [1, 2, 3], "meta_info": {"id": "a", "timing": {"queue_s": 0.5}}})


@asynccontextmanager
async def server(answers: Sequence[Sequence[bytes] | tuple[int, str]]) -> AsyncIterator[str]:
    """Answers one request after the other: with chunks of a stream, or with a status and an error code."""
    left = iter(answers)

    async def generate(request: web.Request) -> web.StreamResponse:
        answer = next(left)
        if isinstance(answer, tuple):
            return web.json_response({"error": {"code": answer[1]}}, status=answer[0])
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in answer:
            await response.write(chunk)
            await asyncio.sleep(0.01)  # each in a read of its own
        return response

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def ask(chunks: Sequence[bytes]) -> load.Heard:
    async with server([chunks]) as url, load.session(10) as client:
        return await load.listen(client, url, load.body_of([1, 2], 3))


def stream() -> bytes:
    return b"".join(f"data: {event}\n\n".encode() for event in [*EVENTS, LAST]) + b"data: [DONE]\n\n"


@pytest.mark.parametrize("size", [1, 7, 40, 10_000])
async def test_every_event_is_counted_once_however_it_is_cut(size: int) -> None:
    whole = stream()
    pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
    heard = await ask(pieces if size > 1 else [whole[:3], whole[3:4], whole[4:]])
    assert heard.failed is None
    assert len(heard.times) == 3 and heard.times == sorted(heard.times)
    assert heard.meta()["timing"] == {"queue_s": 0.5}
    assert 0 < heard.first_s < 5


async def test_an_error_in_mid_stream_fails_the_answer() -> None:
    heard = await ask(
        [f"data: {EVENTS[0]}\n\n".encode(), b'data: {"error": {"code": "rank_dead"}}\n\ndata: [DONE]\n\n']
    )
    assert heard.failed == "200 rank_dead" and len(heard.times) == 1


async def test_a_round_of_an_open_loop() -> None:
    answers = [[stream()], (429, "too_many_requests"), [stream()]]
    bodies = iter([b"{}"] * 3)
    async with server(answers) as url, load.session(10) as client:
        heard = await load.open_loop(client, [url], [0.0, 0.05, 0.1], partial(next, bodies))
    found = load.summary(heard)
    assert (found["asked"], found["answered"], found["failed"]) == (3, 2, {"429 too_many_requests": 1})
    assert found["ttft_p50_ms"] > 0 and found["itl_max_ms"] >= 0
    begins = [each.begin_s for each in heard]
    assert begins[1] - begins[0] >= 0.045 and begins[2] - begins[1] >= 0.045


def test_arrivals_are_as_many_as_asked_and_the_same_each_time() -> None:
    times = load.arrivals(5.0, 8.0, seed=3)
    assert len(times) == 40 and times == sorted(times) and times[0] >= 0 and times[-1] < 8
    assert times == load.arrivals(5.0, 8.0, seed=3) != load.arrivals(5.0, 8.0, seed=4)


def test_gaps_are_of_one_answer_and_begin_in_the_window() -> None:
    one, other = load.Heard(begin_s=0.0, times=[1.0, 1.5, 3.0]), load.Heard(begin_s=0.0, times=[2.0, 2.25])
    assert load.gaps_ms([one, other]) == [500.0, 1500.0, 250.0]
    assert load.gaps_ms([one, other], 1.2, 2.0) == [1500.0]


def test_percentiles() -> None:
    assert load.percentiles([], "x") == {}
    assert load.percentiles(range(100, 0, -1), "x") == {"x_p50_ms": 51, "x_p99_ms": 100, "x_max_ms": 100}
