"""The MLP mixer: down(relu(up(x))^2), or down(silu(gate(x)) * up(x)).

Legend: T packed tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.mixers.mixer import Shapes, Step, linear_shapes, project, stack
from engine.model_config import Activation, MlpConfig
from engine.ops.linear import Projection


def mlp_shapes(config: MlpConfig, hidden: int) -> Shapes:
    size = config.intermediate_size
    down = linear_shapes("down_proj", hidden, size, config.bias)
    if config.activation is Activation.RELU2:
        return linear_shapes("up_proj", size, hidden, config.bias) | down
    if config.fused:
        return linear_shapes("gate_up_proj", 2 * size, hidden, config.bias) | down
    gate, up = (linear_shapes(name, size, hidden, config.bias) for name in ("gate_proj", "up_proj"))
    return gate | up | down


class MlpMixer:
    def __init__(self, config: MlpConfig, weights: Mapping[str, Tensor]) -> None:
        self.gated = config.activation is Activation.GATED_SILU
        if self.gated and not config.fused:
            self.up = Projection(*stack(weights, "gate_proj", "up_proj"))
        else:
            self.up = project(weights, "gate_up_proj" if self.gated else "up_proj")
        self.down = project(weights, "down_proj")

    def matrices(self) -> Iterator[Tensor]:
        yield from (*self.up.matrices(), *self.down.matrices())

    def forward(self, normed: Tensor, residual: Tensor, step: Step) -> Tensor:
        return self.down.add_to(residual, self.inner(normed))

    def inner(self, normed: Tensor) -> Tensor:
        """[T, D] -> [T, intermediate size]."""
        if self.gated:
            gate, up = self.up(normed).chunk(2, dim=-1)
            return F.silu(gate).mul_(up)
        wide = torch.relu_(self.up(normed))
        return wide.mul_(wide)
