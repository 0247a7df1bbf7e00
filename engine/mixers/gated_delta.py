"""The gated delta mixer of Qwen3-Next.

Legend: T packed tokens, D hidden size, J key heads, H value heads, K key dim, V value dim, C conv_dim = 2 J K + H V.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import DecodePart, PrefillPart
from engine.mixers.mixer import Shapes, Step, advance, linear_shapes, project
from engine.model_config import GatedDeltaConfig
from engine.ops.conv import conv_prefill, conv_step
from engine.ops.gated_delta import gated_delta_prefill, gated_delta_step
from engine.ops.linear import Projection
from engine.ops.norm import head_rms_norm_gated


def gated_delta_shapes(config: GatedDeltaConfig, hidden: int) -> Shapes:
    heads, inner, conv = config.value_heads, config.d_inner, config.conv_dim
    shapes = linear_shapes("in_proj_qkvz", conv + inner, hidden, bias=False)
    shapes |= linear_shapes("in_proj_ba", 2 * heads, hidden, bias=False)
    shapes |= {"conv1d.weight": (conv, 1, config.conv_kernel), "A_log": (heads,), "dt_bias": (heads,)}
    shapes |= {"norm.weight": (config.value_dim,)}
    return shapes | linear_shapes("out_proj", hidden, inner, bias=False)


class GatedDeltaMixer:
    """See `RecurrentMixer`; state [slots, H, K, V]."""

    def __init__(
        self, config: GatedDeltaConfig, weights: Mapping[str, Tensor], conv_state: Tensor, state: Tensor, eps: float
    ) -> None:
        self.config, self.eps = config, eps
        self.conv_state, self.state = conv_state, state
        self.inner = Projection(by_part(config, weights))
        self.out = project(weights, "out_proj")
        self.conv_weight = weights["conv1d.weight"].squeeze(1).t().contiguous()  # [W, C]
        self.a = -torch.exp(weights["A_log"].float())  # [H]
        self.widths = [config.conv_dim, config.d_inner, config.value_heads, config.value_heads]  # of q k v, gate, b, a
        self.blocks = list(config.conv_blocks)
        self.dt_bias, self.norm = weights["dt_bias"], weights["norm.weight"]

    def matrices(self) -> Iterator[Tensor]:
        yield from (*self.inner.matrices(), *self.out.matrices())

    def forward(self, normed: Tensor, residual: Tensor, step: Step) -> Tensor:
        qkv, gate, b, a = torch.split(self.inner(normed), self.widths, dim=-1)
        decay = self.a * F.softplus(a.float() + self.dt_bias)  # [T, H]
        y = advance(self, step, qkv, decay, torch.sigmoid(b.float()))  # [T, H, V]
        return self.out.add_to(residual, head_rms_norm_gated(y, gate.view_as(y), self.norm, self.eps))

    def decode(self, part: DecodePart, *inputs: Tensor) -> Tensor:
        """qkv [B, C], decay and beta [B, H] float32 -> y [B, H, V] float32."""
        qkv, decay, beta = inputs
        q, k, v = self._split(conv_step(qkv, self.conv_state, part.slots, self.conv_weight, None))
        return gated_delta_step(q, k, v, decay, beta, self.state, part.slots)

    def prefill(self, part: PrefillPart, step: Step, *inputs: Tensor) -> Tensor:
        """qkv [T, C], decay and beta [T, H] float32 -> y [T, H, V] float32."""
        (qkv, decay, beta), conv_plan, chunk_plan = inputs, step.conv_plan, step.chunk_plan
        assert conv_plan is not None and chunk_plan is not None
        qkv = conv_prefill(qkv, self.conv_state, part.slots, part.fresh, conv_plan, self.conv_weight, None)
        q, k, v = self._split(qkv)
        return gated_delta_prefill(q, k, v, decay, beta, self.state, part.slots, part.fresh, chunk_plan)

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, C] -> q and k [T, J, K], v [T, H, V]."""
        config = self.config
        q, k, v = torch.split(qkv, self.blocks, dim=-1)
        return (
            q.view(-1, config.key_heads, config.key_dim),
            k.view(-1, config.key_heads, config.key_dim),
            v.view(-1, config.value_heads, config.value_dim),
        )


def by_part(config: GatedDeltaConfig, weights: Mapping[str, Tensor]) -> Tensor:
    """The stored rows, key head by key head its q, k, v, z and its b, a, as q, k, v, z, b, a of all heads."""
    qkvz, ba = weights["in_proj_qkvz.weight"], weights["in_proj_ba.weight"]
    share = config.value_heads // config.key_heads
    values = share * config.value_dim
    wide = qkvz.view(config.key_heads, -1, qkvz.shape[1])  # [J, 2 K + 2 H / J V, D]
    narrow = ba.view(config.key_heads, -1, ba.shape[1])  # [J, 2 H / J, D]
    parts = torch.split(wide, [config.key_dim, config.key_dim, values, values], dim=1)
    return torch.cat([part.flatten(0, 1) for part in (*parts, *narrow.chunk(2, dim=1))])
