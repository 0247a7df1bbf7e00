"""A request's life: claim ids and rooms, open both legs at the same time, answer from decode, end both on any failure.

    claimed ──► legs open ──► decode answers ──► answered ──► prefill leg read to its end ──► released
                    └── a leg fails, or the client leaves ──► both ended, workers told ──► released

Nothing is retried: the client gets the first failure as the worker put it. Ids are released when the workers have
answered the aborts, so that a late abort cannot hit the next request of the same id; that one waits for it meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

import msgspec
from starlette.types import Receive, Send

from common.errors import AbortedError, WorkerError
from router.client import Answer, Network
from router.events import WholeEvents, split_events
from router.in_flight import InFlight
from router.legs import Answered, Leg, LegFailed
from router.logprobs import PromptLogprobs
from router.request import GenerateRequest
from router.workers import Worker, Workers

_LINGER_S = 5.0
_STOP_S = 1.0
_RELEASE_WAIT_S = 5.0
_NOTICE_S = 0.1
_MAX_HEADER_CHARS = 256
_DONE = b"data: [DONE]\n\n"


class Dispatcher:
    """Owns what is in flight and the work that outlives a client: late prefill answers and aborts."""

    def __init__(self, workers: Workers, network: Network) -> None:
        self.workers = workers
        self.network = network
        self.in_flight = InFlight()
        self._exchanges: set[Exchange] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._ending: dict[str, asyncio.Task[None]] = {}

    async def generate(self, request: GenerateRequest, receive: Receive, send: Send) -> None:
        """Serve one request to its end. Raises ServingError while the client has been sent nothing."""
        await self._let_end(request.rids)
        pair = self.workers.pick()
        rooms = self.in_flight.claim(request.rids, request.num_sequences)
        prefill_body, decode_body = request.leg_bodies(pair.prefill, rooms)
        prefill = Leg(pair.prefill, prefill_body, self.workers, self.network)
        decode = Leg(pair.decode, decode_body, self.workers, self.network)
        exchange = Exchange(request, prefill, decode, Client(receive, send))
        self._exchanges.add(exchange)
        try:
            await exchange.run()
        finally:
            task = self._in_background(self._release(exchange, request, rooms))
            self._ending.update(dict.fromkeys(request.rids, task))

    async def _let_end(self, rids: tuple[str, ...]) -> None:
        """Wait for requests of these ids that have their answer, or whose client has left; not for long."""
        if any(rid in self.in_flight.rids and rid not in self._ending for rid in rids):
            await asyncio.sleep(_NOTICE_S)  # a client that has just left may not have been noticed yet
        ending = {self._ending[rid] for rid in rids if rid in self._ending}
        if ending:
            await asyncio.wait(ending, timeout=_RELEASE_WAIT_S)

    async def _release(self, exchange: Exchange, request: GenerateRequest, rooms: list[int]) -> None:
        try:
            await exchange.ended()
        finally:
            self._exchanges.discard(exchange)
            self.in_flight.release(request.rids, rooms)
            for rid in request.rids:
                self._ending.pop(rid, None)

    def give_up(self, worker: Worker, error: WorkerError) -> None:
        """The worker does not answer: every request with an open leg there fails with this error."""
        for exchange in self._exchanges:
            exchange.give_up(worker, error)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def stop(self) -> None:
        """End every leg, tell the workers, and let what runs in the background end, but not for long."""
        for exchange in self._exchanges:
            exchange.end_legs()
        if self._background:
            await asyncio.wait(set(self._background), timeout=_STOP_S)
        await _cancel(set(self._background))


class Client:
    """The asking side of one exchange. started: the answer's head has gone out, so its status is fixed."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.started = False

    async def start(self, status: int, content_type: str, rid: str, length: int | None = None) -> None:
        headers = [(b"content-type", content_type.encode("latin-1"))]
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        else:
            headers.append((b"cache-control", b"no-cache"))
        if len(rid) <= _MAX_HEADER_CHARS and rid.isascii() and rid.isprintable():
            headers.append((b"x-request-id", rid.encode("ascii")))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        self.started = True

    async def write(self, body: bytes, *, more: bool) -> None:
        """Waits while the client is behind."""
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def gone(self) -> None:
        """Returns when the client has closed its connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


class Exchange:
    """One request with its two legs and its client. The legs open as soon as it is made."""

    def __init__(self, request: GenerateRequest, prefill: Leg, decode: Leg, client: Client) -> None:
        self._request = request
        self._legs = (prefill, decode)
        self._client = client
        self._given_up: asyncio.Future[LegFailed] = asyncio.get_running_loop().create_future()
        self._aborts: list[asyncio.Task[None]] = []
        self._prefill = asyncio.create_task(prefill.finish())
        self._answer = asyncio.create_task(self._stream(decode) if request.stream else self._json(decode))

    async def run(self) -> None:
        """Until the client has an answer or is gone, whatever happens; the legs may end a little later (`ended`)."""
        gone = asyncio.create_task(self._client.gone())
        try:
            await self._supervise(gone)
        except LegFailed as failure:
            self.end_legs()
            await self._tell(failure)
        except WorkerError as error:
            self.end_legs()
            await self._tell(LegFailed.of(error))
        except AbortedError:
            self.end_legs()
        except asyncio.CancelledError:
            self.end_legs()
            raise
        finally:
            gone.cancel()

    async def ended(self) -> None:
        """Returns when neither leg runs and the workers have answered the aborts. The prefill leg may end a little
        after the answer; what is late is ended."""
        await asyncio.wait({self._answer, self._prefill}, timeout=_LINGER_S)
        if not (self._answer.done() and self._prefill.done()):
            self.end_legs()
        await asyncio.gather(self._answer, self._prefill, *self._aborts, return_exceptions=True)

    async def _supervise(self, gone: asyncio.Task[None]) -> None:
        """Until the client has its answer. Raises LegFailed, or AbortedError when the client is gone."""
        pending: set[asyncio.Future[Any]] = {self._answer, self._prefill, gone, self._given_up}
        while True:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if self._answer in done:
                return self._answer.result()
            if self._given_up in done:
                raise self._given_up.result()
            if self._prefill in done:
                self._prefill.result()
            if gone in done:
                raise AbortedError("the client is gone")

    # The answer

    async def _json(self, decode: Leg) -> None:
        answered = await decode.finish()
        body = answered.body
        if self._request.merges_logprobs:
            body = (await self._prompt_logprobs()).merge_answer(body)
        await self._client.start(200, answered.content_type, self._request.rids[0], len(body))
        await self._client.write(body, more=False)

    async def _stream(self, decode: Leg) -> None:
        """The client's head goes out with the first event, so that a failure before it keeps its status."""
        answer = await decode.start()
        prompt = await self._prompt_logprobs() if self._request.merges_logprobs else None
        events = WholeEvents()
        async for chunk in decode.chunks(answer):
            if whole := events.feed(chunk):
                await self._start_stream(answer)
                await self._client.write(_merged(prompt, whole) if prompt else whole, more=True)
        await self._start_stream(answer)
        await self._client.write(events.rest(), more=False)

    async def _start_stream(self, answer: Answer) -> None:
        if not self._client.started:
            await self._client.start(200, answer.content_type, self._request.rids[0])

    async def _prompt_logprobs(self) -> PromptLogprobs:
        answered: Answered = await asyncio.shield(self._prefill)
        return PromptLogprobs(answered.body)

    # The end

    def give_up(self, worker: Worker, error: WorkerError) -> None:
        """Fail when this worker, which does not answer, has an open leg. Does nothing the second time."""
        for leg in self._legs:
            if leg.worker is worker and leg.open and not self._given_up.done():
                self._given_up.set_result(leg.lost(error))

    async def _tell(self, failure: LegFailed) -> None:
        if not self._client.started:
            await self._client.start(failure.status, failure.content_type, self._request.rids[0], len(failure.body))
            await self._client.write(failure.body, more=False)
            return
        await self._client.write(b"data: " + _error_object(failure) + b"\n\n" + _DONE, more=False)

    def end_legs(self) -> None:
        """Close the connections of what still runs, and tell the workers. Does nothing the second time."""
        self._answer.cancel()
        self._prefill.cancel()
        for leg in self._legs:
            if leg.open:
                leg.open = False
                self._aborts.append(asyncio.create_task(leg.abort(self._request.rids)))


def _merged(prompt: PromptLogprobs, whole: bytes) -> bytes:
    return b"".join(prompt.merge_event(event) + b"\n\n" for event in split_events(whole))


def _error_object(failure: LegFailed) -> bytes:
    """The failure as one line of JSON of our error shape, whatever the worker wrote."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        found = msgspec.json.decode(failure.body)
        if isinstance(found, dict) and isinstance(found.get("error"), dict):
            return msgspec.json.encode(found)
    text = failure.body.decode("utf-8", "replace") or f"status {failure.status}"
    return msgspec.json.encode(WorkerError(text, code="bad_answer").record().body())


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
