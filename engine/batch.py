"""One step of the engine as tensors: which tokens, where their state lies, which of them need logits.

Legend: T packed tokens, R logit rows, S prefill sequences, B decode rows.
Tokens are packed decode rows first, in the order of their slots (so that neighbouring slots are one view), then the
prefill rows as given. Logits come back in the order in which the rows were given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.ops.attention import DecodeSpan, PrefillSpan
from engine.ops.slots import SlotIndex, index_slots
from engine.tracking import Boundary

OnLayer = Callable[[int], None]
"""Called in the thread that computes, with the number of each layer that a step is done with, in order: its pages and
slots then hold what the step leaves there, and so do its track slots, but for those of rows that decode."""

# Decode rows are padded to one rectangle while it stays this small; larger ones are cheaper row by row, in the cache.
_RECTANGLE_TOKENS = 8192


@dataclasses.dataclass(frozen=True, slots=True)
class Track:
    """A state to keep: that of a row's sequence as of `position` tokens, conv and SSM of all layers, in `slot`.

    start < position <= start + len(token_ids) of the row; unless the row decodes, a multiple of the model's chunk.
    """

    position: int
    slot: int


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step.

    token_ids: the query tokens. start: tokens computed before, which is the position of the first one; 0 means that the
    sequence begins with zero states whatever its slot holds. page_table: pages of positions 0 .. start +
    len(token_ids) - 1 (more may follow). num_logits: how many of the last query tokens need logits. track: the state to
    keep on the way, None if there is none; its slot is no row's slot and no other row's track slot.
    """

    token_ids: Sequence[int]
    start: int
    page_table: Sequence[int]
    slot: int
    num_logits: int
    track: Track | None


@dataclasses.dataclass(frozen=True, slots=True)
class DecodePart:
    """The rows with one token and a past, first in the pack. slots: of B rows, ascending. spans: for attention.

    tracks: (slot, track slot) of the rows whose new state is to be kept.
    """

    rows: int
    slots: SlotIndex
    spans: tuple[DecodeSpan, ...]
    tracks: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillPart:
    """The other rows. starts, lengths: of S sequences. fresh: bool [S], start is 0. spans: for attention, counted from
    the first prefill token. tracks: the states to be kept on the way."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    slots: SlotIndex
    fresh: Tensor
    spans: tuple[PrefillSpan, ...]
    tracks: tuple[Boundary, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Made by `build_batch` only. token_ids int64 [T]. positions int64 [T] in the tokens' sequences; None: not wanted.
    locations int64 [T]: page * page_size + offset of each token.

    begun_pages: int64, pages that get their first token in this step and are not filled by it; None: there are none.
    logit_tokens int64 [R]: the packed tokens whose logits are wanted, in the order of the rows given.
    """

    token_ids: Tensor
    positions: Tensor | None
    locations: Tensor
    begun_pages: Tensor | None
    logit_tokens: Tensor
    decode: DecodePart | None
    prefill: PrefillPart | None


def build_batch(
    rows: Sequence[Row], *, page_size: int, with_positions: bool, device: torch.device | str
) -> ForwardBatch:
    """The step of these rows: at least one, each with at least one token, no slot named twice."""
    for row in rows:
        _check(row, page_size)
    slots = [row.slot for row in rows] + [row.track.slot for row in rows if row.track]
    assert rows and len(set(slots)) == len(slots), "a slot belongs to one row"
    decode = sorted((i for i, row in enumerate(rows) if _is_decode(row)), key=lambda i: rows[i].slot)
    prefill = [i for i, row in enumerate(rows) if not _is_decode(row)]
    order = decode + prefill
    packed = [rows[i] for i in order]
    return ForwardBatch(
        token_ids=torch.tensor([token for row in packed for token in row.token_ids], dtype=torch.int64, device=device),
        positions=_to(np.concatenate([_positions(row) for row in packed]), device) if with_positions else None,
        locations=_to(np.concatenate([_locations(row, page_size) for row in packed]), device),
        begun_pages=_begun_pages(packed, page_size, device),
        logit_tokens=_to(_logit_tokens(rows, order), device),
        decode=_decode_part(packed[: len(decode)], page_size, device) if decode else None,
        prefill=_prefill_part(packed[len(decode) :], page_size, device) if prefill else None,
    )


def _check(row: Row, page_size: int) -> None:
    count = len(row.token_ids)
    assert count >= 1 and row.start >= 0 and 0 <= row.num_logits <= count, row
    assert row.slot > 0 and (row.track is None or row.track.slot > 0), "slot 0 belongs to nobody"
    assert row.track is None or row.start < row.track.position <= row.start + count, "the step does not reach the track"
    assert len(row.page_table) >= _pages(row, page_size), "the page table does not cover the tokens"


def _is_decode(row: Row) -> bool:
    return row.start > 0 and len(row.token_ids) == 1


def _pages(row: Row, page_size: int) -> int:
    return -(-(row.start + len(row.token_ids)) // page_size)


def _positions(row: Row) -> NDArray[np.int64]:
    return np.arange(row.start, row.start + len(row.token_ids))


def _locations(row: Row, page_size: int) -> NDArray[np.int64]:
    if len(row.token_ids) == 1:
        return np.array([row.page_table[row.start // page_size] * page_size + row.start % page_size])
    positions = _positions(row)
    return np.asarray(row.page_table)[positions // page_size] * page_size + positions % page_size


def _begun_pages(rows: Sequence[Row], page_size: int, device: torch.device | str) -> Tensor | None:
    pages = []
    for row in rows:
        index, filled = divmod(row.start + len(row.token_ids), page_size)
        if filled and index * page_size >= row.start:
            pages.append(row.page_table[index])
    return torch.tensor(pages, dtype=torch.int64, device=device) if pages else None


def _logit_tokens(rows: Sequence[Row], order: Sequence[int]) -> NDArray[np.int64]:
    ends = np.empty(len(rows), dtype=np.int64)
    ends[order] = np.cumsum([len(rows[i].token_ids) for i in order])
    parts = [np.arange(end - row.num_logits, end) for row, end in zip(rows, ends, strict=True)]
    return np.concatenate(parts)


def _decode_part(rows: Sequence[Row], page_size: int, device: torch.device | str) -> DecodePart:
    lengths = [row.start + 1 for row in rows]
    if len(rows) * max(lengths) <= _RECTANGLE_TOKENS:
        spans = [_rectangle(rows, page_size, device)]
    else:
        spans = [_single(i, row, page_size, device) for i, row in enumerate(rows)]
    return DecodePart(
        rows=len(rows),
        slots=index_slots([row.slot for row in rows], device),
        spans=tuple(spans),
        tracks=tuple((row.slot, row.track.slot) for row in rows if row.track),
    )


def _single(index: int, row: Row, page_size: int, device: torch.device | str) -> DecodeSpan:
    pages = index_slots(row.page_table[: _pages(row, page_size)], device)
    return DecodeSpan(begin=index, end=index + 1, pages=pages, length=row.start + 1, mask=None)


def _rectangle(rows: Sequence[Row], page_size: int, device: torch.device | str) -> DecodeSpan:
    if len(rows) == 1:
        return _single(0, rows[0], page_size, device)
    lengths = np.array([row.start + 1 for row in rows])
    longest = int(lengths.max())
    table = np.zeros((len(rows), -(-longest // page_size)), dtype=np.int64)
    for i, row in enumerate(rows):
        count = _pages(row, page_size)
        table[i, :count] = row.page_table[:count]
    seen = np.arange(longest) < lengths[:, None]
    mask = None if seen.all() else _to(seen[:, None, None], device)
    return DecodeSpan(begin=0, end=len(rows), pages=_to(table.reshape(-1), device), length=longest, mask=mask)


def _prefill_part(rows: Sequence[Row], page_size: int, device: torch.device | str) -> PrefillPart:
    lengths = tuple(len(row.token_ids) for row in rows)
    ends = np.cumsum(lengths).tolist()
    return PrefillPart(
        starts=tuple(row.start for row in rows),
        lengths=lengths,
        slots=index_slots([row.slot for row in rows], device),
        fresh=torch.tensor([row.start == 0 for row in rows], device=device),
        spans=tuple(_span(row, end, page_size, device) for row, end in zip(rows, ends, strict=True)),
        tracks=tuple(
            Boundary(index, row.track.position - row.start, row.track.slot)
            for index, row in enumerate(rows)
            if row.track
        ),
    )


def _span(row: Row, end: int, page_size: int, device: torch.device | str) -> PrefillSpan:
    count = len(row.token_ids)
    mask = None
    if row.start:
        mask = torch.ones(count, row.start + count, dtype=torch.bool, device=device).tril_(row.start)
    pages = index_slots(row.page_table[: _pages(row, page_size)], device)
    return PrefillSpan(begin=end - count, end=end, start=row.start, pages=pages, mask=mask)


def _to(array: NDArray[np.generic], device: torch.device | str) -> Tensor:
    return torch.from_numpy(array).to(device)
