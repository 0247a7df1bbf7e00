"""The Mamba2 mixer.

Legend: T packed tokens, D hidden size, I d_inner = H * P, C conv_dim = I + 2 G N, H heads, P head dim, G groups,
N state. dt is bounded by `time_step_limit` in prefill and decode alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import DecodePart, PrefillPart
from engine.mixers.mixer import Shapes, Step, advance, linear_shapes, project
from engine.model_config import GateNorm, Mamba2Config
from engine.ops.conv import conv_prefill, conv_step
from engine.ops.norm import gated_rms_norm
from engine.ops.ssd import ssd_prefill, ssd_step


def mamba2_shapes(config: Mamba2Config, hidden: int) -> Shapes:
    heads, inner, conv = config.num_heads, config.d_inner, config.conv_dim
    shapes = linear_shapes("in_proj", inner + conv + heads, hidden, config.in_bias)
    shapes |= {"conv1d.weight": (conv, 1, config.conv_kernel)}
    shapes |= {"conv1d.bias": (conv,)} if config.conv_bias else {}
    shapes |= {"A_log": (heads,), "D": (heads,), "dt_bias": (heads,)}
    shapes |= {"norm.weight": (inner,)} if config.norm is not GateNorm.NONE else {}
    return shapes | linear_shapes("out_proj", hidden, inner, config.out_bias)


class Mamba2Mixer:
    """See `RecurrentMixer`; state [slots, H, P, N]."""

    def __init__(
        self, config: Mamba2Config, weights: Mapping[str, Tensor], conv_state: Tensor, state: Tensor, eps: float
    ) -> None:
        self.config, self.eps = config, eps
        self.conv_state, self.state = conv_state, state
        self.inner = project(weights, "in_proj")
        self.out = project(weights, "out_proj")
        self.conv_weight = weights["conv1d.weight"].squeeze(1).t().contiguous()  # [W, C]
        self.conv_bias = weights.get("conv1d.bias")
        self.a = -torch.exp(weights["A_log"].float())  # [H]
        self.d, self.dt_bias, self.norm = weights["D"], weights["dt_bias"], weights.get("norm.weight")
        self.widths = [config.d_inner, config.conv_dim, config.num_heads]  # of gate, x with B and C, dt
        self.blocks = list(config.conv_blocks)
        low, high = config.time_step_limit
        self.bounded = low > 0 or high < math.inf

    def matrices(self) -> Iterator[Tensor]:
        yield from (*self.inner.matrices(), *self.out.matrices())

    def forward(self, normed: Tensor, residual: Tensor, step: Step) -> Tensor:
        gate, xbc, dt = torch.split(self.inner(normed), self.widths, dim=-1)
        y = advance(self, step, xbc, self._time_step(dt)).flatten(1)  # [T, I]
        return self.out.add_to(residual, self._gated(y, gate))

    def decode(self, part: DecodePart, *inputs: Tensor) -> Tensor:
        """xbc [B, C], dt [B, H] float32 -> y [B, H, P] float32."""
        xbc, dt = inputs
        x, b, c = self._split(conv_step(xbc, self.conv_state, part.slots, self.conv_weight, self.conv_bias))
        return ssd_step(x, dt, self.a, b, c, self.d, self.state, part.slots)

    def prefill(self, part: PrefillPart, step: Step, *inputs: Tensor) -> Tensor:
        """xbc [T, C], dt [T, H] float32 -> y [T, H, P] float32."""
        (xbc, dt), conv_plan, chunk_plan = inputs, step.conv_plan, step.chunk_plan
        assert conv_plan is not None and chunk_plan is not None
        xbc = conv_prefill(xbc, self.conv_state, part.slots, part.fresh, conv_plan, self.conv_weight, self.conv_bias)
        x, b, c = self._split(xbc)
        return ssd_prefill(x, dt, self.a, b, c, self.d, self.state, part.slots, part.fresh, chunk_plan)

    def _time_step(self, dt: Tensor) -> Tensor:
        dt = F.softplus(dt + self.dt_bias)  # [T, H] float32
        return dt.clamp_(*self.config.time_step_limit) if self.bounded else dt

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """y [T, I] float32 (overwritten), gate [T, I] -> [T, I] in the gate's dtype."""
        if self.norm is None:
            return y.mul_(F.silu(gate.float())).to(gate.dtype)
        norm_first = self.config.norm is GateNorm.NORM_FIRST
        return gated_rms_norm(y, gate, self.norm, self.config.n_groups, self.eps, norm_first=norm_first)

    def _split(self, xbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, C] -> x [T, H, P], b and c [T, G, N]."""
        config = self.config
        x, b, c = torch.split(xbc, self.blocks, dim=-1)
        return (
            x.view(-1, config.num_heads, config.head_dim),
            b.view(-1, config.n_groups, config.d_state),
            c.view(-1, config.n_groups, config.d_state),
        )
