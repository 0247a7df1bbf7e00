"""The attention mixer. Twin: `engine.mixers.attention`.

Legend: T packed tokens, Q query heads, J key/value heads, E head dim, Z page size, R rotated part of a head.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.cuda.batch import CudaBatch
from engine.cuda.mixers.mixer import MakeLinear, by_part, linear
from engine.kernels.attention import attend_decode, attend_prefill, prepare_attention, write_kv
from engine.kernels.rows import PackedRows
from engine.mixers.attention import fused_qkv
from engine.model_config import AttentionConfig


class AttentionMixer:
    """kv [2, pages, Z, J, E]: this layer's. frequencies float32 [R / 2]: of the rotary embedding, None without one."""

    def __init__(
        self,
        config: AttentionConfig,
        weights: Mapping[str, Tensor],
        norm: Tensor,
        kv: Tensor,
        frequencies: Tensor | None,
        eps: float,
        make: MakeLinear,
    ) -> None:
        self.config, self.kv, self.frequencies, self.eps = config, kv, frequencies, eps
        self.inner = make(*fused_qkv(config, weights), norm)
        self.out = linear(make, weights, "o_proj")
        self.norms = torch.stack((weights["q_norm.weight"], weights["k_norm.weight"])) if config.qk_norm else None
        self.query_width = config.heads * config.head_dim
        self.qkv_width = self.query_width + 2 * config.kv_heads * config.head_dim

    def forward(self, hidden: Tensor, batch: CudaBatch) -> None:
        self.out.add_to(hidden, self.mix(self.inner(hidden), batch))

    def mix(self, wide: Tensor, batch: CudaBatch) -> Tensor:
        """Queries, keys, values and, where there is one, the gate, [T, ...] -> [T, Q E]."""
        return by_part(batch, self._decode, self._prefill, wide).flatten(1)

    def _decode(self, rows: PackedRows, wide: Tensor) -> Tensor:
        splits = _attention_splits(rows.count, self.config.kv_heads)
        query, scale = self._prepare(rows, wide), self.config.scale
        return attend_decode(query, self.kv, rows, scale=scale, splits=splits, gate=self._gate(wide))

    def _prefill(self, rows: PackedRows, wide: Tensor) -> Tensor:
        query = self._prepare(rows, wide)
        return attend_prefill(query, self.kv, rows, scale=self.config.scale, gate=self._gate(wide))

    def _prepare(self, rows: PackedRows, wide: Tensor) -> Tensor:
        """The queries [T, Q E], when keys and values are in their pages."""
        if self.norms is None and self.frequencies is None:
            write_kv(self.kv, wide[:, self.query_width : self.qkv_width], rows)
            return wide[:, : self.query_width]
        return prepare_attention(
            wide,
            self.kv,
            rows,
            heads=self.config.heads,
            norms=self.norms,
            eps=self.eps,
            frequencies=self.frequencies,
        )

    def _gate(self, wide: Tensor) -> Tensor | None:
        return wide[:, self.qkv_width :] if self.config.output_gate else None


def _attention_splits(rows: int, kv_heads: int) -> int:
    """Programs that share a row's tokens, so that about four reach every multiprocessor of a large card."""
    return max(1, min(32, 512 // (rows * kv_heads)))
