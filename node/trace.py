"""The spans of one request at a node, made when it has ended, from the timing that its ranks report.

request of the prefill leg:  queue │ prefill │ transfer
of the decode leg:           wait for state │ decode
of a node that serves alone: queue │ prefill │ decode
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from common.errors import ServingError
from common.tracing import Tracing, Value
from node.messages import Submit, Timing, Update


class RequestTrace:
    """Begins with the request, in the task that answers it, and is ended once."""

    def __init__(self, tracing: Tracing, role: str, submits: Sequence[Submit]) -> None:
        self._tracing = tracing
        self._arrival_s = submits[0].arrival_s
        self._values: dict[str, Value] = {
            "tandem.request_id": submits[0].rid,
            "tandem.sequences": len(submits),
            "tandem.prompt_tokens": sum(len(submit.token_ids) for submit in submits),
        }
        self._error: str | None = None
        self._num_tokens = 0
        self._span = tracing.begin(f"{role} request", "server", self._arrival_s)

    def on_update(self, update: Update) -> None:
        self._num_tokens += len(update.token_ids)
        if update.timing is not None:
            self._add_parts(update, update.timing)

    def on_error(self, error: ServingError) -> None:
        """The first one counts: the others follow from it."""
        self._error = self._error or error.code

    def end(self) -> None:
        values = self._values | {"tandem.completion_tokens": self._num_tokens}
        self._tracing.end(self._span, time.monotonic(), values, self._error)

    def _add_parts(self, update: Update, timing: Timing) -> None:
        """What came over the wire was computed elsewhere: there it has its spans."""
        values: dict[str, Value] = {"tandem.sequence_id": update.rid}
        handed_over, decoded, now = bool(timing.transfer_bytes), timing.decode_s > 0, time.monotonic()
        if handed_over and decoded:
            waited_s = max(0.0, now - timing.decode_s - self._arrival_s)
            self._tracing.add("wait for state", self._span, self._arrival_s, waited_s, values)
        elif handed_over or decoded:
            self._add_prefill(timing, values | {"tandem.cached_tokens": update.num_cached_tokens})
        if handed_over and not decoded:
            sizes = {f"tandem.transfer_bytes.{part}": count for part, count in timing.transfer_bytes.items()}
            self._tracing.add("transfer", self._span, now - timing.transfer_s, timing.transfer_s, values | sizes)
        if decoded:
            self._tracing.add("decode", self._span, now - timing.decode_s, timing.decode_s, values)

    def _add_prefill(self, timing: Timing, values: dict[str, Value]) -> None:
        begin_s = self._arrival_s + timing.queue_s
        self._tracing.add("queue", self._span, self._arrival_s, timing.queue_s, values)
        self._tracing.add("prefill", self._span, begin_s, timing.prefill_s, values)
