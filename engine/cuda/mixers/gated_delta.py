"""The gated delta mixer. Twin: `engine.mixers.gated_delta`.

Legend: T packed tokens, H value heads, K key dim, V value dim, C conv_dim, W conv width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.cuda.batch import CudaBatch
from engine.cuda.mixers.mixer import MakeLinear, by_part, linear
from engine.kernels.conv import conv_prefill
from engine.kernels.gated_delta import gated_delta_prefill, gated_delta_step, head_rms_norm_gated
from engine.kernels.rows import PackedRows
from engine.kernels.step import conv_step
from engine.mixers.gated_delta import by_part as rows_by_part
from engine.model_config import GatedDeltaConfig


class GatedDeltaMixer:
    """conv_state [slots, C, W - 1], state [slots, H, K, V]: this layer's, strided views of the pools."""

    def __init__(
        self,
        config: GatedDeltaConfig,
        weights: Mapping[str, Tensor],
        norm: Tensor,
        conv_state: Tensor,
        state: Tensor,
        eps: float,
        make: MakeLinear,
    ) -> None:
        self.config, self.eps = config, eps
        self.conv_state, self.state = conv_state, state
        self.inner = make(rows_by_part(config, weights), None, norm)
        self.out = linear(make, weights, "out_proj")
        self.conv_weight = weights["conv1d.weight"].squeeze(1).t().contiguous()  # [W, C]
        self.rate = -torch.exp(weights["A_log"].float())  # [H]
        self.dt_bias, self.norm = weights["dt_bias"], weights["norm.weight"]

    def forward(self, hidden: Tensor, batch: CudaBatch) -> None:
        self.out.add_to(hidden, self.mix(self.inner(hidden), batch))

    def mix(self, wide: Tensor, batch: CudaBatch) -> Tensor:
        """q, k, v, gate, b and a, [T, C + H V + 2 H] -> [T, H V]."""
        return by_part(batch, self._decode, self._prefill, wide)

    def _decode(self, rows: PackedRows, wide: Tensor) -> Tensor:
        qkv, gate, b, a = self._split(wide)
        qkv = conv_step(qkv, self.conv_state, rows, self.conv_weight, None)
        heads = self.config.key_heads
        y = gated_delta_step(qkv, a, b, self.dt_bias, self.rate, self.state, rows, key_heads=heads)
        return head_rms_norm_gated(y, gate, self.norm, self.eps)

    def _prefill(self, rows: PackedRows, wide: Tensor) -> Tensor:
        qkv, gate, b, a = self._split(wide)
        qkv = conv_prefill(qkv, self.conv_state, rows, self.conv_weight, None)
        heads, chunk = self.config.key_heads, self.config.chunk_size
        y = gated_delta_prefill(qkv, a, b, self.dt_bias, self.rate, self.state, rows, key_heads=heads, chunk=chunk)
        return head_rms_norm_gated(y, gate, self.norm, self.eps)

    def _split(self, wide: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[T, C + H V + 2 H] -> qkv [T, C], gate [T, H V], b and a [T, H], views."""
        heads = self.config.value_heads
        qkv, gate, b, a = torch.split(wide, [self.config.conv_dim, self.config.d_inner, heads, heads], dim=1)
        return qkv, gate, b, a
