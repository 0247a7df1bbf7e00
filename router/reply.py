"""The asking side of one request: what its client is sent, and whether it is still there."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import Receive, Send

from common.errors import AbortedError, ServingError
from common.json_body import BAD_JSON
from router.events import split_events
from router.logprobs import Merger
from router.record import Meta
from router.request import GENERATE, GenerateRequest

DONE_EVENT = b"data: [DONE]\n\n"
_DONE = b"data: [DONE]"
# In chunks of OpenAI's form, as our nodes write them.
_TOKEN_IDS = re.compile(rb'"token_ids":\[([0-9,]*)\]')
_FINISHED = b'"finish_reason":"'
_OWN_FIELD = b'"tandem":{'
_MAX_HEADER_CHARS = 256


def head_fields(status: int, rid: str | None) -> list[tuple[bytes, bytes]]:
    """What goes into the head of every answer to a request: its id where a header can hold it, and of a 503, which
    passes, when to ask again."""
    fields = [(b"retry-after", b"1")] if status == 503 else []
    if rid is not None and len(rid) <= _MAX_HEADER_CHARS and rid.isascii() and rid.isprintable():
        fields.append((b"x-request-id", rid.encode("ascii")))
    return fields


class Reply:
    """started: the answer's head has gone out, so its status is fixed. started_s: when (of the monotonic clock).

    _waits_since: since when a write waits for the client, on the same clock; None: none does.
    """

    def __init__(self, receive: Receive, send: Send, rid: str) -> None:
        self._receive = receive
        self._send = send
        self._rid = rid
        self.started = False
        self.started_s: float | None = None
        self.status = 0
        self._waits_since: float | None = None

    async def start(self, status: int, content_type: str, length: int | None = None) -> None:
        """Does nothing the second time: a stream that goes on at another worker has its head."""
        if self.started:
            return
        headers = [(b"content-type", content_type.encode("latin-1"))]
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        else:
            headers.append((b"cache-control", b"no-cache"))
        headers += head_fields(status, self._rid)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        self.started, self.started_s, self.status = True, time.monotonic(), status

    async def write(self, body: bytes, *, more: bool) -> None:
        """Waits while the client is behind. A write that is cancelled has sent nothing."""
        self._waits_since = time.monotonic()
        try:
            await self._send({"type": "http.response.body", "body": body, "more_body": more})
        finally:
            self._waits_since = None

    @contextlib.contextmanager
    def patience(self, limit_s: float, stop: Callable[[ServingError], None]) -> Iterator[None]:
        """Call `stop` once, with an AbortedError, when a write has waited for the client for limit_s within the block.
        One timer looks now and then: one for each write would cost more than the write."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal timer
            waited_s = 0.0 if self._waits_since is None else time.monotonic() - self._waits_since
            if waited_s < limit_s:
                timer = loop.call_later(limit_s - waited_s, look)
                return
            message = f"the client has taken nothing of its answer for {limit_s:g} s"
            stop(AbortedError(message, code="client_stalled"))

        timer = loop.call_later(limit_s, look)
        try:
            yield
        finally:
            timer.cancel()

    async def gone(self) -> None:
        """Returns when the client has closed its connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


@dataclass(slots=True)
class Sent:
    """How far the stream of one request has come, over all of its tries.

    last: the decode node's newest whole events that have gone to the client, as they came; before: those before them.
    They are read only at the end, and when the stream has to go on elsewhere. Of an answer that is not streamed `last`
    is all of it. finals: of several sequences, what the last object of each says. prompt: the logprobs that are merged
    into every event. token_ids: of the answer so far, as JSON, of a request that keeps them.
    """

    last: bytes = b""
    before: bytes = b""
    finals: list[Meta] = field(default_factory=list)
    prompt: Merger | None = None
    token_ids: list[bytes] = field(default_factory=list)

    def keep_ids(self, whole: bytes) -> None:
        """Of chunks that have gone to the client. Quotes in a string are escaped, so nothing else looks like it."""
        self.token_ids += [ids for ids in _TOKEN_IDS.findall(whole) if ids]

    @property
    def num_tokens(self) -> int:
        """Of the answer so far; 0 for a request that keeps none."""
        return sum(ids.count(b",") + 1 for ids in self.token_ids)

    @property
    def is_done(self) -> bool:
        """The stream's last event has gone out."""
        return _DONE in self.last

    def is_complete(self, request: GenerateRequest) -> bool:
        """Whether the client has all of the answer, although the stream broke."""
        if self.is_done or request.num_sequences > 1:
            return self.is_done
        if request.path != GENERATE:
            return _OWN_FIELD in self.last
        last = self.object()
        return last is not None and is_finished(last)

    def resume_field(self, request: GenerateRequest) -> dict[str, Any] | None:
        """What a node needs to go on with the answer; None when the client was not told enough, or all of it."""
        if request.num_sequences > 1:
            return None
        if request.path == GENERATE:
            last = self.object()
            return None if last is None else resume_field(last)
        if not self.token_ids or _FINISHED in self.last or _FINISHED in self.before:
            return None
        return {"output_ids": msgspec.json.decode(b"[" + b",".join(self.token_ids) + b"]")}

    def object(self) -> dict[str, Any] | None:
        """The newest answer object; None when the newest events hold none."""
        for event in reversed(split_events(self.last)):
            data = event.removeprefix(b"data:").strip()
            if data.startswith(b"{"):
                return _object(data)
        return None


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        found = msgspec.json.decode(data)
    except BAD_JSON:
        return None
    return found if isinstance(found, dict) else None


def is_finished(answer: dict[str, Any]) -> bool:
    """Whether this object of a stream is the last one of its sequence."""
    meta = answer.get("meta_info")
    return isinstance(meta, dict) and meta.get("finish_reason") is not None


def resume_field(answer: dict[str, Any]) -> dict[str, Any] | None:
    """What a node needs to go on after this object of a stream; None when it does not say enough."""
    ids, meta = answer.get("output_ids"), answer.get("meta_info")
    if not isinstance(ids, list) or not isinstance(meta, dict):
        return None
    names = ("output_token_logprobs", "output_top_logprobs")
    return {"output_ids": ids} | {name: meta[name] for name in names if meta.get(name)}
