"""Rotary position embedding, in the half-split convention.

Legend: T packed tokens, H heads, E head dim, R rotated part of it.
    angle[p, i] = p * theta^(-2 i / R)                       i < R / 2
    out[i]         = x[i] cos - x[i + R / 2] sin             out[i + R / 2] = x[i + R / 2] cos + x[i] sin
Angles are products of float32 numbers, because the models were trained with those: at position 131071 they are some
thousandths away from the exact ones.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Rotary:
    """The frequencies of one model; every attention layer has the same.

    There is no table over positions: it would be max_position_embeddings x R x 4 bytes (67 MB for 262,144 positions and
    R 64), to save a fraction of a millisecond for each 2,048 tokens, once a step.
    """

    def __init__(self, dim: int, theta: float, device: torch.device | str) -> None:
        """dim: R, even (head dim x `partial_rotary_factor`). theta: `rope_theta`."""
        assert dim % 2 == 0, f"{dim} rotated dimensions"
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        self.dim = dim
        self.frequencies = (1.0 / theta**exponents).to(device)  # [R / 2], of the CPU's pow on every device

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What tokens at positions int64 [T] are turned by, in every layer: cos and sin float32 [T, 1, R / 2]."""
        angles = (positions.float()[:, None] * self.frequencies).unsqueeze(1)
        return angles.cos(), angles.sin()

    def apply(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """x [T, H, E] any float dtype -> its first R channels turned, in float32, the others as they are; x stays."""
        cos, sin = turn
        low, high = x[..., : self.dim].float().chunk(2, dim=-1)  # [T, H, R / 2]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        half = self.dim // 2
        out[..., :half] = low * cos - high * sin
        out[..., half : self.dim] = high * cos + low * sin
        out[..., self.dim :] = x[..., self.dim :]
        return out


def rotary_ref(x: Tensor, positions: Tensor, dim: int, theta: float) -> Tensor:
    """Token by token and pair by pair, in float64 but for the angles: x [T, H, E] -> [T, H, E]."""
    out = x.double().clone()
    for t, position in enumerate(positions.tolist()):
        for i in range(dim // 2):
            frequency = 1 / torch.tensor(theta) ** (torch.tensor(2.0 * i) / dim)
            angle = (torch.tensor(float(position)) * frequency).double()
            low, high = x[t, :, i].double(), x[t, :, i + dim // 2].double()
            out[t, :, i] = low * torch.cos(angle) - high * torch.sin(angle)
            out[t, :, i + dim // 2] = high * torch.cos(angle) + low * torch.sin(angle)
    return out
