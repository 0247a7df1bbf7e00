"""Digests of state that lies in a card's memory: each item is hashed there, and the hashes are put together here.

An item's hash is two sums of 32 bits over its words, each word mixed with its place in the item: `mix(word + mix(place
^ seed))`, with a seed for each sum. So words that are lost, shifted or swapped show. Everything of a request is hashed
at once, at its end: the card reads it in less time than one more launch would take.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Container, Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from common.config import Verify
from common.errors import ConfigError
from common.layout import PoolPlacement, StateKind, StateLayout
from transfer.digest import PoolReader, StateDigests, StateReader, digest_of
from transfer.plan import TRACK

_WORD_BYTES = 4
_PIECE_WORDS = 1 << 14
_BLOCK = 1024
_SEEDS = (0x243F6A88, 0x85A308D3)
_FACTORS = (0x85EBCA6B, 0xC2B2AE35)
_SEED_0, _SEED_1 = tl.constexpr(_SEEDS[0]), tl.constexpr(_SEEDS[1])
_FACTOR_0, _FACTOR_1 = tl.constexpr(_FACTORS[0]), tl.constexpr(_FACTORS[1])

Pieces = NDArray[np.int64]
"""[n, 4]: address, place of the first word in its item, number of words, number of the item."""


class DeviceReader(StateReader):
    """Pools in the memory of one card."""

    def __init__(self, layout: StateLayout, placements: Sequence[PoolPlacement], device: torch.device) -> None:
        """Compiles the kernel. Raises ConfigError for items that are not whole words."""
        super().__init__(layout, placements)
        for pool in self.pools:
            if pool.item_bytes % _WORD_BYTES or pool.stride_bytes % _WORD_BYTES or pool.base % _WORD_BYTES:
                raise ConfigError(
                    f"--verify digest: a {pool.kind.value} item of layer {pool.layer} has {pool.item_bytes} bytes, and "
                    f"on a card only whole words of {_WORD_BYTES} can be hashed",
                    param="verify",
                )
        self._device, self._lock = device, threading.Lock()
        self._stream = torch.cuda.Stream(device)
        self.hash([(self.pools[0], [0])])

    def begin(self, verify: Verify) -> DeviceDigests:
        return DeviceDigests(self, verify)

    def hash(self, items: Sequence[tuple[PoolReader, Sequence[int]]]) -> list[bytes]:
        """8 bytes for each item, for each of the pools given. Waits for the card."""
        pieces, count = cut(items)
        with self._lock, torch.cuda.stream(self._stream):
            sums = hash_pieces(torch.from_numpy(pieces).to(self._device), count).cpu()
        return split(sums, items)


class DeviceDigests(StateDigests):
    """Notes what is to be hashed; `digests` hashes it."""

    def __init__(self, reader: DeviceReader, verify: Verify) -> None:
        super().__init__(reader, verify)
        self._device = reader
        self._noted_pages: dict[PoolReader, list[int]] = {pool: [] for pool in reader.of(StateKind.KV)}
        self._noted_slots: dict[tuple[str, PoolReader], int] = {}

    def pages(self, layers: Container[int], pages: Sequence[int]) -> None:
        for pool, noted in self._noted_pages.items():
            if pool.layer in layers:
                noted.extend(pages)

    def slot(self, layers: Container[int], slot: int, *, track: bool, narrowed: memoryview | None = None) -> None:
        for pool in self._device.of(StateKind.CONV, StateKind.SSM):
            if pool.layer in layers:
                self._noted_slots[TRACK if track else pool.kind.value, pool] = slot

    def digests(self) -> dict[str, bytes]:
        items: list[tuple[PoolReader, Sequence[int]]] = list(self._noted_pages.items())
        items += [(pool, [slot]) for (_, pool), slot in self._noted_slots.items()]
        hashes = self._device.hash(items)
        for pool, found in zip(self._noted_pages, hashes, strict=False):
            self._pages[pool].update(found)
        for key, found in zip(self._noted_slots, hashes[len(self._noted_pages) :], strict=True):
            self._slots[key] = digest_of(found, self._verify)
        return super().digests()


def cut(items: Sequence[tuple[PoolReader, Sequence[int]]]) -> tuple[Pieces, int]:
    """The items in pieces of which each is a program's work, and how many items they are."""
    parts, count = [np.empty((0, 4), np.int64)], 0
    for pool, numbers in items:
        words = pool.item_bytes // _WORD_BYTES
        first = np.arange(0, words, _PIECE_WORDS, dtype=np.int64)
        part = np.empty((len(numbers), len(first), 4), np.int64)
        part[..., 0] = pool.base + np.array(numbers, np.int64)[:, None] * pool.stride_bytes + first * _WORD_BYTES
        part[..., 1] = first
        part[..., 2] = np.minimum(_PIECE_WORDS, words - first)
        part[..., 3] = count + np.arange(len(numbers))[:, None]
        parts.append(part.reshape(-1, 4))
        count += len(numbers)
    return np.concatenate(parts), count


def split(sums: Tensor, items: Sequence[tuple[PoolReader, Sequence[int]]]) -> list[bytes]:
    """sums int32 [items, 2] as bytes, those of each pool given together."""
    found, at = sums.numpy(), 0
    hashes = []
    for _, numbers in items:
        hashes.append(found[at : at + len(numbers)].tobytes())
        at += len(numbers)
    return hashes


def hash_pieces(pieces: Tensor, count: int) -> Tensor:
    """int32 [count, 2]: the sums of each item. pieces int64 [n, 4], see `Pieces`, on the device that they lie on."""
    sums = torch.zeros(count, 2, dtype=torch.int32, device=pieces.device)
    if len(pieces):
        _hash[(len(pieces),)](pieces, sums, BLOCK=_BLOCK)
    return sums


def hash_pieces_reference(pieces: Tensor, count: int) -> Tensor:
    """The twin of `hash_pieces`, for host memory."""
    sums = torch.zeros(count, 2, dtype=torch.int64)
    for address, first, words, item in pieces.tolist():
        memory = (ctypes.c_uint32 * words).from_address(address)
        values = torch.from_numpy(np.frombuffer(memory, np.uint32).astype(np.int64))
        places = torch.arange(first, first + words)
        for lane, seed in enumerate(_SEEDS):
            sums[item, lane] += _mix_reference(values + _mix_reference(places ^ seed)).sum()
    low = (sums & 0xFFFFFFFF).numpy().astype(np.uint32)
    return torch.from_numpy(low.view(np.int32))


def _mix_reference(value: Tensor) -> Tensor:
    """value int64, of which the low 32 bits count. A product of two such numbers keeps them whatever it loses."""
    value = value & 0xFFFFFFFF
    value = ((value ^ (value >> 16)) * _FACTORS[0]) & 0xFFFFFFFF
    value = ((value ^ (value >> 13)) * _FACTORS[1]) & 0xFFFFFFFF
    return value ^ (value >> 16)


@triton.jit
def _hash(pieces, sums, BLOCK: tl.constexpr):
    piece = pieces + tl.program_id(0).to(tl.int64) * 4
    words = tl.load(piece).to(tl.pointer_type(tl.uint32))
    first = tl.load(piece + 1)
    count = tl.load(piece + 2).to(tl.int32)
    item = tl.load(piece + 3)
    lane_0 = tl.zeros([BLOCK], tl.uint32)
    lane_1 = tl.zeros([BLOCK], tl.uint32)
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < count
        value = tl.load(words + at, mask=inside, other=0)
        place = (first + at).to(tl.uint32)
        kept = inside.to(tl.uint32)
        lane_0 += _mix(value + _mix(place ^ _SEED_0)) * kept
        lane_1 += _mix(value + _mix(place ^ _SEED_1)) * kept
    tl.atomic_add(sums + item * 2, tl.sum(lane_0, 0).to(tl.int32, bitcast=True))
    tl.atomic_add(sums + item * 2 + 1, tl.sum(lane_1, 0).to(tl.int32, bitcast=True))


@triton.jit
def _mix(value):
    value = (value ^ (value >> 16)) * _FACTOR_0
    value = (value ^ (value >> 13)) * _FACTOR_1
    return value ^ (value >> 16)
