"""The MLP mixer. Twin: `engine.mixers.mlp`.

Legend: T packed tokens, D hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from engine.cuda.batch import CudaBatch
from engine.cuda.mixers.mixer import MakeLinear, linear
from engine.kernels.norm import gated_silu
from engine.mixers.mixer import stack
from engine.model_config import Activation, MlpConfig


class MlpMixer:
    """norm None: what it reads is normed already."""

    def __init__(self, config: MlpConfig, weights: Mapping[str, Tensor], norm: Tensor | None, make: MakeLinear) -> None:
        self.gated, self.size = config.activation is Activation.GATED_SILU, config.intermediate_size
        if self.gated and not config.fused:
            self.up = make(*stack(weights, "gate_proj", "up_proj"), norm)
        else:
            self.up = linear(make, weights, "gate_up_proj" if self.gated else "up_proj", norm)
        self.down = linear(make, weights, "down_proj")

    def forward(self, hidden: Tensor, batch: CudaBatch) -> None:
        self.down.add_to(hidden, self.inner(hidden))

    def inner(self, hidden: Tensor) -> Tensor:
        """[T, D] -> [T, I]."""
        if not self.gated:
            return self.up(hidden, square=True)
        wide = self.up(hidden)  # [T, 2 I]
        return gated_silu(wide[:, : self.size], wide[:, self.size :])
