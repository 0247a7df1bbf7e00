"""What a mixer is to the model on a CUDA device, and what all of them share. Twin: `engine.mixers.mixer`.

Legend: T packed tokens, D hidden size. Decode rows come first in a pack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from engine.cuda.batch import CudaBatch
from engine.cuda.linear import Linear
from engine.kernels.rows import PackedRows

MakeLinear = Callable[[Tensor, Tensor | None, Tensor | None], Linear]  # weight, bias, norm in front


class Mixer(Protocol):
    """One layer."""

    def forward(self, hidden: Tensor, batch: CudaBatch) -> None:
        """hidden [T, D] += mixer(norm(hidden)). Updates its state in the pools."""
        ...


class TokenMixer(Mixer, Protocol):
    """A mixer with a past, in the three steps of its `forward`: hidden += out(mix(inner(norm(hidden))))."""

    inner: Linear
    out: Linear

    def mix(self, wide: Tensor, batch: CudaBatch) -> Tensor:
        """[T, outputs of `inner`] -> [T, inputs of `out`]. Updates the state in the pools."""
        ...


def linear(make: MakeLinear, weights: Mapping[str, Tensor], name: str, norm: Tensor | None = None) -> Linear:
    return make(weights[f"{name}.weight"], weights.get(f"{name}.bias"), norm)


def by_part(
    batch: CudaBatch,
    decode: Callable[[PackedRows, Tensor], Tensor],
    prefill: Callable[[PackedRows, Tensor], Tensor],
    values: Tensor,
) -> Tensor:
    """What decode makes of the first rows of values and prefill of the others, one behind the other."""
    split = batch.decode.count if batch.decode else 0
    parts = []
    if batch.decode:
        parts.append(decode(batch.decode, values[:split]))
    if batch.prefill:
        parts.append(prefill(batch.prefill, values[split:]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
