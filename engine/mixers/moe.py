"""The mixture of experts: routed ones, and a shared one that every token passes.

Legend: T packed tokens, D hidden size, X experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from engine.mixers.mixer import Shapes, Step, linear_shapes, project, within
from engine.mixers.mlp import MlpMixer, mlp_shapes
from engine.model_config import Activation, MlpConfig, MoeConfig, Router
from engine.ops.linear import Projection
from engine.ops.moe import Experts, softmax_of_top_k, top_k_of_sigmoid, top_k_of_softmax


def moe_shapes(config: MoeConfig, hidden: int) -> Shapes:
    inner, width = config.intermediate_size, config.latent_size or hidden
    ups = {"up_proj": inner}
    if config.activation is Activation.GATED_SILU:
        ups = {"gate_up_proj": 2 * inner} if config.fused else {"gate_proj": inner, "up_proj": inner}
    shapes: Shapes = {"router.weight": (config.experts, hidden)}
    if config.router is Router.TOP_K_OF_SIGMOID:
        shapes["router.e_score_correction_bias"] = (config.experts,)
    shapes |= {f"experts.{name}.weight": (config.experts, rows, width) for name, rows in ups.items()}
    shapes |= {"experts.down_proj.weight": (config.experts, width, inner)}
    if config.latent_size is not None:
        shapes |= linear_shapes("fc1_latent_proj", width, hidden, config.bias)
        shapes |= linear_shapes("fc2_latent_proj", hidden, width, config.bias)
    shared = mlp_shapes(shared_mlp(config), hidden)
    shapes |= {f"shared.{name}": shape for name, shape in shared.items()}
    return shapes | ({"shared_gate.weight": (1, hidden)} if config.shared_gate else {})


class MoeMixer:
    def __init__(self, config: MoeConfig, weights: Mapping[str, Tensor]) -> None:
        self.config = config
        self.router = Projection(weights["router.weight"].float())
        self.bias = weights.get("router.e_score_correction_bias")
        self.experts = make_experts(config, within(weights, "experts."))
        self.shared = MlpMixer(shared_mlp(config), within(weights, "shared."))
        self.shared_gate = project(weights, "shared_gate") if config.shared_gate else None
        self.latent_in = project(weights, "fc1_latent_proj") if config.latent_size else None
        self.latent_out = project(weights, "fc2_latent_proj") if config.latent_size else None

    def matrices(self) -> Iterator[Tensor]:
        for part in (self.router, self.shared_gate, self.latent_in, self.latent_out, self.shared):
            yield from () if part is None else part.matrices()
        yield from (self.experts.up, self.experts.down)

    def forward(self, normed: Tensor, residual: Tensor, step: Step) -> Tensor:
        chosen, weights = route(self.config, self.router(normed.float()), self.bias)
        routed = normed if self.latent_in is None else self.latent_in(normed)
        routed = self.experts(routed, chosen, weights)
        hidden = residual + routed if self.latent_out is None else self.latent_out.add_to(residual, routed)
        inner = self.shared.inner(normed)
        if self.shared_gate is not None:
            inner = inner * torch.sigmoid(self.shared_gate(normed))
        return self.shared.down.add_to(hidden, inner)


def route(config: MoeConfig, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """logits [T, X] float32, bias [X] float32 where the router has one -> chosen [T, k], weights float32 [T, k]."""
    count = config.experts_per_token
    match config.router:
        case Router.SOFTMAX_OF_TOP_K:
            return softmax_of_top_k(logits, count)
        case Router.TOP_K_OF_SOFTMAX:
            return top_k_of_softmax(logits, count, config.normalise)
        case Router.TOP_K_OF_SIGMOID:
            assert bias is not None
            return top_k_of_sigmoid(
                logits, bias, count, config.groups, config.top_groups, config.normalise, config.scale
            )


def shared_mlp(config: MoeConfig) -> MlpConfig:
    return MlpConfig(
        intermediate_size=config.shared_size, activation=config.activation, bias=config.bias, fused=config.fused
    )


def make_experts(config: MoeConfig, weights: Mapping[str, Tensor]) -> Experts:
    gated = config.activation is Activation.GATED_SILU
    if gated and not config.fused:
        up = torch.cat((weights["gate_proj.weight"], weights["up_proj.weight"]), dim=1)
    else:
        up = weights["gate_up_proj.weight" if gated else "up_proj.weight"]
    return Experts(up, weights["down_proj.weight"], config.activation)
