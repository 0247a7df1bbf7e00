"""Experts and the choice among them: against float64, against transformers, ties, and the company of other tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import GraniteMoeHybridConfig, NemotronHConfig, Qwen3NextConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMoE
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

from engine.model_config import Activation
from engine.ops.moe import (
    Experts,
    experts_ref,
    softmax_of_top_k,
    softmax_of_top_k_ref,
    top_k_of_sigmoid,
    top_k_of_sigmoid_ref,
    top_k_of_softmax,
    top_k_of_softmax_ref,
)

Route = Callable[..., tuple[Tensor, Tensor]]
X = 12
BIAS = torch.linspace(-0.3, 0.3, X)[torch.randperm(X, generator=torch.Generator().manual_seed(3))]
ROUTES: dict[str, tuple[Route, Route, tuple[Any, ...]]] = {
    "softmax_of_top_k": (softmax_of_top_k, softmax_of_top_k_ref, ()),
    "softmax": (top_k_of_softmax, top_k_of_softmax_ref, (False,)),
    "softmax_normalised": (top_k_of_softmax, top_k_of_softmax_ref, (True,)),
    "sigmoid": (top_k_of_sigmoid, top_k_of_sigmoid_ref, (1, 1, True, 2.5)),
    "sigmoid_plain": (top_k_of_sigmoid, top_k_of_sigmoid_ref, (1, 1, False, 1.0)),
    "sigmoid_groups": (top_k_of_sigmoid, top_k_of_sigmoid_ref, (4, 2, True, 2.5)),
    "sigmoid_all_groups": (top_k_of_sigmoid, top_k_of_sigmoid_ref, (3, 3, True, 1.5)),
}
EVERY_ROUTE = pytest.mark.parametrize("name", ROUTES)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def route(name: str, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    found, _, rest = ROUTES[name]
    return found(logits, *([BIAS.to(logits.device)] if name.startswith("sigmoid") else []), k, *rest)


def route_ref(name: str, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    _, found, rest = ROUTES[name]
    return found(logits, *([BIAS] if name.startswith("sigmoid") else []), k, *rest)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


# -- the choice --------------------------------------------------------------------------------------------------------


@EVERY_ROUTE
@pytest.mark.parametrize("k", [1, 3, 6])
def test_routes_by_their_formulas(name: str, k: int) -> None:
    logits = torch.randn(40, X) * 2
    before = logits.clone()
    chosen, weights = route(name, logits, k)
    expected, expected_weights = route_ref(name, logits, k)
    assert chosen.dtype is torch.int64 and weights.dtype is torch.float32
    assert torch.equal(chosen, expected) and torch.equal(logits, before)
    close(weights, expected_weights)


@pytest.mark.parametrize("name", [name for name in ROUTES if name != "sigmoid_groups"])
def test_all_experts_may_be_chosen(name: str) -> None:
    chosen, weights = route(name, torch.randn(5, X), X)
    assert torch.equal(chosen.sort().values, torch.arange(X).expand(5, X))
    assert (weights >= 0).all()


@EVERY_ROUTE
def test_among_equals_the_first_is_chosen(name: str) -> None:
    """Rows of few different logits, some all alike; what is chosen in a batch is what is chosen alone."""
    logits = torch.randint(-1, 2, (64, X)).float()
    logits[:4] = torch.tensor([0.0, -3.0, 40.0, -200.0]).unsqueeze(1)  # with a sigmoid of exactly 1, and of 0
    chosen, weights = route(name, logits, 4)
    for row, chosen_alone, weights_alone in zip(logits, chosen, weights, strict=True):
        assert all(
            torch.equal(*pair)
            for pair in zip(route(name, row[None], 4), (chosen_alone[None], weights_alone[None]), strict=True)
        )
    if not name.startswith("sigmoid"):
        assert torch.equal(chosen, route_ref(name, logits, 4)[0])
        assert torch.equal(chosen[:4], torch.arange(4).expand(4, 4))


def test_among_equals_of_hundreds_the_first_is_chosen() -> None:
    logits = torch.randn(50, 512).bfloat16().float()
    logits[0] = 0
    assert torch.equal(softmax_of_top_k(logits, 10)[0], softmax_of_top_k_ref(logits, 10)[0])


def test_a_sigmoid_without_bias_chooses_the_first_group_among_equals() -> None:
    chosen, weights = top_k_of_sigmoid(torch.zeros(1, X), torch.zeros(X), 4, 4, 2, True, 2.0)
    assert chosen.tolist() == [[0, 1, 2, 3]] and weights.tolist() == [[0.5] * 4]


def test_the_bias_chooses_and_does_not_weigh() -> None:
    bias = torch.zeros(X)
    bias[7] = 5.0
    chosen, weights = top_k_of_sigmoid(torch.zeros(1, X), bias, 2, 1, 1, False, 1.0)
    assert chosen.tolist() == [[7, 0]] and weights.tolist() == [[0.5, 0.5]]


@EVERY_ROUTE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_narrow_routers_are_full_of_ties(name: str, dtype: torch.dtype) -> None:
    """Of all that float32 tells apart and the narrow type does not, any choice is right; none is chosen twice."""
    exact = torch.randn(300, X) * 0.01 + 3
    logits = exact.to(dtype).float()
    assert max(len(row) - len(set(row)) for row in logits.tolist()) >= 3
    chosen, weights = route(name, logits, 4)
    assert all(len(set(row)) == 4 for row in chosen.tolist()) and torch.isfinite(weights).all()
    close(weights, route(name, exact, 4)[1], 0.02)
    experts = Experts(torch.randn(X, 8, 8), torch.randn(X, 8, 8), Activation.RELU2)
    assert torch.isfinite(experts(torch.randn(300, 8).to(dtype).float(), chosen, weights)).all()


# -- the experts -------------------------------------------------------------------------------------------------------


def make_experts(activation: Activation, dtype: torch.dtype = torch.float32, x: int = X) -> Experts:
    width, inner = 24, 16
    wide = inner * (2 if activation is Activation.GATED_SILU else 1)
    up, down = torch.randn(x, wide, width) * width**-0.5, torch.randn(x, width, inner) * inner**-0.5
    return Experts(up.to(dtype), down.to(dtype), activation)


def draw(tokens: int, k: int, x: int = X) -> tuple[Tensor, Tensor]:
    chosen = torch.stack([torch.randperm(x)[:k] for _ in range(tokens)])
    return chosen, torch.rand(tokens, k)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("tokens", "k"), [(1, 1), (1, X), (2, 3), (17, 4), (50, X), (64, 1)])
def test_experts_against_float64(activation: Activation, grouped: bool, tokens: int, k: int) -> None:
    experts = make_experts(activation)
    experts.grouped = grouped  # what a card does; the CPU can, too
    x = torch.randn(tokens, 40)[:, 3:27]  # a slice of something wider
    chosen, weights = draw(tokens, k)
    before = [value.clone() for value in (x, chosen, weights, experts.up, experts.down)]
    found = experts(x, chosen, weights)
    close(found, experts_ref(x, chosen, weights, experts.up, experts.down, activation), 1e-5)
    assert all(torch.equal(*pair) for pair in zip(before, (x, chosen, weights, experts.up, experts.down), strict=True))


@pytest.mark.parametrize("activation", Activation)
def test_all_tokens_to_one_expert(activation: Activation) -> None:
    experts, x, weights = make_experts(activation), torch.randn(30, 24), torch.rand(30, 1)
    for expert in (0, 5, X - 1):
        chosen = torch.full((30, 1), expert)
        close(
            experts(x, chosen, weights),
            experts_ref(x, chosen, weights, experts.up, experts.down, activation),
            1e-5,
        )


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_in_a_batch_is_the_token_alone(activation: Activation, dtype: torch.dtype) -> None:
    experts, x = make_experts(activation, dtype), torch.randn(33, 24).to(dtype)
    chosen, weights = draw(33, 5)
    found = experts(x, chosen, weights)
    assert found.dtype is dtype
    alone = torch.cat([experts(x[t : t + 1], chosen[t : t + 1], weights[t : t + 1]) for t in range(33)])
    shuffle, tolerance = torch.randperm(33), 1e-5 if dtype is torch.float32 else 1e-2
    close(found, alone, tolerance)
    close(found[shuffle], experts(x[shuffle], chosen[shuffle], weights[shuffle]), tolerance)


def test_one_tokens_broken_numbers_stay_its_own() -> None:
    experts, x, logits = make_experts(Activation.RELU2), torch.randn(9, 24), torch.randn(9, X)
    logits[3], logits[5] = float("nan"), float("inf")
    whole = [t for t in range(9) if t not in (3, 5)]
    for name in ROUTES:
        chosen, weights = route(name, logits, 4)
        assert all(sorted(set(row)) == sorted(row) and 0 <= min(row) <= max(row) < X for row in chosen.tolist())
        expected = experts_ref(x[whole], chosen[whole], weights[whole], experts.up, experts.down, Activation.RELU2)
        close(experts(x, chosen, weights)[whole], expected, 1e-5)


def test_no_tokens() -> None:
    experts = make_experts(Activation.GATED_SILU)
    for experts.grouped in (False, True):
        assert experts(torch.zeros(0, 24), *softmax_of_top_k(torch.zeros(0, X), 4)).shape == (0, 24)


def test_a_sum_of_many_experts_keeps_what_bfloat16_would_lose() -> None:
    """One expert says 256, fifteen say 1 each: a sum in bfloat16 would stay at 256."""
    down = torch.ones(16, 1, 1)
    down[0] = 256
    experts = Experts(torch.ones(16, 1, 1).bfloat16(), down.bfloat16(), Activation.RELU2)
    chosen, x = torch.arange(16).unsqueeze(0), torch.ones(1, 1).bfloat16()
    assert experts(x, chosen, torch.ones(1, 16)).item() == torch.tensor(271.0).bfloat16().item() == 272


def test_a_token_costs_its_own_experts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 512 experts one token multiplies with its ten."""
    experts, calls = make_experts(Activation.GATED_SILU, x=512), []
    monkeypatch.setattr(experts, "_activate", lambda wide: calls.append(wide.shape) or Experts._activate(experts, wide))
    chosen, weights = draw(1, 10, 512)
    x = torch.randn(1, 24)
    close(
        experts(x, chosen, weights),
        experts_ref(x, chosen, weights, experts.up, experts.down, Activation.GATED_SILU),
        1e-5,
    )
    assert calls == [(1, 32)] * 10


def test_shapes_of_another_activation_are_refused() -> None:
    with pytest.raises(AssertionError):
        Experts(torch.zeros(3, 8, 4), torch.zeros(3, 4, 8), Activation.GATED_SILU)


# -- transformers ------------------------------------------------------------------------------------------------------


def initialised(module: nn.Module) -> Any:
    with torch.no_grad():
        for name, weight in [*module.named_parameters(), *module.named_buffers()]:
            weight.copy_(torch.randn_like(weight) * (0.2 if "bias" in name else weight.shape[-1] ** -0.5))
    return module.eval()


@torch.no_grad()
def test_granite_block() -> None:
    config = GraniteMoeHybridConfig(
        hidden_size=32, intermediate_size=20, num_local_experts=9, num_experts_per_tok=4, mamba_n_heads=4
    )
    config._experts_implementation = "eager"
    block, x = initialised(GraniteMoeHybridMoE(config)), torch.randn(37, 32)
    experts = Experts(block.experts.gate_up_proj, block.experts.down_proj, Activation.GATED_SILU)
    found = experts(x, *softmax_of_top_k(x @ block.router.weight.t(), 4))
    close(found, block(x[None])[0])


@torch.no_grad()
@pytest.mark.parametrize("normalise", [True, False])
def test_qwen3_next_block(normalise: bool) -> None:
    config = Qwen3NextConfig(
        hidden_size=32,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=12,
        num_experts=18,
        num_experts_per_tok=5,
        norm_topk_prob=normalise,
    )
    config._experts_implementation = "eager"
    block, x = initialised(Qwen3NextSparseMoeBlock(config)), torch.randn(37, 32)
    experts = Experts(block.experts.gate_up_proj, block.experts.down_proj, Activation.GATED_SILU)
    shared = torch.sigmoid(block.shared_expert_gate(x)) * block.shared_expert(x)
    found = experts(x, *top_k_of_softmax(x @ block.gate.weight.t(), 5, normalise)) + shared
    close(found, block(x[None])[0])


@torch.no_grad()
@pytest.mark.parametrize("latent", [None, 14])
@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2)])
def test_nemotron_block(latent: int | None, groups: int, top_groups: int) -> None:
    config = NemotronHConfig(
        hidden_size=32,
        moe_intermediate_size=20,
        moe_shared_expert_intermediate_size=12,
        moe_latent_size=latent,
        n_routed_experts=16,
        num_experts_per_tok=5,
        n_group=groups,
        topk_group=top_groups,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        mlp_bias=False,
    )
    config._experts_implementation = "eager"
    block, x = initialised(NemotronHMoE(config)), torch.randn(37, 32)
    experts = Experts(block.experts.up_proj, block.experts.down_proj, Activation.RELU2)
    gate = block.gate
    choice = top_k_of_sigmoid(
        x @ gate.weight.t(), gate.e_score_correction_bias, 5, groups, top_groups, True, config.routed_scaling_factor
    )
    found = block.fc2_latent_proj(experts(block.fc1_latent_proj(x), *choice)) + block.shared_experts(x)
    close(found, block(x[None])[0])


# -- on a card ---------------------------------------------------------------------------------------------------------

on_card = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


class TestOnCard:
    """The shape of Qwen3-Next: 512 experts, ten of which a token goes to."""

    pytestmark = on_card

    @pytest.mark.parametrize("tokens", [1, 8, 300])
    def test_all_experts_at_once_also_in_a_graph(self, tokens: int) -> None:
        up, down = torch.randn(512, 1024, 2048) / 45, torch.randn(512, 2048, 512) / 23
        experts = Experts(up.bfloat16().cuda(), down.bfloat16().cuda(), Activation.GATED_SILU)
        assert experts.grouped
        x, logits = torch.randn(tokens, 2048).bfloat16().cuda(), torch.randn(tokens, 512).cuda()

        def run() -> Tensor:
            return experts(x, *top_k_of_softmax(logits, 10, True))

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
        for _ in range(2):
            x.normal_()
            logits.normal_()
            graph.replay()
            plain = Experts(up.cuda(), down.cuda(), Activation.GATED_SILU)
            expected = plain(x.float(), *top_k_of_softmax(logits, 10, True))
            assert float((found.float() - expected).norm()) <= 0.02 * float(expected.norm())
            assert torch.equal(found, run())

    @EVERY_ROUTE
    def test_the_choice_is_the_cpus(self, name: str) -> None:
        logits = torch.randn(200, X).bfloat16().float()
        chosen, weights = route(name, logits, 4)
        found, found_weights = route(name, logits.cuda(), 4)
        close(found_weights.cpu(), weights)
        assert torch.equal(found.cpu(), chosen)
