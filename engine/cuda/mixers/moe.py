"""The mixture of experts, routed and multiplied by torch. Twin: `engine.mixers.moe`.

Legend: T packed tokens, D hidden size, X experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.cuda.batch import CudaBatch
from engine.cuda.mixers.mixer import MakeLinear, linear
from engine.cuda.mixers.mlp import MlpMixer
from engine.kernels.norm import rms_norm
from engine.mixers.mixer import within
from engine.mixers.moe import make_experts, route, shared_mlp
from engine.model_config import MoeConfig


class MoeMixer:
    def __init__(
        self, config: MoeConfig, weights: Mapping[str, Tensor], norm: Tensor, eps: float, make: MakeLinear
    ) -> None:
        self.config, self.norm, self.eps = config, norm, eps
        self.router = weights["router.weight"].float().t()  # [D, X]
        self.bias = weights.get("router.e_score_correction_bias")
        self.experts = make_experts(config, within(weights, "experts."))
        self.shared = MlpMixer(shared_mlp(config), within(weights, "shared."), None, make)
        self.shared_gate = linear(make, weights, "shared_gate") if config.shared_gate else None
        self.latent_in = linear(make, weights, "fc1_latent_proj") if config.latent_size else None
        self.latent_out = linear(make, weights, "fc2_latent_proj") if config.latent_size else None

    def forward(self, hidden: Tensor, batch: CudaBatch) -> None:
        normed = rms_norm(hidden, self.norm, self.eps)
        chosen, weights = route(self.config, torch.mm(normed.float(), self.router), self.bias)
        routed = normed if self.latent_in is None else self.latent_in(normed)
        routed = self.experts(routed, chosen, weights)
        if self.latent_out is None:
            hidden.add_(routed)
        else:
            self.latent_out.add_to(hidden, routed)
        inner = self.shared.inner(normed)
        if self.shared_gate is not None:
            inner.mul_(torch.sigmoid(self.shared_gate(normed)))
        self.shared.down.add_to(hidden, inner)
