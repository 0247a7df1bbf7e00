"""The attention mixer: causal, grouped query heads; where a model has them, rotary embedding, norms of queries and
keys, and a gate on the output.

Legend: T packed tokens, D hidden size, Q query heads, J key/value heads, E head dim, Z page size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from engine.batch import ForwardBatch
from engine.mixers.mixer import Shapes, Step, linear_shapes, project, stack
from engine.model_config import AttentionConfig
from engine.ops.attention import attend_decode, attend_prefill, write_kv
from engine.ops.linear import Projection
from engine.ops.norm import rms_norm
from engine.ops.rotary import Rotary


def attention_shapes(config: AttentionConfig, hidden: int) -> Shapes:
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes = linear_shapes("q_proj", query * (2 if config.output_gate else 1), hidden, config.bias)
    shapes |= linear_shapes("k_proj", key, hidden, config.bias) | linear_shapes("v_proj", key, hidden, config.bias)
    if config.qk_norm:
        shapes |= {"q_norm.weight": (config.head_dim,), "k_norm.weight": (config.head_dim,)}
    return shapes | linear_shapes("o_proj", hidden, query, config.bias)


class AttentionMixer:
    """kv [2, pages, Z, J, E]: this layer's. Keys are kept normed and turned."""

    def __init__(
        self,
        config: AttentionConfig,
        weights: Mapping[str, Tensor],
        kv: Tensor,
        rotary: Rotary | None,
        eps: float,
    ) -> None:
        self.config, self.rotary, self.eps = config, rotary, eps
        self.qkv = Projection(*fused_qkv(config, weights))
        self.out = project(weights, "o_proj")
        self.q_norm, self.k_norm = weights.get("q_norm.weight"), weights.get("k_norm.weight")
        self.kv = kv
        query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.widths = [query, 2 * key, query if config.output_gate else 0]

    def matrices(self) -> Iterator[Tensor]:
        yield from (*self.qkv.matrices(), *self.out.matrices())

    def forward(self, normed: Tensor, residual: Tensor, step: Step) -> Tensor:
        query, keys_values, gate = torch.split(self.qkv(normed), self.widths, dim=-1)
        query = query.view(-1, self.config.heads, self.config.head_dim)  # [T, Q, E]
        keys_values = keys_values.view(-1, 2, self.config.kv_heads, self.config.head_dim)  # [T, 2, J, E]
        query, keys_values = self._prepare(query, keys_values, step)
        write_kv(self.kv, step.batch.locations, keys_values, step.batch.begun_pages)
        out = self._attend(query, keys_values, step.batch).flatten(1)
        return self.out.add_to(residual, out * torch.sigmoid(gate) if self.config.output_gate else out)

    def _prepare(self, query: Tensor, keys_values: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Queries and keys normed and turned, where the model does that."""
        if self.q_norm is None and self.rotary is None:
            return query, keys_values
        keys, values = keys_values.unbind(1)  # [T, J, E]
        if self.q_norm is not None and self.k_norm is not None:
            query, keys = rms_norm(query, self.q_norm, self.eps), rms_norm(keys, self.k_norm, self.eps)
        if self.rotary is not None:
            assert step.turn is not None
            query, keys = self.rotary.apply(query, step.turn), self.rotary.apply(keys, step.turn)
        return query, torch.stack((keys, values), dim=1)

    def _attend(self, query: Tensor, keys_values: Tensor, batch: ForwardBatch) -> Tensor:
        rows, scale = batch.decode.rows if batch.decode else 0, self.config.scale
        parts = []
        if batch.decode:
            parts.append(attend_decode(query[:rows], self.kv, batch.decode.spans, scale))
        if batch.prefill:
            parts.append(attend_prefill(query[rows:], keys_values[rows:], self.kv, batch.prefill.spans, scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def fused_qkv(config: AttentionConfig, weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of one projection to queries, keys, values and, where there is one, the gate.

    In the files the gate of each head follows its query.
    """
    fused = stack(weights, "q_proj", "k_proj", "v_proj")
    if not config.output_gate:
        return fused
    query = config.heads * config.head_dim

    def gate_last(rows: Tensor) -> Tensor:
        heads = rows[: 2 * query].view(config.heads, 2, config.head_dim, *rows.shape[1:])
        queries, gates = heads.unbind(1)
        return torch.cat((queries.flatten(0, 1), rows[2 * query :], gates.flatten(0, 1)))

    weight, bias = fused
    return gate_last(weight), None if bias is None else gate_last(bias)
