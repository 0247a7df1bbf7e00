"""What the card's memory is needed for, counted before any of it is taken."""

from __future__ import annotations

import dataclasses
import math

import torch

from common.errors import ConfigError
from engine.model_config import (
    Activation,
    AttentionConfig,
    HybridConfig,
    LayerKind,
    Mamba2Config,
    MoeConfig,
    Recurrence,
)
from engine.weights import expected_shapes, keep_float32

_CONTEXT_BYTES = 1 << 30  # libraries, their workspaces, captured graphs, and what the allocator cannot use


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes. step: the largest step's tensors. other: see _CONTEXT_BYTES."""

    weights: int
    pages: int
    slots: int
    step: int
    other: int

    @property
    def total(self) -> int:
        return self.weights + self.pages + self.slots + self.step + self.other


def plan_memory(
    config: HybridConfig,
    *,
    dtype: torch.dtype,
    ssm_dtype: torch.dtype,
    num_pages: int,
    page_size: int,
    num_slots: int,
    step_tokens: int,
    logit_rows: int,
) -> MemoryPlan:
    """step_tokens: the most that one step computes. logit_rows: the most that it gives logits of, each in the model's
    dtype, as float32, and as log-probabilities."""
    size = dtype.itemsize
    recurrence, attention = config.recurrence, config.attention
    conv = recurrence.conv_dim * (recurrence.conv_kernel - 1) * size
    ssm = math.prod(recurrence.state_shape) * ssm_dtype.itemsize
    kv = 2 * attention.kv_heads * attention.head_dim * size
    return MemoryPlan(
        weights=sum(
            math.prod(shape) * (4 if keep_float32(name) else size) for name, shape in expected_shapes(config).items()
        ),
        pages=num_pages * page_size * len(config.kv_layers) * kv,
        slots=num_slots * len(config.state_layers) * (conv + ssm),
        step=int(step_tokens * _token_values(config, size) * size) + logit_rows * config.vocab_size * (size + 8),
        other=_CONTEXT_BYTES,
    )


def _token_values(config: HybridConfig, size: int) -> float:
    """Values of `size` bytes of one token that are alive at a time in the layer that needs most, with the hidden state
    and its norm."""
    return 2 * config.hidden_size + max(_layer_values(config, kind, size) for kind in set(config.layers))


def _layer_values(config: HybridConfig, kind: LayerKind, size: int) -> float:
    match kind:
        case LayerKind.MAMBA | LayerKind.GATED_DELTA:
            return _recurrent_values(config.recurrence, size)
        case LayerKind.ATTENTION:
            return _attention_values(config.attention)
        case LayerKind.PARALLEL:
            return _recurrent_values(config.recurrence, size) + _attention_values(config.attention)
        case LayerKind.MLP:
            assert config.mlp is not None
            return _mlp_values(config.mlp.intermediate_size, config.mlp.activation)
        case LayerKind.MOE:
            assert config.moe is not None
            return _moe_values(config.moe, config.hidden_size, size)


def _recurrent_values(recurrence: Recurrence, size: int) -> float:
    """The projection, the convolution's output, the recurrence's and the gated one."""
    values = 3 * recurrence.d_inner + 2 * recurrence.conv_dim + recurrence.state_shape[0]
    if isinstance(recurrence, Mamba2Config):
        return values
    heads, key_dim, value_dim = recurrence.state_shape
    prepared = (
        heads * (key_dim + value_dim + min(64, recurrence.chunk_size)) + 3 * heads * 4 / size
    )  # see `engine.kernels.gated_delta`
    return values + heads + prepared


def _attention_values(config: AttentionConfig) -> float:
    """The projection, the queries normed or turned, and the output."""
    query = config.heads * config.head_dim
    extra = (config.output_gate + (config.qk_norm or config.rotary_dim > 0)) * query
    return 2 * query + 2 * config.kv_heads * config.head_dim + extra


def _mlp_values(inner: int, activation: Activation) -> float:
    return 3 * inner if activation is Activation.GATED_SILU else inner


def _moe_values(config: MoeConfig, hidden: int, size: int) -> float:
    """The router's: what it reads in float32, logits, scores, their order (int64). The routed experts' own copies of
    the token, what each makes of it, with gate, up and their product between; their sum in float32. The shared one's.
    """
    routing = (hidden + config.experts * 5) * 4 / size
    width = config.latent_size or hidden
    routed = config.experts_per_token * (2 * width + 3 * config.intermediate_size) + width * (1 + 4 / size)
    return width + max(routing, routed, _mlp_values(config.shared_size, config.activation))


def check_memory(plan: MemoryPlan, free_bytes: int) -> None:
    """Raises ConfigError, naming the setting that asks for most, when the plan needs more than free_bytes."""
    if plan.total <= free_bytes:
        return
    asked = {
        "max_total_tokens": plan.pages,
        "max_mamba_cache_size": plan.slots,
        "chunked_prefill_size": plan.step,
        "model_path": plan.weights,
    }
    param = max(asked, key=lambda name: asked[name])
    raise ConfigError(
        f"--{param.replace('_', '-')}: {_gib(asked[param])} of {_gib(plan.total)}, and {_gib(free_bytes)} of the "
        f"device are free (weights {_gib(plan.weights)}, pages {_gib(plan.pages)}, slots {_gib(plan.slots)}, "
        f"a step {_gib(plan.step)}, other {_gib(plan.other)})",
        param=param,
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
