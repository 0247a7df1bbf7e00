"""Falcon-H1: Mamba2 and attention side by side in every layer, then a gated MLP; fixed multipliers everywhere.

Multipliers of projections are multiplied into the weights, that of the logits into the final norm; that of the keys is
part of the scale of the scores.
"""

from __future__ import annotations

from pathlib import Path

from engine.config_keys import Keys, read_eos
from engine.families.family import Place, place_of_pair, read_attention, read_head_dim, read_mamba2, scaled
from engine.model_config import Activation, Adjustment, GateNorm, HybridConfig, LayerKind, Mamba2Config, MlpConfig

_MIXERS = {"mamba.": (0, "mamba."), "self_attn.": (0, "attention."), "feed_forward.": (1, "")}


def read(keys: Keys, folder: Path) -> HybridConfig:
    keys.only("hidden_act", "silu", "swish")
    mamba, head_dim = _read_mamba(keys), read_head_dim(keys)
    # Keys are kept without their multiplier, and attention reads the normed input without its own.
    attention_in = keys.number("attention_in_multiplier", 1.0)
    scale = head_dim**-0.5 * keys.number("key_multiplier", 1.0) * attention_in * attention_in
    return HybridConfig(
        model="falcon_h1",
        layers=(LayerKind.PARALLEL, LayerKind.MLP) * keys.layers(),
        vocab_size=keys.count("vocab_size"),
        hidden_size=keys.count("hidden_size"),
        max_position_embeddings=keys.count("max_position_embeddings"),
        eos_token_ids=read_eos(folder, keys),
        norm_eps=keys.number("rms_norm_eps", 1e-5),
        tie_word_embeddings=keys.flag("tie_word_embeddings", False),
        embedding_multiplier=keys.number("embedding_multiplier", 1.0),
        recurrence=mamba,
        attention=read_attention(keys, head_dim, scale=scale, rotary=1.0, qk_norm=False, output_gate=False),
        mlp=MlpConfig(
            intermediate_size=keys.count("intermediate_size"),
            activation=Activation.GATED_SILU,
            bias=keys.flag("mlp_bias", False),
            fused=False,
        ),
        moe=None,
        adjustments=_adjustments(keys, mamba),
    )


def place(config: HybridConfig, stored: str) -> Place | None:
    return place_of_pair(stored, "input_layernorm", "pre_ff_layernorm", "final_layernorm", _MIXERS)


def _read_mamba(keys: Keys) -> Mamba2Config:
    width = keys.count("mamba_d_ssm", default=keys.count("mamba_expand", default=2) * keys.count("hidden_size"))
    norm = GateNorm.NONE
    if keys.flag("mamba_rms_norm", False):
        norm = GateNorm.NORM_FIRST if keys.flag("mamba_norm_before_gate", True) else GateNorm.GATE_FIRST
    return read_mamba2(keys, width, norm, out_bias=keys.flag("projectors_bias", False))


def _adjustments(keys: Keys, mamba: Mamba2Config) -> tuple[Adjustment, ...]:
    attention_in = keys.number("attention_in_multiplier", 1.0)
    if attention_in != 1 and keys.flag("attention_bias", False):
        raise keys.error("attention_in_multiplier", "other than 1 not with attention_bias")
    gate, down = keys.numbers("mlp_multipliers", 2)
    ssm_in, ssm_out = keys.number("ssm_in_multiplier", 1.0), keys.number("ssm_out_multiplier", 1.0)
    rows = (mamba.d_inner, *mamba.conv_blocks, mamba.num_heads)  # z, x, B, C, dt
    parts = tuple(zip(rows, keys.numbers("ssm_multipliers", 5), strict=True))
    attention_out = attention_in * keys.number("attention_out_multiplier", 1.0)  # of the values, which are linear
    return (
        scaled("norm_f.weight", keys.number("lm_head_multiplier", 1.0)),
        scaled("mamba.in_proj.weight", ssm_in, parts),
        scaled("mamba.in_proj.bias", 1.0, parts),
        scaled("mamba.out_proj.(weight|bias)", ssm_out),
        scaled("attention.o_proj.weight", attention_out),
        scaled("attention.o_proj.bias", keys.number("attention_out_multiplier", 1.0)),
        scaled("gate_proj.(weight|bias)", gate),
        scaled("down_proj.(weight|bias)", down),
    )
