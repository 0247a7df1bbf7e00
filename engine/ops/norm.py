"""Root mean square norms, computed in float32.

Legend: T packed tokens, C channels, G groups, H heads, V head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension. x [T, C] any float dtype, weight [C] float32; result as x."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def gated_rms_norm(
    y: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float, *, norm_first: bool = False
) -> Tensor:
    """y * silu(gate), then an RMS norm within each group of channels, then the weight; norm_first: the gate comes last.

    y [T, C] float32 (overwritten), gate [T, C] any float dtype, weight [C] float32, C divisible by groups.
    Returns [T, C] in the gate's dtype.
    """
    if norm_first:
        return _group_norm(y, weight, groups, eps).mul_(F.silu(gate.float())).to(gate.dtype)
    return _group_norm(y.mul_(F.silu(gate.float())), weight, groups, eps).to(gate.dtype)


def _group_norm(y: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    grouped = y.view(y.shape[0], groups, -1)  # [T, G, C / G]
    return F.rms_norm(grouped, grouped.shape[-1:], None, eps).view_as(y).mul_(weight)


def head_rms_norm_gated(y: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """An RMS norm within each head, one weight for all of them, then times silu(gate).

    y [T, H, V] float32, gate [T, H, V] any float dtype, weight [V] float32. Returns [T, H * V] in the gate's dtype.
    """
    return F.rms_norm(y, weight.shape, weight, eps).mul_(F.silu(gate.float())).to(gate.dtype).flatten(1)


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` by its formula, in float64."""
    x = x.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()


def gated_rms_norm_ref(
    y: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float, *, norm_first: bool = False
) -> Tensor:
    """`gated_rms_norm` group by group, in float64."""
    opened = _silu_ref(gate)
    gated = y.double() if norm_first else y.double() * opened
    ones = torch.ones(gated.shape[-1] // groups, device=y.device)
    parts = [rms_norm_ref(part, ones, eps) for part in gated.chunk(groups, dim=-1)]
    normed = torch.cat(parts, dim=-1) * weight.double()
    return normed * opened if norm_first else normed


def head_rms_norm_gated_ref(y: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`head_rms_norm_gated` head by head, in float64."""
    parts = [rms_norm_ref(y[:, h], weight, eps) * _silu_ref(gate[:, h]) for h in range(y.shape[1])]
    return torch.cat(parts, dim=-1)


def _silu_ref(x: Tensor) -> Tensor:
    x = x.double()
    return x / (1 + torch.exp(-x))
