"""Random models of every family, of realistic scale: states that neither die nor explode.

`SHAPES` are what a family is compared with transformers in; `SMALL` is one of each, with a chunk to choose.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

NANO_V2_PATTERN = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
NANO_3_PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
VOCABULARY = 97
COMMON: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """The widths of a NemotronH model; everything else is the same for all."""

    pattern: str
    hidden: int
    heads: int
    head_dim: int
    d_state: int
    groups: int
    conv: int
    chunk: int
    query_heads: int
    kv_heads: int
    attention_dim: int
    mlp: int
    bias: bool = False


def nemotron_h(shape: Shape, **more: Any) -> PretrainedConfig:
    """time_step_min is tiny because transformers takes it as the lower bound of dt in prefill, but not in decode."""
    from transformers import NemotronHConfig

    return NemotronHConfig(
        **COMMON,
        hybrid_override_pattern=shape.pattern,
        hidden_size=shape.hidden,
        mamba_num_heads=shape.heads,
        mamba_head_dim=shape.head_dim,
        ssm_state_size=shape.d_state,
        n_groups=shape.groups,
        conv_kernel=shape.conv,
        chunk_size=shape.chunk,
        num_attention_heads=shape.query_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.attention_dim,
        intermediate_size=shape.mlp,
        use_bias=shape.bias,
        mlp_bias=shape.bias,
        use_conv_bias=True,
        time_step_min=1e-9,
        **more,
    )


def nemotron_3(pattern: str, chunk: int, bias: bool = False, **more: Any) -> PretrainedConfig:
    """NemotronH with mixtures of experts."""
    return nemotron_h(
        Shape(pattern, 48, 4, 12, 16, 2, 4, chunk, 4, 2, 16, 64, bias),
        **{
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 32,
            "routed_scaling_factor": 2.5,
            **more,
        },
    )


def falcon_h1(layers: int, chunk: int, **more: Any) -> PretrainedConfig:
    from transformers import FalconH1Config

    settings = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "mamba_d_ssm": 48,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    return FalconH1Config(**COMMON, num_hidden_layers=layers, mamba_chunk_size=chunk, **{**settings, **more})


def granite(layers: str, chunk: int, **more: Any) -> PretrainedConfig:
    """layers: m for Mamba2, a for attention."""
    from transformers import GraniteMoeHybridConfig

    kinds = {"m": "linear_attention", "a": "full_attention"}
    settings = {
        "hidden_size": 48,
        "intermediate_size": 24,
        "shared_intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 0,
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "embedding_multiplier": 0.8,
        "residual_multiplier": 1.2,
        "attention_multiplier": 0.35,
        "logits_scaling": 0.8,
    }
    return GraniteMoeHybridConfig(
        **COMMON,
        num_hidden_layers=len(layers),
        layer_types=[kinds[letter] for letter in layers],
        mamba_chunk_size=chunk,
        **{**settings, **more},
    )


def qwen3_next(layers: int, chunk: int, **more: Any) -> PretrainedConfig:
    """chunk: transformers has 64 whatever this says."""
    from transformers import Qwen3NextConfig

    settings = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "chunk_size": chunk,
    }
    return Qwen3NextConfig(**COMMON, num_hidden_layers=layers, **{**settings, **more})


FALCON_MULTIPLIERS: Mapping[str, Any] = {
    "embedding_multiplier": 0.8,
    "lm_head_multiplier": 1.4,
    "key_multiplier": 0.7,
    "attention_out_multiplier": 0.8,
    "attention_in_multiplier": 1.5,
    "ssm_multipliers": [1.1, 1.2, 1.5, 1.4, 1.3],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 1.5,
    "mlp_multipliers": [0.75, 0.5],
}
FALCON_BIASES: Mapping[str, Any] = {
    "mamba_proj_bias": True,
    "projectors_bias": True,
    "attention_bias": True,
    "mlp_bias": True,
}
NARROW: Mapping[str, Any] = {"hidden_size": 32, "mamba_n_heads": 4, "mamba_d_state": 8}
SPARSE: Mapping[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 3}

SHAPES: Mapping[str, Callable[[], PretrainedConfig]] = {
    "small": partial(nemotron_h, Shape("M*-M", 48, 4, 12, 16, 2, 4, 8, 4, 2, 16, 64)),
    "biased": partial(nemotron_h, Shape("*M-M*M-", 64, 6, 8, 20, 3, 3, 16, 6, 1, 10, 96, bias=True)),
    "nano_v2": partial(nemotron_h, Shape(NANO_V2_PATTERN, 64, 16, 8, 16, 8, 4, 16, 5, 1, 16, 112)),
    "nemotron3": partial(nemotron_3, "ME*EM", 8),
    "nemotron3_latent": partial(nemotron_3, "EM-*ME", 16, moe_latent_size=20, n_group=4, topk_group=2, bias=True),
    "nano_3": partial(nemotron_3, NANO_3_PATTERN, 16, norm_topk_prob=False),
    "falcon": partial(falcon_h1, 2, 8, **FALCON_MULTIPLIERS),
    "falcon_normed": partial(
        falcon_h1,
        3,
        16,
        mamba_rms_norm=True,
        mamba_norm_before_gate=True,
        mamba_n_groups=2,
        mamba_d_conv=3,
        **{**FALCON_MULTIPLIERS, "attention_in_multiplier": 1.0},
        **FALCON_BIASES,
    ),
    "falcon_deep": partial(
        falcon_h1, 24, 16, mamba_rms_norm=True, mamba_norm_before_gate=False, tie_word_embeddings=True
    ),
    "granite": partial(granite, "mam", 8),
    "granite_sparse": partial(
        granite, "amma", 16, position_embedding_type="rope", mamba_n_groups=2, mamba_proj_bias=True, **SPARSE
    ),
    "granite_4": partial(
        granite, "mmmmmammmmmmmmmammmmmmmmmammmmmmmmmammmm", 16, tie_word_embeddings=True, **NARROW, **SPARSE
    ),
    "qwen": partial(qwen3_next, 4, 8),
    "qwen_dense": partial(
        qwen3_next, 3, 16, layer_types=["full_attention", "linear_attention", "linear_attention"],
        mlp_only_layers=[1], norm_topk_prob=False, linear_num_key_heads=4, linear_conv_kernel_dim=3,
    ),
    "qwen_deep": partial(qwen3_next, 16, 64, hidden_size=32, linear_num_value_heads=8),
}  # fmt: skip
FAMILY_SHAPES = {
    "nemotron_h": ("small", "biased", "nano_v2"),
    "nemotron_3": ("nemotron3", "nemotron3_latent", "nano_3"),
    "falcon_h1": ("falcon", "falcon_normed", "falcon_deep"),
    "granitemoehybrid": ("granite", "granite_sparse", "granite_4"),
    "qwen3_next": ("qwen", "qwen_dense", "qwen_deep"),
}
SMALL: Mapping[str, Callable[[int], PretrainedConfig]] = {
    "nemotron_h": lambda chunk: nemotron_h(Shape("M*-M", 48, 4, 12, 16, 2, 4, chunk, 4, 2, 16, 64)),
    "nemotron_3": lambda chunk: nemotron_3("ME*EM", chunk),
    "falcon_h1": lambda chunk: falcon_h1(2, chunk, **FALCON_MULTIPLIERS),
    "granitemoehybrid": lambda chunk: granite("mam", chunk, **SPARSE),
    "qwen3_next": lambda chunk: qwen3_next(2, chunk, layer_types=["linear_attention", "full_attention"]),
}


def make_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A transformers model in float32. dt_bias and A_log are drawn as they are at the start of a training."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    centred = config.model_type == "qwen3_next"
    with torch.no_grad():
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            _draw(name, weight, centred and "linear_attn" not in name)
    return model


def _draw(name: str, weight: torch.Tensor, centred: bool) -> None:
    """centred: norms are stored around zero."""
    if name.endswith("dt_bias"):
        dt = torch.exp(torch.empty_like(weight).uniform_(math.log(0.001), math.log(0.1)))
        weight.copy_(dt + torch.log(-torch.expm1(-dt)))
    elif name.endswith("A_log"):
        weight.copy_(torch.empty_like(weight).uniform_(1, 16).log())
    elif name.endswith((".D", "norm.weight", "norm_f.weight")):
        weight.normal_(0 if centred else 1, 0.1)
    elif name.endswith("bias"):
        weight.normal_(0, 0.1)
    elif name.endswith("conv1d.weight"):
        weight.uniform_(-1, 1)
    elif name.endswith(("weight", "proj")):
        weight.normal_(0, 1 if "embed" in name else weight.shape[-1] ** -0.5)
