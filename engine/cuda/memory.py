"""What the card's memory is needed for, counted before any of it is taken."""

from __future__ import annotations

import dataclasses
import math

import torch

from common.errors import ConfigError
from engine.model_config import HybridConfig, LayerKind
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
    attention, mamba = len(config.layers_of(LayerKind.ATTENTION)), len(config.layers_of(LayerKind.MAMBA))
    conv = config.conv_dim * (config.conv_kernel - 1) * size
    ssm = config.d_inner * config.d_state * ssm_dtype.itemsize
    return MemoryPlan(
        weights=sum(
            math.prod(shape) * (4 if keep_float32(name) else size) for name, shape in expected_shapes(config).items()
        ),
        pages=num_pages * page_size * attention * 2 * config.kv_heads * config.attention_head_dim * size,
        slots=num_slots * mamba * (conv + ssm),
        step=step_tokens * _token_values(config) * size + logit_rows * config.vocab_size * (size + 8),
        other=_CONTEXT_BYTES,
    )


def _token_values(config: HybridConfig) -> int:
    """Values of one token that are alive at a time in the layer that needs most, with the hidden state and its norm."""
    query = config.attention_heads * config.attention_head_dim
    qkv = query + 2 * config.kv_heads * config.attention_head_dim
    mamba = 3 * config.d_inner + 2 * config.conv_dim + config.num_heads
    return 2 * config.hidden_size + max(mamba, qkv + query, config.intermediate_size)


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
