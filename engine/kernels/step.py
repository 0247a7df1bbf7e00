"""One token of each row through convolution and recurrence, in place over the slots. Twins: `conv_step`, `ssd_step`.

Legend: R rows, C channels, W conv width, H heads, P head dim, G groups, N state. Of rows that are padding nothing is
read, and nothing written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.common import EARLY, enter, padded, silu
from engine.kernels.rows import PackedRows
from engine.kernels.scan import time_step

_CHANNELS = 512


def conv_step(x: Tensor, pool: Tensor, rows: PackedRows, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve one token a row and move its window on.

    x [R, C] with strided rows, pool [slots, C, W - 1] (mutated), a layer's strided view; weight [W, C], bias [C] or
    None. Returns [R, C] contiguous.
    """
    width, channels = weight.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _conv_step[(triton.cdiv(channels, _CHANNELS), rows.count)](
        x,
        x.stride(0),
        pool,
        pool.stride(0),
        weight,
        weight if bias is None else bias,
        out,
        rows.starts,
        rows.slots,
        channels,
        BIAS=bias is not None,
        WIDTH=width,
        CHANNELS=_CHANNELS,
        num_warps=4,
        launch_pdl=EARLY,
    )
    return out


def scan_step(
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
) -> Tensor:
    """Advance each row's state by one token.

    xbc [R, H P + 2 G N] contiguous: x, b, c; dt [R, H] with strided rows; dt_bias, limit, a, d as `scan_prefill`.
    pool [slots, H, P, N] (mutated), a layer's strided view. Returns y [R, H P] in the dtype of xbc.
    """
    heads, dim, size = pool.shape[1:]
    y = torch.empty(rows.count, heads * dim, dtype=xbc.dtype, device=xbc.device)
    block, warps = _cut(rows.count)
    _scan_step[(triton.cdiv(dim, block), heads, rows.count)](
        xbc,
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
        DIM=block,
        SIZE=padded(size),
        num_warps=warps,
        launch_pdl=EARLY,
    )
    return y


def _cut(rows: int) -> tuple[int, int]:
    """Head dims of a program, and its warps."""
    return 16, 4


@triton.jit
def _conv_step(
    x,
    x_stride,
    pool,
    pool_stride,
    weight,
    bias,
    out,
    starts,
    slots,
    channels,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    enter()
    row = tl.program_id(1)
    if tl.load(starts + row) < 0:
        return
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    mask = c < channels
    window = pool + tl.load(slots + row).to(tl.int64) * pool_stride + c * (WIDTH - 1)
    token = tl.load(x + row.to(tl.int64) * x_stride + c, mask=mask, other=0.0)
    acc = token.to(tl.float32) * tl.load(weight + (WIDTH - 1) * channels + c, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        acc += tl.load(bias + c, mask=mask, other=0.0).to(tl.float32)
    for k in tl.static_range(WIDTH - 1):
        old = tl.load(window + k, mask=mask, other=0.0)
        acc += old.to(tl.float32) * tl.load(weight + k * channels + c, mask=mask, other=0.0).to(tl.float32)
        if k > 0:
            tl.store(window + k - 1, old, mask=mask)
    tl.store(window + WIDTH - 2, token.to(pool.dtype.element_ty), mask=mask)
    tl.store(out + row.to(tl.int64) * channels + c, silu(acc).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _scan_step(
    xbc,
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
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
):
    enter()
    head, row = tl.program_id(1), tl.program_id(2)
    if tl.load(starts + row) < 0:
        return
    p, n = tl.program_id(0) * DIM + tl.arange(0, DIM), tl.arange(0, SIZE)
    mask = (p < dim)[:, None] & (n < size)[None, :]
    state = pool + tl.load(slots + row).to(tl.int64) * pool_stride + head * dim * size
    cells = state + p[:, None] * size + n[None, :]
    old = tl.load(cells, mask=mask, other=0.0).to(tl.float32)  # [P, N]
    step = tl.load(dt + row.to(tl.int64) * dt_stride + head).to(tl.float32)
    step = time_step(step, tl.load(dt_bias + head), low, high)
    token = xbc + row.to(tl.int64) * (heads * dim + 2 * groups * size)
    group = token + heads * dim + head // (heads // groups) * size + n
    x = tl.load(token + head * dim + p, mask=p < dim, other=0.0).to(tl.float32)
    b = tl.load(group, mask=n < size, other=0.0).to(tl.float32)
    c = tl.load(group + groups * size, mask=n < size, other=0.0).to(tl.float32)
    new = old * tl.exp(step * tl.load(a + head)) + (x * step)[:, None] * b[None, :]
    tl.store(cells, new.to(pool.dtype.element_ty), mask=mask)
    out = tl.sum(new * c[None, :], 1) + tl.load(d + head) * x
    tl.store(y + row.to(tl.int64) * heads * dim + head * dim + p, out.to(y.dtype.element_ty), mask=p < dim)
