"""The rows of a step as the kernels see them: int32 tensors, so that a captured graph can be replayed with others."""

from __future__ import annotations

import dataclasses

from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class PackedRows:
    """R rows (sequences), packed one behind the other. All tensors int32 on the device.

    count: R. longest: tokens of the longest row; the launch grids cover it. begins [R + 1]: first packed token of each
    row, then their number. starts [R]: position of each row's first token, -1: the row is padding, nothing of it is
    read or written. slots [R]. track_slots, track_offsets [R]: where to leave the state after this many of the row's
    tokens; slot 0: nowhere. table [R * width]: the rows' pages, each row padded to `width` [1] entries.
    """

    count: int
    longest: int
    begins: Tensor
    starts: Tensor
    slots: Tensor
    track_slots: Tensor
    track_offsets: Tensor
    table: Tensor
    width: Tensor
