"""Granite 4 hybrid: Mamba2 or attention, then a gated MLP, alone or beside routed experts; fixed multipliers.

The residual multiplier is multiplied into the last projection of every mixer, that of the logits into the final norm.
"""

from __future__ import annotations

from pathlib import Path

from engine.config_keys import Keys, read_eos
from engine.families.family import (
    Place,
    place_of_pair,
    read_attention,
    read_gated_moe,
    read_head_dim,
    read_layer_types,
    read_mamba2,
    scaled,
)
from engine.model_config import Activation, GateNorm, HybridConfig, LayerKind, MlpConfig, MoeConfig, Router

_KINDS = {
    "mamba": LayerKind.MAMBA,
    "linear_attention": LayerKind.MAMBA,
    "attention": LayerKind.ATTENTION,
    "full_attention": LayerKind.ATTENTION,
}
_TOKEN_MIXERS = {"mamba.": (0, ""), "self_attn.": (0, "")}
_DENSE = {
    **_TOKEN_MIXERS,
    "shared_mlp.input_linear.": (1, "gate_up_proj."),
    "shared_mlp.output_linear.": (1, "down_proj."),
}
_SPARSE = {
    **_TOKEN_MIXERS,
    "shared_mlp.input_linear.": (1, "shared.gate_up_proj."),
    "shared_mlp.output_linear.": (1, "shared.down_proj."),
    "block_sparse_moe.router.layer.": (1, "router."),
    "block_sparse_moe.input_linear.": (1, "experts.gate_up_proj."),
    "block_sparse_moe.output_linear.": (1, "experts.down_proj."),
}


def read(keys: Keys, folder: Path) -> HybridConfig:
    keys.only("hidden_act", "silu", "swish")
    keys.only("position_embedding_type", "rope", "nope")
    head_dim, hidden = read_head_dim(keys), keys.count("hidden_size")
    experts = keys.values.get("num_local_experts") not in (0, None)
    residual = keys.number("residual_multiplier", 1.0)
    width = keys.count("mamba_expand", default=2) * hidden
    mixers = read_layer_types(keys, _KINDS)
    return HybridConfig(
        model="granitemoehybrid",
        layers=tuple(kind for mixer in mixers for kind in (mixer, LayerKind.MOE if experts else LayerKind.MLP)),
        vocab_size=keys.count("vocab_size"),
        hidden_size=hidden,
        max_position_embeddings=keys.count("max_position_embeddings"),
        eos_token_ids=read_eos(folder, keys),
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=keys.flag("tie_word_embeddings", False),
        embedding_multiplier=keys.number("embedding_multiplier", 1.0),
        recurrence=read_mamba2(keys, width, GateNorm.GATE_FIRST, out_bias=keys.flag("mamba_proj_bias", False)),
        attention=read_attention(
            keys,
            head_dim,
            scale=keys.number("attention_multiplier", 1.0),
            rotary=1.0 if keys.values.get("position_embedding_type") == "rope" else 0.0,
            qk_norm=False,
            output_gate=False,
        ),
        mlp=None if experts else _read_mlp(keys),
        moe=_read_moe(keys) if experts else None,
        adjustments=(
            scaled("norm_f.weight", 1 / keys.number("logits_scaling", 1.0)),
            scaled("(out|o|down)_proj.(weight|bias)", residual),
        ),
    )


def place(config: HybridConfig, stored: str) -> Place | None:
    mixers = _DENSE if config.moe is None else _SPARSE
    return place_of_pair(stored, "input_layernorm", "post_attention_layernorm", "norm", mixers)


def _read_mlp(keys: Keys) -> MlpConfig:
    size = keys.count("shared_intermediate_size")
    return MlpConfig(intermediate_size=size, activation=Activation.GATED_SILU, bias=False, fused=True)


def _read_moe(keys: Keys) -> MoeConfig:
    return read_gated_moe(
        keys,
        experts="num_local_experts",
        size="intermediate_size",
        shared="shared_intermediate_size",
        router=Router.SOFTMAX_OF_TOP_K,
        normalise=True,
        shared_gate=False,
        fused=True,
    )
