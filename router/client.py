"""What the router needs of a network to its workers: a seam of two methods, kept by router/http_client.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

REFUSED = "worker_unavailable"
"""Code of the error when nobody listens."""
UNREACHABLE = "worker_unreachable"
"""Code of the error when no connection could be opened for another reason. In both cases the request was not seen."""
REFUSED_KEY = "worker_refused_key"
"""Code of the error when the worker does not take the router's key. It has not looked at the request."""
LOST = "worker_lost"
"""Code of the error when the connection broke. The request may have been seen."""


class Answer(Protocol):
    """A worker's answer whose head has arrived. Read it once, by either verb, or close it.

    Both verbs raise WorkerError when the connection breaks or stays silent for too long.
    """

    status: int
    content_type: str

    async def read(self) -> bytes:
        """The whole body."""

    async def next(self) -> bytes:
        """What has arrived of the body since, at least a byte; empty at its end. Nothing more is read from the worker
        than the consumer takes, but for one buffer."""

    def close(self) -> None:
        """Give up what was not read: closes the connection. Does nothing after the body has ended."""


class Network(Protocol):
    """What the router needs of a network."""

    async def send(
        self,
        method: str,
        url: str,
        body: bytes | None = None,
        *,
        limit_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Open an exchange. limit_s: for all of it, the body included. headers: besides those of a JSON body, which are
        not to be named; they must be checked. Cancelling closes the connection.

        Raises WorkerError: code `worker_unavailable` or `worker_unreachable` (503) when no connection could be opened,
        `worker_lost` (502) when it broke, `worker_timeout` (504) when the worker stayed silent, and
        `worker_refused_key` (502) for a 401 or 403: what a worker says of the router's key is nothing for a client.
        """

    async def close(self) -> None:
        """Close every connection."""
