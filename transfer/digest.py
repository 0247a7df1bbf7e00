"""A digest of each part of a request's state, the same at both ends however the bytes were cut into writes.

Order: each pool of the part by itself, its items in the order of the request; then the pools' digests, in the order of
the layout, hashed once more. So state can be added chunk by chunk and layer by layer, as it is computed or arrives.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, cast

import xxhash

from common.config import Verify
from common.errors import ConfigError
from common.layout import PoolLayout, PoolPlacement, StateKind, StateLayout
from transfer.narrow import is_narrowed, landing, widen
from transfer.plan import KV, TRACK
from transfer.transport import DeviceTransport, Transport

METADATA = "metadata"
HOST_DIGEST, DEVICE_DIGEST = "xxh3", "xxh3 over words hashed on the card"

Stretch = tuple[int, int]
"""The first of some items that count up by one, and how many they are."""


class StateReader:
    """Reads pool items of this process where they lie, without copying. The memory must be host memory.

    wire: the dtype that SSM states cross in; empty: the pools'.
    """

    def __init__(self, layout: StateLayout, placements: Sequence[PoolPlacement], wire: str = "") -> None:
        self.pools = [
            PoolReader(pool, place, is_narrowed(pool, wire))
            for pool, place in zip(layout.pools, placements, strict=True)
            if place.count
        ]

    def of(self, *kinds: StateKind) -> list[PoolReader]:
        return [pool for pool in self.pools if pool.kind in kinds]

    def begin(self, verify: Verify) -> StateDigests:
        """The digests of one request, of which nothing was taken yet."""
        return StateDigests(self, verify)


class PoolReader:
    def __init__(self, pool: PoolLayout, place: PoolPlacement, narrowed: bool) -> None:
        extent = (place.count - 1) * place.stride_bytes + pool.item_bytes
        self.kind, self.layer, self.narrowed = pool.kind, pool.layer, narrowed
        self.base, self.stride_bytes, self.item_bytes = place.base, place.stride_bytes, pool.item_bytes
        self._view = memoryview((ctypes.c_ubyte * extent).from_address(place.base)).cast("B")

    def item(self, item: int) -> memoryview:
        return self._view[item * self.stride_bytes :][: self.item_bytes]

    def spans(self, stretches: Iterable[Stretch]) -> Iterator[memoryview]:
        """The bytes of the items, in their order, in as few pieces as the pool allows."""
        if self.stride_bytes != self.item_bytes:
            for first, count in stretches:
                yield from map(self.item, range(first, first + count))
            return
        for first, count in stretches:
            yield self._view[first * self.item_bytes : (first + count) * self.item_bytes]


class RunningHash:
    """A running `digest_of`: xxh3, and sha256 beside it when every byte is to be proven equal."""

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


class StateDigests:
    """The digests of one request's state at one end, fed in the order of the prompt in each layer, in any order of the
    layers. Without KV layers `digests` has no kv, and so on."""

    def __init__(self, reader: StateReader, verify: Verify) -> None:
        self._reader, self._verify = reader, verify
        self._pages = {pool: RunningHash(verify) for pool in reader.of(StateKind.KV)}
        self._slots: dict[tuple[str, PoolReader], bytes] = {}

    def pages(self, layers: Container[int], pages: Sequence[int]) -> None:
        stretches = list(_stretches(pages))
        for pool, running in self._pages.items():
            if pool.layer in layers:
                for span in pool.spans(stretches):
                    running.update(span)

    def slot(self, layers: Container[int], slot: int, *, track: bool, narrowed: memoryview | None = None) -> None:
        """Take the conv and SSM state in `slot`, a track slot or the final one.

        narrowed: the SSM state of the one layer as it crosses, where it is not the pool's.
        """
        for pool in self._reader.of(StateKind.CONV, StateKind.SSM):
            if pool.layer in layers:
                part = TRACK if track else pool.kind.value
                data = narrowed if pool.narrowed and narrowed is not None else pool.item(slot)
                self._slots[part, pool] = digest_of(data, self._verify)

    def prepare(self) -> None:
        """Everything was taken, in all likelihood: what takes time may be done now."""

    def digests(self) -> dict[str, bytes]:
        """By part, of what was taken."""
        parts = {KV: [running.digest() for running in self._pages.values()]}
        for part in (StateKind.CONV.value, StateKind.SSM.value, TRACK):
            found = [self._slots[part, pool] for pool in self._reader.pools if (part, pool) in self._slots]
            if found:
                parts[part] = found
        return {part: digest_of(b"".join(found), self._verify) for part, found in parts.items()}


class Incoming:
    """The receiver's digests of one request, taken of each piece of each layer when it is announced. With digests or
    without, a narrowed SSM state is widened then.

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
        self._verify, self._pages = verify, pages
        self._digests = reader.begin(verify) if verify is not Verify.OFF else None
        self._narrowed = {pool.layer: pool for pool in reader.pools if pool.narrowed}
        self._slots = {False: slot, True: track_slot}
        self._next_page = {pool.layer: first for pool in reader.pools}
        self._hashed: set[tuple[int, bool]] = set()

    def landed(self, layers: range, *, num_pages: int, state: bool, track: bool) -> None:
        """Take in what was not yet, in these layers: pages up to `num_pages`, the slot, the track slot."""
        for layer in self._next_page.keys() & {*layers}:
            first = self._next_page[layer]
            if num_pages > first and self._digests is not None:
                self._digests.pages((layer,), self._pages[first:num_pages])
            self._next_page[layer] = max(first, num_pages)
            for is_track, wanted in ((False, state), (True, track)):
                slot = self._slots[is_track]
                if wanted and slot is not None and (layer, is_track) not in self._hashed:
                    self._hashed.add((layer, is_track))
                    self._take_slot(layer, slot, is_track)
        if state and self._digests is not None and self._is_complete():
            self._digests.prepare()

    def _is_complete(self) -> bool:
        """Every layer has a state, and as many pages as the others."""
        states = sum(not is_track for _, is_track in self._hashed)
        return states == len(self._next_page) and len(set(self._next_page.values())) == 1

    def _take_slot(self, layer: int, slot: int, is_track: bool) -> None:
        pool = self._narrowed.get(layer)
        item = pool.item(slot) if pool is not None else None
        if self._digests is not None:
            narrowed = landing(item) if item is not None else None
            self._digests.slot((layer,), slot, track=is_track, narrowed=narrowed)
        if item is not None:
            widen(item)

    def digests(self, num_pages: int, track: bool, metadata: bytes) -> dict[str, bytes]:
        """Of every part, `track`: of the track slot too; takes in what was not announced. Empty without digests."""
        everywhere = range(max(self._next_page, default=0) + 1)
        self.landed(everywhere, num_pages=num_pages, state=True, track=track)
        if self._digests is None:
            return {}
        return self._digests.digests() | {METADATA: metadata_digest(metadata, self._verify)}


def digest_kind(transport: Transport) -> str:
    """What two ends must have in common, besides `--verify`, for their digests to be comparable."""
    return DEVICE_DIGEST if transport.on_device else HOST_DIGEST


def open_reader(
    layout: StateLayout, placements: Sequence[PoolPlacement], wire: str, verify: Verify, transport: Transport
) -> StateReader | None:
    """None when nothing has to be read: neither for digests nor to narrow a state. Raises ConfigError for what cannot
    be read on a card."""
    narrows = any(is_narrowed(pool, wire) for pool in layout.pools)
    if not narrows and verify is Verify.OFF:
        return None
    if not transport.on_device:
        return StateReader(layout, placements, wire)
    if narrows or verify is Verify.FULL:
        asked = f"--ssm-wire-dtype {wire}" if narrows else "--verify full"
        param = "ssm_wire_dtype" if narrows else "verify"
        raise ConfigError(f"{asked}: not with --transport {transport.name}, which never reads the state", param=param)
    from transfer.device_digest import DeviceReader

    return DeviceReader(layout, placements, cast(DeviceTransport, transport).card)


def metadata_digest(payload: bytes, verify: Verify) -> bytes:
    return digest_of(payload, verify)


def digest_of(data: memoryview | bytes, verify: Verify) -> bytes:
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
