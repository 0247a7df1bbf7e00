"""NemotronH over the CUDA kernels. The twin is `engine.model.HybridModel`: same weights, pools and results.

Legend: T packed tokens, D hidden size, I d_inner, C conv_dim, V vocabulary. Decode rows come first in a pack.
The hidden states [T, D] are one tensor that every mixer adds its output to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from engine.batch import OnLayer
from engine.cuda.batch import CudaBatch
from engine.cuda.linear import Linear, tiling, workspace
from engine.kernels.attention import attend_decode, attend_prefill, write_kv
from engine.kernels.conv import conv_prefill
from engine.kernels.norm import gated_rms_norm
from engine.kernels.rows import PackedRows
from engine.kernels.scan import scan_prefill
from engine.kernels.step import conv_step, scan_step
from engine.kernels.tokens import embed
from engine.model_config import HybridConfig, LayerKind, Mamba2Config
from engine.pools import StatePools

MakeLinear = Callable[[Tensor, Tensor | None, Tensor | None], Linear]  # weight, bias, norm in front


class Mixer(Protocol):
    """One layer: hidden [T, D] += mixer(norm(hidden)). Updates its state in the pools."""

    def forward(self, hidden: Tensor, batch: CudaBatch) -> None: ...


class CudaNemotronH:
    """weights: canonical names, see `load_weights`. few_rows: see `Linear`. attention_splits: see `attend_decode`."""

    def __init__(
        self,
        config: HybridConfig,
        weights: Mapping[str, Tensor],
        pools: StatePools,
        *,
        few_rows: int,
    ) -> None:
        self.config, self.pools = config, pools
        self.embeddings = weights["embeddings.weight"]  # [V, D]
        device, cut = self.embeddings.device, tiling(self.embeddings.device)
        attention = config.attention
        qkv = (attention.heads + 2 * attention.kv_heads) * attention.head_dim
        widest = max(qkv, *(weight.shape[0] for weight in weights.values()))
        make: MakeLinear = partial(
            Linear,
            eps=config.norm_eps,
            few_rows=few_rows,
            tiling=cut,
            workspace=workspace(cut, widest, few_rows, device),
        )
        self.head = make(weights["lm_head.weight"], None, weights["norm_f.weight"])
        self.mixers = [_mixer(config, weights, pools, layer, make) for layer in range(len(config.layers))]

    def forward(self, batch: CudaBatch, last_tokens: Tensor, on_queued: OnLayer | None = None) -> Tensor:
        """Logits [L, V], in the dtype of the weights, of the tokens that the batch asks for. Advances every row and
        fills the track slots of prefill rows; those of decode rows are the caller's to fill.

        on_queued: called when a layer has been queued, in order.
        """
        rows = batch.decode or batch.prefill
        assert rows is not None
        hidden = embed(batch.token_ids, last_tokens, rows, self.embeddings)
        for layer, mixer in enumerate(self.mixers):
            mixer.forward(hidden, batch)
            if on_queued is not None:
                on_queued(layer)
        if batch.logit_tokens is not None:
            hidden = hidden.index_select(0, batch.logit_tokens)
        return self.head(hidden)


def _mixer(
    config: HybridConfig, weights: Mapping[str, Tensor], pools: StatePools, layer: int, make: MakeLinear
) -> Mixer:
    prefix = f"layers.{layer}.mixer."
    own = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
    norm = weights[f"layers.{layer}.norm.weight"]
    match config.layers[layer]:
        case LayerKind.MAMBA:
            index = pools.state_layers.index(layer)
            return MambaMixer(config, own, norm, pools.conv[:, index], pools.ssm[:, index], make)
        case LayerKind.ATTENTION:
            return AttentionMixer(config, own, norm, pools.kv[pools.kv_layers.index(layer)], make)
        case LayerKind.MLP:
            return MlpMixer(own, norm, make)
        case LayerKind.GATED_DELTA | LayerKind.PARALLEL | LayerKind.MOE:
            raise AssertionError("refused when the folder is read")


class MlpMixer:
    def __init__(self, weights: Mapping[str, Tensor], norm: Tensor, make: MakeLinear) -> None:
        self.up = make(weights["up_proj.weight"], weights.get("up_proj.bias"), norm)
        self.down = make(weights["down_proj.weight"], weights.get("down_proj.bias"), None)

    def forward(self, hidden: Tensor, batch: CudaBatch) -> None:
        self.down.add_to(hidden, self.up(hidden, square=True))


class AttentionMixer:
    """kv [2, pages, Z, J, E]: this layer's."""

    def __init__(
        self, config: HybridConfig, weights: Mapping[str, Tensor], norm: Tensor, kv: Tensor, make: MakeLinear
    ) -> None:
        self.qkv = make(torch.cat([weights[f"{name}_proj.weight"] for name in "qkv"]), None, norm)
        self.out = make(weights["o_proj.weight"], weights.get("o_proj.bias"), None)
        self.kv = kv
        self.query_width = config.attention.heads * config.attention.head_dim

    def forward(self, hidden: Tensor, batch: CudaBatch) -> None:
        qkv = self.qkv(hidden)  # [T, (Q + 2 J) E]
        self.out.add_to(hidden, _by_part(batch, self._decode, self._prefill, qkv).flatten(1))

    def _decode(self, rows: PackedRows, qkv: Tensor) -> Tensor:
        write_kv(self.kv, qkv[:, self.query_width :], rows)
        return attend_decode(
            qkv[:, : self.query_width], self.kv, rows, splits=_attention_splits(rows.count, self.kv.shape[3])
        )

    def _prefill(self, rows: PackedRows, qkv: Tensor) -> Tensor:
        write_kv(self.kv, qkv[:, self.query_width :], rows)
        return attend_prefill(qkv[:, : self.query_width], self.kv, rows)


class MambaMixer:
    """conv_state [slots, C, W - 1], ssm_state [slots, H, P, N]: this layer's, strided views of the pools."""

    def __init__(
        self,
        config: HybridConfig,
        weights: Mapping[str, Tensor],
        norm: Tensor,
        conv_state: Tensor,
        ssm_state: Tensor,
        make: MakeLinear,
    ) -> None:
        assert isinstance(config.recurrence, Mamba2Config)
        self.config, self.eps = config.recurrence, config.norm_eps
        self.conv_state, self.ssm_state = conv_state, ssm_state
        self.inner = make(weights["in_proj.weight"], weights.get("in_proj.bias"), norm)
        self.out = make(weights["out_proj.weight"], weights.get("out_proj.bias"), None)
        self.conv_weight = weights["conv1d.weight"].squeeze(1).t().contiguous()  # [W, C]
        self.conv_bias = weights.get("conv1d.bias")
        self.a = -torch.exp(weights["A_log"].float())  # [H]
        self.d, self.dt_bias, self.norm = weights["D"], weights["dt_bias"], weights["norm.weight"]

    def forward(self, hidden: Tensor, batch: CudaBatch) -> None:
        gated = _by_part(batch, self._decode, self._prefill, self.inner(hidden))  # [T, I]
        self.out.add_to(hidden, gated)

    def _decode(self, rows: PackedRows, fused: Tensor) -> Tensor:
        gate, xbc, dt = self._split(fused)
        y = scan_step(
            conv_step(xbc, self.conv_state, rows, self.conv_weight, self.conv_bias),
            dt,
            self.dt_bias,
            self.config.time_step_limit,
            self.a,
            self.d,
            self.ssm_state,
            rows,
            groups=self.config.n_groups,
        )
        return self._gated(y, gate)

    def _prefill(self, rows: PackedRows, fused: Tensor) -> Tensor:
        gate, xbc, dt = self._split(fused)
        y = scan_prefill(
            conv_prefill(xbc, self.conv_state, rows, self.conv_weight, self.conv_bias),
            dt,
            self.dt_bias,
            self.config.time_step_limit,
            self.a,
            self.d,
            self.ssm_state,
            rows,
            groups=self.config.n_groups,
            chunk=self.config.chunk_size,
        )
        return self._gated(y, gate)

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        return gated_rms_norm(y, gate, self.norm, self.config.n_groups, self.eps)

    def _split(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, I + C + H] -> gate [T, I], xbc [T, C], dt [T, H], views."""
        widths = [self.config.d_inner, self.config.conv_dim, self.config.num_heads]
        gate, xbc, dt = torch.split(fused, widths, dim=1)
        return gate, xbc, dt


def _by_part(
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


def _attention_splits(rows: int, kv_heads: int) -> int:
    """Programs that share a row's tokens, so that about four reach every multiprocessor of a large card."""
    return max(1, min(32, 512 // (rows * kv_heads)))
