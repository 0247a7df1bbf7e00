"""The SSM state crosses as bfloat16 when both ends are told to: prefill narrows it, decode widens it.

On prefill what is narrowed lies in a staging area, registered memory that belongs to one decode rank's worker and holds
the final and the tracked state of one layer at a time. At decode it lands in the second half of the float32 state that
it stands for and is widened in place, so there is no other memory.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np

from common.config import DType
from common.errors import ConfigError
from common.layout import PoolLayout, StateKind, StateLayout

assert sys.byteorder == "little", "a float32 state is narrowed as little-endian integers"


def wire_dtype(layout: StateLayout, asked: DType | None) -> str:
    """In which dtype SSM states cross: the pools' own unless another one is asked for; empty without SSM pools.

    Raises ConfigError for anything but float32 as bfloat16.
    """
    own = {pool.dtype for pool in layout.pools if pool.kind is StateKind.SSM}
    if not own or asked is None or own == {asked.value}:
        return next(iter(own), "")
    if own != {DType.FLOAT32.value}:
        raise ConfigError(
            f"--ssm-wire-dtype {asked.value}: the SSM state is {min(own)}, which can only cross as it is",
            param="ssm_wire_dtype",
        )
    return asked.value


def is_narrowed(pool: PoolLayout, wire: str) -> bool:
    """Whether a pool's items cross as half of their bytes."""
    return pool.kind is StateKind.SSM and wire == DType.BFLOAT16.value and pool.dtype == DType.FLOAT32.value


def narrow(wide: memoryview, out: memoryview) -> None:
    """float32 to bfloat16, to the nearest, ties to even; NaN stays NaN. out: half as many bytes as `wide`."""
    bits = np.frombuffer(wide, np.uint32)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    np.frombuffer(out, np.uint16)[:] = np.where(nan, (bits >> 16) | 0x40, rounded)


def widen(item: memoryview) -> None:
    """A float32 state in place of its bfloat16 one, which lies in the second half of `item`."""
    wide = np.frombuffer(item, np.uint32)
    half = np.frombuffer(landing(item), np.uint16).astype(np.uint32)
    np.left_shift(half, 16, out=wide)


def landing(item: memoryview) -> memoryview:
    """Where in an item at decode its narrowed bytes land."""
    return item[len(item) // 2 :]


class Staging:
    """buffer: registered memory of `staging_bytes`. Used by one worker; what it narrows is overwritten by the next."""

    def __init__(self, buffer: memoryview) -> None:
        self._halves = {False: buffer[: len(buffer) // 2], True: buffer[len(buffer) // 2 :]}

    def narrow(self, item: memoryview, *, track: bool) -> memoryview:
        """The narrowed state of one layer, final or tracked; it stays until the next one of its sort."""
        narrowed = self._halves[track][: len(item) // 2]
        narrow(item, narrowed)
        return narrowed


def staging_bytes(layout: StateLayout) -> int:
    """Two narrowed states of the largest layer: as much as one state that is not narrowed."""
    return max(pool.item_bytes for pool in layout.pools if pool.kind is StateKind.SSM)


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
