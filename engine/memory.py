"""What a sequence holds, and where it comes from: free memory first, then what the cache can spare.

    acquire ──► page_table = cached pages of the prefix (locked) + own pages;  slot = own, filled from the saved state,
                or, when there is no other, the saved state's itself
    take_track_slot ──► a slot that one step writes ──► donate: prefix, pages and slot become the tree's
    release ──► own pages and slots are free, locks are gone

A sequence reads the tree's pages and writes only its own. What it donates it goes on reading under a lock. Pages that
the tree already had stay its own until it ends: a transfer or a step in flight may be reading them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.allocator import PageAllocator, SlotAllocator
from engine.radix_cache import Lock, Match, RadixCache
from engine.sequence import Checkpoint, Sequence


@dataclass(slots=True, kw_only=True)
class MemoryCounters:
    """Totals since the start. checkpoints_skipped: positions that were not saved because no slot was to be had."""

    checkpoints: int = 0
    checkpoints_skipped: int = 0


class SequenceMemory:
    """copy_slots(sources, targets): copies states of all layers. cache: None when prefixes are not kept.

    num_row_slots: the slots 1 … num_row_slots are for what runs, so that its slots stay one run, which a step on the
    CPU reads as a view; a saved state takes one of them only when it can have no other. 0: any slot is as good.
    """

    def __init__(
        self,
        *,
        pages: PageAllocator,
        slots: SlotAllocator,
        cache: RadixCache | None,
        copy_slots: Callable[[Seq[int], Seq[int]], None],
        page_size: int,
        num_row_slots: int = 0,
    ) -> None:
        self.pages = pages
        self.slots = slots
        self.cache = cache
        self.page_size = page_size
        self.num_row_slots = num_row_slots
        self.counters = MemoryCounters()
        self._copy_slots = copy_slots

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    # -- entering --------------------------------------------------------------------------------

    def resume_position(self, sequence: Sequence) -> int:
        """From which position the sequence could be resumed now; 0 when from none."""
        tokens = sequence.tokens(0, sequence.num_tokens)
        match = self._match(sequence, tokens, resume=True, count=False)
        return 0 if match is None else match.state_position

    def acquire(self, sequence: Sequence, *, resume: bool, keep_state: bool, spare_pages: int) -> bool:
        """Give a sequence the pages of all its tokens and a slot. False, and nothing changed, when they are not there.

        resume: begin from the deepest saved state, which `checkpoint` then names (num_computed_tokens: its position);
        otherwise another rank computes the state, and only KV that is here already is used (num_cached_pages says how
        much). keep_state: see `donate`. spare_pages: how many must be left over.
        """
        tokens = sequence.tokens(0, sequence.num_tokens)
        match = self._match(sequence, tokens, resume, count=not sequence.looked_up)
        sequence.looked_up = True
        start, lock = 0, None
        if match is not None:
            start = match.state_position if resume else match.num_kv_tokens
            lock = self._lock(match, resume)
        cached = start // self.page_size
        missing = self.pages_for(len(tokens)) - cached
        if not self.make_room(missing + spare_pages, 1):
            if not (self._is_only_user(lock) and self.make_room(missing + spare_pages, 0)):
                self._unlock(lock)
                return False
            lock = self._take_over(sequence, lock)
        own = self.pages.allocate(missing, sequence.rid)
        sequence.page_table = [*(match.kv_pages[:cached] if match is not None else []), *own]
        sequence.own_pages = set(own)
        sequence.num_cached_pages = cached
        if resume:
            self._resume(sequence, match, lock, keep_state)
            return True
        sequence.slot = self.slots.allocate(sequence.rid)
        if lock is not None:
            sequence.locks.append(lock)
        return True

    def _lock(self, match: Match, resume: bool) -> Lock:
        """A state that is to be read is locked too: making room may evict any other."""
        assert self.cache is not None
        if resume:
            return self.cache.lock(match.state_node, state=match.state_slot is not None)
        return self.cache.lock(match.kv_node)

    def _is_only_user(self, lock: Lock | None) -> bool:
        return lock is not None and lock.state and lock.node.state_locks == 1

    def _take_over(self, sequence: Sequence, lock: Lock | None) -> Lock:
        """The saved state's slot is the only one to be had: it becomes the sequence's own, with the state in it."""
        assert self.cache is not None and lock is not None
        kept = self._without_state(lock)
        sequence.slot = self.cache.take_state(lock.node, sequence.rid)
        return kept

    def _without_state(self, lock: Lock) -> Lock:
        """The same lock on KV alone, in exchange."""
        assert self.cache is not None
        kept = self.cache.lock(lock.node)
        self.cache.unlock(lock)
        return kept

    def _unlock(self, lock: Lock | None) -> None:
        if lock is not None:
            assert self.cache is not None
            self.cache.unlock(lock)

    def _match(self, sequence: Sequence, tokens: list[int], resume: bool, *, count: bool) -> Match | None:
        """The cached prefix. Prompt logprobs need their positions computed: the match ends before the first of them."""
        if self.cache is None:
            return None
        first = sequence.first_logits_wanted
        if resume and first is not None and not sequence.knows_prompt_logprobs:
            tokens = tokens[: first + 1]
        return self.cache.match(tokens, extra_key=sequence.extra_key, count=count)

    def _resume(self, sequence: Sequence, match: Match | None, lock: Lock | None, keep_state: bool) -> None:
        """Begin with the saved state that the match names; without one, with an empty slot."""
        sequence.num_computed_tokens = 0 if match is None else match.state_position
        sequence.branch_position = 0 if match is None else match.branch_position
        if match is None or lock is None or match.state_slot is None:
            self._unlock(lock)
            sequence.slot = self.slots.allocate(sequence.rid)
            return
        if sequence.slot is not None:  # taken over
            sequence.locks.append(lock)
            return
        sequence.slot = self.slots.allocate(sequence.rid)
        self._copy_slots([match.state_slot], [sequence.slot])
        lock = lock if keep_state else self._without_state(lock)
        sequence.checkpoint = Checkpoint(position=match.state_position, slot=match.state_slot, lock=lock)

    def make_room(self, num_pages: int, num_slots: int) -> bool:
        """Evict from the cache until so many are free. False when that is not possible; nothing is evicted then."""
        short_pages, short_slots = num_pages - self.pages.num_free, num_slots - self.slots.num_free
        if short_pages <= 0 and short_slots <= 0:
            return True
        if self.cache is None:
            return False
        if short_pages > self.cache.num_evictable_pages or short_slots > self.cache.num_evictable_slots:
            return False
        self.cache.evict_pages(short_pages)
        self.cache.evict_slots(num_slots - self.slots.num_free)
        return self.pages.num_free >= num_pages and self.slots.num_free >= num_slots

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give the sequence pages for so many tokens. False, and nothing changed, when there are none."""
        missing = self.pages_for(num_tokens) - len(sequence.page_table)
        if missing <= 0:
            return True
        if not self.make_room(missing, 0):
            return False
        taken = self.pages.allocate(missing, sequence.rid, after=sequence.page_table[-1])
        sequence.page_table.extend(taken)
        sequence.own_pages.update(taken)
        return True

    def flush(self) -> None:
        """Drop every cached prefix that nobody uses."""
        if self.cache is not None:
            self.cache.flush()

    # -- saved states ----------------------------------------------------------------------------

    def take_track_slot(self, sequence: Sequence) -> int | None:
        """A slot for a state that is about to be saved; None when there is none, which costs the checkpoint alone."""
        if not self.make_room(0, 1):
            self.counters.checkpoints_skipped += 1
            return None
        if self.slots.highest_free <= self.num_row_slots and self.cache is not None:
            self.cache.evict_slots(1)
        return self.slots.allocate(sequence.rid, highest=True)

    def return_track_slot(self, slot: int) -> None:
        """The state in it is not wanted after all."""
        self.slots.free(slot)

    def donate(self, sequence: Sequence, position: int, slot: int, *, ends_prompt: bool, keep_state: bool) -> None:
        """The state after `position` tokens is in `slot`: prefix, pages and slot become the tree's.

        keep_state: a hand-off reads the saved state while the sequence holds memory. Until that is given back the state
        is not evicted, nor is `slot` freed where the tree had the state already.
        """
        assert self.cache is not None and position % self.page_size == 0
        tokens = sequence.tokens(0, position)
        table = sequence.page_table[: position // self.page_size]
        done = self.cache.insert(tokens, table, slot, extra_key=sequence.extra_key, ends_prompt=ends_prompt)
        sequence.own_pages -= set(table) - set(done.duplicate_pages)
        if done.duplicate_slot is not None and keep_state:
            sequence.spare_slots.append(done.duplicate_slot)
        elif done.duplicate_slot is not None:
            self.slots.free(done.duplicate_slot)
        self.counters.checkpoints += 1
        older, kept = sequence.checkpoint, done.node.slot
        assert kept is not None
        sequence.checkpoint = Checkpoint(
            position=position, slot=kept, lock=self.cache.lock(done.node, state=keep_state)
        )
        if older is not None:
            self.cache.unlock(older.lock)
            self.cache.drop_state(older.lock.node)

    def donate_final(self, sequence: Sequence) -> None:
        """The sequence has ended: its own state and everything it computed become the tree's."""
        slot, position = sequence.slot, sequence.num_computed_tokens
        assert slot is not None
        sequence.slot = None
        self.donate(sequence, position, slot, ends_prompt=False, keep_state=False)

    # -- leaving ---------------------------------------------------------------------------------

    def release(self, sequence: Sequence) -> None:
        """Give back everything that no step and no transfer uses any more."""
        if sequence.own_pages:
            self.pages.free(sorted(sequence.own_pages))
            sequence.own_pages = set()
        sequence.page_table = []
        if sequence.slot is not None:
            self.slots.free(sequence.slot)
            sequence.slot = None
        for slot in sequence.spare_slots:
            self.slots.free(slot)
        sequence.spare_slots = []
        for lock in sequence.locks:
            self._unlock(lock)
        sequence.locks = []
        if sequence.checkpoint is not None:
            self._unlock(sequence.checkpoint.lock)
            sequence.checkpoint = None

    # -- integrity -------------------------------------------------------------------------------

    def check_integrity(self, *, request_pages: Iterable[int], request_slots: Iterable[int]) -> None:
        """AssertionError unless free + owned by requests + cached = all, for pages and slots. Slow.

        request_pages, request_slots: what the requests own themselves.
        """
        if self.cache is not None:
            self.cache.check_integrity(request_pages=request_pages, request_slots=request_slots)
            return
        for allocator, owned in ((self.pages, request_pages), (self.slots, request_slots)):
            allocator.check_integrity()
            items = sorted(item for items in allocator.owned().values() for item in items)
            assert items == sorted(owned), f"{items} owned, {sorted(owned)} by requests"
