"""A control connection in use: its messages, its pulse, and who is at the other end."""

from __future__ import annotations

import time
from collections.abc import Callable

from transfer.channel import Channel
from transfer.messages import Hello, Message, Ping, Pong


class Link:
    """silent: nothing was heard for longer than the liveness time-out. A stopped peer may come back to life; the
    connection to a host that cannot be reached ends."""

    def __init__(self, channel: Channel, peer: Hello, outbound: Callable[[], frozenset[str]]) -> None:
        self.channel, self.peer = channel, peer
        self.silent = False
        self._outbound = outbound
        self._heard_s = self._pinged_s = time.monotonic()

    async def pump(self, handle: Callable[[Message], None]) -> None:
        """Hand every message but pings to `handle`, until the connection ends (raises WorkerError or TransferError)."""
        await self.channel.pump(lambda message: self._hear(message, handle))

    def _hear(self, message: Message, handle: Callable[[Message], None]) -> None:
        self._heard_s = time.monotonic()
        self.silent = False
        if isinstance(message, Ping):
            self.channel.send(Pong(lanes=tuple(self._outbound()) if message.lanes else None))
        else:
            handle(message)

    def beat(self, liveness_timeout_s: float) -> bool:
        """Ping when due. True when the peer has just been found silent."""
        now = time.monotonic()
        if now - self._pinged_s > liveness_timeout_s / 4:
            self._pinged_s = now
            self.channel.send(Ping())
        newly = not self.silent and now - self._heard_s > liveness_timeout_s
        if newly:
            self.silent = True
            self.channel.break_unless_acknowledged(liveness_timeout_s)
        return newly


def tick_s(*timeouts_s: float) -> float:
    """How often to look at the clocks so that none of the time-outs is found much too late."""
    return min(0.25, max(0.01, min(timeouts_s) / 10))
