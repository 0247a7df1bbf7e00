"""What one room's worker has written so far: which blocks, which digests, what the commit says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from common.config import Verify
from common.errors import TransferError
from common.handoff import HandoffMetadata
from common.layout import PoolPlacement, StateKind, StateLayout
from transfer.digest import METADATA, StateReader, metadata_digest
from transfer.messages import Commit, Landed, Landing, Open, TrackState
from transfer.narrow import Staging, address_of
from transfer.plan import TRACK, Pair, coalesce, plan_pages, plan_slot
from transfer.transport import Block


class Piece(NamedTuple):
    """What one step leaves of one prompt: KV of the prompt's pages from `first` on, in `pages` here; when it ends the
    prompt, conv and SSM state in `slot`; and what is in `track_slot`, a saved state other than that."""

    first: int
    pages: tuple[int, ...]
    slot: int | None = None
    track_slot: int | None = None


class Ready(NamedTuple):
    """The piece is complete in these layers."""

    piece: Piece
    layers: range


class Finish(NamedTuple):
    metadata: HandoffMetadata


Job = Ready | Finish


class Round(NamedTuple):
    """Jobs that are written together. ready: what of them crosses. finishes: it is the last one of the room."""

    blocks: list[Block]
    ready: list[Ready]
    finishes: bool


class Posting:
    """mine, theirs: where the pools lie here and at decode. reader: None when verify is off and nothing is narrowed.
    staging: for narrowed SSM states, the worker's.

    For each of `rounds`: write its blocks and meanwhile `hash`; then `commit`. Belongs to the worker. payload: encoded
    metadata. one_at_a_time: a round must have landed before the next is asked for. Each layer gets the pieces in the
    order of the prompt; what one layer gets does not wait for another.
    """

    def __init__(
        self,
        layout: StateLayout,
        mine: Sequence[PoolPlacement],
        theirs: Sequence[PoolPlacement],
        offer: Open,
        reader: StateReader | None,
        verify: Verify,
        staging: Staging | None,
    ) -> None:
        self._layout, self._mine, self._theirs, self._offer = layout, mine, theirs, offer
        self._verify, self._staging = verify, staging
        self.one_at_a_time = staging is not None
        self._digesting = reader.begin(verify) if reader is not None and verify is not Verify.OFF else None
        self._narrowed = {pool.layer: pool for pool in reader.pools if pool.narrowed} if reader is not None else {}
        self._staged: dict[bool, memoryview] = {}
        self._digests: dict[str, bytes] = {}
        kv = {pool.layer for pool in layout.pools if pool.kind is StateKind.KV}
        self._next_page = dict.fromkeys(sorted(kv), offer.num_cached_pages)
        self._no_state = {pool.layer for pool in layout.pools if pool.kind is not StateKind.KV}
        self._no_track = set(self._no_state)
        self._track = TrackState.NONE
        self.bytes_by_part: dict[str, int] = {}
        self.payload = b""

    def rounds(self, jobs: Sequence[Job]) -> Iterator[Round]:
        """These jobs: the first one, then the others, so that it is on its way while they are planned.

        With staging, layer by layer: each round uses the same memory. Raises TransferError: too many pages, or
        a layer was left out.
        """
        if self._staging is None:
            yield self._round(jobs[:1])
            if jobs[1:]:
                yield self._round(jobs[1:])
            return
        for job in jobs:
            match job:
                case Ready(piece=piece, layers=layers):
                    for layer in layers:
                        yield self._round([Ready(piece, range(layer, layer + 1))])
                case Finish():
                    yield self._round([job])

    def _round(self, jobs: Sequence[Job]) -> Round:
        blocks: list[Block] = []
        ready: list[Ready] = []
        for job in jobs:
            match job:
                case Ready(piece=piece, layers=layers):
                    wanted = self._wanted(piece, layers)
                    blocks += self._plan(wanted, layers)
                    ready.append(Ready(wanted, layers))
                case Finish(metadata=metadata):
                    self._finish(metadata)
        for block in blocks:
            self.bytes_by_part[block.part] = self.bytes_by_part.get(block.part, 0) + block.nbytes
        return Round(coalesce(blocks), ready, finishes=any(isinstance(job, Finish) for job in jobs))

    def hash(self, done: Round) -> None:
        """Take the digests of a round. Rounds come in their order, each once."""
        if self._digesting is None:
            return
        for piece, layers in done.ready:
            self._digesting.pages(layers, piece.pages)
            if piece.slot is not None:
                self._digesting.slot(layers, piece.slot, track=False, narrowed=self._staged.get(False))
            if piece.track_slot is not None:
                self._digesting.slot(layers, piece.track_slot, track=True, narrowed=self._staged.get(True))
        if any(piece.slot is not None for piece, _ in done.ready) and self._is_complete():
            self._digesting.prepare()
        if done.finishes:
            self._digests = self._digesting.digests() | {METADATA: metadata_digest(self.payload, self._verify)}

    def _is_complete(self) -> bool:
        """The final state of every layer was sent, and every page that decode has a place for."""
        return not self._no_state and all(page == len(self._offer.pages) for page in self._next_page.values())

    def landed(self, done: Round) -> Landed:
        """That a round is written, for decode to hash while this side goes on."""
        landings = tuple(
            Landing(
                first_layer=layers.start,
                end_layer=layers.stop,
                num_pages=piece.first + len(piece.pages) if piece.pages else 0,
                state=piece.slot is not None,
                track=piece.track_slot is not None,
            )
            for piece, layers in done.ready
        )
        return Landed(room=self._offer.room, lease=self._offer.lease, landings=landings)

    def commit(self, payload: bytes, seconds: float) -> Commit:
        """The last word. payload: what is left of `self.payload` after an injected fault."""
        return Commit(
            room=self._offer.room,
            lease=self._offer.lease,
            num_pages=self._num_pages(),
            metadata=payload,
            track=self._track,
            digests=self._digests,
            bytes_by_part=self.bytes_by_part,
            seconds=seconds,
        )

    def _num_pages(self) -> int:
        return max(self._next_page.values(), default=self._offer.num_cached_pages)

    def _wanted(self, piece: Piece, layers: range) -> Piece:
        """What of the piece decode does not hold already and has a place for. A layer's pages come in order, once."""
        skipped = max(0, min(self._offer.num_cached_pages - piece.first, len(piece.pages)))
        first, pages = piece.first + skipped, piece.pages[skipped:]
        late = [layer for layer in layers if pages and self._next_page.get(layer, first) != first]
        assert not late, f"page {first} of layer {late[0]} sent, {self._next_page[late[0]]} is next"
        if first + len(pages) > len(self._offer.pages):
            raise TransferError(
                f"room {self._offer.room}: {first + len(pages)} pages of KV, decode reserved {len(self._offer.pages)}",
                code="too_many_pages",
            )
        track_slot = piece.track_slot if self._offer.track_slot is not None else None
        return Piece(first, pages, piece.slot, track_slot)

    def _plan(self, piece: Piece, layers: range) -> list[Block]:
        end = piece.first + len(piece.pages)
        pairs = list(zip(piece.pages, self._offer.pages[piece.first : end], strict=True))
        blocks = plan_pages(self._layout, self._mine, self._theirs, pairs, layers)
        self._next_page |= {layer: end for layer in layers if piece.pages and layer in self._next_page}
        if piece.slot is not None:
            blocks += self._plan_slot((piece.slot, self._offer.slot), layers, track=False)
            self._no_state -= {*layers}
        if piece.track_slot is not None and self._offer.track_slot is not None:
            blocks += self._plan_slot((piece.track_slot, self._offer.track_slot), layers, track=True)
            self._no_track -= {*layers}
            self._track = TrackState.RECEIVED
        return blocks

    def _plan_slot(self, slot: Pair, layers: range, *, track: bool) -> list[Block]:
        where = (self._layout, self._mine, self._theirs, slot, layers)
        if self._staging is None:
            return plan_slot(*where, track=track)
        blocks = plan_slot(*where, track=track, kinds=(StateKind.CONV,))
        for layer in self._narrowed.keys() & {*layers}:
            blocks.append(self._narrow(layer, slot, track=track))
        return blocks

    def _narrow(self, layer: int, slot: Pair, *, track: bool) -> Block:
        """Narrow the SSM state of one layer; it lands in the second half of the state that it stands for."""
        assert self._staging is not None
        mine, theirs = slot
        self._staged[track] = staged = self._staging.narrow(self._narrowed[layer].item(mine), track=track)
        places = zip(self._layout.pools, self._theirs, strict=True)
        place = next(place for pool, place in places if pool.layer == layer and pool.kind is StateKind.SSM)
        target = place.base + theirs * place.stride_bytes + len(staged)
        return Block(address_of(staged), target, len(staged), TRACK if track else StateKind.SSM.value)

    def _finish(self, metadata: HandoffMetadata) -> None:
        """Every layer must have had everything before decode is told so."""
        behind = {layer for layer, page in self._next_page.items() if page != len(self._offer.pages)} | self._no_state
        if self._track is TrackState.RECEIVED:
            behind |= self._no_track
        if behind:
            raise TransferError(
                f"room {self._offer.room}: not all of layers {sorted(behind)} was sent", code="incomplete"
            )
        is_end = metadata.tracked_position == metadata.num_prompt_tokens
        if is_end and self._offer.track_slot is not None and self._track is TrackState.NONE:
            self._track = TrackState.SAME_AS_FINAL
        self.payload = msgspec.msgpack.encode(metadata)
