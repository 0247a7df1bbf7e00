"""Requests of random shape to every endpoint that users have, at router and unified node: each gets an answer, or an
error that names what is wrong with it; never a fault of ours, never silence, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import httpx
import pytest

from node import request_names, sampling_fields
from node.openai import chat, completions
from tests.support.stack import Server, Stack

PATHS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "/generate": ({"text": "Tom", "sampling_params": {"max_new_tokens": 2}}, sorted(request_names._KNOWN)),
    "/v1/completions": ({"prompt": "Tom", "max_tokens": 2}, sorted(completions._KNOWN)),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "Tom"}], "max_tokens": 2}, sorted(chat._KNOWN)),
    "/tokenize": ({"prompt": "Tom"}, ["prompt", "messages", "tools", "add_special_tokens", "return_token_strs"]),
    "/detokenize": ({"tokens": [1, 2]}, ["tokens", "skip_special_tokens"]),
}
SCALARS: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**70,
    3.5,
    1e308,
    "",
    "x",
    "text",
    "é😀\u0000",
    "\ud7ff",
    "x" * 3000,
]
KEYS = ["type", "text", "content", "role", "name", "function", "schema", "json_schema", "include_usage", "5", ""]
ERROR_FIELDS = {"message", "type", "param", "code", "retryable"}


def draw(random_: random.Random, depth: int = 0) -> Any:
    kind = random_.random()
    if depth > 3 or kind < 0.6:
        return random_.choice(SCALARS)
    inner = [draw(random_, depth + 1) for _ in range(random_.randrange(4))]
    if kind < 0.8:
        return inner
    return {random_.choice(KEYS): item for item in inner}


def body_of(random_: random.Random, path: str) -> Any:
    base, names = PATHS[path]
    body = json.loads(json.dumps(base))
    for name in random_.sample(names, random_.randint(1, min(3, len(names)))):
        body[name] = draw(random_)
    if path == "/generate" and random_.random() < 0.5:
        body["sampling_params"] = {name: draw(random_) for name in random_.sample(sorted(sampling_fields._KNOWN), 2)}
        body["sampling_params"] |= {"max_new_tokens": 2}
    return body


async def fuzz(url: str, seed: int, count: int) -> Counter[int]:
    random_ = random.Random(seed)
    statuses: Counter[int] = Counter()
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        for _ in range(count):
            path = random_.choice(list(PATHS))
            body = body_of(random_, path)
            response = await client.post(path, json=body)
            statuses[response.status_code] += 1
            check(response, f"{path} {json.dumps(body)[:500]}")
    return statuses


def check(response: httpx.Response, asked: str) -> None:
    assert response.status_code < 500, f"{asked}: {response.text[:500]}"
    if response.status_code != 200:
        assert response.json()["error"].keys() >= ERROR_FIELDS, asked
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.content.endswith(b"data: [DONE]\n\n") and b'data: {"error"' not in response.content, asked
    else:
        response.json()


async def run(stack: Stack, seed: int, count: int) -> None:
    assert stack.unified is not None
    urls = (stack.router.url, stack.router.url, stack.unified.url)
    found = await asyncio.gather(*(fuzz(url, seed + i, count // len(urls)) for i, url in enumerate(urls)))
    assert all(statuses[200] > 0.05 * count / len(urls) and statuses[400] > 0 for statuses in found), found
    for server in (stack.prefill, stack.decode, stack.unified):
        await until_idle(server)
        assert "Traceback" not in server.text() and server.state()["leaks"] == 0
    assert "Traceback" not in stack.router.text()


async def until_idle(server: Server) -> None:
    async with asyncio.timeout(20):
        while not server.is_idle():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.1)


async def test_some_requests_of_any_shape(shared_stack: Stack) -> None:
    await run(shared_stack, 1, 450)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [10, 20, 30])
async def test_many_requests_of_any_shape(seed: int, shared_stack: Stack) -> None:
    await run(shared_stack, seed, 3000)
