"""One /generate request while it runs: its sequences at the ranks, its answers growing in the front."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import Receive

from common.errors import AbortedError, ServingError, from_record
from node.answers import Answer
from node.messages import Failure
from node.rank_client import Mailbox, RankClient
from node.requests import GenerateRequest
from node.tokenizer import Tokenizer
from node.trace import RequestTrace

log = logging.getLogger(__name__)


class Exchange:
    """Submitted by `start`, read with `advance` until `is_finished`, all inside `while_connected`.

    One failed sequence fails the request: the others are aborted on the way out.
    """

    def __init__(self, client: RankClient, tokenizer: Tokenizer, request: GenerateRequest) -> None:
        self._client = client
        self._request = request
        self._mailbox = Mailbox()
        self._answers = {
            submit.rid: Answer(submit, tokenizer, return_text=request.return_text, resume=request.resume)
            for submit in request.submits
        }
        self._places = {submit.rid: i for i, submit in enumerate(request.submits)}
        self._unfinished = set(self._answers)
        self._trace: RequestTrace | None = None

    @property
    def is_finished(self) -> bool:
        return not self._unfinished

    async def start(self) -> None:
        """Submit all sequences. Raises RequestError (rid or room in use) or WorkerError (rank dead or silent)."""
        request = self._request
        await self._client.let_end(request.submits)
        ranks = self._client.submit(request.submits, self._mailbox, groups=request.groups, rank=request.dp_rank)
        for answer, rank in zip(self._answers.values(), ranks, strict=True):
            answer.dp_rank = rank
        self._trace = self._client.begin_trace(request.submits)

    async def advance(self) -> list[str]:
        """Wait for news; the rids that have any. Raises the error of a sequence that failed, or that of `abandon`."""
        items = await self._mailbox.take()
        for item in items:
            if isinstance(item, Failure):
                self._unfinished.discard(item.rid)
                raise self._noted(from_record(item.error))
            self._answers[item.rid].feed(item)
            if self._trace is not None:
                self._trace.on_update(item)
            if item.finish is not None:
                self._unfinished.discard(item.rid)
                log.debug("%s has ended: %s", item.rid, item.finish.type)
        return list(dict.fromkeys(item.rid for item in items))

    async def result(self) -> dict[str, Any] | list[dict[str, Any]]:
        """Wait for the end; the body of the JSON answer."""
        while not self.is_finished:
            await self.advance()
        objects = [answer.object() for answer in self._answers.values()]
        return objects if self._request.is_list else objects[0]

    def due_objects(self, rids: list[str]) -> list[dict[str, Any]]:
        """The stream objects to send now for these sequences; in a list answer each has its `index`."""
        objects = []
        for rid in rids:
            if self._answers[rid].take_due():
                value = self._answers[rid].object()
                if self._request.is_list:
                    value["index"] = self._places[rid]
                objects.append(value)
        return objects

    def abandon(self, error: ServingError) -> None:
        """End what still runs, once; a reader that waits gets the error."""
        if not self._mailbox.is_closed:
            self._client.abort(self._unfinished, error.message, of=self._mailbox)
            self._mailbox.close(error)
            self._end_trace(error)

    def _noted(self, error: ServingError) -> ServingError:
        if self._trace is not None:
            self._trace.on_error(error)
        return error

    def _end_trace(self, error: ServingError) -> None:
        if self._trace is not None:
            if self._unfinished:
                self._trace.on_error(error)
            self._trace.end()

    @asynccontextmanager
    async def while_connected(self, receive: Receive) -> AsyncIterator[None]:
        """Abandon the request as soon as its client disconnects, or when the block is left before its end."""
        watcher = asyncio.create_task(self._watch(receive))
        try:
            yield
        finally:
            watcher.cancel()
            self.abandon(AbortedError("the request has ended"))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.abandon(AbortedError("the client has gone", code="client_disconnected"))
