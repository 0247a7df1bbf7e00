"""Digests: against a slow twin, whatever the cuts; every single byte counts."""

from __future__ import annotations

import hashlib

import pytest
import xxhash
from transfer_rig import Pools, make_layout

from common.config import Verify
from common.layout import PoolPlacement, StateKind
from transfer.digest import PagesDigest, StateReader, pages_digest, slot_digests, track_digest
from transfer.loopback import LoopbackTransport


@pytest.fixture
def pools() -> Pools:
    return Pools(make_layout(), LoopbackTransport(), seed=3)


def slow(pools: Pools, items: list[int], *kinds: StateKind) -> bytes:
    """xxh3 over the concatenation, pool by pool, then over the digests."""
    digests = [
        xxhash.xxh3_64_digest(b"".join(pools.item(pool, item).tobytes() for item in items)) for pool in pools.of(*kinds)
    ]
    return xxhash.xxh3_64_digest(b"".join(digests))


@pytest.mark.parametrize("pages", [[1], [1, 2, 3], [5, 1, 9], [4, 5, 1, 2, 31], []])
def test_pages_as_the_slow_twin(pools: Pools, pages: list[int]) -> None:
    reader = StateReader(pools.layout, pools.placements)
    expected = slow(pools, pages, StateKind.KV)
    assert pages_digest(reader, pages, Verify.DIGEST) == expected
    for cut in range(len(pages) + 1):
        running = PagesDigest(reader, Verify.DIGEST)
        running.update(pages[:cut])
        running.update(pages[cut:])
        assert running.digest() == expected


def test_slots_as_the_slow_twin(pools: Pools) -> None:
    reader = StateReader(pools.layout, pools.placements)
    assert slot_digests(reader, 3, Verify.DIGEST) == {
        "conv": slow(pools, [3], StateKind.CONV),
        "ssm": slow(pools, [3], StateKind.SSM),
    }
    assert track_digest(reader, 5, Verify.DIGEST) == slow(pools, [5], StateKind.CONV, StateKind.SSM)


def test_full_adds_sha256(pools: Pools) -> None:
    reader = StateReader(pools.layout, pools.placements)
    quick, full = (slot_digests(reader, 3, verify)["ssm"] for verify in (Verify.DIGEST, Verify.FULL))
    assert (len(quick), len(full)) == (8, 8 + hashlib.sha256().digest_size)


def test_strided_pools_hash_alike(pools: Pools) -> None:
    """The same items, some bytes apart: the placement does not show in the digest."""
    wide = LoopbackTransport()
    moved = []
    for i, pool in enumerate(pools.layout.pools):
        stride = pool.item_bytes + 64
        buffer = wide.host_buffer(stride * pools.placements[i].count)
        for item in range(pools.placements[i].count):
            buffer[item * stride : item * stride + pool.item_bytes] = pools.item(i, item).data
        address = wide._own[-1].address
        moved.append(PoolPlacement(base=address, stride_bytes=stride, count=pools.placements[i].count))
    here, there = StateReader(pools.layout, pools.placements), StateReader(pools.layout, moved)
    assert pages_digest(here, [1, 2, 7], Verify.DIGEST) == pages_digest(there, [1, 2, 7], Verify.DIGEST)
    assert slot_digests(here, 1, Verify.DIGEST) == slot_digests(there, 1, Verify.DIGEST)
    assert track_digest(here, 2, Verify.DIGEST) == track_digest(there, 2, Verify.DIGEST)


def test_any_flipped_byte_shows(pools: Pools) -> None:
    reader = StateReader(pools.layout, pools.placements)
    before = slot_digests(reader, 3, Verify.DIGEST)
    for pool in pools.of(StateKind.CONV, StateKind.SSM):
        for position in (0, pools.layout.pools[pool].item_bytes - 1):
            pools.item(pool, 3)[position] ^= 1
            after = slot_digests(reader, 3, Verify.DIGEST)
            assert [part for part in before if before[part] != after[part]] == [pools.layout.pools[pool].kind.value]
            pools.item(pool, 3)[position] ^= 1


def test_order_counts(pools: Pools) -> None:
    reader = StateReader(pools.layout, pools.placements)
    assert pages_digest(reader, [1, 2], Verify.DIGEST) != pages_digest(reader, [2, 1], Verify.DIGEST)
