"""One trace of a request across real processes: router, prefill, transfer, decode, as a collector gets it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.stack import Server, free_port, node, running, wait_healthy

otlp = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="the extra otel")

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT_SPAN = "00f067aa0ba902b7"
LIMIT_S = 30


class Collector:
    """An OTLP collector: keeps what it is sent. url: its base."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces", self.path
                collector._take(otlp.ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Not on stderr."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def _take(self, request: Any) -> None:
        with self._changed:
            for resource in request.resource_spans:
                service = _values(resource.resource.attributes)["service.name"]
                self.spans += [_span(service, span) for scope in resource.scope_spans for span in scope.spans]
            self._changed.notify_all()

    def trace(self, trace_id: str, count: int) -> list[dict[str, Any]]:
        """Its spans, once there are so many."""

        def found() -> list[dict[str, Any]]:
            return [span for span in self.spans if span["trace"] == trace_id]

        with self._changed:
            self._changed.wait_for(lambda: len(found()) >= count, LIMIT_S)
            return found()


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def _span(service: str, span: Any) -> dict[str, Any]:
    return {
        "service": service,
        "name": span.name,
        "trace": span.trace_id.hex(),
        "id": span.span_id.hex(),
        "parent": span.parent_span_id.hex(),
        "begin": span.start_time_unix_nano,
        "end": span.end_time_unix_nano,
        "error": span.status.code == 2,
        "values": _values(span.attributes),
    }


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        collector.server.shutdown()
        thread.join()
        collector.server.server_close()


@contextmanager
def traced_stack(collector: Collector, folder: Path) -> Iterator[Server]:
    """A router with its pair."""
    bootstrap_port, port = free_port(), free_port()
    to = ["--otlp-endpoint", collector.url]
    with ExitStack() as exits:
        extra = [*to, "--transport", "loopback"]
        prefill = exits.enter_context(node("prefill", folder, extra, bootstrap_port=bootstrap_port))
        decode = exits.enter_context(node("decode", folder, extra))
        arguments = ["router", "--port", str(port), "--decode", decode.url, *to]
        arguments += ["--prefill", prefill.url, str(bootstrap_port)]
        router = exits.enter_context(running("router", arguments, f"http://127.0.0.1:{port}", folder))
        for server in (prefill, decode, router):
            wait_healthy(server)
        yield router


def test_one_trace_with_the_right_parents(tmp_path: Path) -> None:
    with collecting() as collector, traced_stack(collector, tmp_path) as router:
        headers = {"traceparent": f"00-{TRACE_ID}-{CLIENT_SPAN}-01"}
        body = {"text": "SECRET-PROMPT " * 20, "rid": "mine", "sampling_params": {"max_new_tokens": 5}, "stream": True}
        assert httpx.post(f"{router.url}/generate", json=body, headers=headers, timeout=60).status_code == 200
        spans = collector.trace(TRACE_ID, 11)
        named = {(span["service"], span["name"]): span for span in spans}
        assert len(named) == len(spans) == 11
        request = named["tandem-router", "POST /generate"]
        prefill, decode = named["tandem-prefill", "prefill request"], named["tandem-decode", "decode request"]
        parents = {
            ("tandem-router", "POST /generate"): CLIENT_SPAN,
            ("tandem-router", "wait"): request["id"],
            ("tandem-router", "prefill leg"): request["id"],
            ("tandem-router", "decode leg"): request["id"],
            ("tandem-prefill", "prefill request"): named["tandem-router", "prefill leg"]["id"],
            ("tandem-prefill", "queue"): prefill["id"],
            ("tandem-prefill", "prefill"): prefill["id"],
            ("tandem-prefill", "transfer"): prefill["id"],
            ("tandem-decode", "decode request"): named["tandem-router", "decode leg"]["id"],
            ("tandem-decode", "wait for state"): decode["id"],
            ("tandem-decode", "decode"): decode["id"],
        }
        assert {key: span["parent"] for key, span in named.items()} == parents
        by_id = {span["id"]: span for span in spans}
        for span in spans:
            parent = by_id.get(span["parent"], span)
            assert parent["begin"] - 2e6 <= span["begin"] <= span["end"], span
            assert not span["error"], span
        assert named["tandem-prefill", "prefill"]["end"] <= named["tandem-decode", "decode"]["end"]
        assert request["values"]["tandem.request_id"] == "mine" and request["values"]["tandem.completion_tokens"] == 5
        assert request["values"]["http.response.status_code"] == 200
        assert named["tandem-prefill", "transfer"]["values"]["tandem.transfer_bytes.ssm"] == 655_360
        assert "SECRET" not in str(spans)

        # Another client without a trace of its own, whose request is refused by the nodes: a trace of the router's own.
        wrong = {"text": "x", "sampling_params": {"max_new_tokens": 5, "temperature": -1}, "rid": "wrong"}
        assert httpx.post(f"{router.url}/generate", json=wrong, timeout=60).status_code == 400
        unsampled = {"traceparent": f"00-{'a' * 32}-{CLIENT_SPAN}-00"}
        assert httpx.post(f"{router.url}/generate", json=body, headers=unsampled, timeout=60).status_code == 200
    refused = [span for span in collector.spans if span["values"].get("tandem.request_id") == "wrong"]
    (mine,) = [span for span in refused if span["service"] == "tandem-router"]
    assert mine["error"] and mine["values"]["error.type"] == "invalid_request" and mine["parent"] == ""
    assert mine["trace"] != TRACE_ID
    assert not [span for span in collector.spans if span["trace"] == "a" * 32], "the client did not want it"
