"""Allocators: every item has one owner or none, whatever the order of calls; adjacent pages are kept together."""

from __future__ import annotations

import random

import pytest

from engine.allocator import PageAllocator, SlotAllocator


def runs(pages: list[int]) -> int:
    """How many writes the pages take when adjacent ones are one write."""
    return sum(1 for i, page in enumerate(pages) if i == 0 or page != pages[i - 1] + 1)


def page_allocator_with_free(num_pages: int, free: set[int]) -> PageAllocator:
    allocator = PageAllocator(num_pages)
    taken = allocator.allocate(num_pages - 1, "others")
    allocator.free([page for page in taken if page in free])
    return allocator


class TestPages:
    def test_page_0_is_never_handed_out(self) -> None:
        allocator = PageAllocator(5)
        assert (allocator.num_usable, allocator.num_free) == (4, 4)
        assert allocator.allocate(4, "a") == [1, 2, 3, 4]
        assert not allocator.can_allocate(1)
        assert allocator.can_allocate(0)

    @pytest.mark.parametrize("num_pages", [0, 1])
    def test_a_pool_with_nothing_but_page_0_is_refused(self, num_pages: int) -> None:
        with pytest.raises(AssertionError, match="at least 2"):
            PageAllocator(num_pages)

    def test_lowest_run_that_holds_all(self) -> None:
        allocator = page_allocator_with_free(20, {2, 3, 6, 7, 8, 9, 12, 13, 14})
        assert allocator.allocate(3, "a") == [6, 7, 8]
        assert allocator.allocate(3, "b") == [12, 13, 14]
        assert allocator.allocate(1, "c") == [2]

    def test_longest_runs_when_none_holds_all(self) -> None:
        allocator = page_allocator_with_free(20, {2, 3, 6, 7, 8, 9, 12, 13, 14})
        assert allocator.allocate(8, "a") == [6, 7, 8, 9, 12, 13, 14, 2]
        assert allocator.allocate(1, "b") == [3]

    def test_growth_goes_on_after_the_last_page(self) -> None:
        allocator = page_allocator_with_free(20, {1, 2, 3, 9, 10, 15, 16, 17, 18, 19})
        assert allocator.allocate(1, "others", after=8) == [9]
        assert allocator.allocate(3, "others", after=9) == [10, 1, 2]
        assert allocator.allocate(1, "others", after=19) == [3]
        assert allocator.allocate(2, "others", after=14) == [15, 16]
        assert allocator.allocate(0, "others", after=16) == []

    def test_freed_neighbours_become_one_run(self) -> None:
        allocator = PageAllocator(11)
        pages = {name: allocator.allocate(2, name) for name in "abcde"}
        allocator.free(pages["b"])
        allocator.free(pages["d"])
        allocator.free(pages["c"][::-1])
        assert allocator.allocate(6, "f") == [3, 4, 5, 6, 7, 8]

    def test_wrong_calls_change_nothing(self) -> None:
        allocator = PageAllocator(9)
        allocator.allocate(3, "a")
        for pages, why in [
            ([0], "reserved"),
            ([1, 0], "reserved"),
            ([4], "without an owner"),
            ([2, 4], "without an owner"),
            ([1, 1], "twice"),
            ([9], "without an owner"),
            ([-1], "without an owner"),
        ]:
            with pytest.raises(AssertionError, match=why):
                allocator.free(pages)
        for count in (6, -1):
            with pytest.raises(AssertionError, match="asked"):
                allocator.allocate(count, "b")
        assert allocator.owned() == {"a": [1, 2, 3]}
        assert allocator.num_free == 5
        allocator.check_integrity()
        allocator.free([3, 1])
        with pytest.raises(AssertionError, match="without an owner"):
            allocator.free([1])
        assert allocator.owned() == {"a": [2]}

    def test_transfer_changes_the_owner_and_nothing_else(self) -> None:
        allocator = PageAllocator(9)
        allocator.allocate(3, "a")
        allocator.allocate(2, "b")
        allocator.transfer([5, 2], "c")
        assert allocator.owned() == {"a": [1, 3], "b": [4], "c": [2, 5]}
        assert allocator.num_free == 3
        allocator.check_integrity()
        allocator.free([2, 5, 1])
        assert allocator.owned() == {"a": [3], "b": [4]}

    def test_wrong_transfers_change_nothing(self) -> None:
        allocator = PageAllocator(9)
        allocator.allocate(3, "a")
        for pages, why in [([1, 0], "reserved"), ([1, 4], "without an owner"), ([1, 1], "twice")]:
            with pytest.raises(AssertionError, match=why):
                allocator.transfer(pages, "b")
        assert allocator.owned() == {"a": [1, 2, 3]}

    @pytest.mark.parametrize("seed", range(5))
    def test_random_life(self, seed: int) -> None:
        """Against a model that is a dictionary of lists."""
        rng = random.Random(seed)
        num_pages = rng.choice([2, 3, 17, 64, 200])
        allocator = PageAllocator(num_pages)
        model: dict[str, list[int]] = {}
        for step in range(600):
            free = set(range(1, num_pages)) - {p for pages in model.values() for p in pages}
            action = rng.random()
            if action < 0.5 and allocator.can_allocate(count := rng.randint(0, 1 + num_pages // 4)):
                owner = f"r{step}"
                pages = allocator.allocate(count, owner)
                longest = max((len(run) for run in split(free)), default=0)
                assert count > longest or runs(pages) <= 1
                assert set(pages) <= free and len(set(pages)) == count
                model |= {owner: pages} if pages else {}
            elif action < 0.7 and model and allocator.can_allocate(1):
                owner = rng.choice(list(model))
                (page,) = allocator.allocate(1, owner, after=model[owner][-1])
                assert page in free
                assert page == model[owner][-1] + 1 or model[owner][-1] + 1 not in free
                model[owner].append(page)
            elif model:
                owner = rng.choice(list(model))
                pages = model.pop(owner)
                kept = rng.randint(0, len(pages) - 1) if rng.random() < 0.3 else 0
                allocator.free(rng.sample(pages[kept:], len(pages) - kept))
                model |= {owner: pages[:kept]} if kept else {}
            assert allocator.owned() == {owner: sorted(pages) for owner, pages in model.items()}
            assert allocator.num_free == num_pages - 1 - sum(map(len, model.values()))
            allocator.check_integrity()
        for pages in model.values():
            allocator.free(pages)
        assert allocator.owned() == {} and allocator.num_free == num_pages - 1
        assert allocator.allocate(num_pages - 1, "all") == list(range(1, num_pages))

    def test_integrity_check_sees_a_leak_and_a_page_with_two_lives(self) -> None:
        allocator = PageAllocator(8)
        allocator.allocate(2, "a")
        allocator._free[5] = 0
        with pytest.raises(AssertionError, match="free or owned"):
            allocator.check_integrity()
        allocator._free[5] = 1
        allocator.check_integrity()
        allocator._free[2] = 1
        with pytest.raises(AssertionError, match=r"free and owned: \[2\]"):
            allocator.check_integrity()


class TestSlots:
    def test_lowest_first_and_0_never(self) -> None:
        allocator = SlotAllocator(4)
        assert [allocator.allocate(owner) for owner in "abc"] == [1, 2, 3]
        assert not allocator.can_allocate()
        allocator.free(3)
        allocator.free(1)
        assert allocator.can_allocate(2) and not allocator.can_allocate(3)
        assert allocator.allocate("d") == 1
        assert allocator.owned() == {"d": [1], "b": [2]}

    def test_a_holding_says_who_and_since_when(self, monkeypatch: pytest.MonkeyPatch) -> None:
        allocator = SlotAllocator(3)
        monkeypatch.setattr("time.monotonic", iter((10.0, 11.0)).__next__)
        slot = allocator.allocate("a")
        assert allocator.holdings() == {slot: ("a", 10.0)}
        allocator.transfer(slot, "b")
        assert allocator.holdings() == {slot: ("b", 11.0)}
        allocator.free(slot)
        assert not allocator.holdings()

    def test_generation_counts_allocations(self) -> None:
        allocator = SlotAllocator(3)
        assert allocator.generation(1) == 0
        for expected in (1, 2, 3):
            assert allocator.allocate("a") == 1
            assert allocator.generation(1) == expected
            allocator.free(1)
            assert allocator.generation(1) == expected
        assert allocator.generation(2) == 0

    def test_wrong_calls_change_nothing(self) -> None:
        allocator = SlotAllocator(3)
        allocator.allocate("a")
        for slot in (0, 2, 3, -1):
            with pytest.raises(AssertionError, match=r"reserved|without an owner"):
                allocator.free(slot)
        allocator.allocate("b")
        with pytest.raises(AssertionError, match="none free"):
            allocator.allocate("c")
        assert allocator.owned() == {"a": [1], "b": [2]}
        allocator.check_integrity()
        allocator.free(1)
        with pytest.raises(AssertionError, match="without an owner"):
            allocator.free(1)
        allocator.check_integrity()

    def test_transfer_begins_a_generation(self) -> None:
        allocator = SlotAllocator(3)
        slot = allocator.allocate("a")
        allocator.transfer(slot, "b")
        assert allocator.owned() == {"b": [slot]} and allocator.num_free == 1
        assert allocator.generation(slot) == 2
        for wrong in (0, 2, 3):
            with pytest.raises(AssertionError, match=r"reserved|without an owner"):
                allocator.transfer(wrong, "b")
        assert [allocator.generation(slot) for slot in range(3)] == [0, 2, 0]
        allocator.check_integrity()

    @pytest.mark.parametrize("seed", range(3))
    def test_random_life(self, seed: int) -> None:
        rng = random.Random(seed)
        num_slots = rng.choice([2, 9, 40])
        allocator = SlotAllocator(num_slots)
        owner_of: dict[int, str] = {}
        generation = [0] * num_slots
        for _ in range(500):
            free = sorted(set(range(1, num_slots)) - owner_of.keys())
            if free and rng.random() < 0.55:
                owner = f"r{rng.randint(0, 5)}"
                slot = allocator.allocate(owner)
                assert slot == free[0]
                owner_of[slot] = owner
                generation[slot] += 1
            elif owner_of:
                slot = rng.choice(list(owner_of))
                del owner_of[slot]
                allocator.free(slot)
            assert allocator.num_free == num_slots - 1 - len(owner_of)
            assert [allocator.generation(slot) for slot in range(num_slots)] == generation
            assert {slot: owner for owner, slots in allocator.owned().items() for slot in slots} == owner_of
            allocator.check_integrity()

    def test_integrity_check_sees_a_leak_and_a_slot_with_two_lives(self) -> None:
        allocator = SlotAllocator(4)
        allocator.allocate("a")
        allocator._free.remove(3)
        with pytest.raises(AssertionError, match="free or owned"):
            allocator.check_integrity()
        allocator._free += [3, 3]
        with pytest.raises(AssertionError, match="more than once"):
            allocator.check_integrity()
        allocator._free[-1] = 1
        with pytest.raises(AssertionError, match="free and owned"):
            allocator.check_integrity()


def split(free: set[int]) -> list[list[int]]:
    """The free pages as runs of adjacent ones."""
    found: list[list[int]] = []
    for page in sorted(free):
        if found and found[-1][-1] == page - 1:
            found[-1].append(page)
        else:
            found.append([page])
    return found


def test_saved_states_take_the_highest_slots_so_that_running_ones_stay_one_run() -> None:
    slots = SlotAllocator(10)
    running = [slots.allocate("a"), slots.allocate("b")]
    saved = [slots.allocate("a", highest=True), slots.allocate("b", highest=True)]
    assert (running, saved) == ([1, 2], [9, 8])
    slots.free(1)
    slots.free(9)
    assert slots.allocate("c") == 1 and slots.allocate("c", highest=True) == 9
    slots.check_integrity()
