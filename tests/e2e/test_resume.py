"""An answer that goes on at another decode node is the undisturbed one: text, ids, log-probabilities, counts, end.

A proxy before the real decode node cuts the stream after exactly so many events, as if the node had died there.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import httpx
import pytest
from aiohttp import web

from common.config import RouterConfig, WorkerAddress
from router.in_flight import random_room
from router.logprobs import PromptLogprobs
from tests.router.mocks import MockWorker, RunningRouter, break_connection, run_router
from tests.support.stack import Stack, generate

PROMPT = "Question: Tom has 12 apples and buys 7 more. How many apples does he have?\nAnswer:"
NEAR = 1e-4


LAST = 10**6
"""Cut after the last event."""


def num_tokens(event: bytes) -> int:
    data = event.strip().removeprefix(b"data: ")
    return len(json.loads(data)["output_ids"]) if data.startswith(b"{") else 0


class Cluster:
    """A router with one prefill and two decode workers, which forward to one real node each of the two roles.

    cuts: for each try, after how many tokens of the answer its connection breaks (None: never), but before the last
    event in any case. seen: tokens that the client has.
    """

    def __init__(self, router: RunningRouter, decode: list[MockWorker], decode_url: str) -> None:
        self.router, self.decode, self.decode_url = router, decode, decode_url
        self.cuts: list[int | None] = []
        self.seen, self.progress = 0, asyncio.Event()
        for worker in decode:
            worker.script = self.forward

    async def forward(self, worker: MockWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Ask the real decode node. When a cut is due the worker breaks the connection and listens no more."""
        cut, written = self.cuts.pop(0), 0
        async with aiohttp.ClientSession() as session, session.post(f"{self.decode_url}/generate", json=body) as answer:
            response = web.StreamResponse(status=answer.status, headers={"content-type": answer.content_type})
            while event := await answer.content.readuntil(b"\n\n"):
                is_late = b'"finish_reason":{' in event and cut is not None and cut != LAST
                if cut == 0 or is_late:
                    break
                if not response.prepared:
                    await response.prepare(request)
                await response.write(event)
                written = num_tokens(event)
                if cut is not None and (written >= cut or b'"finish_reason":{' in event):
                    break
        if cut is not None:
            await self.client_has(written)
            worker.stop_soon()
            break_connection(request)
        return response

    async def client_has(self, tokens: int) -> None:
        while self.seen < tokens:
            self.progress.clear()
            await self.progress.wait()

    async def ask(self, body: dict[str, Any], *cuts: int | None) -> list[dict[str, Any]]:
        """The objects of the stream, which has to end well."""
        self.cuts = list(cuts)
        objects, rest = [], b""
        stream = self.router.client.stream("POST", "/generate", json=body | {"stream": True}, timeout=60)
        async with stream as answer:
            assert answer.status_code == 200, await answer.aread()
            async for chunk in answer.aiter_bytes():
                *events, rest = (rest + chunk).split(b"\n\n")
                for event in events:
                    objects.append(event.removeprefix(b"data: "))
                    self.seen = max(self.seen, num_tokens(event))
                self.progress.set()
        assert (objects.pop(), rest, self.cuts) == (b"[DONE]", b"", [])
        return [json.loads(item) for item in objects]

    @property
    def moves(self) -> tuple[int, int]:
        """(retries, resumes)"""
        counters = self.router.state.dispatcher.counters
        return counters.retries, counters.resumes


def forward_to(url: str) -> Any:
    async def script(_: MockWorker, __: web.Request, body: dict[str, Any]) -> web.Response:
        async with aiohttp.ClientSession() as session, session.post(f"{url}/generate", json=body) as answer:
            return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)

    return script


@pytest.fixture
async def cluster(shared_stack: Stack) -> AsyncIterator[Cluster]:
    async with httpx.AsyncClient() as client:
        info = (await client.get(f"{shared_stack.prefill.url}/server_info")).json()
    prefill, decode = MockWorker("prefill"), [MockWorker("decode"), MockWorker("decode")]
    for worker in (prefill, *decode):
        worker.resumes = True
        await worker.start()
    prefill.script = forward_to(shared_stack.prefill.url)
    config = RouterConfig(
        prefill=(WorkerAddress(url=prefill.url, bootstrap_port=info["bootstrap_port"]),),
        decode=tuple(WorkerAddress(url=worker.url) for worker in decode),
        health_interval_s=0.05,
    )
    async with run_router(config) as router:
        await router.until_alive()
        yield Cluster(router, decode, shared_stack.decode.url)
    for worker in (prefill, *decode):
        await worker.stop()


def body(max_new_tokens: int = 24, **sampling: Any) -> dict[str, Any]:
    return {
        "text": PROMPT,
        "return_logprob": True,
        "top_logprobs_num": 2,
        "return_text_in_logprobs": True,
        "logprob_start_len": 0,
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True} | sampling,
    }


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert (found["text"], found["output_ids"]) == (wanted["text"], wanted["output_ids"])
    meta, wanted_meta = found["meta_info"], wanted["meta_info"]
    for name in ("finish_reason", "prompt_tokens", "completion_tokens"):
        assert meta[name] == wanted_meta[name], name
    for name in ("input_token_logprobs", "output_token_logprobs"):
        assert [entry[1:] for entry in meta[name]] == [entry[1:] for entry in wanted_meta[name]], name
        assert [e[0] for e in meta[name][1:]] == pytest.approx([e[0] for e in wanted_meta[name][1:]], abs=NEAR), name
    assert [len(alternatives) for alternatives in meta["output_top_logprobs"]] == [2] * len(found["output_ids"])


def assert_grows(objects: list[dict[str, Any]]) -> None:
    """Neither a gap nor a repeat."""
    for before, after in itertools.pairwise(objects):
        length = len(before["output_ids"])
        assert len(after["output_ids"]) > length or after["meta_info"]["finish_reason"]
        assert after["output_ids"][:length] == before["output_ids"]
        assert after["text"].startswith(before["text"])
        logprobs = "output_token_logprobs"
        assert after["meta_info"][logprobs][:length] == before["meta_info"][logprobs]


# The node


def resumed(request: dict[str, Any], answer: dict[str, Any], length: int) -> dict[str, Any]:
    """The request as the router sends it when the client has so many tokens of the answer."""
    meta, names = answer["meta_info"], ("output_token_logprobs", "output_top_logprobs")
    field = {"output_ids": answer["output_ids"][:length]} | {name: meta[name][:length] for name in names}
    return request | {"resume": field}


def handed_over(stack: Stack, request: dict[str, Any]) -> dict[str, Any]:
    """The answer through both legs, which a client cannot ask a router for."""
    info = httpx.get(f"{stack.prefill.url}/server_info").json()
    legs = request | {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": info["disaggregation_bootstrap_port"],
        "bootstrap_room": random_room(),
    }
    with ThreadPoolExecutor(1) as pool:
        prefill = pool.submit(generate, stack.prefill.url, legs)
        answer = generate(stack.decode.url, legs)
        merged = PromptLogprobs(prefill.result().content).merge_answer(answer.content)
    found: dict[str, Any] = json.loads(merged)
    return found


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seed": {"temperature": 0.9, "sampling_seed": 5},
    "penalties": {"temperature": 0.8, "sampling_seed": 11, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    "repetition": {"repetition_penalty": 1.3},
    "least length": {"min_new_tokens": 18, "ignore_eos": False, "stop": ["\n"]},
}


@pytest.mark.parametrize("name", SAMPLING)
def test_an_answer_goes_on_as_it_would_have(shared_stack: Stack, name: str) -> None:
    """Seed, penalties and the least length count the tokens from before the cut. Handed over, and alone."""
    assert shared_stack.unified is not None
    request = body(**SAMPLING[name])
    wanted = generate(shared_stack.router.url, request).json()
    for length in (1, 9):
        assert_same(handed_over(shared_stack, resumed(request, wanted, length)), wanted)
    alone = generate(shared_stack.unified.url, resumed(request, wanted, len(wanted["output_ids"]) - 1)).json()
    assert_same(alone, wanted)


def test_a_stop_string_across_the_cut_ends_the_answer(shared_stack: Stack) -> None:
    """Cut inside it, before it and one token from its end."""
    plain = generate(shared_stack.router.url, body(40)).json()
    request = body(40, stop=[plain["text"][20:28]])
    wanted = generate(shared_stack.router.url, request).json()
    assert wanted["meta_info"]["finish_reason"]["type"] == "stop"
    length = len(wanted["output_ids"])
    assert length > 6
    for cut in range(length - 5, length):
        found = handed_over(shared_stack, resumed(request, wanted, cut))
        assert_same(found, wanted)


def test_a_long_answer_is_resumed_from_what_the_nodes_have_cached(shared_stack: Stack) -> None:
    """Prompt and answer so far are one prefix to them. First decode has it; then it has lost it, and prefill has it."""
    request = body(400)
    wanted = generate(shared_stack.router.url, request).json()
    again = resumed(request, wanted, 390) | {"logprob_start_len": -1}
    prompt = wanted["meta_info"].pop("input_token_logprobs")
    for forgets in (False, True, True):
        if forgets:
            httpx.post(f"{shared_stack.decode.url}/flush_cache?timeout=10").raise_for_status()
        found = handed_over(shared_stack, again)
        assert_same(found, wanted | {"meta_info": wanted["meta_info"] | {"input_token_logprobs": []}})
    details = found["meta_info"]["cached_tokens_details"]
    assert details["prefill"] > len(prompt) and details["decode"] == 0


# The router


@pytest.mark.parametrize("cut_after", [1, 2, 12, 22])
async def test_a_greedy_stream_goes_on_without_a_gap_or_a_repeat(
    cluster: Cluster, shared_stack: Stack, cut_after: int
) -> None:
    request = body()
    wanted = generate(shared_stack.router.url, request).json()
    objects = await cluster.ask(request, cut_after, None)
    assert_grows(objects)
    assert_same(objects[-1], wanted)
    assert cluster.moves == (0, 1)


async def test_cut_before_the_first_event_it_is_tried_again_from_the_start(
    cluster: Cluster, shared_stack: Stack
) -> None:
    request = body()
    objects = await cluster.ask(request, 0, None)
    assert_same(objects[-1], generate(shared_stack.router.url, request).json())
    assert cluster.moves == (1, 0)


async def test_cut_after_the_last_token_nothing_is_computed_again(cluster: Cluster, shared_stack: Stack) -> None:
    request = body()
    objects = await cluster.ask(request, LAST)
    assert_same(objects[-1], generate(shared_stack.router.url, request).json())
    assert cluster.moves == (0, 0)


async def test_a_stream_that_waits_for_the_end_of_a_stop_string(cluster: Cluster, shared_stack: Stack) -> None:
    plain = generate(shared_stack.router.url, body(40)).json()
    request = body(40, stop=[plain["text"][20:28]])
    wanted = generate(shared_stack.router.url, request).json()
    objects = await cluster.ask(request, len(wanted["output_ids"]) - 1, None)
    assert_grows(objects)
    assert_same(objects[-1], wanted)


REFUSED = [
    ({"resume": 3}, "resume"),
    ({"resume": {"output_ids": [1, -1]}}, "resume.output_ids[1]"),
    ({"resume": {"output_ids": [1], "more": 1}}, "resume.more"),
    ({"resume": {"output_ids": [1, 2]}, "sampling_params": {"max_new_tokens": 2}}, "resume.output_ids"),
    ({"resume": {"output_ids": [1]}, "sampling_params": {"n": 2}}, "resume"),
    ({"resume": {"output_ids": [1]}, "return_logprob": True}, "resume.output_token_logprobs"),
    (
        {"resume": {"output_ids": [1], "output_token_logprobs": []}, "return_logprob": True},
        "resume.output_token_logprobs",
    ),
]


def test_what_a_node_refuses_of_a_resumed_answer(shared_stack: Stack) -> None:
    assert shared_stack.unified is not None
    for fields, param in REFUSED:
        answer = generate(shared_stack.unified.url, {"text": "a", **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), fields
