"""Reading and writing the slots of a batch in a state pool.

Legend: S sequences, the pool is [slots, ...] and may be strided. A batch whose slots are one ascending run is a view:
reading copies nothing and what is updated in place is already written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

SlotIndex = slice | Tensor


def index_slots(slots: Sequence[int], device: torch.device | str) -> SlotIndex:
    """A slice when the slots ascend by one, otherwise int64 [S]."""
    first = slots[0]
    if all(slot == first + offset for offset, slot in enumerate(slots)):
        return slice(first, first + len(slots))
    return torch.tensor(slots, dtype=torch.int64, device=device)


def read_slots(pool: Tensor, slots: SlotIndex) -> Tensor:
    """The slots' items [S, ...]: a view of the pool for a slice, otherwise a copy."""
    return pool[slots] if isinstance(slots, slice) else pool.index_select(0, slots)


def write_slots(pool: Tensor, slots: SlotIndex, items: Tensor) -> None:
    """Store items [S, ...] (any float dtype) in the pool; nothing to do when they are the pool's own view."""
    if isinstance(slots, Tensor):
        pool.index_copy_(0, slots, items.to(pool.dtype))
        return
    target = pool[slots]
    if target.data_ptr() != items.data_ptr():
        target.copy_(items)


def save_states(pool: Tensor, states: Iterable[tuple[int, Tensor]]) -> None:
    """Store (slot, its item, of any float dtype) one by one, each straight from where it lies."""
    for slot, item in states:
        pool[slot].copy_(item)
