"""The spans of one request at the router: the request, its wait, and a leg for each worker that it was given to."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from common.tracing import Tracing, Value

if TYPE_CHECKING:
    from router.leg_outcome import LegOutcome
    from router.record import RequestRecord


class LegTrace:
    """headers: what the leg carries, so that the worker's spans are children of this one."""

    def __init__(self, tracing: Tracing, parent: RequestTrace, role: str, url: str) -> None:
        self._tracing = tracing
        self._url = url
        self._span = tracing.begin(f"{role} leg", "client", time.monotonic(), parent.span)
        self.headers: Mapping[str, str] = tracing.headers(self._span)

    def end(self, outcome: LegOutcome) -> None:
        values: dict[str, Value] = {"url.full": self._url, "tandem.outcome": outcome.end.value}
        error = None if outcome.code is None and outcome.end.value == "ok" else outcome.code or outcome.end.value
        self._tracing.end(self._span, time.monotonic(), values, error)


class RequestTrace:
    """Begins in the task that answers the request."""

    def __init__(self, tracing: Tracing, record: RequestRecord) -> None:
        self._tracing = tracing
        self.span = tracing.begin(f"POST {record.endpoint}", "server", record.arrived_s)

    def leg(self, role: str, url: str) -> LegTrace:
        return LegTrace(self._tracing, self, role, url)

    def end(self, record: RequestRecord) -> None:
        if record.admitted_s is not None:
            self._tracing.add("wait", self.span, record.arrived_s, record.admitted_s - record.arrived_s, {})
        values: dict[str, Value] = {
            "http.request.method": "POST",
            "http.route": record.endpoint,
            "http.response.status_code": record.status,
            "tandem.request_id": record.rid,
            "tandem.prompt_tokens": record.prompt_tokens,
            "tandem.cached_tokens": record.cached_tokens,
            "tandem.completion_tokens": record.completion_tokens,
            "tandem.retries": record.retries,
            "tandem.resumes": record.resumes,
        }
        self._tracing.end(self.span, time.monotonic(), values, None if record.code == "ok" else record.code)
