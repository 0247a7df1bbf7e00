"""A request's life: claim its ids, try it on a pair of workers, move it to another pair if that is safe, release.

    claimed ──► attempt ──► answered ──► released
                 │    ▲
                 │    └── from its start: no byte has gone to the client
                 │    └── from the last event on: its decode node died in mid-answer (resumed)
                 └──► error to the client ──► released

A request never runs twice at once: it moves only when both legs of the try before have ended for certain. Either the
worker has answered the leg, or it has confirmed the abort, or nobody listens there any more. Silence proves nothing:
what a silent worker had is not moved. Every try has rooms of its own. Ids are released when the workers have answered
the aborts, so that a late abort cannot hit the next request of the same id; that one waits for it meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Send

from common.config import RouterConfig
from common.errors import AbortedError, RequestError, ServingError, WorkerError
from common.json_body import BAD_JSON
from router.admission import Admission, Terms, Turn, deadline
from router.affinity import Affinity
from router.attempt import Attempt
from router.client import Network
from router.in_flight import RID_IN_USE, InFlight
from router.legs import Leg, LegFailed
from router.pairing import Possible
from router.record import Recorder, RequestRecord
from router.reply import DONE_EVENT, Reply, Sent
from router.request import GenerateRequest
from router.request_log import request_log
from router.workers import Pair, Worker, Workers

log = logging.getLogger("tandem.router")

_STOP_S = 1.0
_RELEASE_WAIT_S = 5.0
_NOTICE_S = 0.1
_BACKOFF_S = 0.05
_TELL_S = 5.0
"""For the error of a client that may not be reading."""

_NO_TERMS = Terms()

T = TypeVar("T")


class Counters(msgspec.Struct, kw_only=True):
    """Since the start. retries: more tries, from the start. resumes: those that went on in mid-answer."""

    requests: int = 0
    retries: int = 0
    resumes: int = 0


class Dispatcher:
    """Owns what is in flight and the work that outlives a client: late prefill answers and aborts."""

    def __init__(self, config: RouterConfig, workers: Workers, network: Network) -> None:
        self.config = config
        self.workers = workers
        self.network = network
        self.in_flight = InFlight()
        self.counters = Counters()
        self.recorder = Recorder(request_log(config))
        self.admission = Admission(config)
        self._closed: ServingError | None = None
        self._exchanges: set[Exchange] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._idle = asyncio.Event()

    async def generate(
        self,
        request: GenerateRequest,
        receive: Receive,
        send: Send,
        terms: Terms = _NO_TERMS,
        *,
        endpoint: str | None = None,
    ) -> None:
        """Serve one request to its end. endpoint: what it is counted under, by default its path. Raises ServingError
        while the client has been sent nothing."""
        with self.recorder.following(request, endpoint) as record:
            reply = Reply(receive, send, request.rids[0])
            await self._generate(request, reply, record, terms)

    async def _generate(self, request: GenerateRequest, reply: Reply, record: RequestRecord, terms: Terms) -> None:
        self.check_open()
        await self._let_end(request.names)
        self.check_open()
        self.in_flight.claim(request.names, 0)
        self.counters.requests += 1
        exchange = Exchange(self, request, reply, record, terms)
        self._exchanges.add(exchange)
        try:
            with deadline(terms, exchange.expire), reply.patience(self.config.idle_timeout_s, exchange.expire):
                async with self.admission.place(exchange.turn):
                    record.admitted_s = time.monotonic()
                    await exchange.run(self.workers.pick(exchange.affinity))
        finally:
            self.admission.on_tokens(terms.caller, record.prompt_tokens + record.completion_tokens)
            task = self._in_background(self._release(exchange, request))
            self._ending.update(dict.fromkeys(request.names, task))

    async def _let_end(self, rids: frozenset[str]) -> None:
        """Wait for requests of these ids that have their answer, or whose client has left; not for long."""
        if any(rid in self.in_flight.rids and rid not in self._ending for rid in rids):
            await asyncio.sleep(_NOTICE_S)  # a client that has just left may not have been noticed yet
        ending = {self._ending[rid] for rid in rids if rid in self._ending}
        if ending:
            await asyncio.wait(ending, timeout=_RELEASE_WAIT_S)

    async def _release(self, exchange: Exchange, request: GenerateRequest) -> None:
        try:
            await exchange.ended()
        finally:
            self._exchanges.discard(exchange)
            self.in_flight.release(request.names, exchange.rooms)
            for rid in request.names:
                self._ending.pop(rid, None)
            if not self._exchanges:
                self._idle.set()

    def give_up(self, worker: Worker, error: WorkerError) -> None:
        """The worker does not answer: every request with an open leg there fails with this error."""
        for exchange in self._exchanges:
            exchange.give_up(worker, error)

    def on_abort(self, rids: frozenset[str] | None) -> None:
        """A client aborts these requests, or all of them: they are not tried again."""
        for exchange in self._exchanges:
            if rids is None or not exchange.request_ids.isdisjoint(rids):
                exchange.stop(AbortedError("aborted by request"), at_once=False)

    def rids_of(self, caller: str | None, rids: frozenset[str]) -> frozenset[str]:
        """Those of these ids that requests of this caller have here."""
        names = (exchange.request_ids for exchange in self._exchanges if exchange.turn.caller == caller)
        return rids.intersection(name for each in names for name in each)

    def sequences_of(self, rids: frozenset[str]) -> frozenset[str]:
        """These ids, and those of the single sequences of the requests here that have them."""
        theirs = (ids for exchange in self._exchanges if not (ids := exchange.request_ids).isdisjoint(rids))
        return rids.union(name for ids in theirs for name in ids if name.rpartition("_")[0] in rids & ids)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    # The end

    def check_open(self) -> None:
        """Raises WorkerError when nothing new is taken."""
        if self._closed is not None:
            raise self._closed

    async def drain(self, limit_s: float) -> None:
        """Take nothing new; return when nothing runs any more, or after limit_s."""
        self._closed = WorkerError("the router is draining: it ends when what it runs has ended", code="draining")
        self.admission.refuse_waiting(self._closed)
        if self._exchanges:
            log.info("draining for %g s at most, %d requests run; again to end at once", limit_s, len(self._exchanges))
            await self._wait_idle(limit_s)

    async def _wait_idle(self, limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._exchanges:
                    self._idle.clear()
                    await self._idle.wait()

    @property
    def is_draining(self) -> bool:
        return self._closed is not None

    @property
    def num_running(self) -> int:
        return len(self._exchanges)

    def end_all(self) -> None:
        """End every request with an error."""
        for exchange in self._exchanges:
            exchange.stop(WorkerError("the router is shutting down", code="shutting_down"), at_once=True)

    async def stop(self) -> None:
        """End every request, tell the workers, and let what runs in the background end; not for long."""
        self.end_all()
        await self._wait_idle(_STOP_S)
        await _cancel(set(self._background))


class Exchange:
    """One request of one client, over all of its tries. rooms: those that it has used."""

    def __init__(
        self, dispatcher: Dispatcher, request: GenerateRequest, reply: Reply, record: RequestRecord, terms: Terms
    ) -> None:
        self._dispatcher = dispatcher
        self._request = request
        self._reply = reply
        self._record = record
        self._sent = Sent()
        self._attempts: list[Attempt] = []
        self._failed: list[Pair] = []
        self._stopped: LegFailed | None = None
        self._resumed_after: LegFailed | None = None
        self.request_ids = request.names
        self.affinity = Affinity(request.fields, num_sequences=request.num_sequences)
        self.turn = Turn(terms.caller, reply.gone)
        self._halted: asyncio.Future[None] | None = None  # between two tries
        self.rooms: list[int] = []

    async def run(self, pair: Pair) -> None:
        """Until the client has an answer or is gone, whatever happens; the legs may end a little later (`ended`)."""
        gone = asyncio.create_task(self._reply.gone())
        try:
            while True:
                attempt = self._open(pair)
                try:
                    return await attempt.run(gone)
                except LegFailed as failure:
                    self._failed.append(pair)
                    # The id of a leg that was refused for it is another request's: an abort would end that one.
                    attempt.end_legs(tell_workers=failure.code != RID_IN_USE)
                    pair = await self._next_pair(attempt, failure, gone)
        except LegFailed as failure:
            await self._tell(self._cause(failure))
        except AbortedError:
            self._record.on_error("client_disconnected", 499)
            self._attempts[-1].end_legs()
        except asyncio.CancelledError:
            self._attempts[-1].end_legs()
            raise
        finally:
            gone.cancel()
            self._record.on_end(self._reply, self._sent)

    def _open(self, pair: Pair) -> Attempt:
        dispatcher, request = self._dispatcher, self._request
        rooms = dispatcher.in_flight.more_rooms(request.num_sequences, pair.room_rank)
        self.rooms += rooms
        self._record.on_open(pair)
        try:
            prefill_body, decode_body = request.leg_bodies(pair, rooms)
        except RequestError as error:  # these workers cannot do what others could
            raise LegFailed.of(error) from error
        where, weight = (dispatcher.workers, dispatcher.network, request.path), self.affinity.weight
        prefill = Leg(pair.prefill, prefill_body, *where, share=pair.prefill_target.load.begin(weight))
        decode = Leg(pair.decode, decode_body, *where, share=pair.decode_target.load.begin(weight))
        if (trace := self._record.trace) is not None:
            for leg in (prefill, decode):
                leg.trace = trace.leg(leg.worker.role.value, leg.worker.url)
        self._attempts.append(Attempt(request, prefill, decode, self._reply, self._sent))
        return self._attempts[-1]

    # Another try

    async def _next_pair(self, attempt: Attempt, failure: LegFailed, gone: asyncio.Future[None]) -> Pair:
        """Where the request goes on. Raises the failure when it cannot, AbortedError when the client is gone."""
        resumes = self._reply.started
        self._check_may_move(failure)
        request = self._resumed(failure) if resumes else self._request
        self._possible(failure, resumes=resumes)  # without another pair the wait for the legs' end is in vain
        if not await self._unless_over(gone, attempt.ended()):
            raise failure
        await self._unless_over(gone, asyncio.sleep(_BACKOFF_S * len(self._failed)))
        self._check_may_move(failure)
        pair = self._dispatcher.workers.pairing.pick(self._possible(failure, resumes=resumes), self.affinity)
        self._request = request
        self._resumed_after = failure if resumes else None
        counters = self._dispatcher.counters
        counters.resumes += resumes
        counters.retries += not resumes
        self._record.on_move(resumes=resumes)
        what = "goes on" if resumes else "is tried again"
        log.warning("request %s %s at %s after %s", request.rids[0], what, pair.where, failure.code)
        return pair

    async def _unless_over(self, gone: asyncio.Future[None], work: Coroutine[Any, Any, T]) -> T:
        """The result. Raises AbortedError when the client is gone first, LegFailed when the request has to end now."""
        task: asyncio.Task[T] = asyncio.create_task(work)
        self._halted = asyncio.get_running_loop().create_future()
        first: set[asyncio.Future[Any]] = {gone, self._halted, task}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        if self._halted.done() and self._stopped is not None:
            raise self._stopped
        raise AbortedError("the client is gone")

    def _check_may_move(self, failure: LegFailed) -> None:
        if self._stopped is not None:
            raise self._stopped
        if not failure.may_go_on_elsewhere or len(self._failed) > self._dispatcher.config.max_retries:
            raise failure

    def _resumed(self, failure: LegFailed) -> GenerateRequest:
        """The rest of the request, from the last event that the client has. Raises the failure when that cannot be."""
        field = self._sent.resume_field(self._request)
        if field is None or not self._dispatcher.config.resume_on_decode_failure:
            raise failure
        request = self._request.resumed(field)
        if request.num_bytes > self._dispatcher.config.max_body_bytes:  # the nodes' own limit, unless set otherwise
            raise failure
        return request

    def _possible(self, failure: LegFailed, *, resumes: bool) -> Possible:
        """The pairs where it can go on. Raises the failure when there is none."""
        try:
            return self._dispatcher.workers.possible(self._failed, resumes=resumes)
        except WorkerError as error:
            log.info("request %s ends with %s: %s", self._request.rids[0], failure.code, error.message)
            raise failure from error

    # The end

    def give_up(self, worker: Worker, error: WorkerError) -> None:
        """Fail when this worker, which does not answer, has a leg that the answer depends on."""
        if self._attempts and (leg := self._attempts[-1].open_leg(worker)) is not None:
            self._attempts[-1].fail(leg.lost(error))

    def stop(self, error: ServingError, *, at_once: bool) -> None:
        """Not to be tried again; at_once: and to fail with this error now. What still waits for a place fails."""
        self._stopped = LegFailed.of(error)
        self.turn.refuse(error)
        if at_once and self._halted is not None and not self._halted.done():
            self._halted.set_result(None)
        if at_once and self._attempts:
            self._attempts[-1].fail(self._stopped)
            self._attempts[-1].end_legs()

    def expire(self, error: ServingError) -> None:
        self.stop(error, at_once=True)

    async def ended(self) -> None:
        """Returns when no leg runs any more and the workers have answered the aborts."""
        for attempt in self._attempts:
            await attempt.ended()

    def _cause(self, failure: LegFailed) -> LegFailed:
        """That a node cannot go on with an answer is no fault of the request: what made it move is told instead."""
        moved_after = self._resumed_after
        cannot = 400 <= failure.status < 499 and not failure.in_stream
        return moved_after if moved_after is not None and cannot else failure

    async def _tell(self, failure: LegFailed) -> None:
        self._record.on_error(failure.code, failure.status)
        if not self._reply.started:
            await self._reply.start(failure.status, failure.content_type, len(failure.body))
            await self._reply.write(failure.body, more=False)
            return
        # A client that does not read holds no place, least of all when it is told to end; the server then closes its
        # connection.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._dispatcher.config.idle_timeout_s if self._stopped is None else _TELL_S):
                await self._reply.write(b"data: " + _error_object(failure) + b"\n\n" + DONE_EVENT, more=False)


def _error_object(failure: LegFailed) -> bytes:
    """The failure as one line of JSON of our error shape, whatever the worker wrote."""
    with contextlib.suppress(*BAD_JSON):
        found = msgspec.json.decode(failure.body)
        if isinstance(found, dict) and isinstance(found.get("error"), dict):
            return msgspec.json.encode(found)
    text = failure.body.decode("utf-8", "replace") or f"status {failure.status}"
    return msgspec.json.encode(WorkerError(text, code="bad_answer").record().body())


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
