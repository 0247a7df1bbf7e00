"""A whole model in float64, every mixer token by token: the last word on what the engine computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.model_config import Activation, GatedDeltaConfig, GateNorm, HybridConfig, LayerKind, Mamba2Config, Router
from engine.ops.attention import attention_ref
from engine.ops.conv import conv_ref
from engine.ops.gated_delta import gated_delta_sequential_ref
from engine.ops.linear import projection_ref
from engine.ops.moe import experts_ref, softmax_of_top_k_ref, top_k_of_sigmoid_ref, top_k_of_softmax_ref
from engine.ops.norm import gated_rms_norm_ref, head_rms_norm_gated_ref, rms_norm_ref
from engine.ops.rotary import rotary_ref
from engine.ops.ssd import ssd_sequential_ref

Weights = Mapping[str, Tensor]
States = tuple[Tensor, Tensor]  # conv and recurrent state of a layer


def sequential(
    config: HybridConfig, weights: Weights, tokens: Sequence[int]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Logits, and conv and recurrent state of each layer that has them."""
    hidden = weights["embeddings.weight"].double()[list(tokens)] * config.embedding_multiplier
    states: list[States] = []
    for layer, kind in enumerate(config.layers):
        own = _under(f"layers.{layer}.mixer.", weights)
        normed = rms_norm_ref(hidden, weights[f"layers.{layer}.norm.weight"], config.norm_eps)
        hidden = hidden + _mixer(kind, config, own, normed, states)
    hidden = rms_norm_ref(hidden, weights["norm_f.weight"], config.norm_eps)
    return _project(hidden, weights, "lm_head"), [conv for conv, _ in states], [state for _, state in states]


def _mixer(kind: LayerKind, config: HybridConfig, own: Weights, normed: Tensor, states: list[States]) -> Tensor:
    match kind:
        case LayerKind.MLP:
            assert config.mlp is not None
            return _mlp(config.mlp.activation, own, normed)
        case LayerKind.MOE:
            return _moe(config, own, normed)
        case LayerKind.ATTENTION:
            return _attention(config, own, normed)
        case LayerKind.MAMBA:
            return _mamba(config, own, normed, states)
        case LayerKind.GATED_DELTA:
            return _gated_delta(config, own, normed, states)
        case LayerKind.PARALLEL:
            mamba = _mamba(config, _under("mamba.", own), normed, states)
            return mamba + _attention(config, _under("attention.", own), normed)


def _under(prefix: str, weights: Weights) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def _project(x: Tensor, own: Weights, name: str) -> Tensor:
    return projection_ref(x, own[f"{name}.weight"], own.get(f"{name}.bias"))


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _mlp(activation: Activation, own: Weights, x: Tensor) -> Tensor:
    if activation is Activation.RELU2:
        return _project(torch.relu(_project(x, own, "up_proj")) ** 2, own, "down_proj")
    if "gate_up_proj.weight" in own:
        gate, up = _project(x, own, "gate_up_proj").chunk(2, dim=-1)
    else:
        gate, up = _project(x, own, "gate_proj"), _project(x, own, "up_proj")
    return _project(_silu(gate) * up, own, "down_proj")


def _moe(config: HybridConfig, own: Weights, x: Tensor) -> Tensor:
    moe = config.moe
    assert moe is not None
    logits, count = _project(x, own, "router"), moe.experts_per_token
    match moe.router:
        case Router.SOFTMAX_OF_TOP_K:
            chosen, weights = softmax_of_top_k_ref(logits, count)
        case Router.TOP_K_OF_SOFTMAX:
            chosen, weights = top_k_of_softmax_ref(logits, count, moe.normalise)
        case Router.TOP_K_OF_SIGMOID:
            bias = own["router.e_score_correction_bias"]
            groups = (moe.groups, moe.top_groups)
            chosen, weights = top_k_of_sigmoid_ref(logits, bias, count, *groups, moe.normalise, moe.scale)
    experts = _under("experts.", own)
    if moe.activation is Activation.GATED_SILU and not moe.fused:
        up = torch.cat((experts["gate_proj.weight"], experts["up_proj.weight"]), dim=1)
    else:
        up = experts["gate_up_proj.weight" if moe.activation is Activation.GATED_SILU else "up_proj.weight"]
    narrow = _project(x, own, "fc1_latent_proj") if moe.latent_size else x
    routed = experts_ref(narrow, chosen, weights, up, experts["down_proj.weight"], moe.activation)
    shared = _mlp(moe.activation, _under("shared.", own), x)
    if moe.shared_gate:
        shared = shared / (1 + torch.exp(-_project(x, own, "shared_gate")))
    return (_project(routed, own, "fc2_latent_proj") if moe.latent_size else routed) + shared


def _attention(config: HybridConfig, own: Weights, x: Tensor) -> Tensor:
    attention = config.attention
    heads = {name: _project(x, own, f"{name}_proj").view(len(x), -1, attention.head_dim) for name in "qkv"}
    query, keys, gate = heads["q"], heads["k"], None
    if attention.output_gate:
        query, gate = query[:, 0::2], query[:, 1::2]
    if attention.qk_norm:
        query = rms_norm_ref(query, own["q_norm.weight"], config.norm_eps)
        keys = rms_norm_ref(keys, own["k_norm.weight"], config.norm_eps)
    if attention.rotary_dim:
        positions = torch.arange(len(x))
        query, keys = (
            rotary_ref(part, positions, attention.rotary_dim, attention.rope_theta) for part in (query, keys)
        )
    kv = torch.stack((keys, heads["v"])).unsqueeze(2)  # pages of one token
    out = attention_ref(query, kv, list(range(len(x))), 0, attention.scale)
    if gate is not None:
        out = out / (1 + torch.exp(-gate))
    return _project(out.flatten(1), own, "o_proj")


def _mamba(config: HybridConfig, own: Weights, x: Tensor, states: list[States]) -> Tensor:
    mamba = config.recurrence
    assert isinstance(mamba, Mamba2Config)
    gate, xbc, dt = torch.split(_project(x, own, "in_proj"), [mamba.d_inner, mamba.conv_dim, mamba.num_heads], dim=1)
    window = torch.zeros(mamba.conv_dim, mamba.conv_kernel - 1)
    xbc, window = conv_ref(xbc, window, own["conv1d.weight"].squeeze(1).t(), own.get("conv1d.bias"))
    values, b, c = torch.split(xbc, list(mamba.conv_blocks), dim=1)
    y, state = ssd_sequential_ref(
        values.view(len(x), mamba.num_heads, -1),
        torch.log1p(torch.exp(dt + own["dt_bias"].double())).clamp(*mamba.time_step_limit),
        -torch.exp(own["A_log"].double()),
        b.view(len(x), mamba.n_groups, -1),
        c.view(len(x), mamba.n_groups, -1),
        own["D"],
        torch.zeros(mamba.state_shape),
    )
    states.append((window, state))
    y = y.flatten(1)
    if mamba.norm is GateNorm.NONE:
        return _project(y * _silu(gate), own, "out_proj")
    norm_first = mamba.norm is GateNorm.NORM_FIRST
    y = gated_rms_norm_ref(y, gate, own["norm.weight"], mamba.n_groups, config.norm_eps, norm_first=norm_first)
    return _project(y, own, "out_proj")


def _gated_delta(config: HybridConfig, own: Weights, x: Tensor, states: list[States]) -> Tensor:
    """The files order the rows of the projections key head by key head."""
    delta = config.recurrence
    assert isinstance(delta, GatedDeltaConfig)
    share, tokens = delta.value_heads // delta.key_heads, len(x)
    values = share * delta.value_dim
    wide = _project(x, own, "in_proj_qkvz").view(tokens, delta.key_heads, -1)
    q, k, v, gate = (
        part.flatten(1) for part in torch.split(wide, [delta.key_dim, delta.key_dim, values, values], dim=2)
    )
    b, a = (
        part.flatten(1) for part in _project(x, own, "in_proj_ba").view(tokens, delta.key_heads, -1).chunk(2, dim=2)
    )
    window = torch.zeros(delta.conv_dim, delta.conv_kernel - 1)
    qkv, window = conv_ref(torch.cat((q, k, v), dim=1), window, own["conv1d.weight"].squeeze(1).t(), None)
    q, k, v = torch.split(qkv, list(delta.conv_blocks), dim=1)
    y, state = gated_delta_sequential_ref(
        q.view(tokens, delta.key_heads, -1),
        k.view(tokens, delta.key_heads, -1),
        v.view(tokens, delta.value_heads, -1),
        -torch.exp(own["A_log"].double()) * torch.log1p(torch.exp(a + own["dt_bias"].double())),
        1 / (1 + torch.exp(-b)),
        torch.zeros(delta.state_shape),
    )
    states.append((window, state))
    y = head_rms_norm_gated_ref(y, gate.view_as(y), own["norm.weight"], config.norm_eps)
    return _project(y, own, "out_proj")
