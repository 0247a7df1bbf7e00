"""One leg of a request: an exchange with one worker that ends in an answer or in `LegFailed`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from common.errors import ServingError, WorkerError, status_of
from common.json_body import BAD_JSON
from router.client import LOST, REFUSED, REFUSED_KEY, UNREACHABLE, Answer, Network
from router.leg_outcome import LegEnd, LegOutcome, end_of
from router.loads import Share
from router.request import GENERATE
from router.trace import LegTrace
from router.workers import Worker, Workers

log = logging.getLogger("tandem.router")

ABORT_LIMIT_S = 2.0
_ABORT_AGAIN_S = 0.05
# Silence proves no end: the request may still run there. An answer that makes no sense was an answer all the same.
_NEVER_AGAIN = frozenset(
    {"worker_silent", "worker_timeout", "rank_silent", "peer_silent", "first_token_timeout", "bad_answer"}
)


class _Error(msgspec.Struct):
    """code: an SGLang server's is an HTTP status."""

    type: str | None = None
    code: str | int | None = None
    retryable: bool = False

    @property
    def status(self) -> int:
        """Where no head tells one: in a stream. 502: it does not say."""
        told = self.code if isinstance(self.code, int) else status_of(self.type)
        return told if told is not None and 400 <= told <= 599 else 502


class _Body(msgspec.Struct):
    error: _Error


class LegFailed(Exception):  # noqa: N818 - names a state of the leg; the answer in it is the worker's, not ours
    """What the client gets in place of an answer: status, content type and body. status: None of an error in a stream
    (`in_stream`), which says itself what it is."""

    def __init__(self, status: int | None, content_type: str, body: bytes) -> None:
        error = _read(body)
        self.in_stream = status is None
        self.status = error.status if status is None else status
        super().__init__(f"status {self.status}")
        self.content_type = content_type
        self.body = body
        self.code = error.code if isinstance(error.code, str) else None
        self.kind, self._retryable = error.type, error.retryable

    @classmethod
    def of(cls, error: ServingError) -> LegFailed:
        record = error.record()
        return cls(record.status, "application/json", msgspec.json.encode(record.body()))

    @property
    def may_go_on_elsewhere(self) -> bool:
        """Whether the error says that the request may be sent again, and the leg has ended for certain."""
        return self._retryable and self.status >= 500 and self.code not in _NEVER_AGAIN


def _read(body: bytes) -> _Error:
    """What an error's body says; nothing when it has another shape."""
    try:
        return msgspec.json.decode(body, type=_Body).error
    except BAD_JSON:
        return _Error()


@dataclass(slots=True, eq=False)
class Leg:
    """open: the worker may still be at work for it, so an abort makes sense.

    `workers` is told of the leg as soon as it is made, and once of its end. partner: the other leg of the try. share:
    of the load of the rank that it goes to; it ends with the leg.
    """

    worker: Worker
    body: bytes
    workers: Workers
    network: Network
    path: str = GENERATE
    open: bool = True
    partner: Leg | None = None
    trace: LegTrace | None = None
    share: Share | None = None
    began_s: float = field(default_factory=time.monotonic)
    has_ended: bool = False
    _first_byte_s: float | None = None
    _last_byte_s: float = 0.0
    _num_chunks: int = 0

    def __post_init__(self) -> None:
        self.workers.on_leg_begin(self)

    def end(self, end: LegEnd, code: str | None = None, kind: str | None = None) -> None:
        """The first end counts: does nothing the second time."""
        if self.has_ended:
            return
        self.has_ended = True
        gap_s = None
        if self._first_byte_s is not None and self._num_chunks > 1:
            gap_s = (self._last_byte_s - self._first_byte_s) / (self._num_chunks - 1)
        seconds = time.monotonic() - self.began_s
        outcome = LegOutcome(
            end=end, code=code, kind=kind, seconds=seconds, first_byte_s=self._first_byte_s, gap_s=gap_s
        )
        self.workers.on_leg_end(self, outcome)
        if self.trace is not None:
            self.trace.end(outcome)

    @property
    def _headers(self) -> Mapping[str, str] | None:
        return None if self.trace is None else self.trace.headers

    def _on_chunk(self) -> None:
        self._last_byte_s = time.monotonic() - self.began_s
        if self._first_byte_s is None:
            self._first_byte_s = self._last_byte_s
            self.workers.on_first_byte(self)
        self._num_chunks += 1

    async def start(self) -> Answer:
        """Post it; the head of a good answer. Raises LegFailed."""
        try:
            answer = await self.network.send("POST", self.worker.url + self.path, self.body, headers=self._headers)
            if answer.status == 200:
                return answer
            body = await answer.read()
        except WorkerError as error:
            raise self.lost(error) from error
        raise self.refused(answer.status, answer.content_type, body)

    async def finish(self) -> Answered:
        """Post it and read all of a good answer. Raises LegFailed."""
        answer = await self.start()
        try:
            body = await answer.read()
        except WorkerError as error:
            raise self.lost(error) from error
        self.open = False
        self._on_chunk()
        self.end(LegEnd.OK)
        return Answered(answer.content_type, body)

    async def next(self, answer: Answer) -> bytes:
        """What has arrived of a good answer's body; empty at its end. Raises LegFailed.

        Whether it was a whole answer the reader has to know, who says so by `end`.
        """
        try:
            chunk = await answer.next()
        except WorkerError as error:
            raise self.lost(error) from error
        if chunk:
            self._on_chunk()
        else:
            self.open = False
        return chunk

    def refused(self, status: int | None, content_type: str, body: bytes) -> LegFailed:
        """The worker has ended this leg with an error of its own. status: None of one in its stream."""
        self.open = False
        failure = LegFailed(status, content_type, body)
        if not 400 <= failure.status <= 599:
            what = f"{self.worker.role.value} worker: status {status} is no answer"
            failure = LegFailed.of(WorkerError(what, code="bad_answer", status=502))
        self.workers.on_error(self.worker, failure.status)
        self.end(end_of(failure.status, failure.kind), failure.code, failure.kind)
        return failure

    def lost(self, error: WorkerError) -> LegFailed:
        """Report the worker; the error names its role, not its address, since clients see it."""
        if error.code in (REFUSED, UNREACHABLE, REFUSED_KEY):  # it has never seen the request
            self.open = False
        self.workers.report(self.worker, error)
        self.end(LegEnd.LOST, error.code)
        role = self.worker.role.value
        log.warning("%s worker %s: %s", role, self.worker.url, error.message)
        message = f"{role} worker: {error.message}"
        return LegFailed.of(WorkerError(message, code=error.code, status=error.http_status))

    async def abort(self, rids: tuple[str, ...]) -> bool:
        """Tell the worker to give up, also when it has not noticed that the connection is gone. Takes 2 s at most.

        True when the leg has ended for certain: the worker says so, or nobody listens there any more.
        """
        try:
            async with asyncio.timeout(ABORT_LIMIT_S):
                return all([await self._abort_one(rid) for rid in rids])
        except (WorkerError, TimeoutError) as error:
            log.debug("abort at %s: %s", self.worker.url, error)
            return False

    async def _abort_one(self, rid: str) -> bool:
        url, body = f"{self.worker.url}/abort_request", msgspec.json.encode({"rid": rid, "abort_all": False})
        while True:
            try:
                answer = await self.network.send("POST", url, body, limit_s=ABORT_LIMIT_S)
                return _has_ended(answer.status, await answer.read())
            except WorkerError as error:
                if error.code == REFUSED:
                    return True
                if error.code != LOST:
                    raise
            await asyncio.sleep(_ABORT_AGAIN_S)  # it is just dying


class _Aborted(msgspec.Struct):
    ended: bool = True


def _has_ended(status: int, body: bytes) -> bool:
    """Our nodes say whether the request has really ended; of others the acknowledgement has to do."""
    try:
        return status == 200 and msgspec.json.decode(body, type=_Aborted).ended
    except BAD_JSON:
        return status == 200


@dataclass(frozen=True, slots=True)
class Answered:
    content_type: str
    body: bytes
