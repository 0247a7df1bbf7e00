"""What the card's memory is needed for, counted before any of it is taken."""

from __future__ import annotations

import dataclasses
import math

import torch

from common.errors import ConfigError
from engine.model_config import HybridConfig, MoeConfig
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
        step=step_tokens * _token_values(config) * size + logit_rows * config.vocab_size * (size + 8),
        other=_CONTEXT_BYTES,
    )


def _token_values(config: HybridConfig) -> int:
    """Values of one token that are alive at a time in the layer that needs most, with the hidden state and its norm."""
    recurrence, attention, mlp, moe = config.recurrence, config.attention, config.mlp, config.moe
    query = attention.heads * attention.head_dim
    qkv = query + 2 * attention.kv_heads * attention.head_dim
    recurrent = 3 * recurrence.d_inner + 2 * recurrence.conv_dim + recurrence.state_shape[0]
    wide = 0 if mlp is None else mlp.intermediate_size
    routed = 0 if moe is None else _routed_values(moe, config.hidden_size)
    return 2 * config.hidden_size + max(recurrent, qkv + query, wide, routed)


def _routed_values(moe: MoeConfig, hidden: int) -> int:
    """Each of a token's experts gets its own copy of the token, and gives one back; gate, up and their product between."""
    return moe.experts_per_token * (2 * (moe.latent_size or hidden) + 3 * moe.intermediate_size)


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
