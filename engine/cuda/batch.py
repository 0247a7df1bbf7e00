"""Rows of a step as int32 arrays: built on the host as one array, sent with one copy, read as views.

Legend: T packed tokens, R rows. Rows with one token and a past (decode) are packed first, then the others.
Every section begins at a multiple of 16 bytes, so that kernels are compiled once for all batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import Row
from engine.kernels.rows import PackedRows

LAST_TOKEN = -1  # as a token id of a decode row: what its slot sampled last
_ALIGN = 4  # int32 values

Ints = NDArray[np.int32]


@dataclasses.dataclass(frozen=True, slots=True)
class CudaBatch:
    """token_ids int32 [T]; decode, prefill: the two parts, each packed from 0; logit_tokens int32 [L]: the packed
    tokens whose logits are wanted, in the order of the rows given; None: all of them. sampled_places, sampled_slots
    int32: of the rows that want logits, their last ones among these, and their slots; None: all rows of decode."""

    token_ids: Tensor
    decode: PackedRows | None
    prefill: PackedRows | None
    logit_tokens: Tensor | None
    sampled_places: Tensor | None
    sampled_slots: Tensor | None


@dataclasses.dataclass(frozen=True, slots=True)
class HostBatch:
    """The sections of a batch on the host, and what the launches must know of them."""

    sections: tuple[Ints, ...]
    num_decode: int
    num_prefill: int
    longest: int

    @property
    def num_values(self) -> int:
        return sum(_aligned(len(section)) for section in self.sections)

    def write(self, target: Ints) -> None:
        """Lay the sections out in target [num_values], each aligned."""
        at = 0
        for section in self.sections:
            target[at : at + len(section)] = section
            at += _aligned(len(section))

    def on_device(self, values: Tensor) -> CudaBatch:
        """The batch over int32 values [num_values] that hold what `write` wrote."""
        views, at = [], 0
        for section in self.sections:
            views.append(values[at : at + len(section)])
            at += _aligned(len(section))
        token_ids, logit_tokens, places, slots, *rest = views
        decode = _packed(rest[:7], self.num_decode, 1) if self.num_decode else None
        prefill = _packed(rest[7:], self.num_prefill, self.longest) if self.num_prefill else None
        return CudaBatch(token_ids, decode, prefill, logit_tokens, places, slots)


def is_decode(row: Row) -> bool:
    return row.start > 0 and len(row.token_ids) == 1


def host_batch(rows: Sequence[Row], page_size: int) -> HostBatch:
    """The step of these rows: see `engine.batch.build_batch`, whose rules hold here too."""
    order = sorted(range(len(rows)), key=lambda i: not is_decode(rows[i]))
    packed = [rows[i] for i in order]
    num_decode = sum(is_decode(row) for row in rows)
    token_ids = np.fromiter((token for row in packed for token in row.token_ids), np.int32)
    parts = [_row_sections(part, page_size) for part in (packed[:num_decode], packed[num_decode:])]
    return HostBatch(
        sections=(token_ids, _logit_tokens(rows, order), *_sampled(rows), *parts[0], *parts[1]),
        num_decode=num_decode,
        num_prefill=len(rows) - num_decode,
        longest=max((len(row.token_ids) for row in packed[num_decode:]), default=0),
    )


def decode_values(rows: Sequence[Row], size: int, page_size: int, target: Ints) -> int:
    """Write a pure decode step, padded to `size` rows, for `decode_views`. Returns how many values were written."""
    count, step = len(rows), _aligned(size)
    width = max((-(-(row.start + 1) // page_size) for row in rows), default=0)
    target[0] = width
    heads = target[_ALIGN : _ALIGN + 3 * step].reshape(3, step)
    if rows:
        heads[:, :count] = np.array([(row.token_ids[0], row.start, row.slot) for row in rows], np.int32).T
    heads[0, count:], heads[1, count:], heads[2, count:] = 0, -1, 0
    end = _ALIGN + 3 * step + size * width
    _fill_table(rows, page_size, target[end - size * width : end].reshape(size, width))
    return end


def decode_capacity(size: int, max_pages: int) -> int:
    """The most values that `decode_values` writes for `size` rows of at most max_pages pages."""
    return _ALIGN + 3 * _aligned(size) + size * max_pages


def decode_views(values: Tensor, size: int, begins: Tensor, nothing: Tensor) -> CudaBatch:
    """The batch of `size` decode rows over values that `decode_values` fills before each step.

    begins int32: 0, 1, 2, ...; nothing int32: zeros, at least `size` each. Decode tracks are copied after the step.
    """
    step = _aligned(size)
    ids, starts, slots = (values[_ALIGN + i * step :][:size] for i in range(3))
    rows = PackedRows(
        count=size,
        longest=1,
        begins=begins[: size + 1],
        starts=starts,
        slots=slots,
        track_slots=nothing[:size],
        track_offsets=nothing[:size],
        table=values[_ALIGN + 3 * step :],
        width=values[:1],
    )
    return CudaBatch(
        token_ids=ids, decode=rows, prefill=None, logit_tokens=None, sampled_places=None, sampled_slots=None
    )


def _aligned(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN


def _row_sections(rows: Sequence[Row], page_size: int) -> tuple[Ints, ...]:
    """width, begins, starts, slots, track_slots, track_offsets, table; each empty or short when there are no rows."""
    lengths = [len(row.token_ids) for row in rows]
    width = max((-(-(row.start + n) // page_size) for row, n in zip(rows, lengths, strict=True)), default=0)
    table = np.zeros((len(rows), width), np.int32)
    _fill_table(rows, page_size, table)
    columns = (
        [width],
        np.cumsum([0, *lengths]),
        [row.start for row in rows],
        [row.slot for row in rows],
        [row.track.slot if row.track else 0 for row in rows],
        [row.track.position - row.start if row.track else 0 for row in rows],
    )
    return (*(np.asarray(column, np.int32) for column in columns), table.reshape(-1))


def _fill_table(rows: Sequence[Row], page_size: int, table: Ints) -> None:
    """Each row's pages in its line of table [rows, width]; what lies behind them is not read."""
    for line, row in zip(table, rows, strict=False):
        count = -(-(row.start + len(row.token_ids)) // page_size)
        line[:count] = row.page_table[:count]


def _logit_tokens(rows: Sequence[Row], order: Sequence[int]) -> Ints:
    ends = np.empty(len(rows), np.int32)
    ends[list(order)] = np.cumsum([len(rows[i].token_ids) for i in order])
    parts = [np.arange(end - row.num_logits, end, dtype=np.int32) for row, end in zip(rows, ends, strict=True)]
    return np.concatenate(parts)


def _sampled(rows: Sequence[Row]) -> tuple[Ints, Ints]:
    ends = np.cumsum([row.num_logits for row in rows]) - 1
    wanted = [i for i, row in enumerate(rows) if row.num_logits]
    return ends[wanted].astype(np.int32), np.array([rows[i].slot for i in wanted], np.int32)


def _packed(views: Sequence[Tensor], count: int, longest: int) -> PackedRows:
    width, begins, starts, slots, track_slots, track_offsets, table = views
    return PackedRows(
        count=count,
        longest=longest,
        begins=begins,
        starts=starts,
        slots=slots,
        track_slots=track_slots,
        track_offsets=track_offsets,
        table=table,
        width=width,
    )


class Staging:
    """Sends int32 arrays to the device without waiting for it: pinned buffers in turn, each free again when its copy
    has been made. On the CPU (for tests) it copies at once."""

    def __init__(self, capacity: int, device: torch.device, *, buffers: int = 3) -> None:
        self._device = device
        pinned = device.type == "cuda"
        self._buffers = [torch.empty(capacity, dtype=torch.int32, pin_memory=pinned) for _ in range(buffers)]
        self._copied = [torch.cuda.Event() for _ in range(buffers)] if pinned else []
        self._turn = 0

    def begin(self) -> Ints:
        """The buffer to write into, [capacity]; `send` sends it."""
        self._turn = (self._turn + 1) % len(self._buffers)
        if self._copied:
            self._copied[self._turn].synchronize()
        return self._buffers[self._turn].numpy()

    def send(self, count: int, target: Tensor | None = None) -> Tensor:
        """The first `count` values of that buffer, in target or in a new tensor of the device."""
        source = self._buffers[self._turn][:count]
        target = torch.empty(count, dtype=torch.int32, device=self._device) if target is None else target[:count]
        target.copy_(source, non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()
        return target
