"""Kernels over memory that is given by address, as the hand-off does: copies of many blocks, hashes of many items.

Blocks and items are cut into pieces, each a program's work, so that one launch does all of them whatever their sizes.

An item's hash is two sums of 32 bits over its words, each word mixed with its place in the item: `mix(word + mix(place
^ seed))`, with a seed for each sum. So words that are lost, shifted or swapped show.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

WORD_BYTES = 4
_PIECE_WORDS = 1 << 14
_BLOCK = 1024
_SEEDS = (0x243F6A88, 0x85A308D3)
_FACTORS = (0x85EBCA6B, 0xC2B2AE35)
_SEED_0, _SEED_1 = tl.constexpr(_SEEDS[0]), tl.constexpr(_SEEDS[1])
_FACTOR_0, _FACTOR_1 = tl.constexpr(_FACTORS[0]), tl.constexpr(_FACTORS[1])

Ints = NDArray[np.int64]


def copy_blocks(sources: Ints, targets: Ints, words: Ints, device: torch.device) -> None:
    """Queue copies of words[i] words from the address sources[i] to targets[i], on torch's current stream."""
    block, first, count = cut(words)
    pieces = np.stack([sources[block] + first * WORD_BYTES, targets[block] + first * WORD_BYTES, count], axis=1)
    if len(pieces):
        _copy[(len(pieces),)](_send(pieces, device), BLOCK=_BLOCK)


def hash_items(addresses: Ints, words: Ints, device: torch.device) -> Tensor:
    """int32 [items, 2]: the sums of each item, which has words[i] words from addresses[i] on."""
    item, first, count = cut(words)
    pieces = np.stack([addresses[item] + first * WORD_BYTES, first, count, item], axis=1)
    sums = torch.zeros(len(words), 2, dtype=torch.int32, device=device)
    if len(pieces):
        _hash[(len(pieces),)](_send(pieces, device), sums, BLOCK=_BLOCK)
    return sums


def hash_items_reference(addresses: Ints, words: Ints) -> Tensor:
    """The twin of `hash_items`, for host memory."""
    sums = torch.zeros(len(words), 2, dtype=torch.int64)
    for item, (address, count) in enumerate(zip(addresses.tolist(), words.tolist(), strict=True)):
        memory = (ctypes.c_uint32 * count).from_address(address)
        values = torch.from_numpy(np.frombuffer(memory, np.uint32).astype(np.int64))
        places = torch.arange(count)
        for lane, seed in enumerate(_SEEDS):
            sums[item, lane] = _mix_reference(values + _mix_reference(places ^ seed)).sum()
    low = (sums & 0xFFFFFFFF).numpy().astype(np.uint32)
    return torch.from_numpy(low.view(np.int32))


def _send(pieces: Ints, device: torch.device) -> Tensor:
    """From pinned memory: from any other, a copy of more than 64 KiB would wait for the card."""
    host = torch.from_numpy(pieces)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def cut(words: Ints) -> tuple[Ints, Ints, Ints]:
    """Pieces of things of so many words: which thing, its first word there, how many words."""
    pieces = -(-words // _PIECE_WORDS)
    thing = np.repeat(np.arange(len(words)), pieces)
    first = (np.arange(len(thing)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * _PIECE_WORDS
    return thing, first, np.minimum(_PIECE_WORDS, words[thing] - first)


def _mix_reference(value: Tensor) -> Tensor:
    """value int64, of which the low 32 bits count. A product of two such numbers keeps them whatever it loses."""
    value = value & 0xFFFFFFFF
    value = ((value ^ (value >> 16)) * _FACTORS[0]) & 0xFFFFFFFF
    value = ((value ^ (value >> 13)) * _FACTORS[1]) & 0xFFFFFFFF
    return value ^ (value >> 16)


@triton.jit
def _copy(pieces, BLOCK: tl.constexpr):
    piece = pieces + tl.program_id(0).to(tl.int64) * 3
    source = tl.load(piece).to(tl.pointer_type(tl.uint32))
    target = tl.load(piece + 1).to(tl.pointer_type(tl.uint32))
    count = tl.load(piece + 2).to(tl.int32)
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


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
