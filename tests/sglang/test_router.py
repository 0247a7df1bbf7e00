"""The router over SGLang's own servers, named by URL: their answers, errors and quirks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web

from common.config import RouterConfig, WorkerAddress
from router.sglang import one_by_one
from tests.router.mocks import RunningRouter, run_router
from tests.sglang.stub_server import Stub, parse

BOOTSTRAP = 9123


@asynccontextmanager
async def serving(stub: Stub) -> AsyncIterator[str]:
    runner = web.AppRunner(stub.app(), handler_cancellation=True, shutdown_timeout=0.2)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@dataclass
class Served:
    router: RunningRouter
    prefill: Stub
    decode: Stub

    async def generate(self, **body: Any) -> Any:
        return await self.router.client.post("/generate", json=body)

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 - a stub tells nobody
                await asyncio.sleep(0.01)


def stub(mode: str, *more: str) -> Stub:
    return Stub(parse(["--model-path", "m", "--disaggregation-mode", mode, *more]))


@asynccontextmanager
async def served(prefill: Stub, decode: Stub, **settings: Any) -> AsyncIterator[Served]:
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(each)) for each in (prefill, decode)]
        config = RouterConfig(
            prefill=(WorkerAddress(url=urls[0], bootstrap_port=BOOTSTRAP),),
            decode=(WorkerAddress(url=urls[1]),),
            **{"health_interval_s": 0.05} | settings,
        )
        router = await stack.enter_async_context(run_router(config))
        await router.until_alive()
        yield Served(router, prefill, decode)


@pytest.fixture
async def pair() -> AsyncIterator[Served]:
    async with served(stub("prefill"), stub("decode")) as found:
        yield found


async def test_both_legs_have_the_same_room_and_the_prefill_servers_port(pair: Served) -> None:
    answer = await pair.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 3})
    assert answer.json()["output_ids"] == [3, 4, 5]
    (p,), (d,) = pair.prefill.seen, pair.decode.seen
    assert p["bootstrap_room"] == d["bootstrap_room"] and p["bootstrap_port"] == d["bootstrap_port"] == BOOTSTRAP
    assert d["bootstrap_host"] == "127.0.0.1"


async def test_samples_of_a_prompt_have_rooms_of_their_own(pair: Served) -> None:
    """The stub refuses equal ones, as SGLang would mix them up."""
    answer = await pair.generate(input_ids=[[1], [5]], sampling_params={"max_new_tokens": 2, "n": 3})
    assert answer.status_code == 200 and len(answer.json()) == 6
    rooms = pair.decode.seen[0]["bootstrap_room"]
    assert len(set(rooms)) == 6 and pair.prefill.seen[0]["bootstrap_room"] == rooms


async def test_of_samples_and_batches_every_sequence_can_be_aborted(pair: Served) -> None:
    """SGLang aborts by the id of a sequence, and makes that itself where one id is for several."""
    sampling = {"max_new_tokens": 500, "n": 2}
    asking = asyncio.create_task(pair.generate(input_ids=[[777], [777, 1]], rid="r", sampling_params=sampling))
    await pair.until(lambda: len(pair.decode.running) == 4)
    asking.cancel()
    await pair.until(lambda: not pair.decode.running)
    assert {abort["rid"] for abort in pair.decode.aborts} == {"r_0", "r_1", "r_2", "r_3"}


async def test_samples_of_a_completion_are_prompts_and_those_of_a_chat_are_refused(pair: Served) -> None:
    await pair.router.client.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2, "model": "m"})
    body = pair.decode.seen[0]
    assert (body["prompt"], body["n"], len(set(body["bootstrap_room"]))) == (["a", "a", "b", "b"], 1, 4)
    chat = {"messages": [{"role": "user", "content": "x"}], "n": 2, "model": "m"}
    refused = await pair.router.client.post("/v1/chat/completions", json=chat)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "n"
    await pair.router.client.post("/v1/chat/completions", json=chat | {"n": 1})
    assert isinstance(pair.decode.seen[-1]["bootstrap_room"], int)


def test_each_sample_keeps_what_was_said_of_its_prompt() -> None:
    fields = {"text": ["a", "b"], "sampling_params": [{"n": 2, "top_p": 0.1}, {"n": 1}], "logprob_start_len": [0, 4]}
    told = one_by_one(fields, ("x", "y"), 3, is_batch=True)
    assert told["text"] == ["a", "a", "b"] and told["logprob_start_len"] == [0, 0, 4]
    assert told["sampling_params"] == [{"n": 1, "top_p": 0.1}, {"n": 1, "top_p": 0.1}, {"n": 1}]
    assert len(set(told["rid"])) == 3
    one = one_by_one({"text": "a", "sampling_params": {"n": 2}}, ("x",), 2, is_batch=False)
    assert one == {"text": ["a", "a"], "sampling_params": {"n": 1}, "rid": ["x_0", "x_1"]}


async def test_a_stream_goes_through_to_its_end(pair: Served) -> None:
    answer = await pair.generate(input_ids=[[1], [5]], sampling_params={"max_new_tokens": 2}, stream=True)
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    last = {item["index"]: item["output_ids"] for item in map(json.loads, events[:-1])}
    assert last == {0: [1, 2], 1: [5, 6]}


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_a_batch_come_from_prefill_prompt_by_prompt(pair: Served, stream: bool) -> None:
    body = {"sampling_params": {"max_new_tokens": 2}, "return_logprob": True, "logprob_start_len": 0, "stream": stream}
    answer = await pair.generate(input_ids=[[11, 12], [21]], **body)
    if stream:
        events = [json.loads(e[6:]) for e in answer.text.split("\n\n") if e.startswith("data: {")]
        items = [[event for event in events if event["index"] == i][-1] for i in (0, 1)]
    else:
        items = answer.json()
    told = [[entry[1] for entry in item["meta_info"]["input_token_logprobs"]] for item in items]
    assert told == [[11, 12], [21]]
    assert [entry[1] for entry in items[0]["meta_info"]["output_token_logprobs"]] == [23, 24]


async def test_what_prefill_refuses_ends_decode_at_once() -> None:
    """SGLang's decode would wait for its hand-off, five minutes."""
    decode = stub("decode")
    async with served(stub("prefill"), decode) as pair:

        async def waits(_: dict[str, Any]) -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        decode._whole = waits  # type: ignore[method-assign]
        async with asyncio.timeout(5):
            answer = await pair.generate(input_ids=[1, 666], sampling_params={"max_new_tokens": 3})
        assert answer.status_code == 400 and "refused on purpose" in answer.json()["error"]["message"]
        await pair.until(lambda: not decode.running)
        await pair.until(lambda: decode.aborts)


async def test_a_client_that_leaves_is_told_to_both_legs() -> None:
    prefill, decode = stub("prefill"), stub("decode")
    async with served(prefill, decode) as pair:

        async def waits(_: dict[str, Any]) -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        prefill._whole = decode._whole = waits  # type: ignore[method-assign]
        asking = asyncio.create_task(pair.generate(input_ids=[1], rid="mine", sampling_params={"max_new_tokens": 3}))
        await pair.until(lambda: prefill.running and decode.running)
        asking.cancel()
        await pair.until(lambda: prefill.aborts and decode.aborts)
        await pair.until(lambda: not prefill.running and not decode.running)
        assert {abort["rid"] for abort in prefill.aborts + decode.aborts} == {"mine"}


async def test_an_id_is_minted_where_the_client_gives_none_so_that_it_can_be_aborted(pair: Served) -> None:
    asking = asyncio.create_task(pair.generate(input_ids=[777], sampling_params={"max_new_tokens": 500}, stream=True))
    await pair.until(lambda: pair.decode.running)
    asking.cancel()
    await pair.until(lambda: pair.decode.aborts)
    (rid,) = {abort["rid"] for abort in pair.decode.aborts}
    assert rid == pair.decode.seen[0]["rid"] and rid


async def test_abort_request_reaches_both(pair: Served) -> None:
    asking = asyncio.create_task(pair.generate(input_ids=[777], rid="x", sampling_params={"max_new_tokens": 500}))
    await pair.until(lambda: "x" in pair.decode.running)
    assert (await pair.router.client.post("/abort_request", json={"rid": "x"})).status_code == 200
    answer = await asking
    assert pair.decode.aborts and pair.prefill.aborts
    assert answer.status_code >= 400 or answer.json()["meta_info"]["finish_reason"]["type"] == "abort"


async def test_abort_request_names_sequences_one_at_a_time(pair: Served) -> None:
    asking = asyncio.create_task(
        pair.generate(input_ids=[[777], [777]], rid="x", sampling_params={"max_new_tokens": 500})
    )
    await pair.until(lambda: {"x_0", "x_1"} <= set(pair.decode.running))
    assert (await pair.router.client.post("/abort_request", json={"rid": ["x", "y"]})).status_code == 200
    assert {abort["rid"] for abort in pair.decode.aborts} >= {"x_0", "x_1", "y"}
    reasons = {item["meta_info"]["finish_reason"]["type"] for item in (await asking).json()}
    assert reasons == {"abort"}
    assert (await pair.router.client.post("/abort_request", json={"abort_all": True})).status_code == 200
    assert pair.decode.aborts[-1]["abort_all"] is True


async def test_idle_servers_are_asked_for_a_token_now_and_then() -> None:
    async with served(stub("prefill"), stub("decode"), idle_probe_interval_s=0.1) as pair:
        await pair.until(lambda: pair.prefill.made and pair.decode.made)
        answer = await pair.generate(input_ids=[1], sampling_params={"max_new_tokens": 1})
        assert answer.status_code == 200


async def test_order_to_flush_and_what_servers_say_of_themselves_pass(pair: Served) -> None:
    assert (await pair.router.client.post("/flush_cache")).status_code == 200
    assert (await pair.router.client.get("/model_info")).json()["model_path"] == "m"
    info = (await pair.router.client.get("/server_info")).json()
    assert [worker["fingerprint"] for worker in info["workers"]] == [None, None]
    assert info["prefill"][0]["disaggregation_mode"] == "prefill"


async def test_a_unified_server_is_no_worker() -> None:
    async with serving(stub("null")) as url, run_router(RouterConfig(health_interval_s=0.05)) as router:
        answer = await router.client.post("/workers", json={"url": url})
        assert answer.status_code == 400 and "null" in answer.json()["error"]["message"]


@pytest.mark.parametrize("fingerprint", ["", "a\nb", "x" * 2000, 7])
async def test_a_fingerprint_that_is_none_is_refused(pair: Served, fingerprint: object) -> None:
    body = {"url": pair.router.state.workers.decode[0].url, "role": "decode", "fingerprint": fingerprint}
    refused = await pair.router.client.post("/workers", json=body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "fingerprint"


async def test_a_declared_fingerprint_counts_until_another_is_declared(pair: Served) -> None:
    decode = pair.router.state.workers.decode[0]
    body = {"url": decode.url, "role": "decode", "instance": "one"}
    await pair.router.client.post("/workers", json={**body, "fingerprint": "a"})
    await pair.until(lambda: decode.alive and decode.fingerprint == "a")
    refused = await pair.generate(input_ids=[1], sampling_params={"max_new_tokens": 1})
    assert refused.status_code == 503 and "state layout None" in refused.json()["error"]["message"]
    prefill = pair.router.state.workers.prefill[0]
    said = {"url": prefill.url, "role": "prefill", "instance": "two", "bootstrap_port": BOOTSTRAP, "fingerprint": "a"}
    await pair.router.client.post("/workers", json=said)
    await pair.until(lambda: prefill.alive and prefill.fingerprint == "a")
    assert (await pair.generate(input_ids=[1], sampling_params={"max_new_tokens": 1})).status_code == 200
