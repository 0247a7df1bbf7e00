"""Digests: against a slow twin, whatever the cuts; every single byte counts."""

from __future__ import annotations

import hashlib

import pytest
import xxhash
from transfer_rig import Pools, make_layout

from common.config import Verify
from common.layout import PoolPlacement, StateKind
from transfer.digest import StateDigests, StateReader
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


EVERYWHERE = range(5)


def kv_digest(reader: StateReader, pages: list[int], cut: int = 0) -> bytes:
    running = StateDigests(reader, Verify.DIGEST)
    running.pages(EVERYWHERE, pages[:cut])
    running.pages(EVERYWHERE, pages[cut:])
    return running.digests()["kv"]


def slot_digests(
    reader: StateReader, slot: int, *, track: bool = False, verify: Verify = Verify.DIGEST
) -> dict[str, bytes]:
    digests = StateDigests(reader, verify)
    digests.slot(EVERYWHERE, slot, track=track)
    return {part: digest for part, digest in digests.digests().items() if part != "kv"}


@pytest.mark.parametrize("pages", [[1], [1, 2, 3], [5, 1, 9], [4, 5, 1, 2, 31], []])
def test_pages_as_the_slow_twin(pools: Pools, pages: list[int]) -> None:
    reader = StateReader(pools.layout, pools.placements)
    expected = slow(pools, pages, StateKind.KV)
    assert [kv_digest(reader, pages, cut) for cut in range(len(pages) + 1)] == [expected] * (len(pages) + 1)


def test_the_order_of_layers_and_pieces_does_not_show(pools: Pools) -> None:
    """Each layer gets its pages in order, but one layer may be far ahead of another."""
    reader = StateReader(pools.layout, pools.placements)
    whole, parts = (StateDigests(reader, Verify.DIGEST) for _ in range(2))
    whole.pages(EVERYWHERE, [3, 4, 9])
    whole.slot(EVERYWHERE, 2, track=False)
    whole.slot(EVERYWHERE, 5, track=True)
    parts.slot((3,), 5, track=True)
    parts.pages((4,), [3, 4])
    parts.pages((4,), [9])
    for layer in (2, 3, 0):
        parts.slot((layer,), 2, track=False)
    parts.pages((1,), [3])
    for layer in (0, 2):
        parts.slot((layer,), 5, track=True)
    parts.pages((1,), [4, 9])
    assert whole.digests() == parts.digests()
    assert sorted(whole.digests()) == ["conv", "kv", "ssm", "track"]


def test_slots_as_the_slow_twin(pools: Pools) -> None:
    reader = StateReader(pools.layout, pools.placements)
    assert slot_digests(reader, 3) == {
        "conv": slow(pools, [3], StateKind.CONV),
        "ssm": slow(pools, [3], StateKind.SSM),
    }
    assert slot_digests(reader, 5, track=True)["track"] == slow(pools, [5], StateKind.CONV, StateKind.SSM)


def test_full_adds_sha256(pools: Pools) -> None:
    reader = StateReader(pools.layout, pools.placements)
    quick, full = (slot_digests(reader, 3, verify=verify)["ssm"] for verify in (Verify.DIGEST, Verify.FULL))
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
    assert kv_digest(here, [1, 2, 7]) == kv_digest(there, [1, 2, 7])
    assert slot_digests(here, 1) == slot_digests(there, 1)
    assert slot_digests(here, 2, track=True) == slot_digests(there, 2, track=True)


def test_any_flipped_byte_shows(pools: Pools) -> None:
    reader = StateReader(pools.layout, pools.placements)
    before = slot_digests(reader, 3)
    for pool in pools.of(StateKind.CONV, StateKind.SSM):
        for position in (0, pools.layout.pools[pool].item_bytes - 1):
            pools.item(pool, 3)[position] ^= 1
            after = slot_digests(reader, 3)
            assert [part for part in before if before[part] != after[part]] == [pools.layout.pools[pool].kind.value]
            pools.item(pool, 3)[position] ^= 1


def test_order_counts(pools: Pools) -> None:
    reader = StateReader(pools.layout, pools.placements)
    assert kv_digest(reader, [1, 2]) != kv_digest(reader, [2, 1])
