"""The Mamba2 mixer. Twin: `engine.mixers.mamba2`.

Legend: T packed tokens, I d_inner = H P, C conv_dim, H heads, P head dim, N state, W conv width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.cuda.batch import CudaBatch
from engine.cuda.mixers.mixer import MakeLinear, by_part, linear
from engine.kernels.conv import conv_prefill
from engine.kernels.norm import gated_rms_norm, gated_silu
from engine.kernels.rows import PackedRows
from engine.kernels.scan import scan_prefill
from engine.kernels.step import conv_step, scan_step
from engine.model_config import GateNorm, Mamba2Config


class Mamba2Mixer:
    """conv_state [slots, C, W - 1], state [slots, H, P, N]: this layer's, strided views of the pools."""

    def __init__(
        self,
        config: Mamba2Config,
        weights: Mapping[str, Tensor],
        norm: Tensor,
        conv_state: Tensor,
        state: Tensor,
        eps: float,
        make: MakeLinear,
    ) -> None:
        self.config, self.eps = config, eps
        self.conv_state, self.state = conv_state, state
        self.inner, self.out = linear(make, weights, "in_proj", norm), linear(make, weights, "out_proj")
        self.conv_weight = weights["conv1d.weight"].squeeze(1).t().contiguous()  # [W, C]
        self.conv_bias = weights.get("conv1d.bias")
        self.a = -torch.exp(weights["A_log"].float())  # [H]
        self.d, self.dt_bias, self.norm = weights["D"], weights["dt_bias"], weights.get("norm.weight")

    def forward(self, hidden: Tensor, batch: CudaBatch) -> None:
        self.out.add_to(hidden, self.mix(self.inner(hidden), batch))

    def mix(self, wide: Tensor, batch: CudaBatch) -> Tensor:
        """Gate, x, B, C and dt, [T, I + C + H] -> [T, I]."""
        return by_part(batch, self._decode, self._prefill, wide)

    def _decode(self, rows: PackedRows, wide: Tensor) -> Tensor:
        gate, xbc, dt = self._split(wide)
        y = scan_step(
            conv_step(xbc, self.conv_state, rows, self.conv_weight, self.conv_bias),
            dt,
            self.dt_bias,
            self.config.time_step_limit,
            self.a,
            self.d,
            self.state,
            rows,
            groups=self.config.n_groups,
        )
        return self._gated(y, gate)

    def _prefill(self, rows: PackedRows, wide: Tensor) -> Tensor:
        gate, xbc, dt = self._split(wide)
        y = scan_prefill(
            conv_prefill(xbc, self.conv_state, rows, self.conv_weight, self.conv_bias),
            dt,
            self.dt_bias,
            self.config.time_step_limit,
            self.a,
            self.d,
            self.state,
            rows,
            groups=self.config.n_groups,
            chunk=self.config.chunk_size,
        )
        return self._gated(y, gate)

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        if self.norm is None:
            return gated_silu(gate, y)
        norm_first = self.config.norm is GateNorm.NORM_FIRST
        return gated_rms_norm(y, gate, self.norm, self.config.n_groups, self.eps, norm_first=norm_first)

    def _split(self, wide: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, I + C + H] -> gate [T, I], xbc [T, C], dt [T, H], views."""
        widths = [self.config.d_inner, self.config.conv_dim, self.config.num_heads]
        gate, xbc, dt = torch.split(wide, widths, dim=1)
        return gate, xbc, dt
