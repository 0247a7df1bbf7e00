"""One leg of a request: an exchange with one worker that ends in an answer or in `LegFailed`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec

from common.errors import ServingError, WorkerError
from router.client import Answer, Network
from router.workers import Worker, Workers

log = logging.getLogger("tandem.router")

ABORT_LIMIT_S = 2.0


class LegFailed(Exception):  # noqa: N818 - names a state of the leg; the answer in it is the worker's, not ours
    """What the client gets in place of an answer: status, content type and body."""

    def __init__(self, status: int, content_type: str, body: bytes) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.content_type = content_type
        self.body = body

    @classmethod
    def of(cls, error: ServingError) -> LegFailed:
        record = error.record()
        return cls(record.status, "application/json", msgspec.json.encode(record.body()))


@dataclass(slots=True)
class Leg:
    """open: the worker may still be at work for it, so an abort makes sense."""

    worker: Worker
    body: bytes
    workers: Workers
    network: Network
    open: bool = True

    async def start(self) -> Answer:
        """Post it; the head of a good answer. Raises LegFailed."""
        try:
            answer = await self.network.send("POST", f"{self.worker.url}/generate", self.body)
            if answer.status == 200:
                return answer
            body = await answer.read()
        except WorkerError as error:
            raise self.lost(error) from error
        self.open = False
        raise LegFailed(answer.status if 400 <= answer.status <= 599 else 502, answer.content_type, body)

    async def finish(self) -> Answered:
        """Post it and read all of a good answer. Raises LegFailed."""
        answer = await self.start()
        try:
            body = await answer.read()
        except WorkerError as error:
            raise self.lost(error) from error
        self.open = False
        return Answered(answer.content_type, body)

    async def chunks(self, answer: Answer) -> AsyncIterator[bytes]:
        """The body of a good answer as it arrives. Raises LegFailed. Leaves the connection closed or in the pool."""
        try:
            async for chunk in answer.chunks():
                yield chunk
            self.open = False
        except WorkerError as error:
            raise self.lost(error) from error
        finally:
            answer.close()

    def lost(self, error: WorkerError) -> LegFailed:
        """Report the worker; the error names its role, not its address, since clients see it."""
        self.workers.report(self.worker, error)
        role = self.worker.role.value
        log.warning("%s worker %s: %s", role, self.worker.url, error.message)
        message = f"{role} worker: {error.message}"
        return LegFailed.of(WorkerError(message, code=error.code, status=error.http_status))

    async def abort(self, rids: tuple[str, ...]) -> None:
        """Tell the worker to give up, also when it has not noticed that the connection is gone. Takes 2 s at most."""
        url = f"{self.worker.url}/abort_request"
        try:
            async with asyncio.timeout(ABORT_LIMIT_S):
                for rid in rids:
                    body = msgspec.json.encode({"rid": rid, "abort_all": False})
                    answer = await self.network.send("POST", url, body, limit_s=ABORT_LIMIT_S)
                    await answer.read()
        except (WorkerError, TimeoutError) as error:
            log.debug("abort at %s: %s", self.worker.url, error)


@dataclass(frozen=True, slots=True)
class Answered:
    content_type: str
    body: bytes
