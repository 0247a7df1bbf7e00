"""The front's side of the talk with its ranks: who runs where, and what comes back for whom.

    submit ──► PUSH ipc://DIR/to_rank{R} ──► rank R
    mailbox ◄── PULL ipc://DIR/from_ranks ◄── every rank

All methods are called by the event loop's thread. A sequence is running, its rid and its room taken, from `submit`
until its rank says that it ended: also one whose client has gone or was told that it failed.

A rank answers pings between two steps. One that neither answers nor computes (uses next to no processor time) for the
liveness time-out is silent: what it runs fails, and nothing is given to it until it answers again. So a long step is no
silence, however long. A rank that computes for ever is found by the silence of its sequences.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from common.errors import ErrorRecord, RequestError, ServingError, WorkerError, from_record
from node.messages import (
    Abort,
    Failure,
    FromRank,
    Ping,
    Pong,
    Query,
    Ready,
    Reply,
    Shutdown,
    StartFailed,
    Submit,
    ToRank,
    Update,
    Updates,
    from_rank_decoder,
    to_rank_encoder,
)
from node.meter import Meter
from node.processes import cpu_seconds
from node.rank_choice import RankChoice
from node.trace import RequestTrace

log = logging.getLogger(__name__)

MESSAGES_PER_WAKE = 64
MAX_WATCH_INTERVAL_S = 1.0
COMPUTING_SHARE = 0.1  # of one core: a rank that uses as much is in a step
ENDING_WAIT_S = 2.0
NOTICE_S = 0.1


class Mailbox:
    """What came for one HTTP request, for all of its sequences, in order of arrival. One reader."""

    def __init__(self) -> None:
        self._items: list[Update | Failure] = []
        self._closed: ServingError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_closed(self) -> bool:
        return self._closed is not None

    def put(self, item: Update | Failure) -> None:
        self._items.append(item)
        self._wake()

    def close(self, error: ServingError) -> None:
        """Nobody needs what still comes: the reader gets this error instead."""
        self._closed = error
        self._wake()

    async def take(self) -> list[Update | Failure]:
        """Everything that has come since the last call, at least one item. Raises the error given to `close`."""
        if not self._items and self._closed is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._closed is not None:
            raise self._closed
        items, self._items = self._items, []
        return items

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Running(msgspec.Struct, kw_only=True):
    """One sequence at a rank, since since_s; its request arrived at arrival_s. group: the rid that its client gave to
    several. heard_s: last word of the rank on it. token_s: when its last token came, 0 before the first. num_tokens: of
    its prompt and of its answer so far.

    ending: the rank was asked to end it. told: the mailbox has its failure already. ended: set when it runs no more.
    """

    rid: str
    group: str | None
    room: int | None
    rank: int
    mailbox: Mailbox
    since_s: float
    arrival_s: float
    heard_s: float
    num_tokens: int
    token_s: float = 0.0
    ending: bool = False
    told: bool = False
    ended: asyncio.Event = msgspec.field(default_factory=asyncio.Event)


class RankLink(msgspec.Struct, kw_only=True):
    """One rank as the front sees it. death: why it cannot be used until the process in its place is ready; silence: why
    it cannot be used now. ready: what it said last; of a dead one what it was. ready_s: since when the present process
    serves, None before. start_error: why the present process cannot serve.

    heard_s: when it last answered or computed. cpu_s: processor time that it had used when it was last looked at.
    """

    rank: int
    pid: int
    push: zmq.Socket[bytes]
    ready: Ready | None = None
    death: ServingError | None = None
    silence: ServingError | None = None
    ready_s: float | None = None
    start_error: ServingError | None = None
    heard_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def error(self) -> ServingError | None:
        return self.death or self.silence


class RankClient:
    """silence_timeout_s: a sequence whose rank says nothing about it for so long has failed. liveness_timeout_s: a
    rank that says nothing at all for so long is silent.

    by_room: a room belongs to rank number room % ranks, which is how decode finds it on a prefill node. Otherwise a
    sequence goes where its client wants it, or if nothing can run there or the client does not mind, see `RankChoice`.

    `start` begins to listen on ipc_dir; ranks are made known with `add_rank` and are usable after `wait_ready`.
    on_return: called when the process in the place of a dead rank is ready.
    """

    def __init__(
        self, ipc_dir: Path, *, silence_timeout_s: float, liveness_timeout_s: float, by_room: bool = False
    ) -> None:
        self._ipc_dir = ipc_dir
        self._by_room = by_room
        self._choice = RankChoice()
        self._silence_timeout_s = silence_timeout_s
        self._liveness_timeout_s = liveness_timeout_s
        self._watch_interval_s = min(MAX_WATCH_INTERVAL_S, liveness_timeout_s / 4)
        self._watched_s = 0.0
        self._context = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._pull.set_hwm(0)
        self._links: list[RankLink] = []
        self._running: dict[str, Running] = {}
        self._rooms: set[int] = set()
        self._load: Counter[int] = Counter()
        self._queries: dict[int, tuple[int, asyncio.Future[Reply]]] = {}
        self._tickets = itertools.count(1)
        self._started: asyncio.Future[None] | None = None
        self._watcher: asyncio.TimerHandle | None = None
        self._refusal: ServingError | None = None
        self._all_answered = asyncio.Event()
        self.meter = Meter()
        self.begin_trace: Callable[[list[Submit]], RequestTrace | None] = _no_trace
        self.on_return: Callable[[int, Ready], None] = _tell_nobody

    # -- life of the connection --------------------------------------------------------------------

    def start(self) -> None:
        """Bind and listen. Needs a running event loop."""
        self._loop = asyncio.get_running_loop()
        self._pull.bind(f"ipc://{self._ipc_dir}/from_ranks")
        self._fd = int(self._pull.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._receive)
        self._started = self._loop.create_future()
        self._watch()

    def add_rank(self, rank: int, pid: int) -> None:
        assert rank == len(self._links), f"rank {rank} after {len(self._links)} others"
        self._links.append(RankLink(rank=rank, pid=pid, push=self._connect(rank)))

    def replace_rank(self, rank: int, pid: int) -> None:
        """Another process is started in the place of a dead one. It is usable once it is ready. Raises WorkerError when
        there are no descriptors left."""
        link = self._links[rank]
        assert link.death is not None, f"rank {rank} lives"
        dead, link.push = link.push, self._connect(rank)
        dead.close(linger=0)  # and what the dead one has not read
        link.pid, link.cpu_s, link.ready_s, link.start_error = pid, 0.0, None, None

    def _connect(self, rank: int) -> zmq.Socket[bytes]:
        try:
            push = self._context.socket(zmq.PUSH)
        except zmq.ZMQError as error:
            raise WorkerError(f"rank {rank} cannot be talked to: {error}", code="rank_died") from error
        push.set_hwm(0)
        push.connect(f"ipc://{self._ipc_dir}/to_rank{rank}")
        return push

    async def wait_ready(self) -> list[Ready]:
        """Every rank's `Ready`, by rank. Raises the error of the first one that cannot start or dies."""
        assert self._started is not None, "start() comes first"
        await self._started
        return self.readies()

    def shut_down_ranks(self) -> None:
        for link in self._links:
            if link.death is None:
                self._send(link.rank, Shutdown())

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        if self._started is not None and self._started.done() and not self._started.cancelled():
            self._started.exception()  # seen, also when nobody waited for it
        self._loop.remove_reader(self._fd)
        self._context.destroy(linger=0)

    # -- state -------------------------------------------------------------------------------------

    def readies(self) -> list[Ready]:
        return [link.ready for link in self._links if link.ready is not None]

    def errors(self) -> list[ServingError]:
        """One for each rank that cannot be used, now or ever."""
        return [link.error for link in self._links if link.error is not None]

    def usable(self) -> list[int]:
        """The ranks that take sequences."""
        return [link.rank for link in self._links if link.error is None]

    def living(self) -> list[int]:
        """The ranks that are not dead: usable ones, and silent ones."""
        return [link.rank for link in self._links if link.death is None]

    def check_usable(self) -> None:
        """Raises the first rank's error when no rank can be used."""
        if not self.usable():
            raise self._links[0].error or WorkerError("the node has no ranks")

    def ready_s(self, rank: int) -> float | None:
        """Since when, monotonic, its present process serves or served; None: it has not been ready."""
        return self._links[rank].ready_s

    @property
    def all_dead(self) -> bool:
        return all(link.death is not None for link in self._links)

    @property
    def num_ranks(self) -> int:
        return len(self._links)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_unanswered(self) -> int:
        """Sequences whose requests still wait for something: without those that were told of their failure already."""
        return sum(not entry.told for entry in self._running.values())

    def listing(self, limit: int) -> list[dict[str, Any]]:
        """The first `limit` sequences, in order of arrival, for /debug/state."""
        now = time.monotonic()
        return [
            {
                "rid": entry.rid,
                "group": entry.group,
                "room": entry.room,
                "rank": entry.rank,
                "age_s": round(now - entry.since_s, 3),
                "heard_s": round(now - entry.heard_s, 3),
                "ending": entry.ending,
                "told": entry.told,
            }
            for entry in itertools.islice(self._running.values(), limit)
        ]

    def loads(self) -> list[dict[str, int]]:
        """What each rank has in flight, as SGLang's /get_load names it. Waiting and pending: before the first token.
        alive: whether it can be used."""
        names = ("num_reqs", "num_waiting_reqs", "num_tokens", "num_pending_tokens")
        loads: list[dict[str, int]] = [
            {"dp_rank": link.rank, "alive": link.error is None} | dict.fromkeys(names, 0) for link in self._links
        ]
        for entry in self._running.values():
            load = loads[entry.rank]
            load["num_reqs"] += 1
            load["num_tokens"] += entry.num_tokens
            if entry.token_s == 0:
                load["num_waiting_reqs"] += 1
                load["num_pending_tokens"] += entry.num_tokens
        return loads

    @property
    def is_draining(self) -> bool:
        return self._refusal is not None

    # -- draining ----------------------------------------------------------------------------------

    def refuse(self, error: ServingError) -> None:
        """From now on nothing is submitted; who tries gets this error."""
        self._refusal = error
        self._note_answered()

    def check_open(self) -> None:
        """Raises the error given to `refuse`."""
        if self._refusal is not None:
            raise self._refusal

    async def wait_answered(self) -> None:
        """After `refuse`: until no request waits for anything."""
        await self._all_answered.wait()

    def _note_answered(self) -> None:
        if self._refusal is not None and self.num_unanswered == 0:
            self._all_answered.set()

    # -- sequences ---------------------------------------------------------------------------------

    async def let_end(self, submits: list[Submit]) -> None:
        """Wait, for 2 s at most, for sequences of these ids that their rank was asked to end: a client that has left
        may send the same request again at once."""
        running = [self._running[submit.rid] for submit in submits if submit.rid in self._running]
        if not all(entry.ending for entry in running):
            await asyncio.sleep(NOTICE_S)  # a client that has just left may not have been noticed yet
        try:
            async with asyncio.timeout(ENDING_WAIT_S):
                for entry in running:
                    if entry.ending:
                        await entry.ended.wait()
        except TimeoutError:
            return  # `submit` says which one is still in use

    def submit(
        self, submits: list[Submit], mailbox: Mailbox, *, groups: list[str | None], rank: int | None
    ) -> list[int]:
        """Start all sequences of a request, or none of them. The rank of each.

        groups: one a sequence. rank: where the client wants them. Raises RequestError for a rid or a room that is in
        use and WorkerError when no rank can be used, or not that of the room, or when the node drains.
        """
        self.check_open()
        for submit in submits:
            self._check_free(submit)
        self.check_usable()
        ranks = self._choose_ranks(submits, rank)
        for chosen in ranks:
            if (error := self._links[chosen].error) is not None:
                raise error
        now = time.monotonic()
        for submit, group, chosen in zip(submits, groups, ranks, strict=True):
            self._add(submit, mailbox, group, chosen, now)
            self._send(chosen, submit)
        return ranks

    def abort(self, rids: Iterable[str], message: str, *, of: Mailbox | None = None) -> None:
        """Ask the ranks to end these sequences. What is not running is ignored, and what is not of this mailbox."""
        for rid in rids:
            entry = self._running.get(rid)
            if entry is not None and of in (None, entry.mailbox):
                entry.ending = True
                self._send(entry.rank, Abort(rid=rid, message=message))

    def abort_all(self, message: str) -> None:
        self.abort(list(self._running), message)

    async def wait_ended(self, rids: Iterable[str], limit_s: float) -> bool:
        """Wait until none of these sequences runs any more. False when one does after limit_s seconds."""
        running = [self._running[rid] for rid in rids if rid in self._running]
        try:
            async with asyncio.timeout(limit_s):
                for entry in running:
                    await entry.ended.wait()
        except TimeoutError:
            return False
        return True

    def rids_of(self, named: Collection[str]) -> list[str]:
        """The running sequences that a client means by these rids: their own, or those of a group it named."""
        wanted = frozenset(named)
        return [entry.rid for entry in self._running.values() if entry.rid in wanted or entry.group in wanted]

    def _check_free(self, submit: Submit) -> None:
        if submit.rid in self._running:
            raise RequestError(f"rid: {submit.rid} is in use by a running request", code="rid_in_use", param="rid")
        if submit.room is not None and submit.room.room in self._rooms:
            raise RequestError(
                f"bootstrap_room: {submit.room.room} is in use by a running request",
                code="room_in_use",
                param="bootstrap_room",
            )

    def _choose_ranks(self, submits: list[Submit], rank: int | None) -> list[int]:
        """Of each sequence; those of one request count for the next of it."""
        loads, ranks = {usable: self._load[usable] for usable in self.usable()}, []
        for submit in submits:
            ranks.append(self._choose(submit, rank, loads))
            loads[ranks[-1]] = loads.get(ranks[-1], 0) + 1
        return ranks

    def _choose(self, submit: Submit, rank: int | None, loads: dict[int, int]) -> int:
        if len(self._links) == 1:
            return 0
        if self._by_room and submit.room is not None:
            return submit.room.room % len(self._links)
        if rank in loads:
            return rank
        return self._choice.choose(submit.token_ids, submit.extra_key, loads)

    def _add(self, submit: Submit, mailbox: Mailbox, group: str | None, rank: int, now: float) -> None:
        room = None if submit.room is None else submit.room.room
        self._running[submit.rid] = Running(
            rid=submit.rid,
            group=group,
            room=room,
            rank=rank,
            mailbox=mailbox,
            since_s=now,
            arrival_s=submit.arrival_s,
            heard_s=now,
            num_tokens=len(submit.token_ids) + len(submit.output_ids),
        )
        self._load[rank] += 1
        if room is not None:
            self._rooms.add(room)

    def _forget(self, entry: Running) -> None:
        del self._running[entry.rid]
        self._load[entry.rank] -= 1
        if entry.room is not None:
            self._rooms.discard(entry.room)
        entry.ended.set()
        self._note_answered()

    # -- questions ---------------------------------------------------------------------------------

    async def query(self, rank: int, what: str, *, timeout_s: float, limit: int = 0) -> dict[str, Any]:
        """Ask one rank. Raises its error, or WorkerError when it is dead, or silent (also for timeout_s seconds)."""
        if (error := self._links[rank].error) is not None:
            raise error
        ticket = next(self._tickets)
        future: asyncio.Future[Reply] = self._loop.create_future()
        self._queries[ticket] = (rank, future)
        self._send(rank, Query(ticket=ticket, what=what, limit=limit))
        try:
            reply = await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise WorkerError(f"rank {rank} gave no answer in {timeout_s:g} s", code="rank_silent") from None
        finally:
            del self._queries[ticket]
        if reply.error is not None:
            raise from_record(reply.error)
        return reply.payload

    # -- what comes from the ranks -----------------------------------------------------------------

    def _send(self, rank: int, message: ToRank) -> None:
        self._links[rank].push.send(to_rank_encoder.encode(message), zmq.NOBLOCK)

    def _receive(self) -> None:
        """Read what is there. The socket's descriptor tells of a change only once, so stop only when it is empty."""
        for _ in range(MESSAGES_PER_WAKE):
            try:
                frame = self._pull.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(from_rank_decoder.decode(frame))
        self._loop.call_soon(self._receive_more)

    def _receive_more(self) -> None:
        if not self._pull.closed:
            self._receive()

    def _handle(self, message: FromRank) -> None:
        match message:
            case Updates(items=items):
                now = time.monotonic()
                for update in items:
                    self._deliver(update, now, is_last=update.finish is not None)
            case Failure():
                self._deliver(message, time.monotonic(), is_last=True)
            case Reply(ticket=ticket):
                _, future = self._queries.get(ticket, (0, None))
                if future is not None and not future.done():
                    future.set_result(message)
            case Pong(ticket=rank):
                self._on_pong(self._links[rank])
            case Ready():
                self._on_ready(message)
            case StartFailed(pid=pid, error=error):
                self._on_start_failed(pid, from_record(error))

    def _deliver(self, item: Update | Failure, now: float, *, is_last: bool) -> None:
        entry = self._running.get(item.rid)
        if entry is None:  # the rank made it before it read our abort
            return
        entry.heard_s = now
        if isinstance(item, Update):
            entry.num_tokens += len(item.token_ids)
            self.meter.on_update(entry, item, now)
        elif not entry.told:
            self.meter.on_failure(entry, item)
        if is_last:
            self._forget(entry)
        if not entry.told:
            entry.mailbox.put(item)

    def _on_ready(self, ready: Ready) -> None:
        link = next((link for link in self._links if link.pid == ready.pid), None)
        if link is None:
            self._fail_start(WorkerError(f"a process that is none of our ranks is ready: pid {ready.pid}"))
            return
        if link.ready is not None and link.ready.fingerprint != ready.fingerprint:
            message = (
                f"it came back with another state layout, {ready.fingerprint} in place of {link.ready.fingerprint}"
            )
            link.start_error = WorkerError(message, code="layout_mismatch")
            self._send(link.rank, Shutdown())
            return
        was_dead, link.death, link.silence = link.death is not None, None, None
        link.ready, link.heard_s = ready, time.monotonic()
        link.ready_s = link.heard_s
        if was_dead:
            log.info("rank %d serves again (pid %d)", link.rank, link.pid)
            self.on_return(link.rank, ready)
        if all(link.ready for link in self._links) and self._started is not None and not self._started.done():
            self._started.set_result(None)

    def _on_start_failed(self, pid: int, error: ServingError) -> None:
        """The first of all ranks ends the node; of one in the place of a dead one it is told with its death."""
        for link in self._links:
            if link.pid == pid:
                link.start_error = error
        self._fail_start(error)

    def give_up(self, rank: int, error: ServingError) -> None:
        """Its process, which is about to be killed, cannot serve for this reason, if it has not said another one."""
        link = self._links[rank]
        link.start_error = link.start_error or error

    def _fail_start(self, error: ServingError) -> None:
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)

    # -- what goes wrong ---------------------------------------------------------------------------

    def on_rank_death(self, rank: int, error: WorkerError) -> WorkerError:
        """The process is gone: everything that it ran or was asked fails at once, with this error. What it had said
        before is taken in first. Returns the error with why it could not serve, if it had said so."""
        self._receive()
        link = self._links[rank]
        if link.start_error is not None:
            first, *rest = error.message.splitlines()
            error = WorkerError("\n".join([f"{first}: {link.start_error.message}", *rest]), code=error.code)
        link.death = error
        self._choice.forget(rank)
        self._fail_start(error)
        self.fail_running(error, rank=rank)
        self._fail_queries(error, rank)
        return error

    def fail_running(self, error: ServingError, *, rank: int | None = None) -> None:
        """End every sequence (of one rank) with this error, without asking the rank."""
        for entry in [entry for entry in self._running.values() if rank in (None, entry.rank)]:
            self._forget(entry)
            self._tell(entry, error.record())

    def _tell(self, entry: Running, record: ErrorRecord) -> None:
        if not entry.told:
            entry.told = True
            failure = Failure(rid=entry.rid, error=record)
            self.meter.on_failure(entry, failure)
            entry.mailbox.put(failure)
            self._note_answered()

    def _fail_queries(self, error: ServingError, rank: int) -> None:
        for asked, future in self._queries.values():
            if asked == rank and not future.done():
                future.set_exception(error)

    # -- silence -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Look after ranks and sequences, again and again. A front that was held up itself (stopped, suspended, busy)
        has heard nothing for that reason, so it judges no rank."""
        now = time.monotonic()
        was_held_up = now - self._watched_s > 2 * self._watch_interval_s
        self._watched_s = now
        for link in self._links:
            if link.ready is not None and link.death is None:
                self._watch_rank(link, now, was_held_up)
        self._sweep(now - self._silence_timeout_s)
        self._watcher = self._loop.call_later(self._watch_interval_s, self._watch)

    def _watch_rank(self, link: RankLink, now: float, was_held_up: bool) -> None:
        cpu_s = cpu_seconds(link.pid)
        is_computing = cpu_s - link.cpu_s >= COMPUTING_SHARE * self._watch_interval_s
        link.cpu_s = cpu_s
        if is_computing or was_held_up:
            link.heard_s = now
        elif now - link.heard_s >= self._liveness_timeout_s and link.silence is None:
            self._on_silence(link)
        self._send(link.rank, Ping(ticket=link.rank))

    def _on_silence(self, link: RankLink) -> None:
        """Everything there fails now; its rids and rooms are free when the rank, awake again, has read the aborts."""
        message = (
            f"rank {link.rank} (pid {link.pid}) has neither answered nor computed for {self._liveness_timeout_s:g} s"
        )
        log.error(message)
        error = link.silence = WorkerError(message, code="rank_silent")
        for entry in [entry for entry in self._running.values() if entry.rank == link.rank]:
            self.abort([entry.rid], error.message)
            self._tell(entry, error.record())
        self._fail_queries(error, link.rank)

    def _on_pong(self, link: RankLink) -> None:
        link.heard_s = time.monotonic()
        if link.silence is not None:
            log.info("rank %d answers again", link.rank)
            link.silence = None

    def _sweep(self, oldest_s: float) -> None:
        """Fail the sequences that their rank has said nothing about since oldest_s."""
        for entry in [entry for entry in self._running.values() if entry.heard_s < oldest_s and not entry.told]:
            log.warning("rank %d said nothing about %s for %g s", entry.rank, entry.rid, self._silence_timeout_s)
            self.abort([entry.rid], "silent for too long")
            self._tell(entry, _silent(entry.rank, self._silence_timeout_s))


def _tell_nobody(_: int, __: Ready) -> None:
    """Nobody asks who returns."""


def _no_trace(_: list[Submit]) -> None:
    """Nobody traces."""


def _silent(rank: int, timeout_s: float) -> ErrorRecord:
    return WorkerError(f"rank {rank} made no token in {timeout_s:g} s", code="first_token_timeout").record()
