"""`tandem compare` over two servers of SGLang's kind and one of OpenAI's: what differs, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from accuracy.client import Api, Client
from accuracy.compare import Answer, compare, likeness, speed
from cli.compare import compare as command
from common.errors import ConfigError, RequestError, WorkerError
from tests.sglang.stub_server import Stub, parse

PROMPTS: list[dict[str, Any]] = [{"input_ids": [1, 2]}, {"input_ids": [5]}]


@contextlib.asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.2)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def sglang() -> web.Application:
    return Stub(parse(["--model-path", "m"])).app()


def broken_after(token: int, logprob: float = -0.5) -> web.Application:
    """As the stub, but from this token of the answer on it says another one; log-probabilities are given."""

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        reply = web.StreamResponse()
        await reply.prepare(request)
        ids: list[int] = []
        for i in range(body["sampling_params"]["max_new_tokens"]):
            ids.append((sum(body["input_ids"]) + i) % 1000 if i < token else 999)
            meta = {"completion_tokens": i + 1, "output_token_logprobs": [[logprob, each, None] for each in ids]}
            said = {"text": "".join(f"<{each}>" for each in ids), "output_ids": ids, "meta_info": meta}
            await reply.write(b"data: " + json.dumps(said).encode() + b"\n\n")
        await reply.write(b"data: [DONE]\n\n")
        return reply

    app = web.Application()
    app.router.add_post("/generate", generate)
    return app


def openai(cut: bool = False) -> web.Application:
    """Completions, two tokens a chunk, token 1 first."""

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        reply = web.StreamResponse()
        await reply.prepare(request)
        for i in range(0, body["max_tokens"], 2):
            logprobs = {"tokens": [f"<{i}>", f"<{i + 1}>"], "token_logprobs": [-0.1, -0.2]}
            choice = {"index": 0, "text": f"<{i}><{i + 1}>", "logprobs": logprobs}
            await reply.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\r\n\r\n")
        if not cut:
            await reply.write(b"data: [DONE]\n\n")
        return reply

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/v1/models", models)
    return app


def client(url: str, **settings: Any) -> Client:
    return Client(url=url, timeout_s=20.0, parallel=2, **settings)


async def test_equal_stacks_are_equal_and_another_token_is_found() -> None:
    async with serving(sglang()) as one, serving(sglang()) as two, serving(broken_after(3, -0.6)) as other:
        stacks = [("one", client(one)), ("two", client(two)), ("other", client(other, api=Api.GENERATE))]
        first, same, different = await compare(stacks, PROMPTS, new_tokens=6)
    assert first.likeness is None and first.flushed == "flushed" and first.speed.output_tokens == 12
    assert same.likeness is not None and different.likeness is not None
    assert (same.likeness.equal, same.likeness.kl, same.likeness.unit) == (2, 0.0, "tokens")
    assert different.likeness.differences == {0: 3, 1: 3}
    assert different.likeness.largest == pytest.approx(0.1)
    assert different.likeness.kl == pytest.approx(0.0048374, rel=1e-4), "of r = 0.1: expm1(r) - r … of the three tokens"


async def test_completions_and_generate_are_compared_by_text() -> None:
    async with serving(openai()) as one, serving(sglang()) as two:
        plain = [{"text": "\x00"}]
        found = await compare([("openai", client(one)), ("sglang", client(two))], plain, new_tokens=4)
    assert [stack.api for stack in found] == ["completions", "generate"]
    assert [stack.answers for stack in found] == [["<0><1><2><3>"]] * 2
    told = found[1].likeness
    assert told is not None and (told.unit, told.equal, told.kl) == ("characters", 1, None)
    assert found[0].speed.output_tokens == 4 and len(found[0].gaps_s) == 2, "two tokens of one piece share its gap"


async def test_a_stream_that_is_cut_or_refused_is_no_figure() -> None:
    async with serving(openai(cut=True)) as cut, serving(sglang()) as good:
        with pytest.raises(WorkerError, match="cut off"):
            await compare([("cut", client(cut)), ("good", client(good))], [{"text": "x"}], new_tokens=2)
        with pytest.raises(WorkerError, match=r"HTTP 400: .*refused on purpose"):
            await compare([("good", client(good))], [{"input_ids": [666]}], new_tokens=2)
        with pytest.raises(WorkerError, match="no answer within"):
            await compare([("slow", Client(url=good, timeout_s=0.2))], [{"input_ids": [777]}], new_tokens=50)
        with pytest.raises(RequestError, match="input_ids"):
            await compare([("chat", client(good, api=Api.CHAT))], PROMPTS, new_tokens=2)


def test_speed_is_of_tokens_not_of_pieces() -> None:
    answer = Answer(num_tokens=5, at_s=[(0.1, 1), (0.3, 2), (0.4, 2)])
    found = speed([answer], 0.5)
    assert (found.ttft_p50_ms, found.tokens_s) == (pytest.approx(100), pytest.approx(10))
    assert answer.gaps_s == pytest.approx([0.1, 0.1, 0.05, 0.05])
    assert speed([Answer()], 1.0).ttft_p50_ms is None


def test_a_shorter_answer_differs_where_it_ends() -> None:
    found = likeness([Answer(tokens=[1, 2], text="ab")], [Answer(tokens=[1, 2, 3], text="abc")])
    assert found.differences == {0: 2} and found.kl is None


async def test_the_command_prints_a_table_and_writes_json_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, output, plot = tmp_path / "prompts", tmp_path / "out.json", tmp_path / "page.html"
    prompts.write_text('{"input_ids": [1]}\n{"input_ids": [2]}\n')
    async with serving(sglang()) as one, serving(broken_after(2)) as two:
        arguments = [
            f"native={one}/",
            f"<sgl>={two}",
            "--prompts",
            str(prompts),
            "--new-tokens",
            "4",
            "--api",
            "generate",
        ]
        arguments += ["--output", str(output), "--plot", str(plot)]
        await asyncio.to_thread(command.main, arguments, standalone_mode=False)
    shown = capsys.readouterr().out
    assert "native" in shown and "0 of 2" in shown and "token 2 of prompt 0" in shown
    assert json.loads(output.read_text())[1]["likeness"]["differences"] == {"0": 2, "1": 2}
    text = plot.read_text()
    assert text.count("<svg") == 4 and "&lt;sgl&gt;" in text and "<sgl>" not in text


@pytest.mark.parametrize(
    ("stacks", "said"),
    [
        (["a=http://h", "a=http://g"], "a name of its own"),
        (["a=http://h", "b=nothing"], "--stacks nothing"),
    ],
)
def test_stacks_that_make_no_sense_are_refused(stacks: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        command.main(stacks, standalone_mode=False)
