"""One try of a request: two legs in rooms of their own, opened at the same time, ended together.

legs open ──► decode answers ──► answered ──► prefill leg read to its end
    └── a leg fails, or the client leaves ──► both ended, workers told
"""

from __future__ import annotations

import asyncio
from typing import Any

from common.errors import AbortedError, ServingError, WorkerError
from router.client import LOST, Answer
from router.events import WholeEvents, split_events
from router.leg_outcome import LegEnd
from router.legs import Answered, Leg, LegFailed
from router.logprobs import Merger, merger
from router.record import read_finals
from router.reply import DONE_EVENT, Reply, Sent
from router.request import GenerateRequest

_LINGER_S = 5.0
_ERROR_EVENT = b'data: {"error"'
"""How an error in a stream begins. It cannot lie inside a JSON string, where quotes are escaped."""


class Attempt:
    """The legs open as soon as it is made. reply, sent: of the whole request, whose earlier tries they may know of."""

    def __init__(self, request: GenerateRequest, prefill: Leg, decode: Leg, reply: Reply, sent: Sent) -> None:
        self._request = request
        self._prefill_leg, self._decode_leg = prefill, decode
        prefill.partner, decode.partner = decode, prefill
        self._reply = reply
        self._sent = sent
        self._flows = False  # decode's answer, in this try
        self._failed: asyncio.Future[LegFailed] = asyncio.get_running_loop().create_future()
        self._aborts: list[asyncio.Task[bool]] = []
        self._prefill = asyncio.create_task(prefill.finish())
        self._answer = asyncio.create_task(self._stream() if request.stream else self._json())

    async def run(self, gone: asyncio.Future[None]) -> None:
        """Until the client has its answer. Raises LegFailed, or AbortedError when the client is gone.

        Once decode's answer flows, the prefill leg is of no interest: decode has the whole state.
        """
        pending: set[asyncio.Future[Any]] = {self._answer, self._prefill, gone, self._failed}
        while True:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if self._answer in done and not self._answer.cancelled():
                return self._answer.result()
            if self._failed in done:
                raise self._failed.result()
            if self._prefill in done and not self._flows:
                self._prefill.result()
            if gone in done:
                raise AbortedError("the client is gone")

    # The answer

    async def _json(self) -> None:
        answered = await self._decode_leg.finish()
        body = answered.body
        try:
            if self._request.merges_logprobs:
                body = (await self._prompt_logprobs()).merge_answer(body)
        except ServingError as error:
            raise LegFailed.of(error) from error
        self._sent.last = answered.body
        await self._reply.start(200, answered.content_type, len(body))
        await self._reply.write(body, more=False)

    async def _stream(self) -> None:
        """The client's head goes out with the first event, so that a failure before it keeps its status."""
        leg, events = self._decode_leg, WholeEvents()
        answer: Answer | None = None
        try:
            answer = await leg.start()
            if self._request.merges_logprobs and self._sent.prompt is None:
                self._sent.prompt = await self._prompt_logprobs()
            while chunk := await leg.next(answer):
                if whole := events.feed(chunk):
                    await self._pass_on(answer, whole)
            if not self._sent.is_done:
                raise leg.lost(WorkerError("its stream ended before its end", code=LOST, status=502))
            leg.end(LegEnd.OK)
            await self._reply.write(events.rest(), more=False)
        except ServingError as error:
            raise LegFailed.of(error) from error
        except LegFailed:
            if not self._sent.is_complete(self._request):
                raise
            await self._reply.write(b"" if self._sent.is_done else DONE_EVENT, more=False)
        finally:
            if answer is not None:
                answer.close()

    async def _pass_on(self, answer: Answer, whole: bytes) -> None:
        """Give whole events to the client, but no error: raises it as LegFailed."""
        cut = whole.find(_ERROR_EVENT)
        error, whole = (b"", whole) if cut < 0 else (whole[cut:], whole[:cut])
        if whole:
            await self._reply.start(200, answer.content_type)
            await self._reply.write(_merged(self._sent.prompt, whole), more=True)
            if self._request.keeps_ids:
                self._sent.keep_ids(whole)
            self._sent.before, self._sent.last, self._flows = self._sent.last, whole, True
            if self._request.num_sequences > 1:
                self._sent.finals += read_finals(whole)
        if error:
            data = split_events(error)[0].removeprefix(b"data:").strip()
            raise self._decode_leg.refused(None, "application/json", data)

    async def _prompt_logprobs(self) -> Merger:
        answered: Answered = await asyncio.shield(self._prefill)
        return merger(self._request.path, answered.body)

    # The end

    def fail(self, failure: LegFailed) -> None:
        """Does nothing the second time."""
        if not self._failed.done():
            self._failed.set_result(failure)

    def open_leg(self, worker: object) -> Leg | None:
        """The leg at this worker that the answer still depends on."""
        legs = (self._decode_leg,) if self._flows else (self._prefill_leg, self._decode_leg)
        return next((leg for leg in legs if leg.worker is worker and leg.open), None)

    def end_legs(self, *, tell_workers: bool = True) -> None:
        """Close the connections of what still runs, which workers notice, and tell them, by id. Does nothing the second
        time."""
        self._answer.cancel()
        self._prefill.cancel()
        for leg in (self._prefill_leg, self._decode_leg):
            leg.end(LegEnd.ABORTED)
            if leg.open:
                leg.open = False
                if tell_workers:
                    self._aborts.append(asyncio.create_task(leg.abort(self._request.ids_at(leg.worker))))

    async def ended(self) -> bool:
        """Returns when neither leg runs and the workers have answered the aborts. The prefill leg may end a little
        after the answer; what is late is ended. False when an abort was not confirmed: it may still run there."""
        await asyncio.wait({self._answer, self._prefill}, timeout=_LINGER_S)
        if not (self._answer.done() and self._prefill.done()):
            self.end_legs()
        said = await asyncio.gather(self._answer, self._prefill, *self._aborts, return_exceptions=True)
        self._prefill_leg.end(LegEnd.ABORTED)
        self._decode_leg.end(LegEnd.ABORTED)
        return all(ended is True for ended in said[2:])


def _merged(prompt: Merger | None, whole: bytes) -> bytes:
    if prompt is None:
        return whole
    return b"\n\n".join([*(prompt.merge_event(event) for event in split_events(whole)), b""])
