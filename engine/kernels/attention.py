"""Causal attention over paged keys and values, with grouped query heads. Twins: `engine.ops.attention`.

Legend: R rows, T packed tokens, Q query heads, J key/value heads, E head dim, Z page size.
A layer's cache is kv [2, pages, Z, J, E]: K, then V.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.common import EARLY, MIN_DOT, dot, enter, padded
from engine.kernels.rows import PackedRows

_KEYS = 64
_QUERIES = 128


def write_kv(kv: Tensor, keys_values: Tensor, rows: PackedRows) -> None:
    """Store K and V of the packed tokens in the rows' pages. kv [2, pages, Z, J, E] (mutated), keys_values [T, 2 J E]
    with strided rows. What follows a row's last token in a page that the row began in this step is set to zero."""
    _, pages, page_size, heads, dim = kv.shape
    _write_kv[(rows.longest, rows.count)](
        kv,
        pages * page_size * heads * dim,
        keys_values,
        keys_values.stride(0),
        rows.begins,
        rows.starts,
        rows.table,
        rows.width,
        page_size,
        heads * dim,
        BLOCK=padded(heads * dim),
        num_warps=4,
        launch_pdl=EARLY,
    )


def attend_decode(query: Tensor, kv: Tensor, rows: PackedRows, *, splits: int) -> Tensor:
    """One query token a row, its key written. query [R, Q E] with strided rows -> [R, Q, E].

    splits: programs that share a row's tokens. Rows that are padding are left as they are.
    """
    _, pages, page_size, heads, dim = kv.shape
    query_heads = query.shape[1] // dim
    share, padded_dim = query_heads // heads, padded(dim, MIN_DOT)
    partial = torch.empty(rows.count, query_heads, splits, dim + 2, dtype=torch.float32, device=query.device)
    out = torch.empty(rows.count, query_heads, dim, dtype=query.dtype, device=query.device)
    _attend_part[(splits, heads, rows.count)](
        query,
        query.stride(0),
        kv,
        pages * page_size * heads * dim,
        partial,
        rows.starts,
        rows.table,
        rows.width,
        page_size,
        heads,
        dim,
        share,
        dim**-0.5 * math.log2(math.e),
        SPLITS=splits,
        SHARE=padded(share, MIN_DOT),
        DIM=padded_dim,
        KEYS=_KEYS,
        num_warps=4,
        num_stages=3,
        launch_pdl=EARLY,
    )
    _combine_parts[(query_heads, rows.count)](
        partial,
        out,
        rows.starts,
        dim,
        query_heads,
        SPLITS=splits,
        SPLITS_BLOCK=padded(splits),
        DIM=padded_dim,
        launch_pdl=EARLY,
    )
    return out


def attend_prefill(query: Tensor, kv: Tensor, rows: PackedRows) -> Tensor:
    """Many query tokens a row, their keys written. query [T, Q E] with strided rows -> [T, Q, E]."""
    _, pages, page_size, heads, dim = kv.shape
    query_heads = query.shape[1] // dim
    out = torch.empty(query.shape[0], query_heads, dim, dtype=query.dtype, device=query.device)
    queries = min(_QUERIES, padded(rows.longest, MIN_DOT))
    _attend_rows[(triton.cdiv(rows.longest, queries), query_heads, rows.count)](
        query,
        query.stride(0),
        kv,
        pages * page_size * heads * dim,
        out,
        rows.begins,
        rows.starts,
        rows.table,
        rows.width,
        page_size,
        heads,
        dim,
        query_heads,
        dim**-0.5 * math.log2(math.e),
        QUERIES=queries,
        KEYS=_KEYS,
        DIM=padded(dim, MIN_DOT),
        num_warps=8 if queries >= 64 else 4,
        num_stages=2,
    )
    return out


@triton.jit
def _write_kv(kv, half, keys_values, stride, begins, starts, table, width, page_size, channels, BLOCK: tl.constexpr):
    enter()
    t, row = tl.program_id(0), tl.program_id(1)
    begin, start = tl.load(begins + row), tl.load(starts + row)
    count = tl.load(begins + row + 1) - begin
    if (t >= count) | (start < 0):
        return
    position = start + t
    page = tl.load(table + row * tl.load(width) + position // page_size).to(tl.int64)
    c = tl.arange(0, BLOCK)
    mask = c < channels
    source = keys_values + (begin + t).to(tl.int64) * stride + c
    place = kv + (page * page_size + position % page_size) * channels + c
    tl.store(place, tl.load(source, mask=mask), mask=mask)
    tl.store(place + half, tl.load(source + channels, mask=mask), mask=mask)
    offset = position % page_size
    if (t == count - 1) & (offset <= t):
        zero = tl.zeros((BLOCK,), kv.dtype.element_ty)
        for after in range(offset + 1, page_size):
            beyond = kv + (page * page_size + after) * channels + c
            tl.store(beyond, zero, mask=mask)
            tl.store(beyond + half, zero, mask=mask)


@triton.jit
def _load_keys(kv, table, position, known, page_size, heads, dim, head, e, seen):
    """Items [n, E] of one head at these positions, zeros where not known."""
    page = tl.load(table + position // page_size, mask=known, other=0).to(tl.int64)
    place = ((page * page_size + position % page_size) * heads + head) * dim
    return tl.load(kv + place[:, None] + e[None, :], mask=known[:, None] & seen[None, :], other=0.0)


@triton.jit
def _attend_part(
    query,
    query_stride,
    kv,
    half,
    partial,
    starts,
    table,
    width,
    page_size,
    heads,
    dim,
    share,
    scale,
    SPLITS: tl.constexpr,
    SHARE: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
):
    enter()
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + row)
    if start < 0:
        return
    length = start + 1
    portion = tl.cdiv(tl.cdiv(length, SPLITS), KEYS) * KEYS
    low = split * portion
    high = tl.minimum(low + portion, length)
    q, e = tl.arange(0, SHARE), tl.arange(0, DIM)
    seen = e < dim
    mine = (q < share)[:, None] & seen[None, :]
    at = head * share + q
    queries = tl.load(query + row.to(tl.int64) * query_stride + at[:, None] * dim + e[None, :], mask=mine, other=0.0)
    best = tl.full((SHARE,), -float("inf"), tl.float32)
    norm = tl.zeros((SHARE,), tl.float32)
    acc = tl.zeros((SHARE, DIM), tl.float32)
    pages = table + row * tl.load(width)
    for first in range(low, high, KEYS):
        position = first + tl.arange(0, KEYS)
        known = position < high
        keys = _load_keys(kv, pages, position, known, page_size, heads, dim, head, e, seen)
        values = _load_keys(kv + half, pages, position, known, page_size, heads, dim, head, e, seen)
        scores = dot(queries, tl.trans(keys), tl.zeros((SHARE, KEYS), tl.float32)) * scale
        scores = tl.where(known[None, :], scores, -float("inf"))
        better = tl.maximum(best, tl.max(scores, 1))
        weight = tl.exp2(scores - better[:, None])
        keep = tl.exp2(best - better)
        norm = norm * keep + tl.sum(weight, 1)
        acc = dot(weight.to(values.dtype), values, acc * keep[:, None])
        best = better
    place = partial + ((row.to(tl.int64) * heads * share + at) * SPLITS + split) * (dim + 2)
    tl.store(place[:, None] + e[None, :], acc, mask=mine)
    tl.store(place + dim, best, mask=q < share)
    tl.store(place + dim + 1, norm, mask=q < share)


@triton.jit
def _combine_parts(
    partial,
    out,
    starts,
    dim,
    query_heads,
    SPLITS: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
):
    enter()
    head, row = tl.program_id(0), tl.program_id(1)
    if tl.load(starts + row) < 0:
        return
    s, e = tl.arange(0, SPLITS_BLOCK), tl.arange(0, DIM)
    at = row.to(tl.int64) * query_heads + head
    parts = partial + (at * SPLITS + s) * (dim + 2)
    used = s < SPLITS
    best = tl.load(parts + dim, mask=used, other=-float("inf"))
    weight = tl.exp2(best - tl.max(best, 0))
    norm = tl.sum(weight * tl.load(parts + dim + 1, mask=used, other=0.0), 0)
    values = tl.load(parts[:, None] + e[None, :], mask=used[:, None] & (e < dim)[None, :], other=0.0)
    total = tl.sum(values * weight[:, None], 0) / norm
    tl.store(out + at * dim + e, total.to(out.dtype.element_ty), mask=e < dim)


@triton.jit
def _attend_rows(
    query,
    query_stride,
    kv,
    half,
    out,
    begins,
    starts,
    table,
    width,
    page_size,
    heads,
    dim,
    query_heads,
    scale,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
):
    first, query_head, row = tl.program_id(0) * QUERIES, tl.program_id(1), tl.program_id(2)
    begin, start = tl.load(begins + row), tl.load(starts + row)
    count = tl.load(begins + row + 1) - begin
    if (first >= count) | (start < 0):
        return
    head = query_head // (query_heads // heads)
    t, e = first + tl.arange(0, QUERIES), tl.arange(0, DIM)
    seen = e < dim
    mine = (t < count)[:, None] & seen[None, :]
    tokens = (begin + t).to(tl.int64)
    queries = tl.load(query + tokens[:, None] * query_stride + query_head * dim + e[None, :], mask=mine, other=0.0)
    best = tl.full((QUERIES,), -float("inf"), tl.float32)
    norm = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, DIM), tl.float32)
    pages = table + row * tl.load(width)
    length = start + tl.minimum(first + QUERIES, count)
    for low in range(0, length, KEYS):
        position = low + tl.arange(0, KEYS)
        known = position < length
        keys = _load_keys(kv, pages, position, known, page_size, heads, dim, head, e, seen)
        values = _load_keys(kv + half, pages, position, known, page_size, heads, dim, head, e, seen)
        scores = dot(queries, tl.trans(keys), tl.zeros((QUERIES, KEYS), tl.float32)) * scale
        scores = tl.where(position[None, :] <= (start + t)[:, None], scores, -float("inf"))
        better = tl.maximum(best, tl.max(scores, 1))
        weight = tl.exp2(scores - better[:, None])
        keep = tl.exp2(best - better)
        norm = norm * keep + tl.sum(weight, 1)
        acc = dot(weight.to(values.dtype), values, acc * keep[:, None])
        best = better
    place = out + (tokens[:, None] * query_heads + query_head) * dim + e[None, :]
    tl.store(place, (acc / norm[:, None]).to(out.dtype.element_ty), mask=mine)
