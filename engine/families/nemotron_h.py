"""Nemotron-H and Nemotron 3: a layer is one mixer, by the letters of a pattern; attention has no rotary embedding."""

from __future__ import annotations

import re
from pathlib import Path

from engine.config_keys import Keys, read_eos, read_time_step_limit
from engine.families.family import (
    DEFAULT_CHUNK,
    NOWHERE,
    NUMBER,
    Place,
    check_divides,
    place_in_mixer,
    read_attention,
    read_conv_kernel,
)
from engine.model_config import (
    Activation,
    AttentionConfig,
    GateNorm,
    HybridConfig,
    LayerKind,
    Mamba2Config,
    MlpConfig,
    MoeConfig,
    Router,
)

_PREFIXES = ("backbone.", "model.")
_MIXER = re.compile(rf"layers\.({NUMBER})\.mixer\.(.+)")
_OURS = {"gate.": "router.", "shared_experts.": "shared."}
_OTHER_NAMES = {"embedding.weight": "embeddings.weight"}
_LETTERS = (LayerKind.MAMBA, LayerKind.ATTENTION, LayerKind.MLP, LayerKind.MOE)
_LIST_NAMES = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}


def read(keys: Keys, folder: Path) -> HybridConfig:
    """`time_step_limit` bounds dt; `time_step_min` and `time_step_max` only describe how dt_bias was initialised.
    `residual_in_fp32` has no effect, as in transformers: the residual has the dtype of the weights."""
    _refuse_variants(keys)
    layers = _read_layers(keys)
    mlp_bias = keys.flag("mlp_bias", False)
    return HybridConfig(
        model="nemotron_h",
        layers=layers,
        vocab_size=keys.count("vocab_size"),
        hidden_size=keys.count("hidden_size"),
        max_position_embeddings=keys.count("max_position_embeddings"),
        eos_token_ids=read_eos(folder, keys),
        norm_eps=keys.number("layer_norm_epsilon"),
        tie_word_embeddings=keys.flag("tie_word_embeddings", False),
        embedding_multiplier=1.0,
        recurrence=_read_mamba(keys),
        attention=_read_attention(keys),
        mlp=_read_mlp(keys, mlp_bias) if LayerKind.MLP in layers else None,
        moe=_read_moe(keys, mlp_bias) if LayerKind.MOE in layers else None,
        adjustments=(),
    )


def place(config: HybridConfig, stored: str) -> Place | None:
    """Names begin with `backbone.` or `model.`; some versions of `transformers` write `embedding.weight`."""
    if stored.startswith("mtp."):
        return None
    short = next((stored.removeprefix(prefix) for prefix in _PREFIXES if stored.startswith(prefix)), stored)
    short = _OTHER_NAMES.get(short, short)
    found = _MIXER.fullmatch(short)
    if found is None:
        return Place(short)
    if found[2].startswith(tuple(_OURS.values())):
        return NOWHERE
    prefix = next((prefix for prefix in _OURS if found[2].startswith(prefix)), "")
    return place_in_mixer(int(found[1]), _OURS.get(prefix, "") + found[2].removeprefix(prefix))


def _refuse_variants(keys: Keys) -> None:
    keys.only("mlp_hidden_act", "relu2")
    keys.only("mamba_hidden_act", "silu", "swish")
    keys.only("attention_bias", False)
    keys.only("sliding_window")
    if keys.flag("mamba_proj_bias", False) and not keys.flag("use_bias", False):
        raise keys.error("mamba_proj_bias", "biases of the Mamba projections are switched by use_bias")


def _read_layers(keys: Keys) -> tuple[LayerKind, ...]:
    key = "layers_block_type" if keys.values.get("layers_block_type") is not None else "hybrid_override_pattern"
    if keys.values.get(key) is None and keys.values.get("layer_types") is not None:
        key = "layer_types"
    value = keys.values.get(key)
    if not isinstance(value, str | list) or not value:
        raise keys.error(key, "a pattern of M, *, - and E is needed")
    letters = [_LIST_NAMES.get(str(name), str(name)) for name in value] if isinstance(value, list) else list(value)
    for letter in letters:
        if letter not in _LETTERS:
            raise keys.error(key, f"{letter!r} is not one of {', '.join(_LETTERS)}")
    if isinstance(value, str) and keys.count("num_hidden_layers", default=len(letters)) != len(letters):
        raise keys.error("num_hidden_layers", f"the pattern has {len(letters)} layers")
    return tuple(LayerKind(letter) for letter in letters)


def _read_mamba(keys: Keys) -> Mamba2Config:
    heads, groups = keys.count("mamba_num_heads"), keys.count("n_groups", "mamba_n_groups")
    check_divides(keys, "n_groups", groups, "mamba_num_heads", heads)
    bias = keys.flag("use_bias", False)
    return Mamba2Config(
        num_heads=heads,
        head_dim=keys.count("mamba_head_dim"),
        d_state=keys.count("ssm_state_size"),
        n_groups=groups,
        conv_kernel=read_conv_kernel(keys, "conv_kernel", "mamba_d_conv"),
        chunk_size=keys.count("chunk_size", "mamba_chunk_size", default=DEFAULT_CHUNK),
        time_step_limit=read_time_step_limit(keys),
        in_bias=bias,
        out_bias=bias,
        conv_bias=keys.flag("use_conv_bias", True),
        norm=GateNorm.GATE_FIRST,
    )


def _read_attention(keys: Keys) -> AttentionConfig:
    keys.count("num_key_value_heads")  # there is no default
    head_dim = keys.count("head_dim", "attention_head_dim")
    return read_attention(keys, head_dim, scale=None, rotary=0.0, qk_norm=False, output_gate=False)


def _read_mlp(keys: Keys, bias: bool) -> MlpConfig:
    return MlpConfig(
        intermediate_size=keys.count("intermediate_size"), activation=Activation.RELU2, bias=bias, fused=False
    )


def _read_moe(keys: Keys, bias: bool) -> MoeConfig:
    experts, groups = keys.count("n_routed_experts"), keys.count("n_group", default=1)
    chosen, top_groups = keys.count("num_experts_per_tok"), keys.count("topk_group", default=1)
    check_divides(keys, "n_group", groups, "n_routed_experts", experts)
    if top_groups > groups:
        raise keys.error("topk_group", f"at most n_group ({groups})")
    if top_groups < groups and experts < 2 * groups:
        raise keys.error("n_group", "two experts in a group are needed: groups are judged by their best two")
    if chosen > experts // groups * top_groups:
        raise keys.error("num_experts_per_tok", "more than there are experts to choose from")
    keys.only("n_shared_experts", 1)
    latent = keys.values.get("moe_latent_size")
    return MoeConfig(
        experts=experts,
        experts_per_token=chosen,
        intermediate_size=keys.count("moe_intermediate_size"),
        activation=Activation.RELU2,
        router=Router.TOP_K_OF_SIGMOID,
        normalise=keys.flag("norm_topk_prob", True),
        groups=groups,
        top_groups=top_groups,
        scale=keys.number("routed_scaling_factor", 1.0),
        latent_size=None if latent is None else keys.count("moe_latent_size"),
        shared_size=keys.count("moe_shared_expert_intermediate_size"),
        shared_gate=False,
        bias=bias,
        fused=False,
    )
