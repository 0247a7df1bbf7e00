"""A stream of OpenAI's that goes on at another decode node, or is tried again, is the undisturbed one.

Proxies before the real decode node cut the stream after so many events, as if the node had died there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import httpx
import pytest
from aiohttp import web

from common.config import RouterConfig, WorkerAddress
from tests.router.mocks import MockWorker, RunningRouter, break_connection, run_router
from tests.support.stack import Stack

QUESTION = "Tom has 12 apples and buys 7 more. How many apples does he have?"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SHARED = {"temperature": 1.0, "seed": 3, "max_tokens": 40, "ignore_eos": True, "stop": ["zzz"]}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": [{"role": "user", "content": QUESTION}], "logprobs": True, "top_logprobs": 2}),
    "usage": (CHAT, {"messages": [{"role": "user", "content": QUESTION}], "stream_options": {"include_usage": True}}),
    "text": (TEXT, {"prompt": f"Question: {QUESTION}\nAnswer:", "logprobs": 1}),
}


class Cut:
    """Decode workers that forward to the real one. after: for each try, after how many events it dies, but before the
    last one in any case, as a busy machine puts many tokens into one event; None: never."""

    def __init__(self, router: RunningRouter, decode_url: str, workers: list[MockWorker]) -> None:
        self.router, self.decode_url = router, decode_url
        self.after: list[int | None] = []
        self.seen, self.progress = 0, asyncio.Event()
        for worker in workers:
            worker.script = self.forward

    async def forward(self, worker: MockWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        after, base = self.after.pop(0), self.seen
        url = self.decode_url + request.path
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
            response = web.StreamResponse(status=answer.status, headers={"content-type": answer.content_type})
            count = 0
            while event := await answer.content.readuntil(b"\n\n"):
                if count == after or (after is not None and b'"finish_reason":"' in event):
                    break
                if not response.prepared:
                    await response.prepare(request)
                await response.write(event)
                count += 1
        if after is not None:
            while self.seen < base + count:
                self.progress.clear()
                await self.progress.wait()
            worker.stop_soon()
            break_connection(request)
        return response

    async def ask(self, path: str, body: dict[str, Any], *after: int | None) -> list[dict[str, Any]]:
        self.after, self.seen = list(after), 0
        found: list[bytes] = []
        rest = b""
        async with self.router.client.stream("POST", path, json=body | {"stream": True}, timeout=60) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for chunk in answer.aiter_bytes():
                *events, rest = (rest + chunk).split(b"\n\n")
                found += events
                self.seen = len(found)
                self.progress.set()
        assert found.pop() == b"data: [DONE]" and rest == b""
        return [json.loads(event.removeprefix(b"data: ")) for event in found]


@pytest.fixture
async def cut(shared_stack: Stack) -> AsyncIterator[Cut]:
    async with httpx.AsyncClient() as client:
        info = (await client.get(f"{shared_stack.prefill.url}/server_info")).json()
    workers = [MockWorker("decode"), MockWorker("decode")]
    for worker in workers:
        worker.resumes = True
        await worker.start()
    config = RouterConfig(
        prefill=(WorkerAddress(url=shared_stack.prefill.url, bootstrap_port=info["bootstrap_port"]),),
        decode=tuple(WorkerAddress(url=worker.url) for worker in workers),
        health_interval_s=0.05,
    )
    for worker in workers:
        worker.fingerprint, worker.handoff = info["fingerprint"], info["handoff"]
    async with run_router(config) as router:
        await router.until_alive()
        yield Cut(router, shared_stack.decode.url, workers)
    for worker in workers:
        await worker.stop()


def parts(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """All that a client puts together."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    told = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    return {
        "role": [choice["delta"]["role"] for choice in choices if "role" in choice.get("delta", {})],
        "text": "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices),
        "ids": [i for choice in choices for i in choice.get("token_ids", [])],
        "tokens": [
            name
            for item in told
            for name in (item["tokens"] if "tokens" in item else [token["token"] for token in item["content"]])
        ],
        "finish": [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None],
        "usage": chunks[-1].get("usage"),
        "ids_of_request": len({chunk["id"] for chunk in chunks}),
    }


@pytest.mark.parametrize("kind", BODIES)
async def test_a_stream_goes_on_where_it_was(kind: str, cut: Cut) -> None:
    path, fields = BODIES[kind]
    whole = parts(await cut.ask(path, SHARED | fields, None))
    assert len(whole["ids"]) == 40 and whole["finish"] == ["length"]
    counters = cut.router.state.dispatcher.counters
    found = parts(await cut.ask(path, SHARED | fields, 5, None))
    for part, value in whole.items():
        if part == "usage" and value is not None:  # what was cached may differ
            assert found[part]["completion_tokens"] == value["completion_tokens"] == 40
        else:
            assert found[part] == value, part
    assert (counters.retries, counters.resumes) == (0, 1)


async def test_a_call_of_a_tool_goes_on_where_it_was(cut: Cut) -> None:
    """The client has nothing of the call yet, but tokens of it are made."""
    properties = {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}}
    schema = {"type": "object", "properties": properties, "required": ["city", "days"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "plan", "parameters": schema}}]
    fields = {"messages": [{"role": "user", "content": QUESTION}], "tools": tools, "tool_choice": "required"}
    fields |= {"parallel_tool_calls": False, "rid": "names-the-calls"}
    whole = await cut.ask(CHAT, fields | {"temperature": 0, "max_tokens": 100}, None)
    found = await cut.ask(CHAT, fields | {"temperature": 0, "max_tokens": 100}, 8, None)
    (call,) = [call for chunk in whole for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert json.loads(call["function"]["arguments"]).keys() == properties.keys()
    assert [call for chunk in found for call in chunk["choices"][0]["delta"].get("tool_calls", [])] == [call]
    assert parts(found) == parts(whole) and parts(found)["finish"] == ["tool_calls"]
    assert cut.router.state.dispatcher.counters.resumes == 1


async def test_before_the_first_event_it_is_tried_again(cut: Cut) -> None:
    path, fields = BODIES["chat"]
    whole = parts(await cut.ask(path, SHARED | fields, None))
    assert parts(await cut.ask(path, SHARED | fields, 0, None))["text"] == whole["text"]
    counters = cut.router.state.dispatcher.counters
    assert (counters.retries, counters.resumes) == (1, 0)


async def test_what_cannot_go_on_ends_with_an_error_event(cut: Cut) -> None:
    """Several answers, and an echo, whose prompt the client has already."""
    for path, fields in (
        (CHAT, BODIES["chat"][1] | {"n": 2}),
        (TEXT, BODIES["text"][1] | {"echo": True}),
    ):
        *_, last = await cut.ask(path, SHARED | fields, 3, None)
        error = last["error"]
        assert error["code"] == "worker_lost" and set(error) >= {"message", "type", "param", "code"}
    assert cut.router.state.dispatcher.counters.resumes == 0
