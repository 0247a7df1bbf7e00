"""Which slots saved states take."""

from __future__ import annotations

from engine.allocator import PageAllocator, SlotAllocator
from engine.memory import SequenceMemory
from engine.radix_cache import RadixCache
from engine.sequence import Sequence
from tests.engine.test_scheduler import make_sequence

PAGE = 4


def make_memory(*, slots: int, num_row_slots: int) -> SequenceMemory:
    pages, slot_pool = PageAllocator(100), SlotAllocator(slots + 1)
    return SequenceMemory(
        pages=pages,
        slots=slot_pool,
        cache=RadixCache(pages, slot_pool, page_size=PAGE, cache_chunk=PAGE),
        copy_slots=lambda sources, targets: None,
        page_size=PAGE,
        num_row_slots=num_row_slots,
    )


def begin(memory: SequenceMemory, index: int) -> Sequence:
    sequence = make_sequence(f"r{index}", [10 * index + 1] * (PAGE + 1), max_new_tokens=9)
    assert memory.acquire(sequence, resume=True, keep_state=False, spare_pages=0)
    return sequence


def save(memory: SequenceMemory, sequence: Sequence) -> None:
    slot = memory.take_track_slot(sequence)
    assert slot is not None
    memory.donate(sequence, PAGE, slot, ends_prompt=True, keep_state=False)


def serve(memory: SequenceMemory, rounds: int) -> list[list[int]]:
    """Rounds of three sequences that begin together; each saves a state when the one before has ended. The slots of the
    three in each round."""
    found = []
    for index in range(rounds):
        running = [begin(memory, 3 * index + i) for i in range(3)]
        found.append([s.slot for s in running if s.slot is not None])
        for sequence in running:
            save(memory, sequence)
            memory.release(sequence)
    return found


def test_what_runs_keeps_neighbouring_slots_however_many_states_were_saved() -> None:
    memory = make_memory(slots=8, num_row_slots=3)

    assert serve(memory, 6) == [[1, 2, 3]] * 6
    assert memory.cache is not None and memory.cache.num_cached_slots == 5
    memory.slots.check_integrity()


def test_a_saved_state_takes_a_slot_of_what_runs_when_there_is_no_other() -> None:
    memory = make_memory(slots=4, num_row_slots=4)
    sequence = begin(memory, 0)

    save(memory, sequence)

    assert memory.cache is not None and memory.cache.num_cached_slots == 1


def test_without_slots_for_rows_every_slot_can_hold_a_saved_state() -> None:
    memory = make_memory(slots=8, num_row_slots=0)

    serve(memory, 6)

    assert memory.cache is not None and memory.cache.num_cached_slots > 5
