"""The router's spans of a request that moves, and what its legs carry."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web

from common.tracing import Tracing
from router import state
from tests.router.mocks import MockWorker, answer_object, breaks, config_of, run_router

pytest.importorskip("opentelemetry.sdk.trace", reason="the extra otel")
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(state, "open_tracing", lambda *_: Tracing(provider))
    return exporter


async def start(*workers: MockWorker) -> None:
    for worker in workers:
        await worker.start()


async def test_each_try_has_legs_of_its_own(spans: InMemorySpanExporter) -> None:
    seen: list[str] = []

    async def answers(worker: MockWorker, request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        seen.append(request.headers["traceparent"])
        return web.json_response(answer_object(prompt_tokens=30))

    async def fails(worker: MockWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        seen.append(request.headers["traceparent"])
        return await breaks(worker, request, body)

    workers = [MockWorker("prefill"), MockWorker("prefill"), MockWorker("decode"), MockWorker("decode")]
    await start(*workers)
    first = iter([fails])  # the first decode leg, wherever it goes

    async def fails_once(worker: MockWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await next(first, answers)(worker, request, body)

    for worker in workers:
        worker.script = answers if worker.role == "prefill" else fails_once
        worker.abort_ended = True
    try:
        config = config_of(workers[:2], workers[2:], otlp_endpoint="http://127.0.0.1:9")
        async with run_router(config) as router:
            await router.until_alive()
            router.client.headers["traceparent"] = f"00-{TRACE}-{SPAN}-01"
            router.client.headers["tracestate"] = "mine=1"
            assert (await router.generate(rid="moved")).status_code == 200
            router.client.headers["traceparent"] = "nonsense"
            assert (await router.generate(rid="other")).status_code == 200
    finally:
        for worker in workers:
            await worker.stop()
    found = spans.get_finished_spans()
    moved = [span for span in found if f"{span.context.trace_id:032x}" == TRACE]
    (request,) = [span for span in moved if span.name == "POST /generate"]
    legs = [span for span in moved if span.name.endswith(" leg")]
    assert f"{request.parent.span_id:016x}" == SPAN and request.attributes["tandem.retries"] == 1
    assert sorted(leg.name for leg in legs) == ["decode leg"] * 2 + ["prefill leg"] * 2
    assert all(leg.parent.span_id == request.context.span_id for leg in legs)
    failed = [leg for leg in legs if leg.attributes["tandem.outcome"] == "lost"]
    assert [leg.attributes["error.type"] for leg in failed] == ["worker_lost"] and failed[0].name == "decode leg"
    carried = {f"00-{TRACE}-{leg.context.span_id:016x}-01" for leg in legs}
    assert {header for header in seen if TRACE in header} == carried
    (other,) = [span for span in found if span.name == "POST /generate" and span is not request]
    assert other.parent is None and f"{other.context.trace_id:032x}" != TRACE


async def test_without_tracing_legs_carry_nothing() -> None:
    headers: list[Any] = []

    async def answers(_: MockWorker, request: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        headers.append(request.headers)
        return web.json_response(answer_object())

    prefill, decode = MockWorker("prefill"), MockWorker("decode")
    await start(prefill, decode)
    prefill.script = decode.script = answers
    try:
        async with run_router(config_of([prefill], [decode])) as router:
            await router.until_alive()
            router.client.headers["traceparent"] = f"00-{TRACE}-{SPAN}-01"
            assert (await router.generate()).status_code == 200
    finally:
        await prefill.stop()
        await decode.stop()
    assert len(headers) == 2 and not any("traceparent" in each for each in headers)
