"""The Mamba2 recurrence over packed sequences, state in and out of slots. Twin: `engine.ops.ssd.ssd_prefill`.

Legend: R rows, T packed tokens, H heads, P head dim, G groups, N state, L tokens in a cell.
One program runs one head of one row from its first token to its last and keeps the state h [P, N] in registers, or a
part of it along P, whose elements do not depend on each other, where it is larger than they are. It goes by cells of
the row's own grid of positions 0, L, 2 L, ..., so a token's cell does not depend on what else is in the batch, and a
position to be kept, a multiple of the model's chunk and so of L, is always the end of a cell.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.common import MIN_DOT, dot, padded
from engine.kernels.rows import PackedRows

_LARGEST_CELL = 64
_LARGEST_STATE = 16384  # values in a program's registers


def scan_prefill(
    xbc: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    limit: tuple[float, float],
    a: Tensor,
    d: Tensor,
    pool: Tensor,
    rows: PackedRows,
    *,
    groups: int,
    chunk: int,
) -> Tensor:
    """Run every row through the recurrence from its slot, or from zeros where it starts at position 0.

    xbc [T, H P + 2 G N] contiguous: x, b, c. dt [T, H] with strided rows, before dt_bias [H], softplus and limit.
    a, d [H] float32. pool [slots, H, P, N] (mutated: the state after the last token in the slot, that of the position
    to be kept in the track slot), a layer's strided view. Returns y [T, H P] in the dtype of xbc.
    """
    heads, dim, size = pool.shape[1:]
    y = torch.empty(xbc.shape[0], heads * dim, dtype=xbc.dtype, device=xbc.device)
    cell = math.gcd(chunk, _LARGEST_CELL)
    states = padded(size, MIN_DOT)
    dims = min(padded(dim, MIN_DOT), max(MIN_DOT, _LARGEST_STATE // states))
    _scan[(heads, rows.count, triton.cdiv(dim, dims))](
        xbc,
        xbc.stride(0),
        dt,
        dt.stride(0),
        dt_bias,
        *limit,
        a,
        d,
        pool,
        pool.stride(0),
        y,
        rows.begins,
        rows.starts,
        rows.slots,
        rows.track_slots,
        rows.track_offsets,
        heads,
        dim,
        size,
        groups,
        CELL=cell,
        TOKENS=padded(cell, MIN_DOT),
        DIM=dims,
        SIZE=states,
        num_warps=8,
        num_stages=2,
    )
    return y


@triton.jit
def time_step(dt, bias, low, high):
    """softplus(dt + bias) within [low, high]."""
    dt += bias
    dt = tl.where(dt > 20, dt, tl.log(1 + tl.exp(tl.minimum(dt, 20.0))))
    return tl.minimum(tl.maximum(dt, low), high)


@triton.jit
def _scan(
    xbc,
    xbc_stride,
    dt,
    dt_stride,
    dt_bias,
    low,
    high,
    a,
    d,
    pool,
    pool_stride,
    y,
    begins,
    starts,
    slots,
    track_slots,
    track_offsets,
    heads,
    dim,
    size,
    groups,
    CELL: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
):
    head, row = tl.program_id(0), tl.program_id(1)
    begin = tl.load(begins + row).to(tl.int64)
    count = (tl.load(begins + row + 1) - begin).to(tl.int32)
    start = tl.load(starts + row)
    track, boundary = tl.load(track_slots + row), tl.load(track_offsets + row)
    p, n, place = tl.program_id(2) * DIM + tl.arange(0, DIM), tl.arange(0, SIZE), tl.arange(0, TOKENS)
    cells = head * dim * size + p[:, None] * size + n[None, :]
    inside = (p < dim)[:, None] & (n < size)[None, :]
    slot = pool + tl.load(slots + row).to(tl.int64) * pool_stride
    begun = tl.where(start > 0, dim, 0)  # of a row that starts at 0 nothing is read
    state = tl.load(slot + cells, mask=inside & (p < begun)[:, None], other=0.0).to(tl.float32)  # [P, N]
    group = head // (heads // groups)
    x_at = head * dim + p
    b_at = heads * dim + group * size + n
    c_at = b_at + groups * size
    rate, skip, bias = tl.load(a + head), tl.load(d + head), tl.load(dt_bias + head)
    shift = start % CELL
    for cell in range(tl.cdiv(shift + count, CELL)):
        first = tl.maximum(cell * CELL - shift, 0)
        end = tl.minimum((cell + 1) * CELL - shift, count)
        t = first + place
        here = t < end
        tokens = xbc + (begin + t)[:, None] * xbc_stride
        x = tl.load(tokens + x_at[None, :], mask=here[:, None] & (p < dim)[None, :], other=0.0)  # [L, P]
        b = tl.load(tokens + b_at[None, :], mask=here[:, None] & (n < size)[None, :], other=0.0)  # [L, N]
        c = tl.load(tokens + c_at[None, :], mask=here[:, None] & (n < size)[None, :], other=0.0)
        step = tl.load(dt + (begin + t) * dt_stride + head, mask=here, other=0.0).to(tl.float32)
        step = tl.where(here, time_step(step, bias, low, high), 0.0)
        decay = tl.cumsum(step * rate, 0)  # [L], from the start of the cell
        total = tl.sum(step * rate, 0)
        gap = decay[:, None] - decay[None, :]
        weight = tl.exp(tl.where(place[:, None] >= place[None, :], gap, -float("inf"))) * step[None, :]
        scores = dot(c, tl.trans(b), tl.zeros((TOKENS, TOKENS), tl.float32)) * weight
        out = dot(c, tl.trans(state).to(c.dtype), tl.zeros((TOKENS, DIM), tl.float32)) * tl.exp(decay)[:, None]
        out = dot(scores.to(x.dtype), x, out)
        wide = x.to(tl.float32)
        out += skip * wide
        tl.store(
            y + (begin + t)[:, None] * (heads * dim) + x_at[None, :],
            out.to(y.dtype.element_ty),
            mask=here[:, None] & (p < dim)[None, :],
        )
        left = wide * (step * tl.exp(total - decay))[:, None]
        state = dot(tl.trans(left).to(x.dtype), b, state * tl.exp(total))
        if (track > 0) & (end == boundary):
            kept = pool + track.to(tl.int64) * pool_stride
            tl.store(kept + cells, state.to(pool.dtype.element_ty), mask=inside)
    tl.store(slot + cells, state.to(pool.dtype.element_ty), mask=inside)
