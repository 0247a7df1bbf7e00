"""Qwen3-Next: gated delta or gated attention, then a gated MLP or routed experts beside a gated shared one.

Norms are stored around zero, but for that of the gated delta mixer.
"""

from __future__ import annotations

from pathlib import Path

from engine.config_keys import Keys, read_eos
from engine.families.family import (
    Place,
    check_divides,
    place_of_pair,
    read_attention,
    read_conv_kernel,
    read_gated_moe,
    read_layer_types,
    read_rotary_share,
)
from engine.model_config import (
    Activation,
    Adjustment,
    AttentionConfig,
    GatedDeltaConfig,
    HybridConfig,
    LayerKind,
    MlpConfig,
    MoeConfig,
    Router,
)

HEAD_DIM = 256  # unless `head_dim` says otherwise
ROTARY_SHARE = 0.25  # of a head, unless `partial_rotary_factor` says otherwise
DEFAULT_CHUNK = 64  # published models do not say; their kernels fix it
_KINDS = {"linear_attention": LayerKind.GATED_DELTA, "full_attention": LayerKind.ATTENTION}
_MIXERS = {
    "linear_attn.": (0, ""),
    "self_attn.": (0, ""),
    "mlp.shared_expert.": (1, "shared."),
    "mlp.shared_expert_gate.": (1, "shared_gate."),
    "mlp.gate.": (1, "router."),
    "mlp.": (1, ""),
}


def read(keys: Keys, folder: Path) -> HybridConfig:
    keys.only("hidden_act", "silu", "swish")
    mixers = _read_mixers(keys)
    layers = tuple(kind for pair in zip(mixers, _read_mlps(keys, len(mixers)), strict=True) for kind in pair)
    return HybridConfig(
        model="qwen3_next",
        layers=layers,
        vocab_size=keys.count("vocab_size"),
        hidden_size=keys.count("hidden_size"),
        max_position_embeddings=keys.count("max_position_embeddings"),
        eos_token_ids=read_eos(folder, keys),
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=keys.flag("tie_word_embeddings", False),
        embedding_multiplier=1.0,
        recurrence=_read_recurrence(keys),
        attention=_read_attention(keys),
        mlp=_read_mlp(keys) if LayerKind.MLP in layers else None,
        moe=_read_moe(keys) if LayerKind.MOE in layers else None,
        adjustments=(
            Adjustment(pattern=r"layers\.\d+\.norm\.weight", factor=1.0, rows=(), offset=1.0),
            Adjustment(pattern=r"(q_norm|k_norm|norm_f)\.weight", factor=1.0, rows=(), offset=1.0),
        ),
    )


def place(config: HybridConfig, stored: str) -> Place | None:
    return place_of_pair(stored, "input_layernorm", "post_attention_layernorm", "norm", _MIXERS)


def _read_mixers(keys: Keys) -> tuple[LayerKind, ...]:
    if keys.values.get("layer_types") is not None:
        return read_layer_types(keys, _KINDS)
    interval = keys.count("full_attention_interval", default=4)
    return tuple(
        LayerKind.GATED_DELTA if (layer + 1) % interval else LayerKind.ATTENTION for layer in range(keys.layers())
    )


def _read_mlps(keys: Keys, count: int) -> tuple[LayerKind, ...]:
    dense = keys.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise keys.error("mlp_only_layers", "a list of layers is needed")
    step = keys.count("decoder_sparse_step", default=1)
    sparse = keys.values.get("num_experts") != 0
    return tuple(
        LayerKind.MOE if sparse and layer not in dense and (layer + 1) % step == 0 else LayerKind.MLP
        for layer in range(count)
    )


def _read_attention(keys: Keys) -> AttentionConfig:
    share, head_dim = read_rotary_share(keys, ROTARY_SHARE), keys.count("head_dim", default=HEAD_DIM)
    return read_attention(keys, head_dim, scale=None, rotary=share, qk_norm=True, output_gate=True)


def _read_recurrence(keys: Keys) -> GatedDeltaConfig:
    key_heads, value_heads = keys.count("linear_num_key_heads"), keys.count("linear_num_value_heads")
    check_divides(keys, "linear_num_key_heads", key_heads, "linear_num_value_heads", value_heads)
    return GatedDeltaConfig(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=keys.count("linear_key_head_dim"),
        value_dim=keys.count("linear_value_head_dim"),
        conv_kernel=read_conv_kernel(keys, "linear_conv_kernel_dim"),
        chunk_size=keys.count("chunk_size", default=DEFAULT_CHUNK),
    )


def _read_mlp(keys: Keys) -> MlpConfig:
    size = keys.count("intermediate_size")
    return MlpConfig(intermediate_size=size, activation=Activation.GATED_SILU, bias=False, fused=False)


def _read_moe(keys: Keys) -> MoeConfig:
    return read_gated_moe(
        keys,
        experts="num_experts",
        size="moe_intermediate_size",
        shared="shared_expert_intermediate_size",
        router=Router.TOP_K_OF_SOFTMAX,
        normalise=keys.flag("norm_topk_prob", True),
        shared_gate=True,
        fused=False,
    )
