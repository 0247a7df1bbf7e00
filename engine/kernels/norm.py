"""Root mean square norms, and activations and gates.

Legend: T rows, C channels, G groups. The twins are in `engine.ops.norm`; that of `square_relu_` is relu(x)^2, that of
`gated_silu` silu(gate) * x.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.common import EARLY, enter, padded, silu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight. x [T, C] contiguous, weight [C] float32; computed in float32, returned as x."""
    rows, channels = x.shape
    out = torch.empty_like(x)
    block = padded(channels)
    _rms_norm[(rows,)](
        x, weight, out, channels, eps, BLOCK=block, num_warps=min(16, max(1, block // 512)), launch_pdl=EARLY
    )
    return out


def gated_rms_norm(
    y: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float, *, norm_first: bool = False
) -> Tensor:
    """RMS norm by group of y * silu(gate), times weight; norm_first: of y, times weight, times silu(gate).

    y [T, C] contiguous, gate [T, C] with strided rows, weight [C] float32. Returns [T, C] in the gate's dtype.
    """
    rows, channels = y.shape
    out = torch.empty(rows, channels, dtype=gate.dtype, device=y.device)
    share = channels // groups
    block = padded(share)
    _gated_rms_norm[(rows, groups)](
        y,
        gate,
        gate.stride(0),
        weight,
        out,
        channels,
        share,
        eps,
        NORM_FIRST=norm_first,
        BLOCK=block,
        num_warps=min(8, max(1, block // 512)),
        launch_pdl=EARLY,
    )
    return out


def gated_silu(gate: Tensor, x: Tensor) -> Tensor:
    """silu(gate) * x in float32. gate and x [T, C] with strided rows -> [T, C] in the gate's dtype."""
    rows, channels = gate.shape
    out = torch.empty(rows, channels, dtype=gate.dtype, device=gate.device)
    block = min(padded(channels), 2048)
    _gated_silu[(rows, triton.cdiv(channels, block))](
        gate, gate.stride(0), x, x.stride(0), out, channels, BLOCK=block, num_warps=4, launch_pdl=EARLY
    )
    return out


def square_relu_(x: Tensor) -> Tensor:
    """relu(x)^2 in place; x contiguous, rounded to its dtype in between, as two torch calls would."""
    _square_relu[(triton.cdiv(x.numel(), 4096),)](x, x.numel(), BLOCK=4096, num_warps=8, launch_pdl=EARLY)
    return x


@triton.jit
def _rms_norm(x, weight, out, channels, eps, BLOCK: tl.constexpr):
    enter()
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    value = tl.load(x + row * channels + c, mask=c < channels, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(value * value, 0) / channels + eps)
    w = tl.load(weight + c, mask=c < channels, other=0.0)
    tl.store(out + row * channels + c, (value * scale * w).to(out.dtype.element_ty), mask=c < channels)


@triton.jit
def _gated_rms_norm(
    y, gate, gate_stride, weight, out, channels, share, eps, NORM_FIRST: tl.constexpr, BLOCK: tl.constexpr
):
    enter()
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    inside = tl.arange(0, BLOCK)
    c = group * share + inside
    mask = inside < share
    value = tl.load(y + row * channels + c, mask=mask, other=0.0).to(tl.float32)
    opened = silu(tl.load(gate + row * gate_stride + c, mask=mask, other=0.0).to(tl.float32))
    if not NORM_FIRST:
        value *= opened
    scale = 1 / tl.sqrt(tl.sum(value * value, 0) / share + eps)
    w = tl.load(weight + c, mask=mask, other=0.0)
    if NORM_FIRST:
        w *= opened
    tl.store(out + row * channels + c, (value * scale * w).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gated_silu(gate, gate_stride, x, x_stride, out, channels, BLOCK: tl.constexpr):
    enter()
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < channels
    value = silu(tl.load(gate + row * gate_stride + c, mask=mask, other=0.0).to(tl.float32))
    value *= tl.load(x + row * x_stride + c, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * channels + c, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count"])
def _square_relu(x, count, BLOCK: tl.constexpr):
    enter()
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.maximum(tl.load(x + i, mask=i < count, other=0.0).to(tl.float32), 0.0)
    tl.store(x + i, (value * value).to(x.dtype.element_ty), mask=i < count)
