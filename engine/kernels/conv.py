"""Causal depthwise convolution of packed sequences, with its state in slots. Twin: `engine.ops.conv.conv_prefill`.

Legend: R sequences, T packed tokens, C channels, W conv width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.common import padded, silu
from engine.kernels.rows import PackedRows

_TOKENS = 32
_CHANNELS = 128


def conv_prefill(x: Tensor, pool: Tensor, rows: PackedRows, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve each row's tokens after its slot's window, apply silu, and leave the new window in the slot.

    x [T, C] with strided rows, pool [slots, C, W - 1] (mutated: slots, and track slots where a row tracks), a layer's
    strided view; weight [W, C], bias [C] or None. Returns [T, C] contiguous. The twin is bit for bit the same in the
    windows.
    """
    width, channels = weight.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    strides = (x.stride(0), pool.stride(0))
    common = (rows.begins, rows.starts, rows.slots)
    blocks = triton.cdiv(channels, _CHANNELS)
    _conv[(triton.cdiv(rows.longest, _TOKENS), rows.count, blocks)](
        x,
        pool,
        *strides,
        *common,
        weight,
        weight if bias is None else bias,
        out,
        channels,
        BIAS=bias is not None,
        WIDTH=width,
        TOKENS=_TOKENS,
        CHANNELS=_CHANNELS,
    )
    _save_windows[(rows.count, blocks)](
        x,
        pool,
        *strides,
        *common,
        rows.track_slots,
        rows.track_offsets,
        channels,
        WIDTH=width,
        WINDOW=padded(width - 1),
        CHANNELS=_CHANNELS,
    )
    return out


@triton.jit
def _conv(
    x,
    pool,
    x_stride,
    pool_stride,
    begins,
    starts,
    slots,
    weight,
    bias,
    out,
    channels,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    first, row = tl.program_id(0) * TOKENS, tl.program_id(1)
    begin = tl.load(begins + row)
    count = tl.load(begins + row + 1) - begin
    if first >= count:
        return
    t = first + tl.arange(0, TOKENS)
    c = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    seen = (c < channels)[None, :]
    fresh = tl.load(starts + row) == 0
    window = pool + tl.load(slots + row).to(tl.int64) * pool_stride + c * (WIDTH - 1)
    tokens = x + begin.to(tl.int64) * x_stride + c[None, :]
    acc = tl.zeros((TOKENS, CHANNELS), tl.float32)
    if BIAS:
        acc += tl.load(bias + c, mask=c < channels, other=0.0).to(tl.float32)[None, :]
    for k in tl.static_range(WIDTH):
        at = t - (WIDTH - 1) + k
        value = tl.load(tokens + at[:, None] * x_stride, mask=((at >= 0) & (at < count))[:, None] & seen, other=0.0).to(
            tl.float32
        )
        if first == 0 and not fresh:
            old = tl.load(window[None, :] + (WIDTH - 1) + at[:, None], mask=(at < 0)[:, None] & seen, other=0.0)
            value += old.to(tl.float32)
        value *= tl.load(weight + k * channels + c, mask=c < channels, other=0.0).to(tl.float32)[None, :]
        acc += value
    place = out + (begin + t)[:, None].to(tl.int64) * channels + c[None, :]
    tl.store(place, silu(acc).to(out.dtype.element_ty), mask=(t < count)[:, None] & seen)


@triton.jit
def _window_before(tokens, window, end, fresh, x_stride, c, seen, WIDTH: tl.constexpr, WINDOW: tl.constexpr):
    """The WIDTH - 1 inputs before token `end` of a row, the oldest of which may still lie in its slot's window."""
    j = tl.arange(0, WINDOW)
    at = end - (WIDTH - 1) + j
    new = tl.load(tokens + c[:, None] + at[None, :] * x_stride, mask=seen & (at >= 0)[None, :], other=0.0)
    old = tl.load(
        window + c[:, None] * (WIDTH - 1) + (WIDTH - 1) + at[None, :],
        mask=seen & (at < 0)[None, :] & (not fresh),
        other=0.0,
    )
    return tl.where((at >= 0)[None, :], new, old.to(new.dtype))


@triton.jit
def _save_windows(
    x,
    pool,
    x_stride,
    pool_stride,
    begins,
    starts,
    slots,
    track_slots,
    track_offsets,
    channels,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(0)
    begin = tl.load(begins + row)
    count = tl.load(begins + row + 1) - begin
    fresh = tl.load(starts + row) == 0
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    j = tl.arange(0, WINDOW)
    seen = (c < channels)[:, None] & (j < WIDTH - 1)[None, :]
    cells = c[:, None] * (WIDTH - 1) + j[None, :]
    tokens = x + begin.to(tl.int64) * x_stride
    window = pool + tl.load(slots + row).to(tl.int64) * pool_stride
    track = tl.load(track_slots + row)
    if track > 0:
        end = tl.load(track_offsets + row)
        kept = _window_before(tokens, window, end, fresh, x_stride, c, seen, WIDTH, WINDOW)
        tl.store(pool + track.to(tl.int64) * pool_stride + cells, kept.to(pool.dtype.element_ty), mask=seen)
    last = _window_before(tokens, window, count, fresh, x_stride, c, seen, WIDTH, WINDOW)
    tl.debug_barrier()  # a short row moves its window: everything is read before anything is written
    tl.store(window + cells, last.to(pool.dtype.element_ty), mask=seen)
