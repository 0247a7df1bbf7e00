"""Requests that get no answer have a record, a line in the log and an id all the same; tokens that were sent count."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from router.admission import Terms, deadline
from router.record import MAX_RECENT, MAX_REFUSED
from tests.router.mocks import MockWorker, RunningRouter, answer_object, config_of, event, run_router, streams
from tests.router.test_metrics import listing, scrape

KEY = "admin-key-0123456789abcdef"


async def test_what_the_router_refuses_is_listed_logged_and_named(
    prefill: MockWorker,
    decode: MockWorker,
    tmp_path: Any,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "tandem.request")
    keys = tmp_path / "keys"
    keys.write_text(f"admin boss {KEY}\n")
    async with run_router(config_of([prefill], [decode], api_key_file=str(keys), max_body_bytes=2000)) as router:
        await router.until_alive()
        asked = [await router.generate()]
        router.client.headers["authorization"] = f"Bearer {KEY}"
        asked.append(await router.client.post("/generate", content=b"{"))
        asked.append(await router.client.post("/v1/completions", json={"prompt": "hi", "n": 0}))
        asked.append(await router.generate(text="x" * 3000))
        asked.append(await router.generate(sampling_params={"n": 0}))
        decode.healthy = False
        await router.until(lambda: not router.state.workers.decode[0].alive)
        asked.append(await router.generate(rid="mine"))
        asked.append(await router.client.post("/v1/chat/completions", json={"messages": [], "rid": "two\nlines"}))
        codes = ["no_api_key", "invalid_json", "invalid_request", "body_too_large", "invalid_request"]
        codes += ["worker_unavailable"] * 2
        assert [answer.json()["error"]["code"] for answer in asked] == codes
        found = list(reversed(await listing(router)))
        assert [(entry["status"], entry["code"]) for entry in found] == [
            (answer.status_code, code) for answer, code in zip(asked, codes, strict=True)
        ]
        ids = [answer.headers.get("x-request-id") for answer in asked]
        assert ids[5:] == ["mine", None] and len(set(ids)) == 7, "the last is no value of a header"
        assert [entry["id"] for entry in found[:6]] == ids[:6]
        assert "x-request-id" not in (await router.client.get("/nothing")).headers
        assert sum(value for name, value in (await scrape(router)).items() if "rejected_total" in name) == 7
    lines = [line for line in capsys.readouterr().err.splitlines() if "tandem.request" in line]
    assert len(lines) == 7 and all(f"code={code} " in line for code, line in zip(codes, lines, strict=True))
    assert "x" * 50 not in "".join(lines)


async def test_a_flood_of_refusals_leaves_the_others_to_be_seen(router: RunningRouter, decode: MockWorker) -> None:
    assert (await router.generate(rid="served")).status_code == 200
    decode.healthy = False
    await router.until(lambda: not router.state.workers.decode[0].alive)
    for i in range(MAX_RECENT + 20):
        answer = await router.generate(rid=f"r{i}")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    found = [entry["id"] for entry in await listing(router)]
    assert len(found) == MAX_REFUSED + 1 and found[0] == f"r{MAX_RECENT + 19}" and found[-1] == "served"
    shown = (await router.client.get("/status.json")).json()["requests"]
    assert "served" in [entry["id"] for entry in shown]
    failed = (await router.client.get("/status.json?requests=failed")).json()["requests"]
    assert len(failed) == 13 and all(entry["code"] == "worker_unavailable" for entry in failed)
    assert [entry["id"] for entry in await listing(router, "?limit=1")] == [f"r{MAX_RECENT + 19}"]


@pytest.mark.parametrize("n", [0, -1, "2", 1.5, True])
async def test_a_wrong_number_of_answers_is_refused_as_the_nodes_do(router: RunningRouter, n: Any) -> None:
    shown = {"2": '"2"', True: "true"}.get(n, n)
    for path, body, param in (
        ("/v1/completions", {"prompt": "hi", "n": n}, "n"),
        ("/v1/chat/completions", {"messages": [], "n": n}, "n"),
        ("/generate", {"text": "hi", "sampling_params": {"n": n}}, "sampling_params.n"),
    ):
        error = (await router.client.post(path, json=body)).json()["error"]
        assert error["message"] == f"{param}: {shown} is not allowed; it must be an integer from 1 to 128"
        assert (error["code"], error["param"]) == ("invalid_request", param)


GENERATED = event(answer_object(prompt_tokens=30, completion_tokens=2, finish_reason=None))
CHUNKS = b"".join(event({"choices": [{"text": "a", "token_ids": ids}]}) for ids in ([5], [6, 7])).replace(b" ", b"")
CHUNKS = CHUNKS.replace(b"data:", b"data: ")


@pytest.mark.parametrize(
    ("path", "sent", "prompt_tokens", "completion_tokens"),
    [("/generate", GENERATED, 30, 2), ("/v1/completions", CHUNKS, 0, 3)],
)
@pytest.mark.parametrize("how", ["error", "deadline", "client gone"])
async def test_tokens_of_a_stream_that_was_cut_count(
    router: RunningRouter,
    decode: MockWorker,
    path: str,
    sent: bytes,
    prompt_tokens: int,
    completion_tokens: int,
    how: str,
) -> None:
    error = event({"error": {"code": "non_finite_logits", "retryable": False}}) if how == "error" else b""
    decode.script = streams(sent, error or b": nothing\n\n", gap_s=0.05 if error else 30)
    headers = {"x-request-timeout-s": "0.5"} if how == "deadline" else {}
    body = {"text": "hi", "prompt": "hi", "stream": True, "rid": "cut"}
    async with router.client.stream("POST", path, json=body, headers=headers) as answer:
        if how == "client gone":
            async for _ in answer.aiter_bytes():
                break
        else:
            said = await answer.aread()
            assert b'"error"' in said and (how == "error" or b"(header x-request-timeout-s 0.5 s)" in said)
    await router.until(lambda: not router.state.dispatcher.recorder.running)
    (entry,) = await listing(router)
    assert entry["code"] != "ok" and entry["id"] == "cut"
    assert (entry["prompt_tokens"], entry["completion_tokens"]) == (prompt_tokens, completion_tokens)
    assert (await scrape(router))["tandem_router_completion_tokens_total"] == completion_tokens


@pytest.mark.parametrize(
    ("own", "theirs", "named"),
    [(0.2, None, "--request-timeout 0.2 s"), (9, "0.2", "header x-request-timeout-s 0.2 s"), (0.2, "9", "--request-")],
)
async def test_what_is_late_is_told_by_which_time(
    prefill: MockWorker, decode: MockWorker, own: float, theirs: str | None, named: str
) -> None:
    decode.script = streams(b": nothing\n\n", gap_s=30)
    async with run_router(config_of([prefill], [decode], request_timeout_s=own)) as router:
        await router.until_alive()
        headers = {} if theirs is None else {"x-request-timeout-s": theirs}
        answer: httpx.Response = await router.client.post("/generate", json={"text": "hi"}, headers=headers)
        assert answer.status_code == 504 and f"({named}" in answer.json()["error"]["message"]


async def test_without_a_deadline_nothing_is_late() -> None:
    late: list[Any] = []
    with deadline(Terms(), late.append):
        await asyncio.sleep(0)
    assert late == []
