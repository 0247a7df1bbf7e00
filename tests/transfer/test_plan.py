"""The plan against a list written down item by item, over all small cases."""

from __future__ import annotations

import itertools

import pytest
from transfer_rig import make_layout

from common.layout import PoolPlacement, StateKind, StateLayout
from transfer.plan import all_layers, batches, coalesce, plan_pages, plan_slot
from transfer.transport import Block


def place(layout: StateLayout, base: int, gap: int, count: int = 16) -> list[PoolPlacement]:
    """The pools one after the other from `base`, items `gap` bytes apart (0: dense)."""
    placed = []
    for pool in layout.pools:
        stride = pool.item_bytes + gap
        placed.append(PoolPlacement(base=base, stride_bytes=stride, count=count))
        base += stride * count
    return placed


def interleave(layout: StateLayout, base: int, kinds: set[StateKind]) -> list[PoolPlacement]:
    """All layers of one item side by side."""
    stride = sum(pool.item_bytes for pool in layout.pools if pool.kind in kinds)
    placed, offset = [], 0
    for pool in layout.pools:
        placed.append(PoolPlacement(base=base + offset, stride_bytes=stride, count=16))
        offset += pool.item_bytes if pool.kind in kinds else 0
    return placed


def moved(blocks: list[Block]) -> dict[int, tuple[int, str]]:
    """Where each source byte goes; a byte sent twice is a fault."""
    found: dict[int, tuple[int, str]] = {}
    for block in blocks:
        for i in range(block.nbytes):
            assert block.src + i not in found
            found[block.src + i] = (block.dst + i, block.part)
    return found


def naive(
    layout: StateLayout,
    mine: list[PoolPlacement],
    theirs: list[PoolPlacement],
    pairs: list[tuple[int, int]],
    kinds: set[StateKind],
    part: str | None = None,
) -> list[Block]:
    return [
        Block(
            src.base + here * src.stride_bytes,
            dst.base + there * dst.stride_bytes,
            pool.item_bytes,
            part or pool.kind.value,
        )
        for pool, src, dst in zip(layout.pools, mine, theirs, strict=True)
        if pool.kind in kinds
        for here, there in pairs
    ]


LAYOUT = make_layout()
EVERYWHERE = all_layers(LAYOUT)
KV, STATE = {StateKind.KV}, {StateKind.CONV, StateKind.SSM}


@pytest.mark.parametrize(("gap_here", "gap_there"), [(0, 0), (64, 0), (0, 64), (64, 64)])
def test_pages_as_listed(gap_here: int, gap_there: int) -> None:
    mine, theirs = place(LAYOUT, 1000, gap_here), place(LAYOUT, 10**6, gap_there)
    for count in range(4):
        for here in itertools.permutations(range(1, 4), count):
            for there in itertools.permutations((3, 4, 5, 9), count):
                pairs = list(zip(here, there, strict=True))
                planned = plan_pages(LAYOUT, mine, theirs, pairs, EVERYWHERE)
                assert moved(planned) == moved(naive(LAYOUT, mine, theirs, pairs, KV))


@pytest.mark.parametrize("track", [False, True])
def test_slot_as_listed(track: bool) -> None:
    mine, theirs = place(LAYOUT, 1000, 0), place(LAYOUT, 10**6, 8)
    for pair in itertools.product(range(1, 4), repeat=2):
        planned = plan_slot(LAYOUT, mine, theirs, pair, EVERYWHERE, track=track)
        listed = naive(LAYOUT, mine, theirs, [pair], STATE, "track" if track else None)
        assert moved(planned) == moved(listed)


def test_neighbours_at_both_ends_become_one_block() -> None:
    mine, theirs = place(LAYOUT, 0, 0), place(LAYOUT, 10**6, 0)
    pages = [(1, 5), (2, 6), (3, 7)]
    assert len(plan_pages(LAYOUT, mine, theirs, pages, EVERYWHERE)) == 4  # one for each of K and V of two layers
    assert len(plan_pages(LAYOUT, mine, theirs, [(1, 5), (2, 6), (3, 8)], EVERYWHERE)) == 8
    assert len(plan_pages(LAYOUT, mine, theirs, [(1, 6), (2, 5)], EVERYWHERE)) == 8


def test_layers_side_by_side_become_one_block() -> None:
    mine, theirs = interleave(LAYOUT, 0, KV), interleave(LAYOUT, 10**6, KV)
    assert len(plan_pages(LAYOUT, mine, theirs, [(1, 5), (2, 6)], EVERYWHERE)) == 1
    mine, theirs = interleave(LAYOUT, 0, STATE), interleave(LAYOUT, 10**6, STATE)
    assert len(plan_slot(LAYOUT, mine, theirs, (1, 5), EVERYWHERE, track=True)) == 1
    assert (
        len(plan_slot(LAYOUT, mine, theirs, (1, 5), EVERYWHERE, track=False)) == 6
    )  # conv and ssm are different parts


def test_layers_one_by_one_are_all_of_them() -> None:
    mine, theirs = place(LAYOUT, 1000, 0), place(LAYOUT, 10**6, 8)
    pages = [(1, 5), (2, 6), (3, 8)]
    blocks = [block for layer in EVERYWHERE for block in plan_pages(LAYOUT, mine, theirs, pages, (layer,))]
    assert moved(blocks) == moved(plan_pages(LAYOUT, mine, theirs, pages, EVERYWHERE))
    blocks = [b for layer in EVERYWHERE for b in plan_slot(LAYOUT, mine, theirs, (1, 5), (layer,), track=False)]
    assert moved(blocks) == moved(plan_slot(LAYOUT, mine, theirs, (1, 5), EVERYWHERE, track=False))


def test_offsets_beyond_32_bits() -> None:
    base = 1 << 40
    mine, theirs = place(LAYOUT, base, 0), place(LAYOUT, base * 2, 0)
    (first, *_) = plan_pages(LAYOUT, mine, theirs, [(1, 2)], EVERYWHERE)
    assert (first.src, first.dst) == (base + 256, base * 2 + 512)


@pytest.mark.parametrize("limit", [1, 7, 100, 256, 10**6])
def test_batches_hold_the_same_bytes_within_the_limit(limit: int) -> None:
    blocks = [Block(0, 1000, 300, "kv"), Block(400, 2000, 1, "conv"), Block(500, 3000, 256, "ssm")]
    cut = list(batches(blocks, limit))
    assert moved([block for batch in cut for block in batch]) == moved(blocks)
    assert all(sum(block.nbytes for block in batch) <= limit for batch in cut)
    assert len(cut) == -(-557 // limit)


def test_coalesce_keeps_parts_apart() -> None:
    assert coalesce([Block(0, 0, 4, "kv"), Block(4, 4, 4, "ssm")]) == [Block(0, 0, 4, "kv"), Block(4, 4, 4, "ssm")]
    assert coalesce([Block(4, 4, 4, "kv"), Block(0, 0, 4, "kv")]) == [Block(0, 0, 8, "kv")]
    assert coalesce([]) == []
