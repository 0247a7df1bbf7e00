"""What one room's worker has written so far: which blocks, which digests, what the commit says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from common.config import Verify
from common.errors import TransferError
from common.handoff import HandoffMetadata
from common.layout import PoolPlacement, StateLayout
from transfer.digest import METADATA, PagesDigest, StateReader, metadata_digest, slot_digests, track_digest
from transfer.messages import Commit, Landed, Open, TrackState
from transfer.plan import KV, TRACK, plan_pages, plan_slot
from transfer.transport import Block


class Pages(NamedTuple):
    """KV of the prompt's pages from `first` on is complete in `pages` here."""

    first: int
    pages: tuple[int, ...]


class State(NamedTuple):
    """track_slot waits for the metadata: a state saved at the end of the prompt is not sent twice."""

    slot: int
    track_slot: int | None


class Track(NamedTuple):
    slot: int


class Finish(NamedTuple):
    metadata: HandoffMetadata


Job = Pages | State | Finish


class Posting:
    """mine, theirs: where the pools lie here and at decode. reader: None when verify is off.

    For each job: `add`, write and meanwhile `hash`; then `commit`. Belongs to the worker. payload: encoded metadata.
    """

    def __init__(
        self,
        layout: StateLayout,
        mine: Sequence[PoolPlacement],
        theirs: Sequence[PoolPlacement],
        offer: Open,
        reader: StateReader | None,
        verify: Verify,
    ) -> None:
        self._layout, self._mine, self._theirs, self._offer = layout, mine, theirs, offer
        self._reader, self._verify = reader, verify
        self._pages_digest = PagesDigest(reader, verify) if reader is not None else None
        self._digests: dict[str, bytes] = {}
        self._unhashed: list[Pages | State | Track | Finish] = []
        self._saved: int | None = None
        self._state_added = False
        self._track = TrackState.NONE
        self.next_page = offer.num_cached_pages
        self.bytes_by_part: dict[str, int] = {}
        self.payload = b""

    def add(self, job: Job) -> list[Block]:
        """The blocks to write for a job. Raises TransferError: too many pages."""
        match job:
            case Pages():
                blocks = self._plan_pages(self._without_cached(job))
            case State():
                self._saved = job.track_slot
                blocks = self._plan_state(job)
            case Finish():
                self._track = self._track_of(job.metadata)
                self.payload = msgspec.msgpack.encode(job.metadata)
                blocks = self._plan_track() if self._track is TrackState.RECEIVED else []
                self._unhashed.append(job)
        for block in blocks:
            self.bytes_by_part[block.part] = self.bytes_by_part.get(block.part, 0) + block.nbytes
        return blocks

    def landed(self) -> Landed:
        """What was added and is written by now, for decode to hash while this side computes."""
        return Landed(room=self._offer.room, lease=self._offer.lease, num_pages=self.next_page, state=self._state_added)

    def hash(self) -> None:
        """Take the digests of what was added since the last time, in the order of the prompt."""
        jobs, self._unhashed = self._unhashed, []
        if self._reader is None or self._pages_digest is None:
            return
        for job in jobs:
            match job:
                case Pages():
                    self._pages_digest.update(job.pages)
                case State():
                    self._digests |= slot_digests(self._reader, job.slot, self._verify)
                case Track():
                    self._digests[TRACK] = track_digest(self._reader, job.slot, self._verify)
                case Finish():
                    self._digests[KV] = self._pages_digest.digest()
                    self._digests[METADATA] = metadata_digest(self.payload, self._verify)

    def commit(self, payload: bytes, seconds: float) -> Commit:
        """The last word. payload: what is left of `self.payload` after an injected fault."""
        return Commit(
            room=self._offer.room,
            lease=self._offer.lease,
            num_pages=self.next_page,
            metadata=payload,
            track=self._track,
            digests=self._digests,
            bytes_by_part=self.bytes_by_part,
            seconds=seconds,
        )

    def _without_cached(self, job: Pages) -> Pages:
        """What of the pages decode does not hold already; they come in the order of the prompt, each once."""
        skipped = max(0, min(self._offer.num_cached_pages - job.first, len(job.pages)))
        rest = Pages(job.first + skipped, job.pages[skipped:])
        assert not rest.pages or rest.first == self.next_page, f"page {rest.first} sent, {self.next_page} is next"
        return rest

    def _track_of(self, metadata: HandoffMetadata) -> TrackState:
        """What decode will have of the tracked state: only what it offered a slot for and what was saved here."""
        position = metadata.tracked_position
        if self._offer.track_slot is None or position <= 0:
            return TrackState.NONE
        if position == metadata.num_prompt_tokens:
            return TrackState.SAME_AS_FINAL
        return TrackState.NONE if self._saved is None else TrackState.RECEIVED

    def _plan_pages(self, job: Pages) -> list[Block]:
        end = self.next_page + len(job.pages)
        if end > len(self._offer.pages):
            raise TransferError(
                f"room {self._offer.room}: {end} pages of KV, decode reserved {len(self._offer.pages)}",
                code="too_many_pages",
            )
        pairs = list(zip(job.pages, self._offer.pages[self.next_page : end], strict=True))
        self.next_page = end
        self._unhashed.append(job)
        return plan_pages(self._layout, self._mine, self._theirs, pairs)

    def _plan_state(self, job: State) -> list[Block]:
        self._unhashed.append(job)
        self._state_added = True
        return plan_slot(self._layout, self._mine, self._theirs, (job.slot, self._offer.slot), track=False)

    def _plan_track(self) -> list[Block]:
        assert self._saved is not None and self._offer.track_slot is not None
        self._unhashed.append(Track(self._saved))
        return plan_slot(self._layout, self._mine, self._theirs, (self._saved, self._offer.track_slot), track=True)
