"""What a family has to say, and what several of them say in the same way."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.config_keys import Keys, as_float, read_time_step_limit
from engine.model_config import (
    Activation,
    Adjustment,
    AttentionConfig,
    GateNorm,
    HybridConfig,
    LayerKind,
    Mamba2Config,
    MoeConfig,
    Router,
)

DEFAULT_CHUNK = 256
NUMBER = "0|[1-9][0-9]{0,8}"
_LAYER = re.compile(rf"model\.layers\.({NUMBER})\.(.+)")
_WHOLE = {"model.embed_tokens.weight": "embeddings.weight", "lm_head.weight": "lm_head.weight"}
_EXPERT = re.compile(rf"experts\.({NUMBER})\.(.+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """The engine's name of a stored tensor. piece: it is this one of the tensors that are stacked under that name."""

    name: str
    piece: int | None = None


NOWHERE = Place("")
"""Of a tensor that no model of the family has."""


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """read: the architecture of a folder. Raises ConfigError. place: see `engine.families.place_of`."""

    read: Callable[[Keys, Path], HybridConfig]
    place: Callable[[HybridConfig, str], Place | None]


def place_in_mixer(layer: int, name: str) -> Place:
    """Tensors `experts.<number>.<name>` are stacked as `experts.<name>`."""
    expert = _EXPERT.fullmatch(name)
    if expert is None:
        return Place(f"layers.{layer}.mixer.{name}")
    return Place(f"layers.{layer}.mixer.experts.{expert[2]}", int(expert[1]))


def place_of_pair(
    stored: str, first_norm: str, second_norm: str, final_norm: str, mixers: Mapping[str, tuple[int, str]]
) -> Place | None:
    """Families whose layer i is two of ours: 2 i with the norm `first_norm`, and 2 i + 1 with `second_norm`.

    mixers: prefix of a mixer's tensors in the file -> 0 or 1, to which of the two it belongs, and the prefix here.
    """
    if stored.startswith("mtp."):
        return None
    whole = {**_WHOLE, f"model.{final_norm}.weight": "norm_f.weight"}
    if stored in whole:
        return Place(whole[stored])
    found = _LAYER.fullmatch(stored)
    if found is None:
        return NOWHERE
    layer, rest = 2 * int(found[1]), found[2]
    norms = {f"{first_norm}.weight": layer, f"{second_norm}.weight": layer + 1}
    if rest in norms:
        return Place(f"layers.{norms[rest]}.norm.weight")
    for prefix, (second, ours) in mixers.items():
        if rest.startswith(prefix):
            return place_in_mixer(layer + second, ours + rest.removeprefix(prefix))
    return NOWHERE


def scaled(pattern: str, factor: float, rows: tuple[tuple[int, float], ...] = ()) -> Adjustment:
    return Adjustment(pattern=pattern, factor=factor, rows=rows, offset=0.0)


def read_layer_types(keys: Keys, kinds: Mapping[str, LayerKind]) -> tuple[LayerKind, ...]:
    """The mixers that `layer_types` lists, num_hidden_layers of them."""
    key = "layer_types" if keys.values.get("layer_types") is not None else "layers_block_type"
    value = keys.values.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(name, str) and name in kinds for name in value):
        raise keys.error(key, f"a list of {', '.join(kinds)} is needed")
    if keys.count("num_hidden_layers", default=len(value)) != len(value):
        raise keys.error("num_hidden_layers", f"{key} has {len(value)}")
    return tuple(kinds[name] for name in value)


def read_mamba2(keys: Keys, width: int, norm: GateNorm, *, out_bias: bool) -> Mamba2Config:
    """From keys that begin with `mamba_`. width: of the mixer."""
    heads = keys.count("mamba_n_heads", default=128)
    head_dim = width // heads if keys.values.get("mamba_d_head") in (None, "auto") else keys.count("mamba_d_head")
    if head_dim * heads != width:
        raise keys.error("mamba_n_heads", f"mamba_n_heads x mamba_d_head must be the width of the mixer, {width}")
    groups = keys.count("mamba_n_groups", default=1)
    check_divides(keys, "mamba_n_groups", groups, "mamba_n_heads", heads)
    return Mamba2Config(
        num_heads=heads,
        head_dim=head_dim,
        d_state=keys.count("mamba_d_state", default=256),
        n_groups=groups,
        conv_kernel=read_conv_kernel(keys, "mamba_d_conv", default=4),
        chunk_size=keys.count("mamba_chunk_size", default=DEFAULT_CHUNK),
        time_step_limit=read_time_step_limit(keys),
        in_bias=keys.flag("mamba_proj_bias", False),
        out_bias=out_bias,
        conv_bias=keys.flag("mamba_conv_bias", True),
        norm=norm,
    )


def read_conv_kernel(keys: Keys, *names: str, default: int | None = None) -> int:
    kernel = keys.count(*names, default=default)
    if kernel < 2:
        raise keys.error(names[0], "at least 2 is needed")
    return kernel


def read_attention(
    keys: Keys, head_dim: int, *, scale: float | None, rotary: float, qk_norm: bool, output_gate: bool
) -> AttentionConfig:
    """scale None: 1 / sqrt(head_dim). rotary: the share of a head that is rotated."""
    heads = keys.count("num_attention_heads")
    kv_heads = keys.count("num_key_value_heads", default=heads)
    check_divides(keys, "num_key_value_heads", kv_heads, "num_attention_heads", heads)
    rotary_dim = int(head_dim * rotary)
    if rotary_dim % 2:
        raise keys.error("head_dim", f"{rotary_dim} dimensions are rotated, an even number is needed")
    return AttentionConfig(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        bias=keys.flag("attention_bias", False),
        scale=head_dim**-0.5 if scale is None else scale,
        rotary_dim=rotary_dim,
        rope_theta=_read_theta(keys) if rotary_dim else 1.0,
        qk_norm=qk_norm,
        output_gate=output_gate,
    )


def read_gated_moe(
    keys: Keys, *, experts: str, size: str, shared: str, router: Router, normalise: bool, shared_gate: bool, fused: bool
) -> MoeConfig:
    """Experts that are gated MLPs, in one group and of the model's width. experts, size, shared: the keys for how many
    there are, and for how wide one of them and the shared one are."""
    count, chosen = keys.count(experts), keys.count("num_experts_per_tok")
    if chosen > count:
        raise keys.error("num_experts_per_tok", f"at most {experts} ({count})")
    return MoeConfig(
        experts=count,
        experts_per_token=chosen,
        intermediate_size=keys.count(size),
        activation=Activation.GATED_SILU,
        router=router,
        normalise=normalise,
        groups=1,
        top_groups=1,
        scale=1.0,
        latent_size=None,
        shared_size=keys.count(shared),
        shared_gate=shared_gate,
        bias=False,
        fused=fused,
    )


def read_head_dim(keys: Keys) -> int:
    """`head_dim`, or what the hidden size leaves for each head."""
    heads, hidden = keys.count("num_attention_heads"), keys.count("hidden_size")
    if keys.values.get("head_dim") is None:
        check_divides(keys, "num_attention_heads", heads, "hidden_size", hidden)
    return keys.count("head_dim", default=hidden // heads)


def check_divides(keys: Keys, key: str, value: int, other: str, whole: int) -> None:
    if whole % value:
        raise keys.error(key, f"it must divide {other} ({whole})")


def read_rotary_share(keys: Keys, default: float) -> float:
    """`partial_rotary_factor`: the share of a head that is rotated."""
    found = _rope_keys(keys).get("partial_rotary_factor", default)
    share = as_float(found)
    if share is None or not 0 < share <= 1:
        raise keys.error("partial_rotary_factor", "a number above 0 and up to 1 is needed", found)
    return share


def _read_theta(keys: Keys) -> float:
    found = _rope_keys(keys).get("rope_theta", 10000.0)
    theta = as_float(found)
    if theta is None or not 0 < theta < math.inf:
        raise keys.error("rope_theta", "a positive number is needed", found)
    return theta


def _rope_keys(keys: Keys) -> dict[str, Any]:
    """Those of `rope_parameters`, or of `rope_scaling` and of keys of their own, as older files have them."""
    found = dict(keys.values)
    for name in ("rope_scaling", "rope_parameters"):
        value = keys.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise keys.error(name, "an object is needed")
        if value and value.get("rope_type", value.get("type", "default")) != "default":
            raise keys.error(name, "this engine runs the default rotary embedding")
        if value and any(isinstance(each, dict) for each in value.values()):
            raise keys.error(name, "this engine runs one rotary embedding for all layers")
        found |= value or {}
    return {key: value for key, value in found.items() if value is not None}
