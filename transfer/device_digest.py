"""Digests of state that lies in a card's memory: each item is hashed there, and the hashes are put together here.

Everything of a request is hashed at once, when its last layer is there: the card reads all of it in less time than
another launch takes. That is a moment before the first token is sampled and the hand-off committed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.config import Verify
from common.errors import ConfigError
from common.layout import PoolPlacement, StateKind, StateLayout
from transfer.device_kernels import WORD_BYTES, hash_items
from transfer.digest import PoolReader, RunningHash, StateDigests, StateReader, digest_of
from transfer.plan import TRACK

Addresses = NDArray[np.int64]


class DeviceReader(StateReader):
    """Pools in the memory of one card."""

    def __init__(self, layout: StateLayout, placements: Sequence[PoolPlacement], card: int) -> None:
        """card: its number. Compiles the kernel. Raises ConfigError for items that are not whole words."""
        super().__init__(layout, placements)
        for pool in self.pools:
            if pool.item_bytes % WORD_BYTES or pool.stride_bytes % WORD_BYTES or pool.base % WORD_BYTES:
                raise ConfigError(
                    f"--verify digest: a {pool.kind.value} item of layer {pool.layer} has {pool.item_bytes} bytes, and "
                    f"on a card only whole words of {WORD_BYTES} can be hashed",
                    param="verify",
                )
        self._device, self._lock = torch.device("cuda", card), threading.Lock()
        self._stream = torch.cuda.Stream(self._device, priority=-1)
        self.hash([(self.pools[0], addresses_of(self.pools[0], [0]))])()

    def begin(self, verify: Verify) -> DeviceDigests:
        return DeviceDigests(self, verify)

    def hash(self, items: Sequence[tuple[PoolReader, Addresses]]) -> Callable[[], list[bytes]]:
        """8 bytes for each item, together for each of the entries, once the card has them: what is returned waits."""
        addresses = np.concatenate([addresses for _, addresses in items])
        counts = [len(addresses) for _, addresses in items]
        words = np.repeat(np.array([pool.item_bytes // WORD_BYTES for pool, _ in items], np.int64), counts)
        with self._lock, torch.cuda.stream(self._stream):
            sums = hash_items(addresses, words, self._device)
            copied, hashed = sums.to("cpu", non_blocking=True), torch.cuda.Event()
            hashed.record()
        return partial(_cut_hashes, copied, hashed, counts)


def _cut_hashes(sums: Tensor, hashed: torch.cuda.Event, counts: Sequence[int]) -> list[bytes]:
    """sums int32 [items, 2], once `hashed`: the bytes of so many items each."""
    hashed.synchronize()
    rows, ends = sums.numpy(), np.cumsum(counts).tolist()
    return [rows[end - count : end].tobytes() for end, count in zip(ends, counts, strict=True)]


class DeviceDigests(StateDigests):
    """Notes what is to be hashed; `prepare` has the card begin with it, or else `digests`, which waits."""

    def __init__(self, reader: DeviceReader, verify: Verify) -> None:
        super().__init__(reader, verify)
        self._device = reader
        self._noted_pages: dict[PoolReader, list[Addresses]] = {
            pool: [np.empty(0, np.int64)] for pool in reader.of(StateKind.KV)
        }
        self._noted_slots: dict[tuple[str, PoolReader], Addresses] = {}
        self._hashes: Callable[[], list[bytes]] | None = None

    def pages(self, layers: Container[int], pages: Sequence[int]) -> None:
        for pool, noted in self._noted_pages.items():
            if pool.layer in layers and pages:
                noted.append(addresses_of(pool, pages))
                self._hashes = None

    def slot(self, layers: Container[int], slot: int, *, track: bool, narrowed: memoryview | None = None) -> None:
        for pool in self._device.of(StateKind.CONV, StateKind.SSM):
            if pool.layer in layers:
                self._noted_slots[TRACK if track else pool.kind.value, pool] = addresses_of(pool, [slot])
                self._hashes = None

    def prepare(self) -> None:
        if self._hashes is None:
            items = [(pool, np.concatenate(noted)) for pool, noted in self._noted_pages.items()]
            items += [(pool, address) for (_, pool), address in self._noted_slots.items()]
            self._hashes = self._device.hash(items) if items else list

    def digests(self) -> dict[str, bytes]:
        self.prepare()
        assert self._hashes is not None
        hashes = self._hashes()
        for pool, found in zip(self._noted_pages, hashes, strict=False):
            self._pages[pool] = RunningHash(self._verify)
            self._pages[pool].update(found)
        for key, found in zip(self._noted_slots, hashes[len(self._noted_pages) :], strict=True):
            self._slots[key] = digest_of(found, self._verify)
        return super().digests()


def addresses_of(pool: PoolReader, items: Sequence[int]) -> Addresses:
    return pool.base + np.array(items, np.int64) * pool.stride_bytes
