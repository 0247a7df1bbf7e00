"""How many requests run at once, who waits for a place, and how often one key may ask.

Places are given out in turn among the callers that wait, and in order of arrival among the requests of one caller.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from common.config import RouterConfig
from common.errors import AbortedError, CapacityError, ServingError

_RETRY_S = 1.0
_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """On which a request is served. caller: the name of its key, None without keys. is_admin: it may administer the
    router here; told where that matters. deadline_s: on the loop's clock; limit: what it comes from, for its error."""

    caller: str | None = None
    is_admin: bool = False
    deadline_s: float | None = None
    limit: str = ""


class Turn:
    """One request's claim to a place. gone: returns when its client has left."""

    def __init__(self, caller: str | None, gone: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.caller, self.gone = caller, gone
        self.place: asyncio.Future[None] | None = None  # once it has to wait

    def refuse(self, error: ServingError) -> None:
        """Whoever waits gets this error; nothing happens once there is a place."""
        if self.place is not None and not self.place.done():
            self.place.set_exception(error)


class Admission:
    """Of one router. num_running, num_waiting: now. rejected: since the start, by code."""

    def __init__(self, config: RouterConfig) -> None:
        self._limit = config.max_concurrent_requests
        self._queue_size = config.queue_size
        self._timeout_s = config.queue_timeout_s
        self._lines: OrderedDict[str | None, deque[Turn]] = OrderedDict()
        self._requests = _buckets(config.requests_per_minute)
        self._tokens = _buckets(config.tokens_per_minute)
        self.num_running = 0
        self.rejected: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._lines.values()))

    @asynccontextmanager
    async def place(self, turn: Turn) -> AsyncIterator[None]:
        """Hold a place, once there is one.

        Raises CapacityError (429) when too many wait or it took too long, AbortedError when the client has left, and
        what `turn` is refused with.
        """
        if self._is_free:
            self.num_running += 1
        else:
            await self._wait(turn)
        try:
            yield
        finally:
            self.num_running -= 1
            self._give_out()

    @property
    def _is_free(self) -> bool:
        return self._limit is None or (self.num_running < self._limit and not self._lines)

    async def _wait(self, turn: Turn) -> None:
        if self.num_waiting >= self._queue_size and not self._make_room(turn.caller):
            raise self._full()
        turn.place = asyncio.get_running_loop().create_future()
        self._lines.setdefault(turn.caller, deque()).append(turn)
        gone = asyncio.create_task(turn.gone())
        try:
            await asyncio.wait({turn.place, gone}, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not turn.place.done() and gone.done():
                raise AbortedError("the client left while its request waited", code="client_disconnected")
            if not turn.place.done():
                raise self._refusal("queue_timeout", f"no place within {self._timeout_s:g} s")
            turn.place.result()
        except (ServingError, asyncio.CancelledError):
            self._leave(turn, turn.place)
            raise
        finally:
            gone.cancel()

    def _make_room(self, caller: str | None) -> bool:
        """Whoever fills the line keeps nobody else out: the newest request of the longest line goes, if that line is
        longer even than this caller's will be."""
        longest = max(self._lines.values(), key=len, default=None)
        if longest is None or len(longest) <= len(self._lines.get(caller, ())) + 1:
            return False
        longest.pop().refuse(self._full())
        return True

    def _full(self) -> CapacityError:
        return self._refusal("queue_full", f"{self.num_running} requests run and {self.num_waiting} wait")

    def _leave(self, turn: Turn, place: asyncio.Future[None]) -> None:
        """Whoever waits no more; a place that it got meanwhile goes to the next."""
        if place.done() and place.exception() is None:
            self.num_running -= 1
            self._give_out()
            return
        line = self._lines.get(turn.caller, deque())
        if turn in line:
            line.remove(turn)
            if not line:
                del self._lines[turn.caller]

    def _give_out(self) -> None:
        while self._lines and (self._limit is None or self.num_running < self._limit):
            caller, line = self._lines.popitem(last=False)
            place = line.popleft().place
            if line:
                self._lines[caller] = line  # behind the other callers
            if place is not None and not place.done():
                self.num_running += 1
                place.set_result(None)

    def refuse_waiting(self, error: ServingError) -> None:
        """Nobody gets a place any more."""
        for line in self._lines.values():
            for turn in line:
                turn.refuse(error)

    def check_rate(self, caller: str) -> None:
        """Count a request of this key. Raises CapacityError (429) when there are too many, or too many tokens."""
        for buckets, what in ((self._requests, "requests"), (self._tokens, "tokens")):
            if buckets is not None and (wait_s := buckets.wait_s(caller)) > 0:
                self.rejected["rate_limited"] += 1
                message = f"too many {what} a minute with this key"
                raise CapacityError(message, code="rate_limited", status=429, retry_after_s=wait_s)
        if self._requests is not None:
            self._requests.spend(caller, 1)

    def on_tokens(self, caller: str | None, count: int) -> None:
        """So many were read and made for this caller."""
        if self._tokens is not None and caller is not None:
            self._tokens.spend(caller, count)

    def _refusal(self, code: str, why: str) -> CapacityError:
        self.rejected[code] += 1
        return CapacityError(f"the router is full: {why}", code=code, status=429, retry_after_s=_RETRY_S)


@contextmanager
def deadline(terms: Terms, stop: Callable[[ServingError], None]) -> Iterator[None]:
    """Call `stop` with the error of a request that is late when its deadline passes within the block."""
    if terms.deadline_s is None:
        yield
        return
    message = f"not answered within the time that it was given ({terms.limit})"
    error = AbortedError(message, code="deadline_exceeded", status=504)
    timer = asyncio.get_running_loop().call_at(terms.deadline_s, stop, error)
    try:
        yield
    finally:
        timer.cancel()


def _buckets(per_minute: int | None) -> Buckets | None:
    return None if per_minute is None else Buckets(per_minute)


class Buckets:
    """One for each name: it holds so much as may be spent in a minute, and fills steadily. More can be spent than is
    there: that is owed. clock: seconds, never back."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._size = float(per_minute)
        self._clock = clock
        self._levels: dict[str, tuple[float, float]] = {}  # what was in it, and when; names are those of keys

    def wait_s(self, name: str) -> float:
        """Until one is there; 0: it is."""
        return max(0.0, (1 - self._level(name)) * _MINUTE_S / self._size)

    def spend(self, name: str, amount: int) -> None:
        self._levels[name] = self._level(name) - amount, self._clock()

    def _level(self, name: str) -> float:
        now = self._clock()
        level, then = self._levels.get(name, (self._size, now))
        return min(self._size, level + (now - then) * self._size / _MINUTE_S)
