"""A digest of each part of a request's state, the same at both ends however the bytes were cut into writes.

Order: each pool of the part by itself, its items in the order of the request; then the pools' digests, in the order of
the layout, hashed once more. So KV pages can be added chunk by chunk, all layers at a time.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import xxhash

from common.config import Verify
from common.layout import PoolLayout, PoolPlacement, StateKind, StateLayout
from transfer.plan import KV, TRACK

METADATA = "metadata"

Stretch = tuple[int, int]
"""The first of some items that count up by one, and how many they are."""


class StateReader:
    """Reads pool items of this process where they lie, without copying. The memory must be host memory."""

    def __init__(self, layout: StateLayout, placements: Sequence[PoolPlacement]) -> None:
        self.pools = [
            _PoolReader(pool, place) for pool, place in zip(layout.pools, placements, strict=True) if place.count
        ]

    def of(self, *kinds: StateKind) -> list[_PoolReader]:
        return [pool for pool in self.pools if pool.kind in kinds]


class _PoolReader:
    def __init__(self, pool: PoolLayout, place: PoolPlacement) -> None:
        extent = (place.count - 1) * place.stride_bytes + pool.item_bytes
        self.kind = pool.kind
        self._view = memoryview((ctypes.c_ubyte * extent).from_address(place.base)).cast("B")
        self._stride, self._item = place.stride_bytes, pool.item_bytes

    def item(self, item: int) -> memoryview:
        return self._view[item * self._stride :][: self._item]

    def spans(self, stretches: Iterable[Stretch]) -> Iterator[memoryview]:
        """The bytes of the items, in their order, in as few pieces as the pool allows."""
        if self._stride != self._item:
            for first, count in stretches:
                yield from map(self.item, range(first, first + count))
            return
        for first, count in stretches:
            yield self._view[first * self._item : (first + count) * self._item]


class _Hash:
    """A running `_digest`: xxh3, and sha256 beside it when every byte is to be proven equal."""

    def __init__(self, verify: Verify) -> None:
        assert verify is not Verify.OFF, "no digest is taken when verify is off"
        self._hashes: list[Any] = [xxhash.xxh3_64()]
        if verify is Verify.FULL:
            self._hashes.append(hashlib.sha256())

    def update(self, data: memoryview | bytes) -> None:
        for each in self._hashes:
            each.update(data)

    def digest(self) -> bytes:
        return b"".join(each.digest() for each in self._hashes)


class PagesDigest:
    """The digest of the KV pages of one request, fed in the order of the prompt."""

    def __init__(self, reader: StateReader, verify: Verify) -> None:
        self._verify = verify
        self._pools = [(pool, _Hash(verify)) for pool in reader.of(StateKind.KV)]

    def update(self, pages: Sequence[int]) -> None:
        stretches = list(_stretches(pages))
        for pool, running in self._pools:
            for span in pool.spans(stretches):
                running.update(span)

    def digest(self) -> bytes:
        return _digest(b"".join(running.digest() for _, running in self._pools), self._verify)


class Incoming:
    """The receiver's digests of one request, taken of each piece when it is announced.

    first: the first prompt page that crosses the wire.
    """

    def __init__(
        self,
        reader: StateReader,
        verify: Verify,
        pages: Sequence[int],
        first: int,
        slot: int,
        track_slot: int | None,
    ) -> None:
        self._reader, self._verify = reader, verify
        self._pages, self._hashed = pages, first
        self._slot, self._track_slot = slot, track_slot
        self._pages_digest = PagesDigest(reader, verify)
        self._slots: dict[str, bytes] = {}

    def pages_landed(self, num_pages: int) -> None:
        """Hash what was not yet, up to `num_pages`."""
        self._pages_digest.update(self._pages[self._hashed : num_pages])
        self._hashed = max(self._hashed, num_pages)

    def state_landed(self) -> None:
        """Hash the slot, once."""
        if StateKind.SSM.value not in self._slots:
            self._slots |= slot_digests(self._reader, self._slot, self._verify)

    def digests(self, num_pages: int, track: bool, metadata: bytes) -> dict[str, bytes]:
        """Of every part, `track`: of the track slot too; hashes what was not announced before."""
        self.pages_landed(num_pages)
        self.state_landed()
        if track and self._track_slot is not None:
            self._slots[TRACK] = track_digest(self._reader, self._track_slot, self._verify)
        return {
            KV: self._pages_digest.digest(),
            METADATA: metadata_digest(metadata, self._verify),
            **self._slots,
        }


def pages_digest(reader: StateReader, pages: Sequence[int], verify: Verify) -> bytes:
    running = PagesDigest(reader, verify)
    running.update(pages)
    return running.digest()


def slot_digests(reader: StateReader, slot: int, verify: Verify) -> dict[str, bytes]:
    """The digests of conv and ssm."""
    return {
        kind.value: _slot_digest(reader, (kind,), slot, verify)
        for kind in (StateKind.CONV, StateKind.SSM)
        if reader.of(kind)
    }


def track_digest(reader: StateReader, slot: int, verify: Verify) -> bytes:
    return _slot_digest(reader, (StateKind.CONV, StateKind.SSM), slot, verify)


def metadata_digest(payload: bytes, verify: Verify) -> bytes:
    return _digest(payload, verify)


def _slot_digest(reader: StateReader, kinds: tuple[StateKind, ...], slot: int, verify: Verify) -> bytes:
    return _digest(b"".join(_digest(pool.item(slot), verify) for pool in reader.of(*kinds)), verify)


def _digest(data: memoryview | bytes, verify: Verify) -> bytes:
    quick = xxhash.xxh3_64_digest(data)
    return quick + hashlib.sha256(data).digest() if verify is Verify.FULL else quick


def _stretches(items: Iterable[int]) -> Iterator[Stretch]:
    first, count = 0, 0
    for item in items:
        if count and item == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = item, 1
    if count:
        yield first, count
