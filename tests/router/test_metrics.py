"""What the router counts and logs of requests, between real clients and scripted workers."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from tests.router.mocks import (
    MockWorker,
    RunningRouter,
    answer_object,
    config_of,
    event,
    fails,
    run_router,
    streams,
)

REPO = Path(__file__).resolve().parents[2]
TIMING = {"queue_s": 0.02, "prefill_s": 0.2, "transfer_s": 0.01, "decode_s": 0.5}
META = {
    "prompt_tokens": 30,
    "cached_tokens": 16,
    "completion_tokens": 5,
    "timing": TIMING,
    "transfer_bytes": {"kv": 1000, "ssm": 50},
}
Samples = dict[str, float]


async def scrape(router: RunningRouter) -> Samples:
    """Sample name with its labels → value."""
    answer = await router.client.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    return {
        sample.name + "".join(f" {name}={value}" for name, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def listing(router: RunningRouter, query: str = "") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await router.client.get(f"/debug/requests{query}")).json()["requests"]
    return found


def answers(body: object) -> Any:
    async def script(_: MockWorker, __: web.Request, ___: dict[str, Any]) -> web.Response:
        return web.json_response(body)

    return script


def waits_for(go_on: asyncio.Event) -> Any:
    async def script(_: MockWorker, __: web.Request, ___: dict[str, Any]) -> web.Response:
        await go_on.wait()
        return web.json_response(answer_object())

    return script


async def test_a_json_answer_is_counted_with_what_it_says_of_itself(
    router: RunningRouter, prefill: MockWorker, decode: MockWorker
) -> None:
    decode.script = answers(answer_object(**META))
    assert (await router.generate(rid="mine")).status_code == 200
    found = await scrape(router)
    assert found["tandem_router_requests_total code=ok endpoint=/generate"] == 1
    assert found["tandem_router_prompt_tokens_total"] == 30
    assert found["tandem_router_cached_tokens_total"] == 16
    assert found["tandem_router_completion_tokens_total"] == 5
    assert found["tandem_router_transfer_bytes_total part=kv"] == 1000
    assert found["tandem_router_transfer_bytes_total part=ssm"] == 50
    assert found["tandem_router_transfer_bytes_total part=conv"] == 0, "growth can be seen"
    for phase, seconds in TIMING.items():
        name = phase.removesuffix("_s")
        assert found[f"tandem_router_phase_seconds_sum phase={name}"] == pytest.approx(seconds)
        assert found[f"tandem_router_phase_seconds_count phase={name}"] == 1
    assert found["tandem_router_phase_seconds_bucket le=0.25 phase=prefill"] == 1
    assert found["tandem_router_phase_seconds_bucket le=0.1 phase=prefill"] == 0
    assert found["tandem_router_request_seconds_count"] == 1
    assert found["tandem_router_time_to_first_token_seconds_count"] == 0, "only a stream has a first token"
    assert found["tandem_router_requests_in_flight"] == 0
    for role, worker in (("prefill", prefill), ("decode", decode)):
        assert found[f"tandem_router_legs_total outcome=ok role={role}"] == 1
        assert found[f"tandem_router_policy_decisions_total role={role}"] == 1
        labels = f"role={role} state=alive worker={worker.url}"
        assert found[f"tandem_router_worker_state {labels}"] == 1
        assert found[f"tandem_router_worker_legs role={role} worker={worker.url}"] == 0
        assert found[f"tandem_router_worker_load_tokens rank=0 role={role} worker={worker.url}"] == 0
    (entry,) = await listing(router)
    assert (entry["id"], entry["code"], entry["status"], entry["running"]) == ("mine", "ok", 200, False)
    assert entry["timing"] == TIMING and entry["transfer_bytes"] == META["transfer_bytes"]
    assert 0 <= entry["wait_s"] <= entry["opened_s"] <= entry["ttft_s"] <= entry["e2e_s"] < 10


@pytest.mark.parametrize("cut", ["done with the last", "done apart", "two with the last"])
async def test_a_stream_is_read_at_its_end_only(router: RunningRouter, decode: MockWorker, cut: str) -> None:
    """However it is cut into chunks. What the other events say counts for nothing."""
    first = event(answer_object(prompt_tokens=999, completion_tokens=999))
    last, done = event(answer_object(**META)), b"data: [DONE]\n\n"
    chunks = {
        "done with the last": (first, last + done),
        "done apart": (first, last, done),
        "two with the last": (first, first + last + done),
    }
    decode.script = streams(*chunks[cut], gap_s=0.02)
    assert (await router.generate(stream=True)).status_code == 200
    found = await scrape(router)
    assert found["tandem_router_prompt_tokens_total"] == 30
    assert found["tandem_router_completion_tokens_total"] == 5
    assert found["tandem_router_time_to_first_token_seconds_count"] == 1
    assert found["tandem_router_inter_token_seconds_count"] == 1
    assert 0.02 / 4 <= found["tandem_router_inter_token_seconds_sum"] < 1
    assert found["tandem_router_phase_seconds_count phase=decode"] == 1


async def test_sequences_of_one_request_are_added_up(router: RunningRouter, decode: MockWorker) -> None:
    decode.script = answers([answer_object(**META), answer_object(**META)])
    await router.generate(text=["a", "b"])
    ends = [event(answer_object(**META) | {"index": i}) for i in range(2)]
    middle = event(answer_object(prompt_tokens=999) | {"text": '"timing":'})
    decode.script = streams(ends[0], middle, ends[1], b"data: [DONE]\n\n")
    await router.generate(text=["a", "b"], stream=True)
    found = await scrape(router)
    assert found["tandem_router_prompt_tokens_total"] == 4 * 30
    assert found["tandem_router_transfer_bytes_total part=ssm"] == 4 * 50
    assert found["tandem_router_phase_seconds_sum phase=decode"] == pytest.approx(2 * 0.5), "the longest of each"


async def test_openais_objects_say_the_same(router: RunningRouter, decode: MockWorker) -> None:
    """In a stream with usage in every chunk only the last one counts."""
    usage = {"prompt_tokens": 30, "completion_tokens": 5, "total_tokens": 35}
    decode.script = answers({"choices": [], "usage": usage, "tandem": META})
    chat = {"messages": [{"role": "user", "content": "hi"}], "model": "m"}
    assert (await router.client.post("/v1/chat/completions", json=chat)).status_code == 200
    so_far = event({"choices": [], "usage": {"prompt_tokens": 30, "completion_tokens": 4, "total_tokens": 34}})
    end = event({"choices": [], "usage": usage, "tandem": META}) + b"data: [DONE]\n\n"
    decode.script = streams(so_far, so_far + so_far + end)
    assert (await router.client.post("/v1/completions", json={"prompt": "hi", "stream": True})).status_code == 200
    decode.script = answers({"choices": [], "usage": usage})  # of a foreign node
    assert (await router.client.post("/v1/completions", json={"prompt": "hi"})).status_code == 200
    found = await scrape(router)
    assert found["tandem_router_requests_total code=ok endpoint=/v1/chat/completions"] == 1
    assert found["tandem_router_requests_total code=ok endpoint=/v1/completions"] == 2
    assert found["tandem_router_prompt_tokens_total"] == 3 * 30
    assert found["tandem_router_completion_tokens_total"] == 3 * 5
    assert found["tandem_router_phase_seconds_count phase=prefill"] == 2


@pytest.mark.parametrize(
    "body",
    [b"not json", b"[1, 2]", b"null", b"{}", b'{"meta_info": {"prompt_tokens": "many"}}', b"[" * 5000, b"\xff\xfe"],
)
async def test_an_answer_that_says_nothing_is_passed_on_all_the_same(
    router: RunningRouter, decode: MockWorker, body: bytes
) -> None:
    async def script(_: MockWorker, __: web.Request, ___: dict[str, Any]) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    decode.script = script
    answer = await router.generate()
    assert answer.status_code == 200 and answer.content == body
    found = await scrape(router)
    assert found["tandem_router_requests_total code=ok endpoint=/generate"] == 1
    assert found["tandem_router_prompt_tokens_total"] == 0


async def test_refusals_and_failures_are_counted_once_by_code(
    router: RunningRouter, prefill: MockWorker, decode: MockWorker
) -> None:
    async def refuses(_: MockWorker, __: web.Request, ___: dict[str, Any]) -> web.Response:
        return web.json_response({"error": {"code": "too_many_tokens"}}, status=400)

    async def oddly(_: MockWorker, __: web.Request, ___: dict[str, Any]) -> web.Response:
        return web.json_response({"error": {"code": 'x"} 1\nfake_metric 5'}}, status=400)

    assert (await router.client.post("/generate", content=b"{")).status_code == 400
    for script in (refuses, oddly):
        decode.script = prefill.script = script
        assert (await router.generate()).status_code == 400
    decode.healthy = False
    await router.until(lambda: not router.state.workers.decode[0].alive)
    assert (await router.generate()).status_code == 503
    found = await scrape(router)
    for code in ("invalid_json", "too_many_tokens", "other", "worker_unavailable"):
        assert found[f"tandem_router_requests_total code={code} endpoint=/generate"] == 1, code
    rejected = {name: value for name, value in found.items() if name.startswith("tandem_router_rejected_total")}
    assert rejected == {
        "tandem_router_rejected_total code=invalid_json": 1,
        "tandem_router_rejected_total code=worker_unavailable": 1,
    }
    failed = {name: value for name, value in found.items() if name.startswith("tandem_router_failed_total")}
    assert failed == {"tandem_router_failed_total code=worker_unavailable": 1}, "what a client did wrong is no failure"
    assert found["tandem_router_request_seconds_count"] == 0, "of answers only"
    assert {name: value for name, value in found.items() if "worker_up" in name} == {
        f"tandem_router_worker_up role=prefill worker={prefill.url}": 1,
        f"tandem_router_worker_up role=decode worker={decode.url}": 0,
    }


async def test_a_failure_in_mid_stream_has_its_code_and_status_200(router: RunningRouter, decode: MockWorker) -> None:
    error = {"error": {"code": "non_finite_logits", "retryable": False}}
    decode.script = streams(event(answer_object(finish_reason=None)), event(error), b"data: [DONE]\n\n")
    assert (await router.generate(stream=True)).status_code == 200
    (entry,) = await listing(router)
    assert (entry["status"], entry["code"]) == (200, "non_finite_logits")
    found = await scrape(router)
    assert found["tandem_router_requests_total code=non_finite_logits endpoint=/generate"] == 1
    assert found["tandem_router_failed_total code=non_finite_logits"] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_client_ends_itself_is_no_failure(router: RunningRouter, decode: MockWorker, stream: bool) -> None:
    error = {"error": {"code": "aborted", "message": "aborted by request", "retryable": False}}
    decode.script = (
        streams(event(answer_object(finish_reason=None)), event(error))
        if stream
        else fails(499, json.dumps(error).encode())
    )
    await router.generate(stream=stream)
    (entry,) = await listing(router)
    assert entry["code"] == "aborted"
    assert not [name for name in await scrape(router) if name.startswith("tandem_router_failed_total")]


async def test_what_runs_is_listed_first_and_counted_in_flight(router: RunningRouter, decode: MockWorker) -> None:
    go_on = asyncio.Event()
    await router.generate(rid="first")
    decode.script = waits_for(go_on)
    running = asyncio.create_task(router.generate(rid="second"))
    await router.until(lambda: len(decode.bodies) == 2)
    assert (await scrape(router))["tandem_router_requests_in_flight"] == 1
    assert (await scrape(router))["tandem_router_queue_length"] == 0
    newest, older = await listing(router)
    assert (newest["id"], newest["running"], newest["code"]) == ("second", True, "running")
    assert older["id"] == "first" and not older["running"]
    assert [entry["id"] for entry in await listing(router, "?limit=1")] == ["second"]
    go_on.set()
    await running
    assert (await scrape(router))["tandem_router_requests_in_flight"] == 0


@pytest.mark.parametrize("limit", ["0", "-1", "x", "", "1.5", "9" * 5000, "٣"])
async def test_a_limit_that_is_none_is_refused_by_name(router: RunningRouter, limit: str) -> None:
    answer = await router.client.get(f"/debug/requests?limit={limit}")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "limit"


async def test_what_the_guard_and_the_waiting_line_refuse_is_counted_too(
    prefill: MockWorker, decode: MockWorker, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("admin boss admin-key-0123456789abcdef\n")
    keys.chmod(0o600)
    config = config_of([prefill], [decode], api_key_file=str(keys), max_concurrent_requests=1, queue_size=0)
    async with run_router(config) as router:
        await router.until_alive()
        assert (await router.generate()).status_code == 401
        assert (await router.client.get("/metrics")).status_code == 401
        router.client.headers["authorization"] = "Bearer admin-key-0123456789abcdef"
        go_on = asyncio.Event()
        decode.script = waits_for(go_on)
        running = asyncio.create_task(router.generate())
        await router.until(lambda: len(decode.bodies) == 1)
        assert (await router.generate()).status_code == 429
        go_on.set()
        assert (await running).status_code == 200
        found = await scrape(router)
    requests = {name: value for name, value in found.items() if name.startswith("tandem_router_requests_total")}
    assert requests == {
        f"tandem_router_requests_total code={code} endpoint=/generate": 1 for code in ("no_api_key", "queue_full", "ok")
    }, "and /metrics is none of them"
    assert found["tandem_router_rejected_total code=queue_full"] == 1


# The log


async def test_a_line_a_request_and_nothing_of_what_it_said(
    prefill: MockWorker, decode: MockWorker, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tandem.request")
    decode.script = answers(answer_object(text="SECRET-ANSWER", **META))
    async with run_router(config_of([prefill], [decode])) as router:
        await router.until_alive()
        await router.generate(text="SECRET-PROMPT", rid="two\nlines and \x1b[31m \u2028\u0085\u009b\x7f")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "tandem.request" in line]
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} router INFO tandem\.request: id=", line)
    fields = dict(word.split("=", 1) for word in line.split("tandem.request: ")[1].split(" "))
    assert fields["id"] == r'"two\nlines\u0020and\u0020\u001b[31m\u0020\u2028\u0085\u009b\u007f"'
    assert (fields["status"], fields["code"], fields["endpoint"]) == ("200", "ok", "/generate")
    assert (fields["prompt_tokens"], fields["cached_tokens"], fields["completion_tokens"]) == ("30", "16", "5")
    assert (fields["prefill_node"], fields["decode_node"]) == (prefill.url, decode.url)
    assert float(fields["prefill"]) == 0.2 and fields["transfer_bytes"] == "1050"
    assert "SECRET" not in line


async def test_the_log_as_json_and_off(
    prefill: MockWorker, decode: MockWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    for form, expected in (("json", 1), ("off", 0)):
        async with run_router(config_of([prefill], [decode], request_log=form)) as router:
            await router.until_alive()
            await router.generate(rid="mine", text="SECRET-PROMPT")
        err = capsys.readouterr().err
        lines = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
        assert len(lines) == expected
        if lines:
            assert lines[0]["id"] == "mine" and lines[0]["code"] == "ok" and lines[0]["decode"] == decode.url
        assert "SECRET" not in err


# Documentation


def documented(prefix: str) -> set[str]:
    text = (REPO / "docs" / "operations.md").read_text()
    return set(re.findall(rf"^\| (?=`{prefix})(.*?) \|", text, re.MULTILINE))


async def test_docs_name_every_metric_and_no_other(router: RunningRouter, decode: MockWorker) -> None:
    """And names follow Prometheus's rules."""
    decode.script = answers(answer_object(**META))
    await router.generate()
    await router.client.post("/generate", content=b"{")
    text = (await router.client.get("/metrics")).text
    families = list(text_string_to_metric_families(text))
    exposed = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    named = {name for row in documented("tandem_router_") for name in re.findall(r"`(\w+)`", row)}
    assert exposed == named
    for family in families:
        assert re.fullmatch("tandem_router_[a-z_]+", family.name) and family.documentation
        assert not family.name.endswith(("_ms", "_count", "_sum")) and family.type != "unknown"
        if family.type == "histogram":
            assert family.name.endswith(("_seconds", "_bytes", "_tokens"))
