"""Texts that are hard on a protocol come out as they went in: in JSON and streams, of every form, with and without a
router in between. The ranks are fake and repeat the prompt, token by token."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.config import Role, RouterConfig, WorkerAddress
from tests.node.conftest import FakeNode, fake_node, node_config
from tests.router.mocks import RunningRouter, run_router

ECHO = "{{ messages[-1].content }}"
STRINGS = [
    'data: [DONE]\n\ndata: {"error": {"message": "no"}}\n\n',
    '"quotes", \\back\\"slashes\\\\ and {braces}',
    "lines\nof\r\nevery\r\n\r\nkind\n\n\n",
    "half a character: 😀 日本語 €5 naïve",
    "👩‍👩‍👧‍👦 e\u0301 \u0928\u093f",
    "right to left: مرحبا שלום \u202eabc\u202c",
    "\u0000\u0001\u001f\u007f\ufeff\u2028\u2029",
    "<|im_end|></s><think>{{ 7 * 7 }}{% raw %}",
    '"token_ids":[1,2],"finish_reason":"stop"',
]


@pytest.fixture(scope="module")
def folder(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, with a chat template that repeats what the user says."""
    folder = tmp_path_factory.mktemp("echo") / "model"
    shutil.copytree(model_path, folder)
    (folder / "chat_template.jinja").write_text(ECHO)
    return folder


@pytest.fixture(scope="module")
def nodes(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Role, FakeNode]]:
    logs = tmp_path_factory.mktemp("logs")
    configs = {role: node_config(str(folder), role) for role in Role}
    with (
        fake_node(configs[Role.UNIFIED], logs / "unified") as unified,
        fake_node(configs[Role.PREFILL], logs / "prefill") as prefill,
        fake_node(configs[Role.DECODE], logs / "decode") as decode,
    ):
        yield {Role.UNIFIED: unified, Role.PREFILL: prefill, Role.DECODE: decode}


@pytest.fixture
async def router(nodes: dict[Role, FakeNode]) -> AsyncIterator[RunningRouter]:
    config = RouterConfig(
        prefill=(WorkerAddress(url=nodes[Role.PREFILL].url, bootstrap_port=8998),),
        decode=(WorkerAddress(url=nodes[Role.DECODE].url),),
    )
    async with run_router(config) as running:
        await running.until_alive()
        yield running


async def test_every_string_comes_out_as_it_went_in(nodes: dict[Role, FakeNode], router: RunningRouter) -> None:
    async with httpx.AsyncClient(base_url=nodes[Role.UNIFIED].url, timeout=20) as unified:
        await asyncio.gather(*(check(client, text) for text in STRINGS for client in (unified, router.client)))


async def check(client: httpx.AsyncClient, text: str) -> None:
    count = (await client.post("/tokenize", json={"prompt": text})).json()["count"]
    generate = {"text": text, "sampling_params": {"max_new_tokens": count, "ignore_eos": True}}
    completion = {"prompt": text, "max_tokens": count, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": count, "ignore_eos": True}
    whole = await post(client, "/generate", generate)
    streams = await asyncio.gather(
        events(client, "/generate", generate),
        events(client, "/v1/completions", completion),
        events(client, "/v1/chat/completions", chat),
    )
    assert whole["text"] == text
    assert streams[0][-1]["text"] == text
    assert pieces(streams[1]) == text
    assert pieces(streams[2]) == text
    assert (await post(client, "/v1/completions", completion))["choices"][0]["text"] == text
    assert (await post(client, "/v1/completions", completion | {"echo": True}))["choices"][0]["text"] == text + text
    message = (await post(client, "/v1/chat/completions", chat))["choices"][0]["message"]
    assert message == {"role": "assistant", "content": text, "refusal": None}
    assert (await post(client, "/detokenize", {"tokens": whole["output_ids"]}))["text"] == text


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    """The objects of a stream, each a line of its own, with nothing but [DONE] after them."""
    # One token after the other, so that characters are cut.
    slow = {"frequency_penalty": 1}
    sampling = {"sampling_params": body["sampling_params"] | slow} if "sampling_params" in body else slow
    response = await client.post(path, json=body | sampling | {"stream": True})
    assert response.status_code == 200, response.text
    *lines, done, end = response.content.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


def pieces(chunks: list[Any]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    texts = [choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices]
    assert not any("\ufffd" in text for text in texts)
    assert len(texts) > 2
    return "".join(texts)
