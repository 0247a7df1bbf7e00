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
_QUERY_BYTES = 65536  # of a program's queries in shared memory, beside keys and values
_TOKENS = 16


def prepare_attention(
    qkv: Tensor,
    kv: Tensor,
    rows: PackedRows,
    *,
    heads: int,
    norms: Tensor | None,
    eps: float,
    frequencies: Tensor | None,
) -> Tensor:
    """Norm and turn queries and keys, and store keys and values as `write_kv` does: all that comes before attention.

    qkv [T, at least (Q + 2 J) E] with strided rows: queries of `heads` Q, keys, values. kv [2, pages, Z, J, E]
    (mutated). norms float32 [2, E]: weights of the RMS norms of a query's and a key's head, None: there are none.
    frequencies float32 [R / 2]: see `engine.ops.rotary`, None: nothing is turned. Returns the queries [T, Q E].
    """
    _, pages, page_size, kv_heads, dim = kv.shape
    out = torch.empty(qkv.shape[0], heads * dim, dtype=qkv.dtype, device=qkv.device)
    tokens, block = min(_TOKENS, padded(rows.longest)), padded(dim)
    _turn_and_write[(triton.cdiv(rows.longest, tokens), heads + 2 * kv_heads, rows.count)](
        qkv,
        qkv.stride(0),
        out,
        kv,
        pages * page_size * kv_heads * dim,
        qkv if norms is None else norms,
        eps,
        qkv if frequencies is None else frequencies,
        0 if frequencies is None else frequencies.shape[0],
        rows.begins,
        rows.starts,
        rows.table,
        rows.width,
        page_size,
        heads,
        kv_heads,
        dim,
        NORM=norms is not None,
        TURN=frequencies is not None,
        TOKENS=tokens,
        DIM=block,
        num_warps=min(8, max(1, tokens * block // 256)),
        launch_pdl=EARLY,
    )
    return out


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


def attend_decode(
    query: Tensor, kv: Tensor, rows: PackedRows, *, scale: float, splits: int, gate: Tensor | None = None
) -> Tensor:
    """One query token a row, its key written. query [R, Q E] with strided rows -> [R, Q, E].

    scale: of the scores. splits: programs that share a row's tokens. gate [R, Q E] with strided rows: the output is
    multiplied by its sigmoid. Rows that are padding are left as they are.
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
        scale * math.log2(math.e),
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
        out if gate is None else gate,
        0 if gate is None else gate.stride(0),
        rows.starts,
        dim,
        query_heads,
        GATE=gate is not None,
        SPLITS=splits,
        SPLITS_BLOCK=padded(splits),
        DIM=padded_dim,
        launch_pdl=EARLY,
    )
    return out


def attend_prefill(query: Tensor, kv: Tensor, rows: PackedRows, *, scale: float, gate: Tensor | None = None) -> Tensor:
    """Many query tokens a row, their keys written. query [T, Q E] with strided rows -> [T, Q, E].

    scale, gate: see `attend_decode`.
    """
    _, pages, page_size, heads, dim = kv.shape
    query_heads = query.shape[1] // dim
    out = torch.empty(query.shape[0], query_heads, dim, dtype=query.dtype, device=query.device)
    fitting = _QUERY_BYTES // (padded(dim, MIN_DOT) * query.element_size())
    queries = min(_QUERIES, padded(rows.longest, MIN_DOT), max(MIN_DOT, fitting))
    _attend_rows[(triton.cdiv(rows.longest, queries), query_heads, rows.count)](
        query,
        query.stride(0),
        kv,
        pages * page_size * heads * dim,
        out,
        out if gate is None else gate,
        0 if gate is None else gate.stride(0),
        rows.begins,
        rows.starts,
        rows.table,
        rows.width,
        page_size,
        heads,
        dim,
        query_heads,
        scale * math.log2(math.e),
        GATE=gate is not None,
        QUERIES=queries,
        KEYS=_KEYS,
        DIM=padded(dim, MIN_DOT),
        num_warps=8 if queries >= 64 else 4,
        num_stages=2,
    )
    return out


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x.to(tl.float32)))


@triton.jit
def _turn_and_write(
    qkv,
    qkv_stride,
    out,
    kv,
    half,
    norms,
    eps,
    frequencies,
    pairs,
    begins,
    starts,
    table,
    width,
    page_size,
    heads,
    kv_heads,
    dim,
    NORM: tl.constexpr,
    TURN: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Some tokens of one row and one head: of a query, a key or a value."""
    enter()
    head, row = tl.program_id(1), tl.program_id(2)
    begin, start = tl.load(begins + row), tl.load(starts + row)
    count = tl.load(begins + row + 1) - begin
    t, e = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, DIM)
    if (tl.program_id(0) * TOKENS >= count) | (start < 0):
        return
    mask = (t < count)[:, None] & (e < dim)[None, :]
    source = qkv + (begin + t).to(tl.int64)[:, None] * qkv_stride + head * dim
    x = tl.load(source + e[None, :], mask=mask, other=0.0)  # [tokens, E]
    if head < heads + kv_heads:
        value = x.to(tl.float32)
        norm = norms + head // heads * dim  # of queries, then of keys
        if NORM:
            scale = 1 / tl.sqrt(tl.sum(value * value, 1) / dim + eps)
            value *= scale[:, None] * tl.load(norm + e, mask=e < dim, other=0.0)[None, :]
            value = value.to(x.dtype).to(tl.float32)  # as two steps round
        if TURN:
            low, turned = e < pairs, e < 2 * pairs
            partner = tl.where(low, e + pairs, e - pairs)
            other = tl.load(source + partner[None, :], mask=mask & turned[None, :], other=0.0).to(tl.float32)
            if NORM:
                other *= scale[:, None] * tl.load(norm + partner, mask=turned, other=0.0)[None, :]
                other = other.to(x.dtype).to(tl.float32)
            frequency = tl.load(frequencies + tl.minimum(e, partner), mask=turned, other=0.0)
            angle = (start + t).to(tl.float32)[:, None] * frequency[None, :]
            value = value * tl.cos(angle) + tl.where(low, -1.0, 1.0)[None, :] * other * tl.sin(angle)
        x = value.to(x.dtype)
    if head < heads:
        tl.store(out + (begin + t).to(tl.int64)[:, None] * (heads * dim) + head * dim + e[None, :], x, mask=mask)
        return
    position = start + t
    pages = table + row * tl.load(width)
    page = tl.load(pages + position // page_size, mask=t < count, other=0).to(tl.int64)
    of_value = (head - heads) // kv_heads
    cells = kv + of_value.to(tl.int64) * half + (head - heads - of_value * kv_heads) * dim + e
    token = kv_heads * dim
    tl.store(cells[None, :] + ((page * page_size + position % page_size) * token)[:, None], x, mask=mask)
    if count - 1 < (tl.program_id(0) + 1) * TOKENS:
        offset = (start + count - 1) % page_size
        if offset <= count - 1:
            last = tl.load(pages + (start + count - 1) // page_size).to(tl.int64) * page_size
            for after in range(offset + 1, page_size):
                zero = tl.zeros((DIM,), kv.dtype.element_ty)
                tl.store(cells + (last + after) * token, zero, mask=e < dim)


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
    gate,
    gate_stride,
    starts,
    dim,
    query_heads,
    GATE: tl.constexpr,
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
    if GATE:
        total *= _sigmoid(tl.load(gate + row.to(tl.int64) * gate_stride + head * dim + e, mask=e < dim, other=0.0))
    tl.store(out + at * dim + e, total.to(out.dtype.element_ty), mask=e < dim)


@triton.jit
def _attend_rows(
    query,
    query_stride,
    kv,
    half,
    out,
    gate,
    gate_stride,
    begins,
    starts,
    table,
    width,
    page_size,
    heads,
    dim,
    query_heads,
    scale,
    GATE: tl.constexpr,
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
    acc = acc / norm[:, None]
    if GATE:
        acc *= _sigmoid(
            tl.load(gate + tokens[:, None] * gate_stride + query_head * dim + e[None, :], mask=mine, other=0.0)
        )
    place = out + (tokens[:, None] * query_heads + query_head) * dim + e[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=mine)
