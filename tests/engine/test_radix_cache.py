"""The radix cache: sentence by sentence, then against a twin that is a dictionary of prefixes."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import pytest

from engine.allocator import PageAllocator, SlotAllocator
from engine.radix_cache import CACHE_OWNER, InsertResult, Match, Node, RadixCache


class Rig:
    """A cache with its allocators, and requests that own what they took and did not donate or free."""

    def __init__(self, *, page_size: int = 4, cache_chunk: int = 8, num_pages: int = 100, num_slots: int = 20) -> None:
        self.pages = PageAllocator(num_pages)
        self.slots = SlotAllocator(num_slots)
        self.cache = RadixCache(self.pages, self.slots, page_size=page_size, cache_chunk=cache_chunk)
        self.page_size = page_size

    def take_pages(self, count: int) -> list[int]:
        return self.pages.allocate(count, "request")

    def take_slot(self) -> int:
        return self.slots.allocate("request")

    def put(
        self, tokens: list[int], *, state: bool = False, extra_key: str | None = None, ends_prompt: bool = False
    ) -> InsertResult:
        """Compute `tokens` without any hit, donate them, free the duplicates."""
        pages = self.take_pages(len(tokens) // self.page_size)
        slot = self.take_slot() if state else None
        result = self.cache.insert(tokens, pages, slot, extra_key=extra_key, ends_prompt=ends_prompt)
        self.pages.free(result.duplicate_pages)
        if result.duplicate_slot is not None:
            self.slots.free(result.duplicate_slot)
        self.check()
        return result

    def find(self, tokens: list[int], extra_key: str | None = None) -> Match:
        match = self.cache.match(tokens, extra_key=extra_key)
        self.check()
        return match

    def depths(self, tokens: list[int], extra_key: str | None = None) -> tuple[int, int, int]:
        """KV tokens, state position, branch position."""
        match = self.find(tokens, extra_key)
        return match.num_kv_tokens, match.state_position, match.branch_position

    def holds(self, tokens: list[int]) -> bool:
        """Whether the tree has the KV of all of `tokens`; unlike a match, this is no use of it."""
        return (None, tuple(tokens)) in kv_of(self.cache)

    def has_state(self, tokens: list[int]) -> bool:
        return (None, tuple(tokens)) in states_of(self.cache)

    def check(self) -> None:
        owned_pages, owned_slots = self.pages.owned(), self.slots.owned()
        self.cache.check_integrity(
            request_pages=owned_pages.get("request", []), request_slots=owned_slots.get("request", [])
        )


def seq(start: int, count: int) -> list[int]:
    """`count` tokens that no other start shares."""
    return [start * 1000 + i for i in range(count)]


# A prefix and its namespace. The views below read the tree without using it.
Place = tuple[str | None, tuple[int, ...]]


def nodes_of(cache: RadixCache) -> dict[Place, Node]:
    """Every node by the whole prefix at its end."""
    found: dict[Place, Node] = {}
    todo: list[tuple[Node, tuple[int, ...]]] = [(cache._root, ())]
    while todo:
        node, prefix = todo.pop()
        for child in node.children.values():
            place = child.extra_key, prefix + child.tokens
            found[place] = child
            todo.append((child, place[1]))
    return found


def kv_of(cache: RadixCache) -> dict[Place, int]:
    """Every cached whole-page prefix → its last page."""
    kv: dict[Place, int] = {}
    for (extra_key, prefix), node in nodes_of(cache).items():
        for i, page in enumerate(reversed(node.pages)):
            kv[extra_key, prefix[: len(prefix) - i * cache.page_size]] = page
    return kv


def states_of(cache: RadixCache) -> dict[Place, int]:
    return {place: node.slot for place, node in nodes_of(cache).items() if node.slot is not None}


class TestMatch:
    def test_nothing_is_held(self) -> None:
        rig = Rig()
        match = rig.find(seq(1, 10))
        assert (match.kv_pages, match.num_kv_tokens) == ([], 0)
        assert (match.state_position, match.state_slot, match.branch_position) == (0, None, 0)
        assert match.kv_node is match.state_node is rig.cache._root
        assert rig.depths([]) == (0, 0, 0)

    def test_whole_pages_only(self) -> None:
        rig = Rig()
        inserted = rig.put(seq(1, 12))
        for count in range(13):
            match = rig.find(seq(1, count))
            assert match.num_kv_tokens == count // 4 * 4
            assert match.kv_pages == inserted.pages_now[: count // 4]
        assert rig.depths(seq(1, 7) + [-1] * 20)[0] == 4
        assert rig.depths(seq(1, 3) + [-1] * 20)[0] == 0

    def test_one_token_is_left_to_compute(self) -> None:
        rig = Rig()
        rig.put(seq(1, 8), state=True)
        rig.put(seq(1, 16), state=True)
        assert rig.depths(seq(1, 17)) == (16, 16, 0)
        assert rig.depths(seq(1, 16)) == (16, 8, 0)
        assert rig.depths(seq(1, 9)) == (8, 8, 0)
        assert rig.depths(seq(1, 8)) == (8, 0, 0)

    def test_the_deepest_state_inside_the_held_kv(self) -> None:
        rig = Rig()
        slots = [rig.cache._slots._free[0]]
        rig.put(seq(1, 8), state=True)
        rig.put(seq(1, 24), state=True)
        match = rig.find(seq(1, 40))
        assert (match.num_kv_tokens, match.state_position) == (24, 24)
        match = rig.find(seq(1, 20) + seq(2, 20))
        assert (match.num_kv_tokens, match.state_position, match.state_slot) == (20, 8, slots[0])
        assert match.state_node.end == 8 and match.kv_node.end == 20

    def test_branch_position_is_the_grid_point_below_the_held_kv(self) -> None:
        rig = Rig()
        rig.put(seq(1, 20))
        assert rig.depths(seq(1, 40)) == (20, 0, 16)
        assert rig.depths(seq(1, 16)) == (16, 0, 8)  # a token must be left to compute
        assert rig.depths(seq(1, 17)) == (16, 0, 16)
        assert rig.depths(seq(1, 8)) == (8, 0, 0)
        rig.put(seq(1, 8), state=True)
        assert rig.depths(seq(1, 40)) == (20, 8, 16)
        assert rig.depths(seq(1, 14)) == (12, 8, 0)

    @pytest.mark.parametrize(("page_size", "cache_chunk"), [(1, 1), (1, 64), (16, 16), (16, 64), (16, 256), (64, 128)])
    def test_three_requests_with_257_tokens_in_common(self, page_size: int, cache_chunk: int) -> None:
        rig = Rig(page_size=page_size, cache_chunk=cache_chunk, num_pages=2000)
        common, expected = seq(1, 257), 257 // cache_chunk * cache_chunk
        prompts = [common + seq(2 + i, 300) for i in range(3)]
        first = rig.find(prompts[0])
        assert (first.num_kv_tokens, first.state_position, first.branch_position) == (0, 0, 0)
        rig.put(prompts[0][:512], state=True)
        second = rig.find(prompts[1])
        assert (second.num_kv_tokens, second.state_position) == (257 // page_size * page_size, 0)
        assert second.branch_position == expected
        rig.put(prompts[1][:expected], state=True)
        rig.put(prompts[1][:512])
        third = rig.find(prompts[2])
        assert (third.state_position, third.branch_position) == (expected, 0)
        assert third.state_slot is not None and third.state_node.end == expected
        assert rig.depths(prompts[0])[1] == 512  # the first one's state was not lost

    def test_namespaces_hold_the_same_tokens_apart(self) -> None:
        rig = Rig()
        plain = rig.put(seq(1, 8), state=True)
        assert rig.depths(seq(1, 9), "a") == (0, 0, 0)
        assert rig.depths(seq(1, 9), "") == (0, 0, 0)
        keyed = rig.put(seq(1, 8), extra_key="a")
        assert keyed.duplicate_pages == [] and set(keyed.pages_now).isdisjoint(plain.pages_now)
        assert rig.depths(seq(1, 9), "a") == (8, 0, 8)
        assert rig.depths(seq(1, 9)) == (8, 8, 0)

    def test_children_may_share_less_than_a_page(self) -> None:
        rig = Rig()
        rig.put([1, 2, 3, 4, 5, 6, 7, 8], state=True)
        rig.put([1, 2, 3, 4, 5, 6, 7, 9], state=True)
        rig.put([1, 2, 3, 0, 5, 6, 7, 9], state=True)
        assert len(rig.cache._root.children) == 2
        assert rig.depths([1, 2, 3, 4, 5, 6, 7, 8, 0]) == (8, 8, 0)
        assert rig.depths([1, 2, 3, 4, 5, 6, 7, 9, 0]) == (8, 8, 0)
        assert rig.depths([1, 2, 3, 4, 5, 6, 7, 0, 0]) == (4, 0, 0)
        assert rig.depths([1, 2, 3, 0, 5, 6, 7, 9, 0]) == (8, 8, 0)
        assert rig.depths([1, 2, 3, 9, 5, 6, 7, 9, 0]) == (0, 0, 0)

    def test_counters(self) -> None:
        rig = Rig()
        rig.find(seq(1, 30))
        rig.put(seq(1, 12))
        rig.find(seq(1, 30))
        rig.put(seq(1, 8), state=True)
        rig.find(seq(1, 30))
        rig.find(seq(1, 9))
        rig.cache.match(seq(1, 30), extra_key=None, count=False)
        assert asdict(rig.cache.counters) == {
            "hits": 2,
            "misses": 2,
            "hit_tokens": 16,
            "kv_hit_tokens": 12 + 12 + 8,
            "evicted_pages": 0,
            "evicted_slots": 0,
        }


class TestInsert:
    def test_what_is_new_becomes_the_trees(self) -> None:
        rig = Rig()
        pages, slot = rig.take_pages(4), rig.take_slot()
        result = rig.cache.insert(seq(1, 16), pages, slot, extra_key=None)
        assert (result.pages_now, result.duplicate_pages, result.duplicate_slot) == (pages, [], None)
        assert rig.pages.owned() == {CACHE_OWNER: sorted(pages)}
        assert rig.slots.owned() == {CACHE_OWNER: [slot]}
        assert (rig.cache.num_cached_pages, rig.cache.num_cached_slots) == (4, 1)
        assert (rig.cache.num_evictable_pages, rig.cache.num_evictable_slots) == (4, 1)
        assert result.node.end == 16 and result.node.slot == slot
        rig.check()

    def test_a_writer_from_before_the_donation_can_tell(self) -> None:
        rig = Rig()
        slot = rig.take_slot()
        generation = rig.slots.generation(slot)
        rig.cache.insert(seq(1, 8), rig.take_pages(2), slot, extra_key=None)
        assert rig.slots.generation(slot) != generation

    def test_what_the_tree_has_is_handed_back(self) -> None:
        rig = Rig()
        first = rig.put(seq(1, 12))
        own = rig.take_pages(5)
        tokens = seq(1, 8) + seq(2, 12)
        result = rig.cache.insert(tokens, own, None, extra_key=None)
        assert result.duplicate_pages == own[:2]
        assert result.pages_now == first.pages_now[:2] + own[2:]
        assert rig.pages.owned()["request"] == sorted(own[:2])
        assert rig.find(tokens).kv_pages == result.pages_now
        assert rig.find(seq(1, 12)).kv_pages == first.pages_now
        rig.check()

    def test_the_trees_own_pages_are_no_duplicates(self) -> None:
        rig = Rig()
        held = rig.put(seq(1, 8)).pages_now
        own = rig.take_pages(2)
        result = rig.cache.insert(seq(1, 16), held + own, None, extra_key=None)
        assert (result.pages_now, result.duplicate_pages) == (held + own, [])
        again = rig.cache.insert(seq(1, 16), result.pages_now, None, extra_key=None)
        assert (again.pages_now, again.duplicate_pages, again.node) == (held + own, [], result.node)
        rig.check()

    def test_a_state_inside_an_edge_splits_it(self) -> None:
        rig = Rig()
        whole = rig.put(seq(1, 24), state=True)
        slot = rig.take_slot()
        result = rig.cache.insert(seq(1, 8), whole.pages_now[:2], slot, extra_key=None)
        assert result.node.end == 8 and result.node.slot == slot and result.duplicate_slot is None
        assert result.node.pages == whole.pages_now[:2] and whole.node.pages == whole.pages_now[2:]
        assert whole.node.parent is result.node and whole.node.end == 24 and whole.node.slot is not None
        rig.check()

    def test_a_split_leaves_the_upper_half_without_a_state(self) -> None:
        rig = Rig()
        lower = rig.put(seq(1, 16), state=True, ends_prompt=True).node
        upper = rig.find(seq(1, 8) + [-1] * 8).kv_node
        assert upper.slot is None and not upper.ends_prompt and upper.num_state_uses == 0
        assert lower.slot is not None and lower.ends_prompt and lower.parent is upper
        assert rig.depths(seq(1, 9)) == (8, 0, 8)

    def test_a_second_state_is_handed_back(self) -> None:
        rig = Rig()
        first = rig.put(seq(1, 8), state=True)
        slot = rig.take_slot()
        second = rig.cache.insert(seq(1, 8), first.pages_now, slot, extra_key=None)
        assert second.duplicate_slot == slot and second.node is first.node and first.node.slot != slot
        assert rig.slots.owned()["request"] == [slot]
        rig.check()

    def test_a_state_joins_kv_that_is_there(self) -> None:
        rig = Rig()
        rig.put(seq(1, 8))
        assert rig.put(seq(1, 8), state=True).duplicate_slot is None
        assert rig.depths(seq(1, 9)) == (8, 8, 0)

    def test_nothing_to_donate(self) -> None:
        rig = Rig()
        result = rig.put([])
        assert (result.pages_now, result.node) == ([], rig.cache._root)
        rig.cache.unlock(rig.cache.lock(result.node))
        rig.check()

    def test_wrong_donations_change_nothing(self) -> None:
        rig = Rig()
        held = rig.put(seq(1, 8), state=True)
        own, slot = rig.take_pages(3), rig.take_slot()
        assert held.node.slot is not None
        before = kv_of(rig.cache), states_of(rig.cache)
        for tokens, pages, given, why in [
            (seq(2, 7), own[:2], None, "do not hold"),
            (seq(2, 8), own[:1], None, "do not hold"),
            (seq(2, 12), own, slot, "no state can be saved at 12"),
            ([], [], slot, "no state can be saved at 0"),
            (seq(2, 8), own[:2], held.node.slot, "the tree's already"),
            (seq(2, 8), held.pages_now, None, "for other tokens"),
            (seq(1, 8), held.pages_now[::-1], None, "for other tokens"),
            (seq(1, 12), [*held.pages_now, held.pages_now[0]], None, "for other tokens"),
            (seq(2, 8), [own[0], own[0]], None, "twice"),
            (seq(2, 8), [own[0], 0], None, "reserved"),
            (seq(2, 8), [own[0], 99], None, "without an owner"),
        ]:
            with pytest.raises(AssertionError, match=why):
                rig.cache.insert(tokens, pages, given, extra_key=None)
            assert (kv_of(rig.cache), states_of(rig.cache)) == before
            rig.check()

    @pytest.mark.parametrize(("page_size", "cache_chunk"), [(0, 8), (4, 0), (4, 6), (8, 4)])
    def test_sizes_that_do_not_fit_are_refused(self, page_size: int, cache_chunk: int) -> None:
        with pytest.raises(AssertionError):
            Rig(page_size=page_size, cache_chunk=cache_chunk)


class TestDropState:
    def test_an_older_checkpoint_goes_and_its_kv_stays(self) -> None:
        rig = Rig()
        older = rig.put(seq(1, 8), state=True).node
        rig.put(seq(1, 16), state=True)
        assert rig.cache.drop_state(older)
        assert rig.slots.owned() == {CACHE_OWNER: [2]}
        assert rig.depths(seq(1, 9)) == (8, 0, 8)
        assert rig.depths(seq(1, 17)) == (16, 16, 0)
        assert not rig.cache.drop_state(older)
        assert rig.cache.counters.evicted_slots == 0

    def refused(self, rig: Rig, node: Node) -> bool:
        slot = node.slot
        dropped = rig.cache.drop_state(node)
        rig.check()
        return not dropped and node.slot == slot

    def test_the_end_of_a_prompt_stays(self) -> None:
        rig = Rig()
        node = rig.put(seq(1, 8), state=True, ends_prompt=True).node
        rig.put(seq(1, 16), state=True)
        assert self.refused(rig, node)

    def test_a_prompt_may_end_where_another_request_passed(self) -> None:
        rig = Rig()
        node = rig.put(seq(1, 8), state=True).node
        assert rig.cache.insert(seq(1, 8), rig.find(seq(1, 8)).kv_pages, None, extra_key=None, ends_prompt=True)
        assert self.refused(rig, node)

    def test_once_the_end_of_a_prompt_always_the_end_of_one(self) -> None:
        rig = Rig()
        result = rig.put(seq(1, 8), state=True, ends_prompt=True)
        rig.cache.insert(seq(1, 8), result.pages_now, None, extra_key=None)
        assert self.refused(rig, result.node)

    def test_a_locked_state_stays_and_locked_kv_does_not_matter(self) -> None:
        rig = Rig()
        node = rig.put(seq(1, 8), state=True).node
        rig.cache.lock(node)
        reading = rig.cache.lock(node, state=True)
        assert self.refused(rig, node)
        rig.cache.unlock(reading)
        assert rig.cache.drop_state(node)

    def test_a_state_that_another_request_resumed_from_stays(self) -> None:
        rig = Rig()
        node = rig.put(seq(1, 8), state=True).node
        rig.put(seq(1, 16), state=True)
        rig.find(seq(1, 9))
        assert self.refused(rig, node)

    def test_a_match_that_passes_by_does_not_count(self) -> None:
        rig = Rig()
        node = rig.put(seq(1, 8), state=True).node
        rig.put(seq(1, 16), state=True)
        rig.find(seq(1, 30))
        assert rig.cache.drop_state(node)

    def test_a_state_that_another_request_saved_too_stays(self) -> None:
        rig = Rig()
        node = rig.put(seq(1, 8), state=True).node
        rig.put(seq(1, 8), state=True)
        assert self.refused(rig, node)

    def test_a_later_state_in_the_place_of_an_evicted_one_stays(self) -> None:
        rig = Rig()
        node = rig.put(seq(1, 8), state=True).node
        rig.cache.evict_slots(1)
        assert rig.put(seq(1, 8), state=True).node is node
        assert self.refused(rig, node)

    def test_a_place_where_paths_part_stays(self) -> None:
        rig = Rig()
        node = rig.put(seq(1, 8), state=True).node
        rig.put(seq(1, 16))
        rig.put(seq(1, 8) + seq(2, 8))
        assert self.refused(rig, node)

    def test_paths_part_off_the_grid(self) -> None:
        """The state of a branch position stays, however many tokens below it the paths part."""
        rig = Rig()
        rig.put(seq(1, 24), state=True)
        rig.find(seq(1, 20) + seq(2, 8))
        branch = rig.put(seq(1, 16), state=True).node
        rig.put(seq(1, 20) + seq(2, 12), state=True)
        assert [len(child.children) for child in branch.children.values()] == [2]
        assert self.refused(rig, branch)

    def test_a_deeper_state_that_all_share_takes_its_place(self) -> None:
        rig = Rig()
        node = rig.put(seq(1, 8), state=True).node
        rig.put(seq(1, 16), state=True)
        rig.put(seq(1, 24))
        rig.put(seq(1, 16) + seq(2, 8))
        assert rig.cache.drop_state(node)

    def test_a_node_that_is_gone(self) -> None:
        rig = Rig()
        node = rig.put(seq(1, 8), state=True).node
        rig.cache.flush()
        assert not rig.cache.drop_state(node)
        rig.check()


class TestLocks:
    def test_kv_of_the_path_stays(self) -> None:
        rig = Rig()
        rig.put(seq(1, 8))
        inner = rig.put(seq(1, 16)).node
        rig.put(seq(1, 24))
        rig.put(seq(2, 8))
        lock = rig.cache.lock(inner)
        rig.check()
        assert rig.cache.num_evictable_pages == 4
        assert rig.cache.evict_pages(100) == 4
        assert rig.holds(seq(1, 16)) and rig.cache.num_cached_pages == 4
        rig.cache.unlock(lock)
        rig.check()
        assert rig.cache.num_evictable_pages == 4
        assert rig.cache.evict_pages(100) == 4

    def test_a_kv_lock_lets_the_state_go(self) -> None:
        rig = Rig()
        node = rig.put(seq(1, 8), state=True).node
        lock = rig.cache.lock(node)
        assert rig.cache.num_evictable_slots == 1
        assert rig.cache.evict_slots(1) == 1
        assert rig.holds(seq(1, 8)) and not rig.has_state(seq(1, 8))
        rig.cache.unlock(lock)
        rig.check()

    def test_a_state_lock_keeps_the_state_and_its_kv(self) -> None:
        rig = Rig()
        node = rig.put(seq(1, 8), state=True).node
        lock = rig.cache.lock(node, state=True)
        rig.check()
        assert (rig.cache.num_evictable_slots, rig.cache.num_evictable_pages) == (0, 0)
        assert (rig.cache.evict_slots(1), rig.cache.evict_pages(1)) == (0, 0)
        assert rig.cache.flush().num_slots == 0
        rig.cache.unlock(lock)
        rig.check()
        assert (rig.cache.num_evictable_slots, rig.cache.num_evictable_pages) == (1, 2)
        assert rig.cache.evict_slots(1) == 1

    def test_the_state_is_read_and_the_kv_used_on(self) -> None:
        rig = Rig()
        node = rig.put(seq(1, 8), state=True).node
        using, reading = rig.cache.lock(node), rig.cache.lock(node, state=True)
        rig.cache.unlock(reading)
        assert (rig.cache.evict_slots(1), rig.cache.evict_pages(1)) == (1, 0)
        rig.cache.unlock(using)
        assert rig.cache.evict_pages(1) == 2

    def test_every_holder_counts(self) -> None:
        rig = Rig()
        node = rig.put(seq(1, 8), state=True).node
        locks = [rig.cache.lock(node, state=True) for _ in range(3)]
        for lock in locks:
            assert (rig.cache.evict_slots(1), rig.cache.evict_pages(1)) == (0, 0)
            rig.cache.unlock(lock)
            rig.check()
        assert rig.cache.evict_pages(1) == 2

    def test_a_match_locks_no_more_than_it_found(self) -> None:
        rig = Rig()
        rig.put(seq(1, 40), state=True)
        match = rig.find(seq(1, 8) + seq(2, 30))
        lock = rig.cache.lock(match.kv_node)
        assert rig.cache.evict_pages(100) == 8
        assert rig.holds(seq(1, 8))
        rig.cache.unlock(lock)

    def test_locks_survive_splits(self) -> None:
        rig = Rig()
        node = rig.put(seq(1, 24), state=True).node
        lock = rig.cache.lock(node, state=True)
        rig.put(seq(1, 8) + seq(2, 8))
        rig.put(seq(1, 16), state=True)
        assert rig.cache.evict_pages(100) == 2
        assert rig.holds(seq(1, 24)) and rig.has_state(seq(1, 24))
        rig.cache.unlock(lock)
        rig.check()
        assert rig.cache.evict_pages(100) == 6

    def test_a_lock_on_nothing(self) -> None:
        rig = Rig()
        rig.put(seq(1, 8))
        lock = rig.cache.lock(rig.find(seq(2, 8)).kv_node)
        assert rig.cache.evict_pages(100) == 2
        rig.cache.unlock(lock)
        rig.check()

    def test_wrong_locks(self) -> None:
        rig = Rig()
        node = rig.put(seq(1, 8)).node
        with pytest.raises(AssertionError, match="no state"):
            rig.cache.lock(node, state=True)
        with pytest.raises(AssertionError, match="no state"):
            rig.cache.lock(rig.cache._root, state=True)
        lock = rig.cache.lock(node)
        rig.cache.unlock(lock)
        with pytest.raises(AssertionError, match="unlocked twice"):
            rig.cache.unlock(lock)
        rig.check()
        rig.cache.evict_pages(1)
        with pytest.raises(AssertionError, match="evicted"):
            rig.cache.lock(node)
        rig.check()


class TestEviction:
    def test_least_recently_used_leaves_first(self) -> None:
        rig = Rig()
        for name in (1, 2, 3):
            rig.put(seq(name, 8))
        rig.find(seq(1, 8))
        assert rig.cache.evict_pages(1) == 2
        assert [rig.holds(seq(name, 8)) for name in (1, 2, 3)] == [True, False, True]
        assert rig.cache.evict_pages(1) == 2
        assert [rig.holds(seq(name, 8)) for name in (1, 2, 3)] == [True, False, False]
        assert rig.cache.evict_pages(3) == 2
        assert rig.cache.num_cached_pages == 0 and rig.pages.num_free == 99
        rig.check()

    def test_then_parents_that_became_leaves(self) -> None:
        rig = Rig()
        rig.put(seq(1, 8))
        rig.put(seq(1, 16))
        rig.put(seq(1, 8) + seq(2, 8))
        rig.put(seq(3, 8))
        rig.find(seq(1, 16))
        order = [seq(1, 8) + seq(2, 8), seq(3, 8), seq(1, 16), seq(1, 8)]
        for gone in order:
            assert rig.holds(gone)
            assert rig.cache.evict_pages(1) == 2
            assert not rig.holds(gone)
            rig.check()

    def test_a_leafs_state_goes_with_it_and_counts(self) -> None:
        rig = Rig()
        rig.put(seq(1, 8), state=True)
        rig.put(seq(1, 16), state=True)
        assert rig.cache.evict_pages(1) == 2
        assert rig.slots.num_free == 18 and rig.has_state(seq(1, 8))
        assert (rig.cache.counters.evicted_pages, rig.cache.counters.evicted_slots) == (2, 1)
        rig.check()

    def test_pages_above_a_state_outlive_it(self) -> None:
        """However old the shallow KV is, the deep state that stands on it goes first."""
        rig = Rig()
        shallow = rig.put(seq(1, 8)).node
        deep = rig.put(seq(1, 8) + seq(2, 8), state=True).node
        rig.put(seq(3, 8))
        lock = rig.cache.lock(deep, state=True)
        assert rig.cache.evict_pages(100) == 2
        rig.cache.unlock(lock)
        rig.cache.evict_pages(1)
        assert deep.slot is None and shallow.parent is not None
        rig.check()

    def test_a_state_goes_and_its_kv_stays(self) -> None:
        rig = Rig()
        rig.put(seq(1, 8), state=True)
        rig.put(seq(1, 16), state=True)
        assert rig.cache.evict_slots(5) == 2
        assert rig.cache.num_cached_slots == 0 and rig.cache.num_cached_pages == 4
        assert rig.depths(seq(1, 17)) == (16, 0, 16)
        assert rig.cache.counters.evicted_slots == 2 and rig.cache.counters.evicted_pages == 0

    def test_least_recently_used_states_first(self) -> None:
        rig = Rig()
        for name in (1, 2, 3):
            rig.put(seq(name, 8), state=True)
        rig.find(seq(1, 9))
        gone = []
        while rig.cache.evict_slots(1):
            gone.append([name for name in (1, 2, 3) if not rig.has_state(seq(name, 8))])
            rig.check()
        assert gone == [[2], [2, 3], [1, 2, 3]]

    def test_only_the_state_that_is_resumed_from_is_used(self) -> None:
        rig = Rig()
        rig.put(seq(1, 8), state=True)
        rig.put(seq(1, 16), state=True)
        rig.put(seq(2, 8), state=True)
        rig.find(seq(1, 17))
        rig.cache.evict_slots(2)
        assert rig.has_state(seq(1, 16))
        assert not rig.has_state(seq(1, 8)) and not rig.has_state(seq(2, 8))

    def test_a_state_that_leaves_nothing_to_compute_is_not_used(self) -> None:
        rig = Rig()
        rig.put(seq(1, 8), state=True)
        rig.put(seq(2, 8), state=True)
        rig.find(seq(1, 8))
        rig.cache.evict_slots(1)
        assert not rig.has_state(seq(1, 8))

    def test_a_donated_duplicate_is_use_of_both_orders(self) -> None:
        rig = Rig()
        rig.put(seq(1, 8), state=True)
        rig.put(seq(2, 8), state=True)
        rig.put(seq(1, 8), state=True)
        rig.cache.evict_slots(1)
        assert rig.has_state(seq(1, 8)) and not rig.has_state(seq(2, 8))
        rig.cache.evict_pages(1)
        assert rig.holds(seq(1, 8)) and not rig.holds(seq(2, 8))

    def test_passing_by_is_use_of_kv_only(self) -> None:
        rig = Rig()
        rig.put(seq(1, 8), state=True)
        rig.put(seq(2, 8), state=True)
        rig.put(seq(1, 16))
        rig.cache.evict_slots(1)
        assert not rig.has_state(seq(1, 8))
        rig.cache.evict_pages(1)
        assert not rig.holds(seq(2, 8))

    @pytest.mark.parametrize("state", [False, True])
    def test_giving_a_lock_back_is_use(self, state: bool) -> None:
        rig = Rig()
        node = rig.put(seq(1, 8), state=True).node
        lock = rig.cache.lock(node, state=state)
        rig.put(seq(2, 8), state=True)
        rig.cache.unlock(lock)
        rig.check()
        rig.cache.evict_slots(1)
        assert rig.has_state(seq(1, 8)) is state
        rig.cache.evict_pages(1)
        assert rig.holds(seq(1, 8)) and not rig.holds(seq(2, 8))

    def test_the_two_orders_are_separate(self) -> None:
        rig = Rig()
        rig.put(seq(1, 8), state=True)
        rig.put(seq(2, 8), state=True)
        rig.find(seq(1, 8))  # KV only
        rig.cache.evict_slots(1)
        assert not rig.has_state(seq(1, 8)) and rig.has_state(seq(2, 8))
        rig.cache.evict_pages(1)
        assert rig.holds(seq(1, 8)) and not rig.holds(seq(2, 8))

    @pytest.mark.parametrize("count", [0, -1])
    def test_asking_for_nothing(self, count: int) -> None:
        rig = Rig()
        rig.put(seq(1, 8), state=True)
        assert (rig.cache.evict_pages(count), rig.cache.evict_slots(count)) == (0, 0)
        assert rig.has_state(seq(1, 8))

    def test_stops_when_enough_is_free(self) -> None:
        rig = Rig()
        for name in range(5):
            rig.put(seq(name, 12))
        assert rig.cache.evict_pages(3) == 3
        assert rig.cache.evict_pages(4) == 6
        assert rig.cache.num_cached_pages == rig.cache.num_evictable_pages == 6

    def test_flush_frees_all_that_is_unlocked(self) -> None:
        rig = Rig()
        node = rig.put(seq(1, 8), state=True).node
        rig.put(seq(1, 16), state=True)
        rig.put(seq(2, 8), state=True, extra_key="a")
        lock = rig.cache.lock(node)
        flushed = rig.cache.flush()
        rig.check()
        assert (flushed.num_pages, flushed.num_slots) == (4, 3)
        assert rig.depths(seq(1, 17)) == (8, 0, 8)
        rig.cache.unlock(lock)
        flushed = rig.cache.flush()
        assert (flushed.num_pages, flushed.num_slots) == (2, 0)
        assert rig.pages.owned() == rig.slots.owned() == {}
        assert nodes_of(rig.cache) == {}
        assert rig.cache.counters.evicted_pages == rig.cache.counters.evicted_slots == 0

    def test_a_state_is_taken_over_and_its_kv_stays(self) -> None:
        rig = Rig()
        node = rig.put(seq(1, 8), state=True).node
        lock = rig.cache.lock(node, state=True)
        with pytest.raises(AssertionError, match="no state to be had"):
            rig.cache.take_state(node, "request")
        rig.cache.unlock(lock)
        slot = rig.cache.take_state(node, "request")
        rig.check()
        assert rig.slots.owned() == {"request": [slot]}
        assert rig.depths(seq(1, 9)) == (8, 0, 8)
        with pytest.raises(AssertionError, match="no state to be had"):
            rig.cache.take_state(node, "request")

    def test_thousands_of_nodes(self) -> None:
        """Takes long when every eviction looks at every node."""
        count = 20_000
        rig = Rig(page_size=1, cache_chunk=1, num_pages=count + 1, num_slots=count + 1)
        for name, page in enumerate(rig.take_pages(count)):
            rig.cache.insert([name], [page], rig.take_slot(), extra_key=None)
        start = time.perf_counter()
        for _ in range(count // 2):
            assert rig.cache.evict_slots(1) == 1
        for _ in range(count):
            assert rig.cache.evict_pages(1) == 1
        assert time.perf_counter() - start < 5
        rig.check()


def test_families_of_prefixes_are_told_by_their_sizes() -> None:
    """The twelve tokens that two prompts share count once."""
    rig = Rig()
    rig.put([*seq(1, 12), *seq(2, 4)], state=True)
    longest = rig.put([*seq(1, 12), *seq(3, 12)], state=True)
    rig.put(seq(4, 8))
    lock = rig.cache.lock(longest.node)
    families, omitted = rig.cache.prefixes(10)
    assert families == [
        {"tokens": 28, "longest_tokens": 24, "branches": 2, "states": 2, "in_use": 2},
        {"tokens": 8, "longest_tokens": 8, "branches": 1, "states": 0, "in_use": 0},
    ]
    assert omitted == 0 and rig.cache.prefixes(1) == (families[:1], 1)
    rig.cache.unlock(lock)
    rig.cache.flush()
    assert rig.cache.prefixes(10) == ([], 0)


def _wrong_owner(rig: Rig, node: Node) -> None:
    rig.pages.transfer(node.pages[:1], "request")


def _forgotten_free(rig: Rig, node: Node) -> None:
    rig.pages.allocate(1, "cache")


def _freed_slot(rig: Rig, node: Node) -> None:
    assert node.slot is not None
    rig.slots.free(node.slot)


def _page_twice(rig: Rig, node: Node) -> None:
    node.pages[0] = node.pages[1]


def _lost_node(rig: Rig, node: Node) -> None:
    cache = rig.cache
    assert node.parent is not None
    del node.parent.children[cache._key(node.extra_key, node.tokens)]
    del cache._idle_nodes[node], cache._idle_states[node]
    cache.num_evictable_pages -= len(node.pages)


def _lost_state(rig: Rig, node: Node) -> None:
    node.slot = None


def _state_off_the_grid(rig: Rig, node: Node) -> None:
    parent = node.parent
    assert parent is not None
    upper = rig.cache._split(node, 1)
    upper.slot, node.slot = node.slot, None


def _state_lock_leaked(rig: Rig, node: Node) -> None:
    node.state_locks += 1


def _lock_leaked(rig: Rig, node: Node) -> None:
    node.kv_locks += 1


def _lock_of_the_parent_lost(rig: Rig, node: Node) -> None:
    rig.cache.lock(node)
    assert node.parent is not None
    node.parent.kv_locks -= 1


def _wrong_key(rig: Rig, node: Node) -> None:
    assert node.parent is not None
    node.tokens = (-1, *node.tokens[1:])


def _ragged_edge(rig: Rig, node: Node) -> None:
    node.tokens = node.tokens[:-1]


def _wrong_end(rig: Rig, node: Node) -> None:
    node.end += 8


def _wrong_count(rig: Rig, node: Node) -> None:
    rig.cache.num_evictable_pages += 1


def _not_in_the_order(rig: Rig, node: Node) -> None:
    del rig.cache._idle_nodes[node]


def _state_not_in_the_order(rig: Rig, node: Node) -> None:
    del rig.cache._idle_states[node]


def _parent_older(rig: Rig, node: Node) -> None:
    rig.cache._idle_nodes.move_to_end(node)


def _mixed_namespaces(rig: Rig, node: Node) -> None:
    assert node.parent is not None
    del node.parent.children[rig.cache._key(node.extra_key, node.tokens)]
    node.extra_key = "a"
    node.parent.children[rig.cache._key(node.extra_key, node.tokens)] = node


def _no_parent(rig: Rig, node: Node) -> None:
    node.parent = None


class TestIntegrity:
    @pytest.mark.parametrize(
        ("damage", "why"),
        [
            (_wrong_owner, "owned by others"),
            (_forgotten_free, "leaked"),
            (_freed_slot, "owned by others"),
            (_page_twice, "cached"),
            (_lost_node, "pages cached"),
            (_lost_state, "unlocked states"),
            (_state_off_the_grid, "off the grid"),
            (_state_lock_leaked, "1 state locks counted, 0 held"),
            (_lock_leaked, "1 KV locks counted, 0 held"),
            (_lock_of_the_parent_lost, "0 KV locks counted, 1 held"),
            (_wrong_key, "wrong key"),
            (_ragged_edge, "whole pages"),
            (_wrong_end, "after its tokens"),
            (_wrong_count, "5 pages counted, 4 evictable"),
            (_not_in_the_order, "unlocked nodes"),
            (_state_not_in_the_order, "unlocked states"),
            (_parent_older, "older than its child"),
            (_mixed_namespaces, "two namespaces"),
            (_no_parent, "without a parent"),
        ],
    )
    def test_sees(self, damage: Callable[[Rig, Node], None], why: str) -> None:
        rig = Rig()
        rig.put(seq(1, 8))
        node = rig.put(seq(1, 16), state=True).node
        damage(rig, node)
        with pytest.raises(AssertionError, match=why):
            rig.check()

    def test_compares_with_what_the_requests_own(self) -> None:
        rig = Rig()
        rig.put(seq(1, 8), state=True)
        pages, slot = rig.take_pages(2), rig.take_slot()
        rig.cache.check_integrity(request_pages=pages, request_slots=[slot])
        for wrong_pages, wrong_slots in [(pages[:1], [slot]), (pages, []), ([*pages, 1], [slot]), (pages, [slot, 1])]:
            with pytest.raises(AssertionError, match="leaked or owned twice"):
                rig.cache.check_integrity(request_pages=wrong_pages, request_slots=wrong_slots)


@dataclass
class TwinState:
    slot: int
    used: int


@dataclass
class Twin:
    """The same cache, obviously right and slow: a dictionary of prefixes, scanned in full for everything.

    kv: whole-page prefix → its last page. ends: prefix at which a node ends → when it was last used. uses, prompt_ends:
    of ends. locks: (prefix, with its state).
    """

    page_size: int
    cache_chunk: int
    kv: dict[Place, int] = field(default_factory=dict)
    ends: dict[Place, int] = field(default_factory=dict)
    states: dict[Place, TwinState] = field(default_factory=dict)
    uses: Counter[Place] = field(default_factory=Counter)
    prompt_ends: set[Place] = field(default_factory=set)
    locks: list[tuple[Place, bool]] = field(default_factory=list)
    clock: int = 0

    def now(self) -> int:
        self.clock += 1
        return self.clock

    def prefixes(self, place: Place) -> list[Place]:
        """All whole-page prefixes, longest first, without the empty one."""
        extra_key, tokens = place
        whole = len(tokens) // self.page_size * self.page_size
        return [(extra_key, tokens[:n]) for n in range(whole, 0, -self.page_size)]

    def longest(self, place: Place) -> Place:
        return next((prefix for prefix in self.prefixes(place) if prefix in self.kv), (place[0], ()))

    def use(self, place: Place) -> None:
        for prefix in self.prefixes(place):
            if prefix in self.ends:
                self.ends[prefix] = self.now()

    def use_state(self, place: Place) -> None:
        self.uses[place] += 1
        self.states[place].used = self.now()

    def end_at(self, place: Place) -> None:
        if place[1]:
            self.ends.setdefault(place, 0)
        self.use(place)

    def match(self, place: Place) -> tuple[list[int], int, int | None, int]:
        """KV pages, state position, state slot, branch position."""
        found = self.longest(place)
        self.end_at(found)
        limit = len(place[1]) - 1
        usable = [prefix for prefix in self.prefixes(found) if prefix in self.states and len(prefix[1]) <= limit]
        position, slot = 0, None
        if usable:
            self.use_state(usable[0])
            position, slot = len(usable[0][1]), self.states[usable[0]].slot
        branches = [n for n in range(position + 1, min(len(found[1]), limit) + 1) if n % self.cache_chunk == 0]
        return self.pages_of(found), position, slot, max(branches, default=0)

    def pages_of(self, place: Place) -> list[int]:
        return [self.kv[prefix] for prefix in reversed(self.prefixes(place))]

    def insert(self, place: Place, pages: list[int], slot: int | None, ends_prompt: bool) -> tuple[list[int], bool]:
        """Duplicate pages, and whether the slot is one."""
        duplicates = []
        self.end_at(self.longest(place))
        for prefix, page in zip(reversed(self.prefixes(place)), pages, strict=True):
            if self.kv.setdefault(prefix, page) != page:
                duplicates.append(page)
        self.end_at(place)
        if ends_prompt:
            self.prompt_ends.add(place)
        if slot is None:
            return duplicates, False
        duplicate_slot = place in self.states
        self.states.setdefault(place, TwinState(slot, 0))
        self.use_state(place)
        return duplicates, duplicate_slot

    def next_pages(self, place: Place) -> set[tuple[int, ...]]:
        extra_key, tokens = place
        n = len(tokens)
        longer = [t for e, t in self.kv if e == extra_key and len(t) == n + self.page_size and t[:n] == tokens]
        return {t[n:] for t in longer}

    def is_locked(self, place: Place) -> bool:
        return any(place in self.prefixes(locked) for locked, _ in self.locks)

    def parts_before_the_next_state(self, place: Place) -> bool:
        while len(pages := self.next_pages(place)) == 1:
            place = place[0], place[1] + pages.pop()
            if place in self.states:
                return False
        return len(pages) > 1

    def drop_state(self, place: Place) -> bool:
        keep = (place, True) in self.locks or place in self.prompt_ends or self.uses[place] > 1
        if place not in self.states or keep or self.parts_before_the_next_state(place):
            return False
        del self.states[place]
        return True

    def unlock(self, lock: tuple[Place, bool]) -> None:
        self.locks.remove(lock)
        place, state = lock
        for prefix in self.prefixes(place):
            if prefix in self.ends and not self.is_locked(prefix):
                self.ends[prefix] = self.now()
        if state and lock not in self.locks:
            self.states[place].used = self.now()

    def evictable_states(self) -> list[Place]:
        return [place for place in self.states if (place, True) not in self.locks]

    def evict_slot(self) -> bool:
        oldest = min(self.evictable_states(), key=lambda place: self.states[place].used, default=None)
        if oldest is None:
            return False
        del self.states[oldest]
        return True

    def evict_leaf(self) -> int:
        """How many pages the oldest unlocked leaf had; 0 when there is none."""
        leaves = [place for place in self.ends if not self.next_pages(place) and not self.is_locked(place)]
        if not leaves:
            return 0
        oldest = min(leaves, key=lambda place: self.ends[place])
        count = 0
        for prefix in self.prefixes(oldest):
            if count and prefix in self.ends:
                break
            del self.kv[prefix]
            count += 1
        del self.ends[oldest]
        self.states.pop(oldest, None)
        self.uses.pop(oldest, None)
        self.prompt_ends.discard(oldest)
        return count

    def evict_pages(self, count: int) -> int:
        freed = 0
        while freed < count and (more := self.evict_leaf()):
            freed += more
        return freed


class Pair:
    """The cache and its twin, driven by the same random calls."""

    def __init__(self, seed: int, *, page_size: int, chunk_pages: int, num_pages: int, num_slots: int) -> None:
        self.rng = random.Random(seed)
        self.rig = Rig(
            page_size=page_size, cache_chunk=page_size * chunk_pages, num_pages=num_pages, num_slots=num_slots
        )
        self.cache = self.rig.cache
        self.twin = Twin(page_size, page_size * chunk_pages)
        self.locks: list[tuple[tuple[Place, bool], object]] = []
        self.known: list[list[int]] = [[]]
        self.seen: Counter[str] = Counter()

    def place(self) -> Place:
        """A prompt that often shares a prefix with earlier ones: pages of one token repeated, and a few more tokens."""
        rng = self.rng
        ends = sorted(self.twin.states if rng.random() < 0.5 else self.twin.ends, key=repr)
        if ends and rng.random() < 0.4:
            extra_key, held = rng.choice(ends)
            return extra_key, (*held, *[rng.randint(0, 1) for _ in range(rng.choice([0, 1, self.twin.cache_chunk]))])
        base = rng.choice(self.known)
        base = base[: rng.randint(0, len(base))] if rng.random() < 0.7 else base
        num_pages = rng.randint(0, 4 * self.twin.cache_chunk // self.twin.page_size)
        blocks = [token for _ in range(num_pages) for token in [rng.randint(0, 1)] * self.twin.page_size]
        tokens = base + blocks + [rng.randint(0, 1) for _ in range(rng.randint(0, self.twin.page_size))]
        tokens = tokens[: 12 * self.twin.cache_chunk]
        self.known = [*self.known[-15:], tokens]
        return rng.choice([None, None, None, "a"]), tuple(tokens)

    def match(self) -> None:
        place = self.place()
        match = self.cache.match(place[1], extra_key=place[0])
        assert (match.kv_pages, match.state_position, match.state_slot, match.branch_position) == self.twin.match(place)
        assert match.num_kv_tokens == len(match.kv_pages) * self.twin.page_size == match.kv_node.end
        assert match.state_node.end == match.state_position and match.state_node.slot == match.state_slot
        self.seen["hits"] += match.state_position > 0
        self.seen["branches"] += match.branch_position > 0

    def request(self) -> None:
        """Match, lock, take memory for the rest (evicting for it), compute, donate."""
        place = self.place()
        grid = self.rng.choice([self.twin.page_size, self.twin.cache_chunk, self.twin.cache_chunk])
        tokens = place[1][: len(place[1]) // grid * grid]
        place = place[0], tokens
        match = self.cache.match(tokens, extra_key=place[0])
        self.twin.match(place)
        found = self.twin.longest(place)
        lock = self.cache.lock(match.kv_node)
        self.twin.locks.append((found, False))
        num_used = self.rng.choice([0, len(match.kv_pages), self.rng.randint(0, len(match.kv_pages))])
        own = self.take(len(tokens) // self.twin.page_size - num_used)
        if own is not None:
            self.donate(place, match.kv_pages[:num_used] + own)
        self.cache.unlock(lock)
        self.twin.unlock((found, False))

    def take(self, count: int) -> list[int] | None:
        missing = count - self.rig.pages.num_free
        if missing > 0:
            assert self.cache.evict_pages(missing) == self.twin.evict_pages(missing)
            self.seen["evictions for a request"] += 1
        return self.rig.take_pages(count) if self.rig.pages.can_allocate(count) else None

    def take_slot(self) -> int | None:
        if not self.rig.slots.can_allocate():
            assert self.cache.evict_slots(1) == int(self.twin.evict_slot())
        return self.rig.take_slot() if self.rig.slots.can_allocate() else None

    def donate(self, place: Place, pages: list[int]) -> None:
        on_grid = len(place[1]) > 0 and len(place[1]) % self.twin.cache_chunk == 0
        slot = self.take_slot() if on_grid and self.rng.random() < 0.9 else None
        ends_prompt = self.rng.random() < 0.1 and len(place[1]) > 0
        result = self.cache.insert(place[1], pages, slot, extra_key=place[0], ends_prompt=ends_prompt)
        duplicates, duplicate_slot = self.twin.insert(place, pages, slot, ends_prompt)
        assert result.duplicate_pages == duplicates
        assert result.duplicate_slot == (slot if duplicate_slot else None)
        assert result.pages_now == self.twin.pages_of(place) and result.node.end == len(place[1])
        self.rig.pages.free(duplicates)
        if result.duplicate_slot is not None:
            self.rig.slots.free(result.duplicate_slot)
        self.seen["duplicate pages"] += len(duplicates)
        self.seen["duplicate slots"] += duplicate_slot

    def lock(self) -> None:
        nodes = nodes_of(self.cache)
        if nodes and len(self.locks) < 5:
            place = self.rng.choice(sorted(self.rng.choice([nodes, states_of(self.cache) or nodes]), key=repr))
            state = nodes[place].slot is not None and self.rng.random() < 0.6
            self.locks.append(((place, state), self.cache.lock(nodes[place], state=state)))
            self.twin.locks.append((place, state))
            self.seen["state locks"] += state

    def unlock(self) -> None:
        if self.locks:
            twins, lock = self.locks.pop(self.rng.randrange(len(self.locks)))
            self.cache.unlock(lock)  # type: ignore[arg-type]
            self.twin.unlock(twins)

    def drop_state(self) -> None:
        nodes = nodes_of(self.cache)
        candidates = sorted((place for place in nodes if nodes[place].slot is not None), key=repr)
        if candidates:
            place = self.rng.choice(candidates)
            dropped = self.cache.drop_state(nodes[place])
            assert dropped == self.twin.drop_state(place)
            self.seen["dropped" if dropped else "not dropped"] += 1

    def evict_pages(self) -> None:
        count = self.rng.randint(0, 6)
        evicted = self.cache.evict_pages(count)
        assert evicted == self.twin.evict_pages(count)
        self.seen["evicted pages"] += evicted

    def evict_slots(self) -> None:
        count = self.rng.randint(0, 2)
        evicted = self.cache.evict_slots(count)
        assert evicted == sum(self.twin.evict_slot() for _ in range(count))
        self.seen["evicted slots"] += evicted

    def flush(self) -> None:
        num_pages, num_slots = len(self.twin.kv), len(self.twin.states)
        while self.twin.evict_slot():
            pass
        while self.twin.evict_leaf():
            pass
        flushed = self.cache.flush()
        assert flushed.num_pages == num_pages - len(self.twin.kv)
        assert flushed.num_slots == num_slots - len(self.twin.states)
        self.seen["flushes"] += 1

    def compare(self) -> None:
        self.rig.check()
        twin, cache = self.twin, self.cache
        assert kv_of(cache) == twin.kv
        assert set(nodes_of(cache)) == set(twin.ends)
        assert states_of(cache) == {place: state.slot for place, state in twin.states.items()}
        assert cache.num_cached_pages == len(twin.kv) and cache.num_cached_slots == len(twin.states)
        assert cache.num_evictable_pages == sum(not twin.is_locked(place) for place in twin.kv)
        assert cache.num_evictable_slots == len(twin.evictable_states())
        assert self.rig.pages.owned().get(CACHE_OWNER, []) == sorted(twin.kv.values())


SMALL = {"page_size": 1, "chunk_pages": 1, "num_pages": 40, "num_slots": 8}
SHAPES = [
    SMALL,
    {"page_size": 1, "chunk_pages": 3, "num_pages": 60, "num_slots": 6},
    {"page_size": 2, "chunk_pages": 1, "num_pages": 30, "num_slots": 12},
    {"page_size": 2, "chunk_pages": 2, "num_pages": 60, "num_slots": 10},
    {"page_size": 4, "chunk_pages": 2, "num_pages": 80, "num_slots": 30},
]
WEIGHTS = {
    "request": 40,
    "match": 15,
    "lock": 8,
    "unlock": 7,
    "drop_state": 10,
    "evict_pages": 6,
    "evict_slots": 6,
    "flush": 1,
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape.values())))
def test_random_life_against_the_twin(shape: dict[str, int], seed: int) -> None:
    pair = Pair(seed, **shape)
    for _ in range(1000):
        (name,) = pair.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
        getattr(pair, name)()
        pair.compare()
    assert all(pair.seen.values()) and len(pair.seen) == 11, pair.seen
    while pair.locks:
        pair.unlock()
    pair.flush()
    assert pair.rig.pages.owned() == pair.rig.slots.owned() == {}
