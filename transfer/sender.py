"""The prefill side of the hand-off.

    expect ─┐              send_pages, send_state, commit
            ├─► RoomOpened ──────────────────────────────► writes ─► Commit ─► decode's word ─► Sent, Released
    Open  ──┘
    expect and Decline: RoomDeclined, Released
    anything wrong, at any time: RoomFailed at once, Released when no write is in flight (then decode hears Drained)
    a write that failed may go on: decode hears Drained when its connections were closed, once nobody writes

Threads: the scheduler calls; a loop thread talks to decode ranks; each decode rank has workers of its own that write
and hash (`Transport.writers`), so that a stuck peer holds up nobody else. A lock guards the rooms; nobody waits while
holding it. What the scheduler sends before decode has opened the room is kept until it has.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from common.config import TransferConfig
from common.errors import AbortedError, RequestError, ServingError, TransferError, WorkerError, from_record
from common.handoff import HandoffMetadata
from common.layout import PoolPlacement, StateKind, StateLayout
from transfer.channel import Channel
from transfer.digest import open_reader
from transfer.events import EventQueue, Offer, PrefillEvent, Released, RoomDeclined, RoomFailed, RoomOpened, Sent
from transfer.flight import Flight
from transfer.gate import WriteGate
from transfer.handshake import Identity, brief, read_key
from transfer.link import Link, tick_s
from transfer.loop import LoopThread
from transfer.messages import (
    Abort,
    Accepted,
    Decline,
    Drained,
    Failed,
    Hello,
    Message,
    Open,
    Opened,
    Pong,
)
from transfer.narrow import Staging, is_narrowed, staging_bytes, wire_dtype
from transfer.plan import all_layers, batches
from transfer.posting import Finish, Job, Piece, Posting, Ready, Round
from transfer.room import Lane, Peer, Room, RoomState
from transfer.server import FrameServer
from transfer.transport import Block, Transport

log = logging.getLogger(__name__)

MAX_WRITE_BYTES = 32 << 20
WRITES_IN_FLIGHT = 2  # of a room
BURST_FROM = 7 / 8  # of the layers
ROOM_LIMIT = 2**63
GREETINGS, GREETING_BYTES = 3, 4096


class Outgoing:
    """A piece of a prompt whose layers are being completed. Belongs to one use of a room: when that is over, what is
    still said here goes nowhere. Any thread may call, one at a time.

    in_burst: whether the first layers are to wait for one of the last.
    """

    def __init__(
        self, piece: Piece, layout: StateLayout, submit: Callable[[Job], None], in_burst: Callable[[], bool]
    ) -> None:
        self._piece, self._submit, self._in_burst = piece, submit, in_burst
        self._layers, self._all = {pool.layer for pool in layout.pools}, all_layers(layout)
        self._waits_for = int(BURST_FROM * self._all[-1])
        self._held: list[int] = []

    def layer_done(self, layer: int) -> None:
        """The piece is complete in this layer. Layers without state are no news."""
        if layer not in self._layers:
            return
        self._held.append(layer)
        if layer < self._waits_for and self._in_burst():
            return
        self._waits_for = 0
        for done in self._held:
            self._submit(Ready(self._piece, range(done, done + 1)))
        self._held = []

    def all_done(self) -> None:
        self._submit(Ready(self._piece, self._all))


class PrefillTransfer:
    """placements: where this rank keeps each pool of the layout. wake: called, from any thread, after each event.

    control_address: what the node's bootstrap endpoint has to answer for this rank.
    """

    def __init__(
        self,
        layout: StateLayout,
        placements: Sequence[PoolPlacement],
        transport: Transport,
        config: TransferConfig,
        wake: Callable[[], None],
        *,
        node_id: str = "prefill",
        port: int = 0,
    ) -> None:
        """Raises ConfigError when the cluster key cannot be read or the port cannot be had."""
        self._layout, self._placements = layout, tuple(placements)
        self._transport, self._config = transport, config
        wire = wire_dtype(layout, config.ssm_wire_dtype)
        self._narrows = any(is_narrowed(pool, wire) for pool in layout.pools)
        self._reader = open_reader(layout, placements, wire, config.verify, transport)
        self._spare_stagings: list[Staging] = []
        self._identity = Identity("prefill", node_id, config.verify, layout, self._placements, transport, wire)
        self._events: EventQueue[PrefillEvent] = EventQueue(wake)
        self._lock = threading.RLock()
        self._rooms: dict[int, Room] = {}
        self._peers: list[Peer] = []
        self._workers: set[threading.Thread] = set()
        self._gate = WriteGate()
        self._doubts: dict[tuple[str, int], int] = {}
        self._refusals: dict[int, tuple[ServingError, float]] = {}  # of rooms that failed before decode spoke of them
        self._reopened = False
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        key = read_key(config.cluster_key_file)
        self._server = FrameServer(
            config.host, port, key, self._identity.hello, config.bootstrap_timeout_s, self._serve
        )
        self._thread = LoopThread("transfer-prefill")
        try:
            self._thread.run(self._server.start(), config.bootstrap_timeout_s)
        except BaseException:
            self._thread.stop()
            raise
        self._thread.call(self._thread.spawn, self._watch())

    @property
    def control_address(self) -> tuple[str, int]:
        return self._server.address

    # The scheduler's side: none of these blocks.

    def expect(self, room: int, rid: str, deadline_s: float) -> None:
        """The prefill leg is here; decode has `deadline_s` seconds to open the room. Raises RequestError (in use)."""
        assert 0 <= room < ROOM_LIMIT, f"room {room}"
        with self._lock:
            entry = self._rooms.get(room) or self._add(room, RoomState.EXPECTED, deadline_s, "decode to open the room")
            if entry.rid is not None or not entry.live:
                raise RequestError(f"room {room} is in use", code="room_in_use", param="bootstrap_room")
            entry.rid = rid
            self._refusals.pop(room, None)
            match entry.state:
                case RoomState.DECLINED:
                    self._end_declined(entry)
                case RoomState.OFFERED:
                    self._begin(entry)

    def announce(self, room: int, piece: Piece) -> Outgoing:
        """A step is about to compute the piece; what is returned sends it, as soon as a layer is done or all are.

        Each layer gets the pieces of a prompt in order, the slots with the last one.
        """
        with self._lock:
            entry = self._expected(room)
        return Outgoing(piece, self._layout, lambda job: self._submit(entry, job), lambda: self._leaves_in_burst(entry))

    def _leaves_in_burst(self, entry: Room | None) -> bool:
        """Also while nobody is known to get it: nothing can leave then."""
        if entry is None or not entry.live:
            return False
        peer = entry.peer
        return peer is None or self._transport.bursts(peer.link.peer.session)

    def send_pages(self, room: int, first_page_index: int, src_pages: Sequence[int]) -> None:
        """KV of prompt pages first_page_index … is complete in `src_pages`. Calls are in the order of the prompt."""
        self.announce(room, Piece(first_page_index, tuple(src_pages))).all_done()

    def send_state(self, room: int, slot: int, track_slot: int | None = None) -> None:
        """The final conv and SSM state is complete in `slot`, a saved one of an earlier position in `track_slot`."""
        self.announce(room, Piece(0, (), slot, track_slot)).all_done()

    def commit(self, room: int, metadata: HandoffMetadata) -> None:
        """Compute is finished and everything was sent. Pages and slots stay as they are until `Released`."""
        with self._lock:
            self._submit(self._expected(room), Finish(metadata))

    def abort(self, room: int, error: ServingError) -> None:
        """End the room on both sides. A room that is over already is no fault."""
        with self._lock:
            entry = self._expected(room)
            if entry is not None:
                self._fail(entry, error)

    def poll(self) -> list[PrefillEvent]:
        return self._events.drain()

    def room_states(self) -> dict[int, str]:
        """State of every room that the prefill leg has come for."""
        with self._lock:
            return {room: entry.state.value for room, entry in self._rooms.items() if entry.rid is not None}

    def stats(self) -> dict[str, Any]:
        with self._lock:
            return {
                "transport": self._transport.name,
                "rooms": dict(Counter(entry.state.value for entry in self._rooms.values())),
                "rooms_total": dict(self._counts),
                "bytes": dict(self._bytes),
                "seconds": dict(self._seconds),
                "peers": [peer.link.peer.node_id for peer in self._peers],
                "peers_silent": sum(peer.link.silent for peer in self._peers),
            }

    def close(self) -> None:
        """Fail what is open, wait for the writes in flight (at most the transfer time-out), end the threads.

        After that no write reads this rank's memory, unless one took longer.
        """
        if not self._thread.running:
            return
        with self._lock:
            for entry in list(self._rooms.values()):
                self._fail(entry, AbortedError("the prefill rank is shutting down", code="shutdown"))
        deadline = time.monotonic() + self._config.transfer_timeout_s
        while self._any_busy() and time.monotonic() < deadline:
            time.sleep(0.005)
        self._thread.run(self._server.close(), self._config.transfer_timeout_s)
        self._thread.stop()
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))

    # Rooms. All of these need the lock.

    def _expected(self, room: int) -> Room | None:
        """The room that the scheduler speaks of. When that is over, decode may have begun to use the number again."""
        entry = self._rooms.get(room)
        return None if entry is None or entry.rid is None else entry

    def _add(self, room: int, state: RoomState, timeout_s: float, waiting_for: str) -> Room:
        nth = self._counts["started"]
        self._counts["started"] += 1
        entry = Room(room, nth, state, time.monotonic() + timeout_s, waiting_for)
        self._rooms[room] = entry
        return entry

    def _begin(self, entry: Room) -> None:
        """Both legs are here."""
        assert entry.open is not None and entry.peer is not None
        entry.move(RoomState.OPEN)
        entry.deadline_s = None
        theirs, staging = entry.peer.link.peer.placements, entry.peer.staging
        entry.posting = Posting(
            self._layout, self._placements, theirs, entry.open, self._reader, self._config.verify, staging
        )
        entry.peer.link.channel.send(Opened(room=entry.room, lease=entry.open.lease))
        cached = entry.open.num_cached_pages
        offer = Offer(len(entry.open.pages), cached, cached * self._layout.page_size, entry.open.track_slot is not None)
        self._events.put(RoomOpened(entry.room, offer))
        if any(isinstance(job, Finish) for job in entry.waiting):
            entry.compute_end_s = time.monotonic()  # what passed until now was no transfer
            self._set_transfer_deadline(entry)
        for job in entry.waiting:
            entry.peer.put(entry, job)
        entry.waiting.clear()

    def _end_declined(self, entry: Room) -> None:
        """The prefill leg is here and decode does not need it."""
        self._counts["declined"] += 1
        self._events.put(RoomDeclined(entry.room))
        self._remove(entry)

    def _submit(self, entry: Room | None, job: Job) -> None:
        with self._lock:
            if entry is None or not entry.live:
                return  # it failed; the event is on its way
            if isinstance(job, Finish):
                entry.compute_end_s = time.monotonic()
            if entry.state is RoomState.EXPECTED:
                entry.waiting.append(job)
                return
            assert entry.peer is not None, f"room {entry.room}: a job for a room that is {entry.state}"
            if isinstance(job, Finish):
                self._set_transfer_deadline(entry)
            entry.peer.put(entry, job)

    def _set_transfer_deadline(self, entry: Room) -> None:
        entry.deadline_s = time.monotonic() + self._config.transfer_timeout_s
        entry.waiting_for = "the transfer"

    def _fail(self, entry: Room, error: ServingError, *, tell: bool = True) -> None:
        if not entry.live:
            return
        if entry.state is RoomState.EXPECTED:
            self._refusals[entry.room] = error, time.monotonic() + self._config.bootstrap_timeout_s
        entry.move(RoomState.DRAINING)
        entry.deadline_s = None
        log.warning("room %s failed: %s", entry.room, brief(error))
        if entry.open is not None and entry.peer is not None and tell:
            entry.peer.link.channel.send(Failed(room=entry.room, lease=entry.open.lease, error=error.record()))
        if entry.rid is not None:
            self._events.put(RoomFailed(entry.room, error))
        self._settle(entry)

    def _settle(self, entry: Room) -> None:
        """Release a failed room once its worker has let go of it."""
        if entry.busy or entry.state is not RoomState.DRAINING:
            return
        if entry.open is not None and entry.peer is not None:
            if entry.unsure:
                self._doubts[entry.peer.link.peer.instance, entry.open.lease] = entry.room
            else:
                entry.peer.link.channel.send(Drained(room=entry.room, lease=entry.open.lease))
        self._counts["failed"] += 1
        self._remove(entry)

    def _remove(self, entry: Room) -> None:
        entry.move(RoomState.RELEASED)
        del self._rooms[entry.room]
        if entry.rid is not None:
            self._events.put(Released(entry.room))

    # The loop thread: what decode ranks say.

    async def _serve(self, channel: Channel, hello: Hello) -> None:
        """One decode rank, from its hello to the end of its connection."""
        if len(hello.placements) != len(self._layout.pools) or not hello.session:
            raise TransferError(f"{hello.node_id} did not say where its pools are", code="protocol_error")
        lanes: tuple[Lane, ...] = tuple(queue.SimpleQueue() for _ in range(self._transport.writers))
        peer = Peer(Link(channel, hello, self._transport.outbound), lanes, self._take_staging(), at_work=len(lanes))
        self._workers = {each for each in self._workers if each.is_alive()}
        for lane in lanes:
            name = f"transfer-to-{hello.node_id}"
            worker = threading.Thread(target=self._work, args=(peer, lane), name=name, daemon=True)
            worker.start()
            self._workers.add(worker)
        with self._lock:
            self._peers.append(peer)
        log.info("decode rank %s connected from %s", hello.node_id, channel.peer_host)
        try:
            await peer.link.pump(lambda message: self._handle(peer, message))
        finally:
            self._lose(peer)

    def _handle(self, peer: Peer, message: Message) -> None:
        with self._lock:
            match message:
                case Open():
                    self._opened(peer, message)
                case Decline():
                    self._declined(message)
                case Accepted():
                    self._accepted(message)
                case Abort():
                    self._aborted(peer, message)
                case Pong():
                    pass
                case _:
                    raise TransferError(f"unexpected {type(message).__name__} from decode", code="protocol_error")

    def _opened(self, peer: Peer, message: Open) -> None:
        refusal = self._take_refusal(message.room) or self._refusal(peer.link.peer, message)
        if refusal is not None:
            peer.link.channel.send(Failed(room=message.room, lease=message.lease, error=refusal.record()))
            peer.link.channel.send(Drained(room=message.room, lease=message.lease))
            return
        entry = self._rooms.get(message.room) or self._add_early(message.room, RoomState.OFFERED)
        entry.open, entry.peer = message, peer
        if entry.state is RoomState.EXPECTED:
            self._begin(entry)

    def _add_early(self, room: int, state: RoomState) -> Room:
        """Decode speaks of a room whose prefill leg is not here yet."""
        return self._add(room, state, self._config.bootstrap_timeout_s, "the prefill leg")

    def _take_refusal(self, room: int) -> ServingError | None:
        refusal = self._refusals.pop(room, None)
        return None if refusal is None else refusal[0]

    def _declined(self, message: Decline) -> None:
        if self._take_refusal(message.room) is not None:
            return
        entry = self._rooms.get(message.room) or self._add_early(message.room, RoomState.DECLINED)
        match entry.state:
            case RoomState.EXPECTED:
                self._end_declined(entry)
            case RoomState.DECLINED:
                pass
            case _:
                log.warning("room %s (%s) was declined when it was %s", message.room, message.rid, entry.state)
                self._fail(entry, TransferError(f"room {entry.room} was opened and declined", code="protocol_error"))

    def _refusal(self, hello: Hello, message: Open) -> ServingError | None:
        """Why this room cannot be opened, if so."""
        entry = self._rooms.get(message.room)
        if entry is not None and entry.state is not RoomState.EXPECTED:
            return RequestError(f"room {message.room} is in use", code="room_in_use", param="bootstrap_room")
        if not 0 <= message.room < ROOM_LIMIT or not 0 <= message.num_cached_pages <= len(message.pages):
            return RequestError(f"room {message.room}: the offer makes no sense", code="bad_offer")
        slots = [message.slot] if message.track_slot is None else [message.slot, message.track_slot]
        for pool, place in zip(self._layout.pools, hello.placements, strict=True):
            items = message.pages if pool.kind is StateKind.KV else slots
            if items and not 0 <= min(items) <= max(items) < place.count:
                return RequestError(
                    f"room {message.room}: {pool.kind.value} item outside decode's pool", code="bad_offer"
                )
        return None

    def _accepted(self, message: Accepted) -> None:
        entry = self._rooms.get(message.room)
        if entry is None or entry.open is None or entry.open.lease != message.lease or not entry.live:
            return  # it crossed our own Failed
        if entry.state is not RoomState.CONFIRMING or entry.posting is None:
            raise TransferError(f"room {entry.room} was accepted before it was committed", code="protocol_error")
        self._counts["sent"] += 1
        self._bytes.update(entry.posting.bytes_by_part)
        self._events.put(Sent(entry.room, entry.posting.bytes_by_part, time.monotonic() - entry.compute_end_s))
        self._remove(entry)

    def _aborted(self, peer: Peer, message: Abort) -> None:
        """Decode gave up. A room that we do not know (any more) has nothing in flight, unless a write of it failed."""
        entry = self._rooms.get(message.room)
        instance = peer.link.peer.instance
        if entry is not None and entry.is_lease(instance, message.lease):
            entry.peer = peer  # it may have re-connected
            self._fail(entry, from_record(message.error), tell=False)
        elif (instance, message.lease) not in self._doubts:
            peer.link.channel.send(Drained(room=message.room, lease=message.lease, cut=self._reopened))

    def _lose(self, peer: Peer) -> None:
        error = WorkerError(f"decode rank {peer.link.peer.node_id} is gone", code="peer_lost")
        with self._lock:
            self._peers.remove(peer)
            self._fail_all(peer, error)
        for lane in peer.lanes:
            lane.put(None)

    def _fail_all(self, peer: Peer, error: ServingError) -> None:
        for entry in [entry for entry in self._rooms.values() if entry.peer is peer]:
            self._fail(entry, error)

    async def _watch(self) -> None:
        """Look at the clocks."""
        config = self._config
        pause_s = tick_s(config.bootstrap_timeout_s, config.transfer_timeout_s, config.liveness_timeout_s)
        while True:
            await asyncio.sleep(pause_s)
            with self._lock:
                self._check_clocks(time.monotonic())

    def _check_clocks(self, now: float) -> None:
        for peer in self._peers:
            if peer.link.beat(self._config.liveness_timeout_s):
                waited = self._config.liveness_timeout_s
                name = peer.link.peer.node_id
                self._fail_all(peer, WorkerError(f"decode rank {name} was silent for {waited} s", code="peer_silent"))
        self._refusals = {room: (error, until) for room, (error, until) in self._refusals.items() if until > now}
        for entry in [e for e in self._rooms.values() if e.deadline_s is not None and e.deadline_s < now]:
            if entry.state is RoomState.DECLINED:
                self._remove(entry)  # nobody came for it
                continue
            early = entry.state in (RoomState.EXPECTED, RoomState.OFFERED)
            code = "bootstrap_timeout" if early else "transfer_timeout"
            self._fail(entry, TransferError(f"room {entry.room}: timed out waiting for {entry.waiting_for}", code=code))

    def _any_busy(self) -> bool:
        with self._lock:
            return any(entry.busy for entry in self._rooms.values())

    # The workers of one decode rank.

    def _take_staging(self) -> Staging | None:
        """For as long as the worker lives. Registered memory stays, so a later worker gets it."""
        if not self._narrows:
            return None
        with self._lock:
            if self._spare_stagings:
                return self._spare_stagings.pop()
        return Staging(self._transport.host_buffer(staging_bytes(self._layout)))

    def _work(self, peer: Peer, lane: Lane) -> None:
        self._greet(peer)
        ahead: tuple[Room, Job] | None = None
        while True:
            first = ahead or lane.get()
            if first is None:
                break
            entry, jobs = first[0], [first[1]]
            ahead = None
            # What the scheduler sent at once is written at once.
            while not lane.empty():
                following = lane.get()
                if following is None:
                    lane.put(None)
                    break
                if following[0] is not entry:
                    ahead = following
                    break
                jobs.append(following[1])
            self._perform(entry, jobs)
        with self._lock:
            peer.at_work -= 1
            is_last = not peer.at_work
            if peer.staging is not None:
                self._spare_stagings.append(peer.staging)
        if is_last:
            self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        try:
            self._transport.forget(peer.link.peer.session)
        except TransferError as error:
            log.warning("decode rank %s is not let go of: %s", peer.link.peer.node_id, brief(error))

    def _greet(self, peer: Peer) -> None:
        """Open the data connections by writing the reserved page or slot 0 of the first pool, which nobody reads.

        The first write to a peer is slow, and where a dead process had the same session it fails, once.
        """
        pool, mine, theirs = self._layout.pools[0], self._placements[0], peer.link.peer.placements[0]
        block = Block(mine.base, theirs.base, min(pool.item_bytes, GREETING_BYTES), "greeting")
        for _ in range(GREETINGS):
            try:
                with self._gate.writing():
                    self._transport.write(peer.link.peer.session, [block])
            except TransferError as error:
                log.warning("decode rank %s cannot be written to yet: %s", peer.link.peer.node_id, brief(error))
            else:
                return

    def _perform(self, entry: Room, jobs: Sequence[Job]) -> None:
        """Write what the jobs name, then commit if they say so; a failure ends the room."""
        with self._lock:
            if not entry.live:
                return
            entry.busy = True
        error: ServingError | None = None
        try:
            with self._gate.writing():
                self._write(entry, jobs)
        except ServingError as known:
            error = known
        except Exception as bug:
            log.exception("room %s: the transfer worker failed", entry.room)
            error = TransferError(f"internal error in the transfer of room {entry.room}: {bug}", code="internal")
        with self._lock:
            entry.busy = False
            if error is not None and entry.live:
                self._fail(entry, error)
            else:
                self._settle(entry)
        self._clear_doubts()

    def _clear_doubts(self) -> None:
        """Close the connections of writes that have failed, so that they end, and tell decode; once nobody writes."""
        if not self._doubts or not self._gate.close_if_idle():
            return
        with self._lock:
            doubts = dict(self._doubts)
        try:
            reopened = self._transport.reopen()
        except ServingError as error:
            log.warning("failed writes are still in doubt: %s", brief(error))
            return
        finally:
            self._gate.open()
        if reopened:
            self._tell_cut(doubts)

    def _tell_cut(self, doubts: dict[tuple[str, int], int]) -> None:
        """A decode rank that cannot hear it now will ask, with `Abort`, when it has connected again."""
        with self._lock:
            self._reopened = True
            for (instance, lease), room in doubts.items():
                self._doubts.pop((instance, lease), None)
                for peer in [peer for peer in self._peers if peer.link.peer.instance == instance]:
                    peer.link.channel.send(Drained(room=room, lease=lease, cut=True))

    def _write(self, entry: Room, jobs: Sequence[Job]) -> None:
        """Write, hash while the bytes are on their way, then commit; if there is more to come, say what has landed."""
        posting, peer = entry.posting, entry.peer
        assert posting is not None and peer is not None
        landing: Round | None = None
        with Flight(entry, self._transport, peer.link.peer.session) as flight:
            for done in posting.rounds(jobs):
                begun = 0
                for batch in batches(done.blocks, MAX_WRITE_BYTES):
                    flight.land(WRITES_IN_FLIGHT - 1)
                    if not entry.live:
                        return
                    flight.begin(batch)
                    begun += 1
                posting.hash(done)
                flight.land(0 if posting.one_at_a_time else min(begun, WRITES_IN_FLIGHT))
                self._say_landed(entry, posting, landing)
                landing = done
            flight.land()
        self._add_seconds(flight.seconds)
        if isinstance(jobs[-1], Finish):
            self._send_commit(entry, posting)
        else:
            self._say_landed(entry, posting, landing)

    def _add_seconds(self, seconds: dict[str, float]) -> None:
        with self._lock:
            for part, more in seconds.items():
                self._seconds[part] = self._seconds.get(part, 0.0) + more

    def _say_landed(self, entry: Room, posting: Posting, done: Round | None) -> None:
        if done is not None and done.blocks and self._reader is not None and entry.live and entry.peer is not None:
            entry.peer.link.channel.send(posting.landed(done))

    def _send_commit(self, entry: Room, posting: Posting) -> None:
        """The last word: every write has completed."""
        payload = self._transport.metadata(posting.payload, entry.nth)
        commit = posting.commit(payload or b"", time.monotonic() - entry.compute_end_s)
        with self._lock:
            if not entry.live or entry.peer is None:
                return
            entry.move(RoomState.CONFIRMING)
            if payload is not None:
                entry.peer.link.channel.send(commit)
