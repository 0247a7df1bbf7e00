"""NemotronH: residual blocks of one mixer each (Mamba2, attention or MLP) behind an RMS norm.

Legend: T packed tokens, D hidden size, I d_inner = H * P, C conv_dim = I + 2 G N, V vocabulary, R logit rows.
The file computes with what a `ForwardBatch` says and writes state into the pools; it does not know sequences, pages or
slots beyond that. dt is bounded by `time_step_limit` in prefill and decode alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import ForwardBatch, OnLayer
from engine.model_config import HybridConfig, LayerKind
from engine.ops.attention import attend_decode, attend_prefill, write_kv
from engine.ops.chunks import ChunkPlan, plan_chunks
from engine.ops.conv import ConvPlan, conv_prefill, conv_step, plan_conv
from engine.ops.linear import Projection
from engine.ops.norm import gated_rms_norm, rms_norm
from engine.ops.ssd import ssd_prefill, ssd_step
from engine.pools import StatePools


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What every layer of one forward pass shares: the batch, and where its prefill tokens lie for conv and scan."""

    batch: ForwardBatch
    conv_plan: ConvPlan | None
    chunk_plan: ChunkPlan | None


class Mixer(Protocol):
    """One layer's mixer: normed [T, D] -> residual [T, D] plus the mixer's output. Updates its state in the pools."""

    def forward(self, normed: Tensor, residual: Tensor, step: Step) -> Tensor: ...


class NemotronH:
    """The model over its weights (canonical names, see `load_weights`) and the pools its state lives in.

    A state to keep is written by the mixers themselves where a prompt passes it; where rows decode it is the new state,
    copied when the last layer is done.
    """

    def __init__(self, config: HybridConfig, weights: Mapping[str, Tensor], pools: StatePools) -> None:
        self.config = config
        self.pools = pools
        self.embeddings = weights["embeddings.weight"]  # [V, D]
        self.final_norm = weights["norm_f.weight"]
        self.head = _project(weights, "lm_head")
        self.norms = [weights[f"layers.{layer}.norm.weight"] for layer in range(len(config.layers))]
        self.mixers = [_mixer(config, weights, pools, layer) for layer in range(len(config.layers))]

    def matrices(self) -> Iterator[Tensor]:
        """The weights that take memory, in every layout that is kept of them."""
        yield self.embeddings
        for part in (self, *self.mixers):
            for projection in vars(part).values():
                if isinstance(projection, Projection):
                    yield from (each for each in (projection.matrix, projection.packed) if each is not None)

    def forward(self, batch: ForwardBatch, on_layer: OnLayer | None = None) -> Tensor:
        """Logits float32 [R, V] of the tokens the batch asks for. Advances every row, fills the track slots.

        on_layer: called after every layer, in order.
        """
        step = self._plan(batch)
        hidden = F.embedding(batch.token_ids, self.embeddings)  # [T, D]
        for layer, (norm, mixer) in enumerate(zip(self.norms, self.mixers, strict=True)):
            hidden = mixer.forward(rms_norm(hidden, norm, self.config.layer_norm_epsilon), hidden, step)
            if on_layer is not None:
                on_layer(layer)
        if batch.decode and batch.decode.tracks:
            self.pools.copy_slots(*zip(*batch.decode.tracks, strict=True))
        hidden = hidden.index_select(0, batch.logit_tokens)  # [R, D]
        return self.head(rms_norm(hidden, self.final_norm, self.config.layer_norm_epsilon)).float()

    def _plan(self, batch: ForwardBatch) -> Step:
        part = batch.prefill
        if part is None:
            return Step(batch=batch, conv_plan=None, chunk_plan=None)
        device = batch.token_ids.device
        return Step(
            batch=batch,
            conv_plan=plan_conv(part.lengths, self.config.conv_kernel, part.tracks, device),
            chunk_plan=plan_chunks(part.starts, part.lengths, self.config.chunk_size, part.tracks, device),
        )


def _mixer(config: HybridConfig, weights: Mapping[str, Tensor], pools: StatePools, layer: int) -> Mixer:
    prefix = f"layers.{layer}.mixer."
    own = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
    match config.layers[layer]:
        case LayerKind.MAMBA:
            index = pools.mamba_layers.index(layer)
            return MambaMixer(config, own, pools.conv[:, index], pools.ssm[:, index])
        case LayerKind.ATTENTION:
            return AttentionMixer(config, own, pools.kv[pools.attention_layers.index(layer)])
        case LayerKind.MLP:
            return MlpMixer(own)


class MlpMixer:
    """down(relu(up(x))^2)."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.up = _project(weights, "up_proj")
        self.down = _project(weights, "down_proj")

    def forward(self, normed: Tensor, residual: Tensor, step: Step) -> Tensor:
        wide = torch.relu_(self.up(normed))
        return self.down.add_to(residual, wide.mul_(wide))


class AttentionMixer:
    """Causal attention with grouped query heads and no position embedding. kv [2, pages, Z, J, E]: this layer's."""

    def __init__(self, config: HybridConfig, weights: Mapping[str, Tensor], kv: Tensor) -> None:
        fused = torch.cat([weights[f"{name}_proj.weight"] for name in "qkv"])
        self.qkv = Projection(fused)
        self.out = _project(weights, "o_proj")
        self.kv = kv
        self.shape = (config.attention_heads, config.kv_heads, config.attention_head_dim)

    def forward(self, normed: Tensor, residual: Tensor, step: Step) -> Tensor:
        heads, kv_heads, dim = self.shape
        qkv = self.qkv(normed)  # [T, (Q + 2 J) E]
        query = qkv[:, : heads * dim].view(-1, heads, dim)  # [T, Q, E]
        keys_values = qkv[:, heads * dim :].view(-1, 2, kv_heads, dim)  # [T, 2, J, E]
        write_kv(self.kv, step.batch.locations, keys_values, step.batch.begun_pages)
        return self.out.add_to(residual, self._attend(query, keys_values, step.batch).flatten(1))

    def _attend(self, query: Tensor, keys_values: Tensor, batch: ForwardBatch) -> Tensor:
        rows = batch.decode.rows if batch.decode else 0
        parts = []
        if batch.decode:
            parts.append(attend_decode(query[:rows], self.kv, batch.decode.spans))
        if batch.prefill:
            parts.append(attend_prefill(query[rows:], keys_values[rows:], self.kv, batch.prefill.spans))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class MambaMixer:
    """Mamba2. conv_state [slots, C, W - 1] and ssm_state [slots, H, P, N]: this layer's, strided views of the pools."""

    def __init__(
        self, config: HybridConfig, weights: Mapping[str, Tensor], conv_state: Tensor, ssm_state: Tensor
    ) -> None:
        self.config = config
        self.conv_state, self.ssm_state = conv_state, ssm_state
        self.inner = _project(weights, "in_proj")
        self.out = _project(weights, "out_proj")
        self.conv_weight = weights["conv1d.weight"].squeeze(1).t().contiguous()  # [W, C]
        self.conv_bias = weights.get("conv1d.bias")
        self.a = -torch.exp(weights["A_log"].float())  # [H]
        self.d, self.dt_bias, self.norm = weights["D"], weights["dt_bias"], weights["norm.weight"]
        low, high = config.time_step_limit
        self.bounded = low > 0 or high < math.inf

    def forward(self, normed: Tensor, residual: Tensor, step: Step) -> Tensor:
        config = self.config
        gate, xbc, dt = torch.split(self.inner(normed), [config.d_inner, config.conv_dim, config.num_heads], dim=-1)
        y = self._scan(xbc, self._time_step(dt), step).flatten(1)  # [T, I]
        y = gated_rms_norm(y, gate, self.norm, config.n_groups, config.layer_norm_epsilon)
        return self.out.add_to(residual, y)

    def _time_step(self, dt: Tensor) -> Tensor:
        dt = F.softplus(dt + self.dt_bias)  # [T, H] float32
        return dt.clamp_(*self.config.time_step_limit) if self.bounded else dt

    def _scan(self, xbc: Tensor, dt: Tensor, step: Step) -> Tensor:
        """Convolution and recurrence, decode rows and prefill rows each their own way: y [T, H, P] float32."""
        rows = step.batch.decode.rows if step.batch.decode else 0
        parts = []
        if step.batch.decode:
            parts.append(self._decode(xbc[:rows], dt[:rows], step))
        if step.batch.prefill:
            parts.append(self._prefill(xbc[rows:], dt[rows:], step))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, xbc: Tensor, dt: Tensor, step: Step) -> Tensor:
        part = step.batch.decode
        assert part is not None
        x, b, c = self._split(conv_step(xbc, self.conv_state, part.slots, self.conv_weight, self.conv_bias))
        return ssd_step(x, dt, self.a, b, c, self.d, self.ssm_state, part.slots)

    def _prefill(self, xbc: Tensor, dt: Tensor, step: Step) -> Tensor:
        part, conv_plan, chunk_plan = step.batch.prefill, step.conv_plan, step.chunk_plan
        assert part is not None and conv_plan is not None and chunk_plan is not None
        xbc = conv_prefill(xbc, self.conv_state, part.slots, part.fresh, conv_plan, self.conv_weight, self.conv_bias)
        x, b, c = self._split(xbc)
        return ssd_prefill(x, dt, self.a, b, c, self.d, self.ssm_state, part.slots, part.fresh, chunk_plan)

    def _split(self, xbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, C] -> x [T, H, P], b and c [T, G, N]."""
        config = self.config
        state = config.n_groups * config.d_state
        x, b, c = torch.split(xbc, [config.d_inner, state, state], dim=-1)
        return (
            x.view(-1, config.num_heads, config.head_dim),
            b.view(-1, config.n_groups, config.d_state),
            c.view(-1, config.n_groups, config.d_state),
        )


def _project(weights: Mapping[str, Tensor], name: str) -> Projection:
    return Projection(weights[f"{name}.weight"], weights.get(f"{name}.bias"))
