"""One token of each row through a Mamba2 mixer, in place over the slots. Twins: `conv_step` and `ssd_step`.

Legend: R rows, C channels, W conv width, H heads, P head dim, G groups, N state.
Two launches: `scan_step` reads the conv windows and advances the SSM states; `finish_step` then moves the windows, when
nobody reads them any more, and applies the gated norm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.common import padded, silu
from engine.kernels.rows import PackedRows
from engine.kernels.scan import time_step

_DIM = 16  # of a head dim, at a time
_FEW_ROWS = 8


def scan_step(
    xbc: Tensor,
    conv_pool: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt: Tensor,
    dt_bias: Tensor,
    limit: tuple[float, float],
    a: Tensor,
    d: Tensor,
    pool: Tensor,
    rows: PackedRows,
    *,
    groups: int,
) -> Tensor:
    """Convolve each row's token (without moving the window) and advance its state.

    xbc [R, C] and dt [R, H] with strided rows; conv_pool [slots, C, W - 1], conv_weight [W, C], conv_bias [C] or None;
    dt_bias, limit, a, d as `scan_prefill`. pool [slots, H, P, N] (mutated). Returns y [R, H P] in the dtype of xbc;
    rows that are padding are left as they are.
    """
    heads, dim, size = pool.shape[1:]
    count = rows.count
    y = torch.empty(count, heads * dim, dtype=xbc.dtype, device=xbc.device)
    parts = triton.cdiv(dim, _DIM) if count < _FEW_ROWS else 1
    _scan_step[(parts, heads, count)](
        xbc,
        xbc.stride(0),
        conv_pool,
        conv_pool.stride(0),
        conv_weight,
        conv_weight if conv_bias is None else conv_bias,
        dt,
        dt.stride(0),
        dt_bias,
        *limit,
        a,
        d,
        pool,
        pool.stride(0),
        y,
        rows.starts,
        rows.slots,
        heads,
        dim,
        size,
        groups,
        conv_weight.shape[1],
        BIAS=conv_bias is not None,
        WIDTH=conv_weight.shape[0],
        PARTS=parts,
        DIM=_DIM,
        SIZE=padded(size),
        num_warps=4,
    )
    return y


def finish_step(
    xbc: Tensor, conv_pool: Tensor, y: Tensor, gate: Tensor, weight: Tensor, rows: PackedRows, groups: int, eps: float
) -> Tensor:
    """Move each row's conv window on by its token, and return the gated RMS norm of y.

    xbc [R, C] with strided rows, conv_pool [slots, C, W - 1] (mutated); the rest and the result as `gated_rms_norm`.
    """
    channels, window = conv_pool.shape[1:]
    count, width = y.shape
    out = torch.empty(count, width, dtype=gate.dtype, device=y.device)
    share, moved = width // groups, triton.cdiv(channels, groups)
    _finish_step[(groups, count)](
        xbc,
        xbc.stride(0),
        conv_pool,
        conv_pool.stride(0),
        y,
        gate,
        gate.stride(0),
        weight,
        out,
        rows.starts,
        rows.slots,
        channels,
        width,
        share,
        moved,
        eps,
        WINDOW=window,
        WINDOW_BLOCK=padded(window),
        SHARE=padded(share),
        MOVED=padded(moved),
        num_warps=8,
    )
    return out


@triton.jit
def _convolve(
    token, window, weight, bias, c, mask, channels, dtype: tl.constexpr, BIAS: tl.constexpr, WIDTH: tl.constexpr
):
    """silu of the convolution of channels c, rounded to dtype, as float32."""
    acc = tl.load(token + c, mask=mask, other=0.0).to(tl.float32)
    acc *= tl.load(weight + (WIDTH - 1) * channels + c, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        acc += tl.load(bias + c, mask=mask, other=0.0).to(tl.float32)
    for k in tl.static_range(WIDTH - 1):
        old = tl.load(window + c * (WIDTH - 1) + k, mask=mask, other=0.0).to(tl.float32)
        acc += old * tl.load(weight + k * channels + c, mask=mask, other=0.0).to(tl.float32)
    return silu(acc).to(dtype).to(tl.float32)


@triton.jit
def _scan_step(
    xbc,
    xbc_stride,
    conv_pool,
    conv_stride,
    conv_weight,
    conv_bias,
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
    starts,
    slots,
    heads,
    dim,
    size,
    groups,
    channels,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
):
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tl.load(starts + row) < 0:
        return
    slot = tl.load(slots + row).to(tl.int64)
    window, token = conv_pool + slot * conv_stride, xbc + row.to(tl.int64) * xbc_stride
    n = tl.arange(0, SIZE)
    b_at = heads * dim + head // (heads // groups) * size + n
    dtype: tl.constexpr = xbc.dtype.element_ty
    b = _convolve(token, window, conv_weight, conv_bias, b_at, n < size, channels, dtype, BIAS, WIDTH)
    c = _convolve(token, window, conv_weight, conv_bias, b_at + groups * size, n < size, channels, dtype, BIAS, WIDTH)
    step = tl.load(dt + row.to(tl.int64) * dt_stride + head).to(tl.float32)
    step = time_step(step, tl.load(dt_bias + head), low, high)
    decay, skip = tl.exp(step * tl.load(a + head)), tl.load(d + head)
    state = pool + slot * pool_stride + head * dim * size
    for block in range(part, tl.cdiv(dim, DIM), PARTS):
        p = block * DIM + tl.arange(0, DIM)
        mask = (p < dim)[:, None] & (n < size)[None, :]
        cells = state + p[:, None] * size + n[None, :]
        old = tl.load(cells, mask=mask, other=0.0).to(tl.float32)  # [P, N]
        x = _convolve(token, window, conv_weight, conv_bias, head * dim + p, p < dim, channels, dtype, BIAS, WIDTH)
        new = old * decay + (x * step)[:, None] * b[None, :]
        tl.store(cells, new.to(pool.dtype.element_ty), mask=mask)
        out = tl.sum(new * c[None, :], 1) + skip * x
        tl.store(y + row.to(tl.int64) * heads * dim + head * dim + p, out.to(y.dtype.element_ty), mask=p < dim)


@triton.jit
def _finish_step(
    xbc,
    xbc_stride,
    conv_pool,
    conv_stride,
    y,
    gate,
    gate_stride,
    weight,
    out,
    starts,
    slots,
    channels,
    width,
    share,
    moved,
    eps,
    WINDOW: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
    SHARE: tl.constexpr,
    MOVED: tl.constexpr,
):
    group, row = tl.program_id(0), tl.program_id(1)
    if tl.load(starts + row) < 0:
        return
    wide_row = row.to(tl.int64)
    inside = tl.arange(0, MOVED)
    c, j = group * moved + inside, tl.arange(0, WINDOW_BLOCK)
    known = (inside < moved) & (c < channels)
    window = conv_pool + tl.load(slots + row).to(tl.int64) * conv_stride + c[:, None] * WINDOW + j[None, :]
    seen = known[:, None] & (j < WINDOW)[None, :]
    older = tl.load(window + 1, mask=seen & (j < WINDOW - 1)[None, :], other=0.0)
    newest = tl.load(xbc + wide_row * xbc_stride + c, mask=known, other=0.0)
    tl.debug_barrier()  # everything is read before anything is written
    tl.store(window, tl.where((j < WINDOW - 1)[None, :], older, newest.to(older.dtype)[:, None]), mask=seen)

    inside = tl.arange(0, SHARE)
    at, mask = group * share + inside, inside < share
    value = tl.load(y + wide_row * width + at, mask=mask, other=0.0).to(tl.float32)
    value *= silu(tl.load(gate + wide_row * gate_stride + at, mask=mask, other=0.0).to(tl.float32))
    scale = 1 / tl.sqrt(tl.sum(value * value, 0) / share + eps)
    value *= scale * tl.load(weight + at, mask=mask, other=0.0)
    tl.store(out + wide_row * width + at, value.to(out.dtype.element_ty), mask=mask)
