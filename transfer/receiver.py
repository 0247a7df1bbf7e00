"""The decode side of the hand-off.

    open ─► look up the rank, connect ─► Open ─► (prefill computes, writes) ─► Commit ─► digests ─► Committed
            RESERVED                     WRITING                                        COMMITTED, RELEASED
    decline ─► look up the rank, connect ─► Decline; nothing is lent, nothing is told
    anything wrong, at any time: RoomFailed at once (DRAINING), Released when no write of the room can land any more

No write can land any more when the sender says Drained (and, when it had to close connections because a write failed,
the last of them is gone), or when the sender is dead and the last of its data connections is gone. Dead is a sender at
whose address nobody listens any more, or another process does. Time alone frees nothing: a stopped sender may wake up
and write.

Threads: the scheduler calls, and offers a room itself where the sender is connected; one loop thread does everything
else. A lock guards leases and peers; nobody waits while holding it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from common.config import TransferConfig
from common.errors import AbortedError, RequestError, ServingError, TransferError, WorkerError, from_record
from common.handoff import HandoffMetadata, RoomAddress
from common.layout import PoolPlacement, StateLayout
from transfer.digest import Incoming, open_reader
from transfer.events import Committed, DecodeEvent, EventQueue, Released, RoomFailed
from transfer.handshake import Identity, brief, read_key
from transfer.lease import Lease, LeaseState
from transfer.link import Link, tick_s
from transfer.loop import LoopThread
from transfer.messages import (
    Abort,
    Accepted,
    Commit,
    Decline,
    Drained,
    Failed,
    Landed,
    Message,
    Open,
    Opened,
    Ping,
    Pong,
    Ranks,
    TrackState,
)
from transfer.narrow import wire_dtype
from transfer.rendezvous import look_up
from transfer.server import dial
from transfer.transport import Transport

log = logging.getLogger(__name__)

ROOM_LIMIT = 2**63

Address = tuple[str, int]
T = TypeVar("T")


@dataclass(slots=True)
class _Fence:
    """What keeps the leases of a lost sender from being released.

    rank: where it listened; it may be alive behind a broken connection, so it is asked until it is known to be dead.
    connections: what is left of its data connections once it is dead; None: they cannot be seen.
    """

    rank: Address
    asked_s: float
    dead: bool = False
    connections: set[str] | None = None


class DecodeTransfer:
    """placements: where this rank keeps each pool of the layout. wake: called, from any thread, after each event."""

    def __init__(
        self,
        layout: StateLayout,
        placements: Sequence[PoolPlacement],
        transport: Transport,
        config: TransferConfig,
        wake: Callable[[], None],
        node_id: str,
    ) -> None:
        """Raises ConfigError when the cluster key cannot be read, or the SSM state cannot cross as was asked."""
        self._layout, self._placements = layout, tuple(placements)
        self._transport, self._config = transport, config
        wire = wire_dtype(layout, config.ssm_wire_dtype)
        self._reader = open_reader(layout, placements, wire, config.verify, transport)
        self._key = read_key(config.cluster_key_file)
        self._identity = Identity("decode", node_id, config.verify, layout, self._placements, transport, wire)
        self._events: EventQueue[DecodeEvent] = EventQueue(wake)
        self._lock = threading.RLock()
        self._leases: dict[int, Lease] = {}
        self._links: dict[Address, Link] = {}
        self._fences: dict[str, _Fence] = {}
        self._routes: dict[Address, Ranks] = {}
        self._lookups: dict[Address, asyncio.Task[Ranks]] = {}
        self._dials: dict[Address, asyncio.Task[Link]] = {}
        self._serials = itertools.count()
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._mismatches: Counter[str] = Counter()
        self._thread = LoopThread("transfer-decode")
        self._thread.call(self._thread.spawn, self._watch())

    # The scheduler's side: none of these blocks.

    def open(
        self,
        address: RoomAddress,
        rid: str,
        pages: Sequence[int],
        slot: int,
        track_slot: int | None = None,
        num_cached_pages: int = 0,
    ) -> None:
        """Lend these pages and slots to the room until `Committed` or `Released`. Raises RequestError: room in use.

        pages: one for each page of the prompt; the first num_cached_pages are filled already and are not written.
        """
        assert 0 <= address.room < ROOM_LIMIT, f"room {address.room}"
        assert 0 <= num_cached_pages <= len(pages), f"{num_cached_pages} of {len(pages)} pages cached"
        message = Open(
            room=address.room,
            lease=next(self._serials),
            rid=rid,
            pages=tuple(pages),
            slot=slot,
            track_slot=track_slot,
            num_cached_pages=num_cached_pages,
        )
        with self._lock:
            self._refuse_if_leased(address.room)
            lease = Lease(address, message, time.monotonic() + self._config.bootstrap_timeout_s)
            self._leases[address.room] = lease
            link = self._known_link(address)
            if link is None:
                self._thread.call(self._spawn_placing, lease)
            else:
                self._offer(lease, link)
            if self._reader is not None:  # no word on the lease is taken in before the lock is free
                lease.incoming = Incoming(
                    self._reader, self._config.verify, message.pages, num_cached_pages, slot, track_slot
                )

    def decline(self, address: RoomAddress, rid: str) -> None:
        """Tell the prefill rank that it is not needed: this node serves the request alone. Raises RequestError: in use.

        There is no lease and no event. If the rank cannot be reached, its leg of the request times out by itself.
        """
        assert 0 <= address.room < ROOM_LIMIT, f"room {address.room}"
        with self._lock:
            self._refuse_if_leased(address.room)
            self._counts["declined"] += 1
        self._thread.call(self._spawn_declining, address, rid)

    def abort(self, room: int, error: ServingError) -> None:
        """End the room on both sides. A room that is over already is no fault."""
        with self._lock:
            lease = self._leases.get(room)
            if lease is not None:
                self._fail(lease, error)

    def poll(self) -> list[DecodeEvent]:
        return self._events.drain()

    def room_states(self) -> dict[int, str]:
        """State of the lease of every room; `quarantined` for one that drains and whose sender is lost."""
        with self._lock:
            return {
                room: "quarantined" if lease.writer in self._fences else lease.state.value
                for room, lease in self._leases.items()
            }

    def stats(self) -> dict[str, Any]:
        """quarantined: leases whose sender is lost and may still write."""
        with self._lock:
            return {
                "transport": self._transport.name,
                "leases": dict(Counter(lease.state.value for lease in self._leases.values())),
                "quarantined": sum(lease.writer in self._fences for lease in self._leases.values()),
                "rooms_total": dict(self._counts),
                "bytes": dict(self._bytes),
                "digest_mismatches": dict(self._mismatches),
                "peers": [link.peer.node_id for link in self._links.values()],
                "peers_silent": sum(link.silent for link in self._links.values()),
            }

    def close(self) -> None:
        """Fail what is open, wait (at most the transfer time-out) until nothing can be written here, end the thread."""
        if not self._thread.running:
            return
        with self._lock:
            for lease in list(self._leases.values()):
                self._fail(lease, AbortedError("the decode rank is shutting down", code="shutdown"))
        deadline = time.monotonic() + self._config.transfer_timeout_s
        while self._leases and time.monotonic() < deadline:
            time.sleep(0.005)
        self._thread.stop()

    # Leases. All of these need the lock.

    def _offer(self, lease: Lease, link: Link) -> None:
        """Tell the sender where to write."""
        lease.writer, lease.waiting_for = link.peer.instance, "the prefill leg"
        lease.move(LeaseState.WRITING)
        link.channel.send(lease.open)

    def _known_link(self, address: RoomAddress) -> Link | None:
        """The connection to the room's rank, if there is one that works: then nothing has to be waited for."""
        ranks = self._routes.get((address.host, address.port))
        link = None if ranks is None else self._links.get(ranks.addresses[address.room % len(ranks.addresses)])
        return None if link is None or link.silent else link

    def _refuse_if_leased(self, room: int) -> None:
        if room in self._leases:
            raise RequestError(f"room {room} is in use", code="room_in_use", param="bootstrap_room")

    def _fail(self, lease: Lease, error: ServingError, *, tell: bool = True) -> None:
        if not lease.live:
            return
        log.warning("room %s failed: %s", lease.room, brief(error))
        never_told = lease.state is LeaseState.RESERVED
        lease.move(LeaseState.DRAINING)
        self._counts["failed"] += 1
        self._events.put(RoomFailed(lease.room, error))
        if never_told:
            self._release(lease)
        elif tell:
            self._tell_abort(lease, error)

    def _tell_abort(self, lease: Lease, error: ServingError) -> None:
        for link in self._links.values():
            if link.peer.instance == lease.writer:
                link.channel.send(Abort(room=lease.room, lease=lease.open.lease, error=error.record()))

    def _release(self, lease: Lease) -> None:
        self._remove(lease)
        self._events.put(Released(lease.room))

    def _remove(self, lease: Lease) -> None:
        lease.move(LeaseState.RELEASED)
        del self._leases[lease.room]

    def _of_writer(self, instance: str, state: LeaseState) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.writer == instance and lease.state is state]

    # Finding the sender. On the loop thread.

    def _spawn_placing(self, lease: Lease) -> None:
        self._thread.spawn(self._place(lease))

    async def _place(self, lease: Lease) -> None:
        """Connect to the room's rank and tell it where to write."""
        try:
            link = await self._link_for(lease.address)
        except ServingError as error:
            with self._lock:
                self._fail(lease, error)
            return
        with self._lock:
            if lease.state is not LeaseState.RESERVED:
                return  # aborted meanwhile
            if link not in self._links.values():
                self._fail(lease, _gone(link))
                return
            self._offer(lease, link)

    def _spawn_declining(self, address: RoomAddress, rid: str) -> None:
        self._thread.spawn(self._decline(address, rid))

    async def _decline(self, address: RoomAddress, rid: str) -> None:
        try:
            link = await self._link_for(address)
        except ServingError as error:
            log.info("room %s could not be declined: %s", address.room, brief(error))
            return
        link.channel.send(Decline(room=address.room, rid=rid))

    async def _link_for(self, address: RoomAddress) -> Link:
        """The connection to the room's rank, made when there is none. Raises ServingError.

        Where the rank was known to be may be out of date, another process being there in its place: then the bootstrap
        endpoint is asked before anything is given up.
        """
        was_known = (address.host, address.port) in self._routes
        try:
            return await self._link_by_route(address)
        except ServingError:
            if not was_known:
                raise
        return await self._link_by_route(address)

    async def _link_by_route(self, address: RoomAddress) -> Link:
        """Raises ServingError, and then the route is forgotten."""
        node = (address.host, address.port)
        rank = await self._rank_for(node, address.room)
        link = self._links.get(rank)
        if link is not None and link.silent:
            self._routes.pop(node, None)  # it may have been replaced; the bootstrap endpoint would know
            rank = await self._rank_for(node, address.room)
            link = self._links.get(rank)
            if link is not None and link.silent:
                self._routes.pop(node, None)
                raise WorkerError(f"prefill rank {link.peer.node_id} is silent", code="peer_silent")
        try:
            return link or await self._connect_once(rank)
        except ServingError:
            self._routes.pop(node, None)
            raise

    async def _rank_for(self, node: Address, room: int) -> Address:
        ranks = self._routes.get(node)
        if ranks is None:
            ranks = await _share(self._lookups, node, self._look_up)
        return ranks.addresses[room % len(ranks.addresses)]

    async def _connect_once(self, rank: Address) -> Link:
        return await _share(self._dials, rank, self._connect)

    async def _look_up(self, node: Address) -> Ranks:
        ranks = await look_up(*node, self._key, self._identity.hello(), self._config.bootstrap_timeout_s)
        self._routes[node] = ranks
        return ranks

    async def _connect(self, rank: Address) -> Link:
        channel, theirs = await dial(*rank, self._key, self._identity.hello(), self._config.bootstrap_timeout_s)
        link = Link(channel, theirs, self._transport.outbound)
        with self._lock:
            self._links[rank] = link
            if self._fences.pop(theirs.instance, None):
                # The same process behind a new connection: its word is worth more than the fence.
                error = WorkerError("the connection was lost", code="peer_lost").record()
                for lease in self._of_writer(theirs.instance, LeaseState.DRAINING):
                    channel.send(Abort(room=lease.room, lease=lease.open.lease, error=error))
            for fence in [fence for fence in self._fences.values() if fence.rank == rank]:
                self._bury(fence)
        log.info("connected to prefill rank %s at %s:%s", theirs.node_id, *rank)
        self._thread.spawn(self._listen(rank, link))
        return link

    # What senders say. On the loop thread.

    async def _listen(self, rank: Address, link: Link) -> None:
        try:
            await link.pump(lambda message: self._handle(link, message))
        except ServingError as error:
            log.info("connection to prefill rank %s ended: %s", link.peer.node_id, brief(error))
        finally:
            link.channel.close()
            with self._lock:
                self._lose(rank, link)

    def _handle(self, link: Link, message: Message) -> None:
        match message:
            case Opened():
                self._opened(link, message)
            case Landed():
                self._landed(link, message)
            case Commit():
                self._commit(link, message)
            case Failed():
                self._failed(link, message)
            case Drained():
                self._drained(link, message)
            case Pong():
                self._exempt(message)
            case _:
                raise TransferError(f"unexpected {type(message).__name__} from prefill", code="protocol_error")

    def _lease_of(self, link: Link, message: Opened | Landed | Commit | Failed | Drained) -> Lease | None:
        """The lease that this sender speaks of, unless it is over or not the sender's."""
        lease = self._leases.get(message.room)
        if lease is None or (lease.writer, lease.open.lease) != (link.peer.instance, message.lease):
            return None
        return lease

    def _opened(self, link: Link, message: Opened) -> None:
        with self._lock:
            lease = self._lease_of(link, message)
            if lease is not None and lease.live:
                lease.deadline_s = (
                    time.monotonic() + self._config.first_token_timeout_s + self._config.transfer_timeout_s
                )
                lease.waiting_for = "the first token"

    def _failed(self, link: Link, message: Failed) -> None:
        with self._lock:
            lease = self._lease_of(link, message)
            if lease is not None:
                self._fail(lease, from_record(message.error), tell=False)

    def _drained(self, link: Link, message: Drained) -> None:
        with self._lock:
            lease = self._lease_of(link, message)
            if lease is None or lease.state is not LeaseState.DRAINING:
                return
            if message.cut:
                lease.connections = self._connections_of_nobody()
                self._check_fences()
            else:
                self._release(lease)

    def _landed(self, link: Link, message: Landed) -> None:
        """Hash while the sender computes what is still missing."""
        with self._lock:
            lease = self._lease_of(link, message)
            if lease is None or not lease.live or lease.incoming is None:
                return
        self._transport.settle()
        for each in message.landings:
            layers = range(each.first_layer, each.end_layer)
            lease.incoming.landed(layers, num_pages=each.num_pages, state=each.state, track=each.track)

    def _commit(self, link: Link, message: Commit) -> None:
        """Every byte is in place: check them, then give the lease back as a success."""
        with self._lock:
            lease = self._lease_of(link, message)
            if lease is None or not lease.live:
                return  # given up; the sender has or will have our Abort
        started_s = time.monotonic()
        try:
            metadata = self._check(lease, message)
        except TransferError as error:
            with self._lock:
                self._fail(lease, error)
            return
        seconds = message.seconds + time.monotonic() - started_s
        with self._lock:
            if not lease.live:
                return
            lease.move(LeaseState.COMMITTED)
            self._events.put(Committed(lease.room, metadata, message.bytes_by_part, seconds, message.track))
            link.channel.send(Accepted(room=lease.room, lease=lease.open.lease))
            self._counts["committed"] += 1
            self._bytes.update(message.bytes_by_part)
            self._remove(lease)

    def _check(self, lease: Lease, message: Commit) -> HandoffMetadata:
        """Compare every part's digest. Raises TransferError: `digest_mismatch` naming the parts, `bad_metadata`."""
        filled, wanted = message.num_pages, len(lease.open.pages)
        if filled != wanted:
            raise TransferError(f"room {lease.room}: {filled} of {wanted} pages were committed", code="bad_metadata")
        self._transport.settle()
        if lease.incoming is not None:
            found = lease.incoming.digests(filled, message.track is TrackState.RECEIVED, message.metadata)
            wrong = sorted(part for part in found | message.digests if found.get(part) != message.digests.get(part))
            if wrong:
                self._mismatches.update(wrong)
                raise TransferError(
                    f"room {lease.room}: {', '.join(wrong)} did not arrive intact",
                    code="digest_mismatch",
                    param=wrong[0],
                )
        metadata = _metadata(lease.room, message.metadata)
        if not _track_is_possible(lease.open, message.track, metadata):
            raise TransferError(
                f"room {lease.room}: track state {message.track}, tracked position {metadata.tracked_position} of "
                f"{metadata.num_prompt_tokens} tokens",
                code="bad_metadata",
            )
        return metadata

    # Loss and time.

    def _lose(self, rank: Address, link: Link) -> None:
        if self._links.get(rank) is link:
            del self._links[rank]
        self._routes = {node: ranks for node, ranks in self._routes.items() if rank not in ranks.addresses}
        for lease in self._of_writer(link.peer.instance, LeaseState.WRITING):
            self._fail(lease, _gone(link), tell=False)
        self._raise_fence(link, rank)

    def _raise_fence(self, link: Link, rank: Address) -> None:
        """Hold what a lost sender may still write to, and look whether it is dead."""
        instance = link.peer.instance
        if self._of_writer(instance, LeaseState.DRAINING):
            self._fences[instance] = _Fence(rank, time.monotonic())
            self._thread.spawn(self._seek(self._fences[instance]))

    async def _seek(self, fence: _Fence) -> None:
        """Connect to a lost sender: one that is alive after all can say what it still has in flight (`_connect`)."""
        try:
            await self._connect_once(fence.rank)
        except ServingError as error:
            log.debug("lost prefill rank at %s:%s: %s", *fence.rank, brief(error))
            if isinstance(error.__cause__, ConnectionRefusedError):
                with self._lock:
                    self._bury(fence)

    def _bury(self, fence: _Fence) -> None:
        """The sender is dead. What it sent may still be on its way; ask the living which connections are theirs."""
        if fence.dead:
            return
        fence.dead, fence.connections = True, self._connections_of_nobody()
        self._check_fences()

    def _connections_of_nobody(self) -> set[str] | None:
        """The data connections. The living are asked which of them are theirs; `_exempt` takes those out."""
        for link in self._links.values():
            link.channel.send(Ping(lanes=True))
        inbound = self._transport.inbound()
        return None if inbound is None else set(inbound)

    def _exempt(self, message: Pong) -> None:
        if message.lanes is None:
            return
        with self._lock:
            for left in self._awaited():
                left.difference_update(message.lanes)
            self._check_fences()

    def _awaited(self) -> list[set[str]]:
        """The connections that fences and leases wait for to go."""
        every = [fence.connections for fence in self._fences.values()]
        every += [lease.connections for lease in self._leases.values()]
        return [connections for connections in every if connections is not None]

    def _check_fences(self) -> None:
        awaited = self._awaited()
        inbound = self._transport.inbound() if awaited else None
        if inbound is None:
            return
        for left in awaited:
            left.intersection_update(inbound)
        for instance in [instance for instance, fence in self._fences.items() if fence.connections == set()]:
            del self._fences[instance]
            for lease in self._of_writer(instance, LeaseState.DRAINING):
                self._release(lease)
        for lease in [lease for lease in self._leases.values() if lease.connections == set()]:
            self._release(lease)

    async def _watch(self) -> None:
        """Look at the clocks."""
        config = self._config
        pause_s = tick_s(
            config.bootstrap_timeout_s,
            config.transfer_timeout_s,
            config.first_token_timeout_s,
            config.liveness_timeout_s,
        )
        while True:
            await asyncio.sleep(pause_s)
            with self._lock:
                self._check_clocks(time.monotonic())

    def _check_clocks(self, now: float) -> None:
        for link in list(self._links.values()):
            if link.beat(self._config.liveness_timeout_s):
                waited = self._config.liveness_timeout_s
                silent = WorkerError(f"prefill rank {link.peer.node_id} was silent for {waited} s", code="peer_silent")
                for lease in self._of_writer(link.peer.instance, LeaseState.WRITING):
                    self._fail(lease, silent)
        for lease in [lease for lease in self._leases.values() if lease.live and lease.deadline_s < now]:
            self._fail(lease, _timed_out(lease))
        self._check_fences()
        for fence in self._fences.values():
            if not fence.dead and now - fence.asked_s > self._config.liveness_timeout_s / 4:
                fence.asked_s = now
                self._thread.spawn(self._seek(fence))


async def _share(
    pending: dict[Address, asyncio.Task[T]], where: Address, make: Callable[[Address], Coroutine[Any, Any, T]]
) -> T:
    """Rooms that need the same thing at the same time share one attempt."""
    task = pending.get(where)
    if task is None:
        task = asyncio.get_running_loop().create_task(make(where))
        pending[where] = task
        task.add_done_callback(lambda _: pending.pop(where))
    return await asyncio.shield(task)


def _gone(link: Link) -> WorkerError:
    return WorkerError(f"prefill rank {link.peer.node_id} is gone", code="peer_lost")


def _timed_out(lease: Lease) -> ServingError:
    text = f"room {lease.room}: timed out waiting for {lease.waiting_for}"
    if lease.state is LeaseState.RESERVED:
        return WorkerError(text, code="bootstrap_timeout")  # as the handshake's own limit, which ends at the same time
    early = lease.waiting_for != "the first token"
    return TransferError(text, code="bootstrap_timeout" if early else "first_token_timeout")


def _track_is_possible(offer: Open, track: TrackState, metadata: HandoffMetadata) -> bool:
    """Whether what the sender says of the track slot agrees with the metadata and with what was offered."""
    position, end = metadata.tracked_position, metadata.num_prompt_tokens
    match track:
        case TrackState.NONE:
            return offer.track_slot is None or position != end
        case TrackState.RECEIVED:
            return offer.track_slot is not None and 0 < position < end
        case TrackState.SAME_AS_FINAL:
            return offer.track_slot is not None and position == end


def _metadata(room: int, payload: bytes) -> HandoffMetadata:
    try:
        metadata = msgspec.msgpack.decode(payload, type=HandoffMetadata)
    except msgspec.MsgspecError as error:
        raise TransferError(f"room {room}: the metadata cannot be read: {error}", code="bad_metadata") from error
    if metadata.room != room:
        raise TransferError(f"room {room}: metadata of room {metadata.room}", code="bad_metadata")
    return metadata
