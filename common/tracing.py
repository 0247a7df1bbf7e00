"""Traces by OpenTelemetry: router → prefill → transfer → decode, sent by OTLP over HTTP. Off unless asked for.

The context of a request (W3C `traceparent`, `tracestate`) comes in with its headers and goes out with those of its
legs. Spans are made when they are over, from times that are measured anyway. Without `--otlp-endpoint` nothing of this
is imported or called.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, SpanKind

_TRACES_PATH = "/v1/traces"
_SEND_EVERY_MS = 1000
_SEND_TIMEOUT_S = 5.0
_CLOSE_S = 2.0
_MODULE = "opentelemetry.exporter.otlp.proto.http"
_NAMES = (b"traceparent", b"tracestate")

Value = str | int | float | bool


def open_tracing(endpoint: str | None, service: str) -> Tracing | None:
    """endpoint: base URL of a collector, or all of its URL for traces; None: no traces. service: `service.name`.

    Raises ConfigError when it is no URL or OpenTelemetry is not installed.
    """
    check_endpoint(endpoint)
    if endpoint is None:
        return None
    url = endpoint.rstrip("/") + _TRACES_PATH if urlsplit(endpoint).path in ("", "/") else endpoint
    return Tracing(_provider(url, service))


def check_endpoint(endpoint: str | None) -> None:
    """Raises ConfigError when it is no URL or OpenTelemetry is not installed."""
    if endpoint is None:
        return
    _check_url(endpoint)
    if not _is_installed():
        raise ConfigError(
            f"--otlp-endpoint {endpoint}: OpenTelemetry is not installed; pip install 'tandem-serve[otel]'",
            param="otlp_endpoint",
        )


@contextmanager
def closing(tracing: Tracing | None) -> Iterator[None]:
    """What is left is sent when the block ends."""
    try:
        yield
    finally:
        if tracing is not None:
            tracing.close()


def _check_url(endpoint: str) -> None:
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if is_url and "@" in parts.netloc:  # settings are shown
        message = "--otlp-endpoint: a URL without a user and password; OTEL_EXPORTER_OTLP_HEADERS takes what is secret"
        raise ConfigError(message, param="otlp_endpoint")
    if not is_url:
        raise ConfigError(f"--otlp-endpoint {endpoint}: a URL such as http://127.0.0.1:4318", param="otlp_endpoint")


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec(_MODULE) is not None
    except ModuleNotFoundError:
        return False


def _provider(url: str, service: str) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": service}), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=url, timeout=_SEND_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=_SEND_EVERY_MS))
    return provider


class Tracing:
    """Of one process. Times are of the monotonic clock."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("tandem")
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def context_of(self, headers: list[tuple[bytes, bytes]]) -> Iterator[None]:
        """Spans that begin in this block, in this task, belong to the trace that these headers name, if any."""
        from opentelemetry.context import Context, attach, detach

        carrier = {name.decode(): value.decode("latin-1") for name, value in headers if name in _NAMES}
        token = attach(self._propagator.extract(carrier, Context()))
        try:
            yield
        finally:
            detach(token)

    def begin(self, name: str, kind: str, start_s: float, parent: Span | None = None) -> Span:
        """A span that is to be ended by `end`. kind: server, client or internal. parent: by default what the request's
        headers named."""
        context = None if parent is None else _context(parent)
        return self._tracer.start_span(name, context, _kind(kind), start_time=_epoch_ns(start_s))

    def end(self, span: Span, end_s: float, values: Mapping[str, Value], error: str | None = None) -> None:
        """error: its code."""
        span.set_attributes(dict(values))
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(_epoch_ns(end_s))

    def add(self, name: str, parent: Span, start_s: float, seconds: float, values: Mapping[str, Value]) -> None:
        """A part of the parent that is over."""
        span = self.begin(name, "internal", start_s, parent)
        self.end(span, start_s + seconds, values)

    def headers(self, span: Span) -> dict[str, str]:
        """What makes another process's spans children of this one."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, _context(span))
        return carrier

    def close(self) -> None:
        """Send what is left; not for long, whether anybody listens or not."""
        closer = threading.Thread(target=self._provider.shutdown, daemon=True)
        closer.start()
        closer.join(_CLOSE_S)


def _context(span: Span) -> Context:
    from opentelemetry.trace import set_span_in_context

    return set_span_in_context(span)


def _kind(name: str) -> SpanKind:
    from opentelemetry.trace import SpanKind

    return SpanKind[name.upper()]


def _epoch_ns(monotonic_s: float) -> int:
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)


class TraceContext:
    """ASGI: what a request's headers say of its trace holds for the task that answers it. find: of an application."""

    def __init__(self, app: ASGIApp, find: Callable[[Scope], Tracing]) -> None:
        self._app, self._find = app, find

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._find(scope).context_of(scope["headers"]):
            await self._app(scope, receive, send)
