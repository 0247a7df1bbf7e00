"""Root mean square norms, computed in float32.

Legend: T packed tokens, C channels, G groups.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension. x [T, C] any float dtype, weight [C] float32; result as x."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def gated_rms_norm(y: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """y * silu(gate), then an RMS norm within each group of channels, then the weight.

    y [T, C] float32 (overwritten), gate [T, C] any float dtype, weight [C] float32, C divisible by groups.
    Returns [T, C] in the gate's dtype.
    """
    y.mul_(F.silu(gate.float()))
    grouped = y.view(y.shape[0], groups, -1)  # [T, G, C / G]
    normed = F.rms_norm(grouped, grouped.shape[-1:], None, eps).view_as(y)
    return normed.mul_(weight).to(gate.dtype)


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` by its formula, in float64."""
    x = x.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()


def gated_rms_norm_ref(y: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """`gated_rms_norm` group by group, in float64."""
    gate = gate.double()
    gated = y.double() * gate / (1 + torch.exp(-gate))
    ones = torch.ones(gated.shape[-1] // groups, device=y.device)
    parts = [rms_norm_ref(part, ones, eps) for part in gated.chunk(groups, dim=-1)]
    return torch.cat(parts, dim=-1) * weight.double()
