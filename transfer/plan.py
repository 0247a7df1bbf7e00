"""Which bytes go where: a pure function of the layout, two placements and the pairs of pages or slots.

Items that are neighbours at both ends become one block: a TCP write costs tens of microseconds whatever its size.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence

from common.layout import PoolLayout, PoolPlacement, StateKind, StateLayout
from transfer.transport import Block

KV, TRACK = StateKind.KV.value, "track"

Pair = tuple[int, int]
"""An item's number here and at the peer."""


def all_layers(layout: StateLayout) -> range:
    return range(max(pool.layer for pool in layout.pools) + 1)


def plan_pages(
    layout: StateLayout,
    mine: Sequence[PoolPlacement],
    theirs: Sequence[PoolPlacement],
    pages: Sequence[Pair],
    layers: Container[int],
) -> list[Block]:
    """The blocks of these KV pages of these layers, coalesced."""
    runs = list(_runs(pages))
    return coalesce(
        block
        for pool, src, dst in zip(layout.pools, mine, theirs, strict=True)
        if pool.kind is StateKind.KV and pool.layer in layers
        for block in _pool_blocks(pool, src, dst, runs, KV)
    )


def plan_slot(
    layout: StateLayout,
    mine: Sequence[PoolPlacement],
    theirs: Sequence[PoolPlacement],
    slot: Pair,
    layers: Container[int],
    *,
    track: bool,
    kinds: Container[StateKind] = (StateKind.CONV, StateKind.SSM),
) -> list[Block]:
    """The blocks of one slot's conv and SSM state of these layers; their part is "track" for a track slot."""
    run = [(*slot, 1)]
    return coalesce(
        block
        for pool, src, dst in zip(layout.pools, mine, theirs, strict=True)
        if pool.kind in kinds and pool.layer in layers
        for block in _pool_blocks(pool, src, dst, run, TRACK if track else pool.kind.value)
    )


def coalesce(blocks: Iterable[Block]) -> list[Block]:
    """The same bytes in as few blocks as can be, in the order of the source. No two of `blocks` may overlap."""
    merged: list[Block] = []
    for block in sorted(blocks):
        last = merged[-1] if merged else None
        if last and (last.src + last.nbytes, last.dst + last.nbytes, last.part) == (block.src, block.dst, block.part):
            merged[-1] = last._replace(nbytes=last.nbytes + block.nbytes)
        else:
            merged.append(block)
    return merged


def batches(blocks: Sequence[Block], limit_bytes: int) -> Iterator[list[Block]]:
    """Cut the blocks into writes of at most `limit_bytes`, so that an abort never waits for more than one of them."""
    if sum(block.nbytes for block in blocks) <= limit_bytes:
        if blocks:
            yield list(blocks)
        return
    batch: list[Block] = []
    room = limit_bytes
    for block in blocks:
        offset = 0
        while offset < block.nbytes:
            nbytes = min(room, block.nbytes - offset)
            batch.append(Block(block.src + offset, block.dst + offset, nbytes, block.part))
            offset, room = offset + nbytes, room - nbytes
            if room == 0:
                yield batch
                batch, room = [], limit_bytes
    if batch:
        yield batch


def _pool_blocks(
    pool: PoolLayout, src: PoolPlacement, dst: PoolPlacement, runs: Iterable[tuple[int, int, int]], part: str
) -> Iterator[Block]:
    dense = src.stride_bytes == dst.stride_bytes == pool.item_bytes
    for mine, theirs, count in runs:
        start = src.base + mine * src.stride_bytes
        target = dst.base + theirs * dst.stride_bytes
        if dense:
            yield Block(start, target, count * pool.item_bytes, part)
        else:
            for i in range(count):
                yield Block(start + i * src.stride_bytes, target + i * dst.stride_bytes, pool.item_bytes, part)


def _runs(pairs: Iterable[Pair]) -> Iterator[tuple[int, int, int]]:
    """(mine, theirs, count) for each stretch of pairs that counts up by one at both ends."""
    start: Pair | None = None
    count = 0
    for mine, theirs in pairs:
        if start is not None and (mine, theirs) == (start[0] + count, start[1] + count):
            count += 1
            continue
        if start is not None:
            yield (*start, count)
        start, count = (mine, theirs), 1
    if start is not None:
        yield (*start, count)
