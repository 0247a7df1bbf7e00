"""The decode rank. A request's life here:

    submit ──► reserving ──────────► receiving ───────► running ──► done
               until there are       the room is open;   (adopted by the scheduler)
               pages and a slot      prefill writes

A request without a room goes straight to the scheduler: the rank then serves it alone. So does a retracted one.
Memory reserved for a room belongs to the lease until `Committed`; after a failure it comes back with `Released`, when
no write can land in it any more.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import msgspec

from common.config import NodeConfig
from common.errors import AbortedError, CapacityError, RequestError, ServingError, WorkerError
from common.handoff import HandoffMetadata, RoomAddress, prompt_digest
from engine.batch import Track
from engine.scheduler import StepReport
from engine.sequence import Sequence
from node.accounting import Rooms, RoomView
from node.engine_host import EngineHost, finish_local, local_timing, room_in_use
from node.messages import Abort, FromRank, Query, Ready, Submit, Timing
from node.rank import Waker, run_rank
from node.registration import peer_name
from node.transport_memory import pool_allocator
from transfer.events import Committed, Released, RoomFailed
from transfer.messages import TrackState
from transfer.receiver import DecodeTransfer
from transfer.transport import Transport, open_transport


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeRoom:
    """One hand-off. failed: the client has been told; only the memory is still out. track_slot: where the tracked state
    is to come; None when there was no slot for it. digest: of the prompt, once the room is open."""

    address: RoomAddress
    sequence: Sequence
    deadline_s: float
    track_slot: int | None = None
    digest: bytes = b""
    failed: bool = False
    since_s: float = field(default_factory=time.monotonic)


@dataclass(slots=True, kw_only=True, eq=False)
class Received:
    """What is known of a request once its state has arrived. committed_s: `time.monotonic()` at that moment."""

    metadata: HandoffMetadata
    bytes_by_part: dict[str, int]
    transfer_s: float
    committed_s: float = field(default_factory=time.monotonic)


class DecodeRole:
    def __init__(self, config: NodeConfig, rank: int, transport: Transport, waker: Waker) -> None:
        self.rank = rank
        self.config = config.transfer
        self.transport = transport
        self.host = EngineHost(config, allocate=pool_allocator(transport), hold_after_prefill=False)
        self.transfer = DecodeTransfer(
            layout=self.host.layout,
            placements=self.host.runner.pools.placements(),
            transport=transport,
            config=config.transfer,
            wake=waker,
            node_id=peer_name(config, rank),
        )
        self.reserving: deque[DecodeRoom] = deque()
        self.rooms: dict[int, DecodeRoom] = {}
        self.received: dict[Sequence, Received] = {}
        self.adopted: list[tuple[DecodeRoom, Committed]] = []

    def ready(self) -> Ready:
        return self.host.ready(rank=self.rank, transport=self.transport.name, control_address=None)

    # -- messages from the front -------------------------------------------------------------------

    def submit(self, message: Submit) -> None:
        sequence = self.host.new_sequence(message)
        if message.room is None:
            self.host.scheduler.add(sequence)
            return
        if message.room.room in self.rooms or any(r.address.room == message.room.room for r in self.reserving):
            self.host.fail(sequence, room_in_use(message.room.room))
            return
        if self.host.lacks_little(sequence):
            self.transfer.decline(message.room, sequence.rid)
            self.host.scheduler.add(sequence)
            return
        deadline_s = time.monotonic() + self.config.first_token_timeout_s
        self.reserving.append(DecodeRoom(address=message.room, sequence=sequence, deadline_s=deadline_s))

    def abort(self, message: Abort) -> None:
        for sequence in self.host.select(message.rid):
            self._end(sequence, AbortedError(message.message))

    def _end(self, sequence: Sequence, error: ServingError) -> None:
        """End a sequence wherever it is. Memory in a lease stays there until `Released`."""
        room = self._room_of(sequence)
        if room is not None and room.address.room in self.rooms:
            self.transfer.abort(room.address.room, error)
            self._fail(room, error)
            return
        if room is not None:
            self.reserving.remove(room)
        self.host.scheduler.remove(sequence)
        self.host.scheduler.release(sequence)
        self.received.pop(sequence, None)
        self.host.fail(sequence, error)

    def _room_of(self, sequence: Sequence) -> DecodeRoom | None:
        return next((r for r in (*self.reserving, *self.rooms.values()) if r.sequence is sequence), None)

    def query(self, message: Query) -> None:
        extra = {
            "num_reserving": len(self.reserving),
            "num_receiving": len(self.rooms),
            "transfer": self.transfer.stats(),
        }
        idle = not (self.host.sequences or self.rooms)
        self.host.answer_query(message, idle=idle, rooms=self._rooms_seen(), extra_state=extra)

    def watch(self, now: float) -> None:
        self.host.watch(self._rooms_seen(), now)

    def _rooms_seen(self) -> Rooms:
        states = self.transfer.room_states()
        views = [_view(room, states.get(number)) for number, room in self.rooms.items()]
        views += [_view(room, "reserving") for room in self.reserving]
        return Rooms(views=views, strays={n: state for n, state in states.items() if n not in self.rooms})

    # -- the loop ----------------------------------------------------------------------------------

    def poll(self) -> None:
        for event in self.transfer.poll():
            room = self.rooms[event.room]
            match event:
                case Committed():
                    self._adopt(room, event)
                case RoomFailed(error=error):
                    self._fail(room, error)
                case Released():
                    del self.rooms[event.room]
                    self._release(room)
        self._expire()
        self._reserve()

    def step(self) -> bool:
        self._take_in_adopted()
        report = self.host.scheduler.step()
        if report is not None:
            self._finish(report)
        return self.host.scheduler.has_work()

    def _reserve(self) -> None:
        """Open rooms in order of arrival while pages, slots and places last; retracted sequences come first."""
        scheduler = self.host.scheduler
        while self.reserving and not scheduler.waiting:
            room, spare = self.reserving[0], len(scheduler.running)
            has_place = scheduler.num_active() + len(self.rooms) < scheduler.limits.max_running
            if not has_place:
                return
            if not scheduler.memory.acquire(room.sequence, resume=False, keep_state=False, spare_pages=spare):
                return
            self.reserving.popleft()
            self._open(room)

    def _open(self, room: DecodeRoom) -> None:
        scheduler, sequence = self.host.scheduler, room.sequence
        assert sequence.slot is not None
        sequence.num_local_cached_tokens = sequence.num_cached_pages * scheduler.limits.page_size
        if scheduler.limits.tracks_prefill:
            room.track_slot = scheduler.memory.take_track_slot(sequence)
        try:
            self.transfer.open(
                room.address,
                rid=sequence.rid,
                pages=sequence.page_table,
                slot=sequence.slot,
                track_slot=room.track_slot,
                num_cached_pages=sequence.num_cached_pages,
            )
        except ServingError as error:
            self._release(room)
            self.host.fail(sequence, error)
            return
        self.rooms[room.address.room] = room
        room.digest = prompt_digest(sequence.tokens(0, sequence.num_tokens))

    def _expire(self) -> None:
        """End what has waited too long for memory or for its state."""
        now = time.monotonic()
        late = [r for r in (*self.reserving, *self.rooms.values()) if now > r.deadline_s and not r.failed]
        for room in late:
            message = f"no first token within {self.config.first_token_timeout_s:g} s (first_token_timeout)"
            self._end(room.sequence, CapacityError(message, code="first_token_timeout"))

    def _adopt(self, room: DecodeRoom, event: Committed) -> None:
        del self.rooms[room.address.room]
        sequence, metadata = room.sequence, event.metadata
        if room.failed:
            self._release(room)
            return
        if metadata.prompt_digest != room.digest:
            self._release(room)
            self.host.fail(sequence, _other_prompt(sequence, metadata))
            return
        sequence.num_computed_tokens = metadata.num_prompt_tokens
        sequence.num_cached_tokens = metadata.num_cached_tokens
        sequence.sampling = msgspec.structs.replace(sequence.sampling, sampling_seed=metadata.sampling_seed)
        self.received[sequence] = Received(
            metadata=metadata, bytes_by_part=event.bytes_by_part, transfer_s=event.transfer_s
        )
        emission = self.host.scheduler.adopt(sequence, metadata.first_token)
        if emission.finish is None:
            self.host.emit(emission, None)
            self.adopted.append((room, event))
            return
        self._take_in(room, event)
        self._finish(StepReport(chunks=[], emissions=[emission], failures=[]))

    def _take_in_adopted(self) -> None:
        """What can wait until the first tokens are on their way, but not until the next step."""
        for room, event in self.adopted:
            self._take_in(room, event)
        self.adopted.clear()

    def _take_in(self, room: DecodeRoom, event: Committed) -> None:
        track_slot = room.track_slot if event.track is not TrackState.NONE else None
        self._cache_prompt(room, event)
        tracked = None if track_slot is None else Track(event.metadata.tracked_position, track_slot)
        self.host.states.record("commit", room.sequence, tracked)

    def _cache_prompt(self, room: DecodeRoom, event: Committed) -> None:
        """Keep the prompt up to its tracked position for the next turn of this conversation."""
        sequence, slot, memory = room.sequence, room.track_slot, self.host.scheduler.memory
        room.track_slot = None
        if slot is None:
            return
        match event.track:
            case TrackState.NONE:
                memory.return_track_slot(slot)
                return
            case TrackState.SAME_AS_FINAL:
                assert sequence.slot is not None
                self.host.runner.copy_slots([sequence.slot], [slot])
            case TrackState.RECEIVED:
                pass
        memory.donate(sequence, event.metadata.tracked_position, slot, ends_prompt=True, keep_state=False)

    def _release(self, room: DecodeRoom) -> None:
        if room.track_slot is not None:
            self.host.scheduler.memory.return_track_slot(room.track_slot)
            room.track_slot = None
        self.host.scheduler.release(room.sequence)

    def _finish(self, report: StepReport) -> None:
        finish_local(self.host, report, self._timing)
        for sequence, _ in report.failures:
            self.received.pop(sequence, None)

    def _timing(self, sequence: Sequence) -> Timing:
        received = self.received.pop(sequence, None)
        if received is None:
            return local_timing(sequence)
        return Timing(
            queue_s=received.metadata.queue_s,
            prefill_s=received.metadata.prefill_s,
            transfer_s=received.transfer_s,
            decode_s=time.monotonic() - received.committed_s,
            transfer_bytes=received.bytes_by_part,
        )

    def _fail(self, room: DecodeRoom, error: ServingError) -> None:
        """End the request now; its memory waits for `Released`."""
        if not room.failed:
            room.failed = True
            self.host.fail(room.sequence, error)

    def take_outbox(self) -> list[FromRank]:
        return self.host.take_outbox()

    def close(self) -> None:
        for room in list(self.rooms.values()):
            self.transfer.abort(room.address.room, WorkerError("the decode node is shutting down"))
        self.transfer.close()
        self.transport.close()


def _view(room: DecodeRoom, state: str | None) -> RoomView:
    return RoomView(
        room=room.address.room,
        sequence=room.sequence,
        since_s=room.since_s,
        state=state,
        failed=room.failed,
        track_slot=room.track_slot,
    )


def _other_prompt(sequence: Sequence, metadata: HandoffMetadata) -> RequestError:
    return RequestError(
        f"the two legs of room {metadata.room} were sent different prompts, of {metadata.num_prompt_tokens} tokens on "
        f"the prefill node and of {sequence.num_tokens} here",
        code="prompt_mismatch",
    )


def make_decode_role(config: NodeConfig, rank: int, waker: Waker) -> DecodeRole:
    return DecodeRole(config, rank, open_transport(config.transfer, config.model.device), waker)


def main() -> None:
    run_rank(make_decode_role)


if __name__ == "__main__":
    main()
