"""The prefill rank. A request's life here:

    submit ──► opening ──────► scheduler (waiting → prefilling) ──► sending ──► sent
               the room is      each layer's pages, and with the     metadata     the answer goes out,
               announced;       last chunk its state, are posted     are posted   pages and slot come
               decode opens it  as soon as that layer is done                     back on `Released`
               (or declines it: the answer goes out at once)

A prompt is computed only once decode has opened its room, that is, has memory for it: a prefill rank whose slots are
full of states that nobody can take would wait for decode, and decode for it. One at a time may begin early, while there
is nothing else to compute, if it leaves memory for any other.
Pages and slot stay with the room until the transfer says that no write reads them any more.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from common.config import NodeConfig
from common.errors import AbortedError, ServingError, WorkerError
from common.handoff import HandoffMetadata, prompt_digest
from common.sampling import FinishReason, TokenLogprob
from engine.batch import OnLayer
from engine.scheduler import Chunk, StepReport
from engine.sequence import Emission, Phase, Sequence
from node.accounting import Rooms, RoomView
from node.engine_host import EngineHost, room_in_use
from node.messages import Abort, FromRank, Query, Ready, Submit, Timing
from node.rank import Waker, run_rank
from node.registration import peer_name
from node.transport_memory import pool_allocator
from transfer.events import Released, RoomDeclined, RoomFailed, RoomOpened, Sent
from transfer.posting import Piece
from transfer.sender import Outgoing, PrefillTransfer
from transfer.transport import Transport, open_transport

MAX_SLOTS = 4
"""That a sequence holds here: its own, the saved state that it began with, one that it saves, one not wanted."""

NO_TOKEN = TokenLogprob(logprob=None, token_id=0)


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillRoom:
    """One hand-off. digest: of the prompt. token: the first token, None until it is sampled. failed: the client has
    been told of an error."""

    room: int
    sequence: Sequence
    digest: bytes = b""
    token: TokenLogprob | None = None
    failed: bool = False
    since_s: float = field(default_factory=time.monotonic)


class PrefillRole:
    def __init__(self, config: NodeConfig, rank: int, transport: Transport, waker: Waker) -> None:
        self.rank = rank
        self.config = config.transfer
        self.transport = transport
        self.host = EngineHost(config, allocate=pool_allocator(transport), hold_after_prefill=True)
        pools = self.host.runner.pools
        self.transfer = PrefillTransfer(
            layout=self.host.layout,
            placements=pools.placements(),
            transport=transport,
            config=config.transfer,
            wake=waker,
            node_id=peer_name(config, rank),
        )
        self.rooms: dict[int, PrefillRoom] = {}
        self.room_of: dict[Sequence, PrefillRoom] = {}
        self.early: PrefillRoom | None = None

    def ready(self) -> Ready:
        return self.host.ready(
            rank=self.rank, transport=self.transport.name, control_address=self.transfer.control_address
        )

    # -- messages from the front -------------------------------------------------------------------

    def submit(self, message: Submit) -> None:
        assert message.room is not None, "the front refuses a prefill request without a room"
        sequence = self.host.new_sequence(message)
        room = PrefillRoom(room=message.room.room, sequence=sequence)
        if room.room in self.rooms:  # over for the transfer perhaps, but its last event is not taken in yet
            self.host.fail(sequence, room_in_use(room.room))
            return
        try:
            # A full decode node opens the room late: this waits as long as the client does.
            self.transfer.expect(room.room, message.rid, self.config.first_token_timeout_s)
        except ServingError as error:
            self.host.fail(sequence, error)
            return
        self.rooms[room.room] = room
        self.room_of[sequence] = room
        if self._may_begin_early(sequence):
            self.early = room
            self.host.scheduler.add(sequence)
        room.digest = prompt_digest(sequence.tokens(0, sequence.num_tokens))

    def _may_begin_early(self, sequence: Sequence) -> bool:
        """Whether to compute it before decode has memory for it: there is nothing else to do, and what it holds leaves
        enough for any other, so that no room that decode has opened ever waits for it. Not while its grammar is being
        compiled: another prompt could pass it and cache the same pages, which it would then hold beside its own. Not if
        most of it is cached here: it may be at decode too, which then declines the room."""
        scheduler, memory = self.host.scheduler, self.host.scheduler.memory
        if self.config.disable_early_prefill or self.early is not None or scheduler.has_work():
            return False
        if not sequence.is_ready() or self.host.lacks_little(sequence):
            return False
        pages = memory.pages_for(sequence.num_tokens) + memory.pages_for(self.host.context_length)
        return pages <= memory.pages.num_usable and memory.slots.num_usable > MAX_SLOTS

    def abort(self, message: Abort) -> None:
        for sequence in self.host.select(message.rid):
            room = self.room_of[sequence]
            error = AbortedError(message.message)
            self.transfer.abort(room.room, error)
            self._fail(room, error)

    def query(self, message: Query) -> None:
        extra: dict[str, object] = {"transfer": self.transfer.stats()}
        self.host.answer_query(message, idle=not self.rooms, rooms=self._rooms_seen(), extra_state=extra)

    def watch(self, now: float) -> None:
        self.host.watch(self._rooms_seen(), now)

    def _rooms_seen(self) -> Rooms:
        states = self.transfer.room_states()
        views = [_view(room, states.get(number)) for number, room in self.rooms.items()]
        return Rooms(views=views, strays={n: state for n, state in states.items() if n not in self.rooms})

    # -- the loop ----------------------------------------------------------------------------------

    def poll(self) -> None:
        for event in self.transfer.poll():
            room = self.rooms[event.room]
            match event:
                case RoomOpened():
                    self._begin(room)
                case RoomFailed(error=error):
                    self._fail(room, error)
                case RoomDeclined():
                    self._answer_declined(room)
                case Sent():
                    self._answer(room, event)
                case Released():
                    self._release(room)

    def _begin(self, room: PrefillRoom) -> None:
        if room is self.early:
            self.early = None
        elif not room.failed:
            self.host.scheduler.add(room.sequence)

    def step(self) -> bool:
        report = self.host.scheduler.step(None if self.config.disable_layerwise_transfer else self._listen)
        if report is not None:
            self._send(report)
        return self.host.scheduler.has_work()

    def _send(self, report: StepReport) -> None:
        for chunk in report.chunks if self.config.disable_layerwise_transfer else ():
            self._announce(chunk).all_done()
        for emission in report.emissions:
            self._commit(emission)
        for sequence, error in report.failures:
            room = self.room_of[sequence]
            self.transfer.abort(room.room, error)
            self._fail(room, error)

    def _listen(self, chunks: list[Chunk]) -> OnLayer:
        """A step is about to run: what it completes is sent layer by layer, in the thread that computes."""
        outgoing = [self._announce(chunk) for chunk in chunks]

        def on_layer(layer: int) -> None:
            for each in outgoing:
                each.layer_done(layer)

        return on_layer

    def _announce(self, chunk: Chunk) -> Outgoing:
        """What the chunk completes: its pages and, when it ends the prompt, the slots. What the cache had is sent now.

        Every chunk but the last ends on a page, so none is sent twice. A state saved at the end of the prompt is the
        final one and is not sent.
        """
        sequence, page_size = chunk.sequence, self.host.scheduler.limits.page_size
        room, saved, tracked = self.room_of[sequence].room, sequence.checkpoint, sequence.tracked
        first, end = chunk.start // page_size, math.ceil(chunk.end / page_size)
        if first and first == sequence.num_cached_pages:
            self.transfer.send_pages(room, 0, sequence.page_table[:first])
        pages = tuple(sequence.page_table[first:end])
        is_last = sequence.phase is Phase.HELD and chunk.end == sequence.num_computed_tokens
        if not is_last or tracked is None or tracked.position == chunk.end:
            return self.transfer.announce(room, Piece(first, pages, sequence.slot if is_last else None))
        if saved is not None and saved.slot == tracked.slot:
            self.transfer.announce(room, Piece(0, (), None, saved.slot)).all_done()
            return self.transfer.announce(room, Piece(first, pages, sequence.slot))
        return self.transfer.announce(room, Piece(first, pages, sequence.slot, tracked.slot))

    def _commit(self, emission: Emission) -> None:
        sequence = emission.sequence
        room = self.room_of[sequence]
        room.token = emission.token
        tracked, length = sequence.tracked, sequence.num_computed_tokens
        self.host.states.record("prefill", sequence, tracked)
        self.transfer.commit(
            room.room,
            HandoffMetadata(
                room=room.room,
                rid=sequence.rid,
                num_prompt_tokens=length,
                prompt_digest=room.digest,
                num_cached_tokens=sequence.num_cached_tokens,
                tracked_position=tracked.position if tracked else -1,
                first_token=emission.token or NO_TOKEN,
                sampling_seed=sequence.sampling.sampling_seed,
                queue_s=sequence.queue_s,
                prefill_s=sequence.prefill_s,
            ),
        )

    def _answer(self, room: PrefillRoom, sent: Sent) -> None:
        sequence = room.sequence
        timing = Timing(
            queue_s=sequence.queue_s,
            prefill_s=sequence.prefill_s,
            transfer_s=sent.seconds,
            transfer_bytes=sent.bytes_by_part,
        )
        finish = FinishReason(type="length", length=len(sequence.output_ids))
        self.host.emit(Emission(sequence=sequence, token=room.token, finish=finish), timing)

    def _answer_declined(self, room: PrefillRoom) -> None:
        """Decode holds enough of the prompt to compute the rest: a normal answer without a token ends this leg."""
        if room.failed:
            return
        self.host.scheduler.remove(room.sequence)  # it may have begun early
        room.sequence.num_cached_tokens = 0  # nothing of the answer rests on them
        finish = FinishReason(type="length", length=0)
        self.host.emit(Emission(sequence=room.sequence, token=None, finish=finish), Timing())

    def _fail(self, room: PrefillRoom, error: ServingError) -> None:
        """End the request now; its memory waits for `Released`."""
        if room.failed:
            return
        room.failed = True
        self.host.scheduler.remove(room.sequence)
        self.host.fail(room.sequence, error)

    def _release(self, room: PrefillRoom) -> None:
        self.host.scheduler.release(room.sequence)
        if room is self.early:
            self.early = None
        del self.rooms[room.room], self.room_of[room.sequence]

    def take_outbox(self) -> list[FromRank]:
        return self.host.take_outbox()

    def close(self) -> None:
        for room in list(self.rooms.values()):
            self.transfer.abort(room.room, WorkerError("the prefill node is shutting down"))
        self.transfer.close()
        self.transport.close()


def _view(room: PrefillRoom, state: str | None) -> RoomView:
    return RoomView(room=room.room, sequence=room.sequence, since_s=room.since_s, state=state, failed=room.failed)


def make_prefill_role(config: NodeConfig, rank: int, waker: Waker) -> PrefillRole:
    return PrefillRole(config, rank, open_transport(config.transfer, config.model.device), waker)


def main() -> None:
    run_rank(make_prefill_role)


if __name__ == "__main__":
    main()
