"""Rotary embedding: by its formula, far out, and as transformers computes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import FalconH1Config, Qwen3NextConfig
from transformers.models.falcon_h1 import modeling_falcon_h1 as falcon_h1
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from engine.ops.rotary import Rotary, rotary_ref

FAR = [0, 1, 2, 8191, 131071, 262143]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def rotate(x: Tensor, positions: Tensor, dim: int, theta: float) -> Tensor:
    rotary = Rotary(dim, theta, "cpu")
    return rotary.apply(x, rotary.at(positions))


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dim", "width"), [(2, 2), (8, 8), (8, 32), (10, 14)])
@pytest.mark.parametrize("theta", [1e4, 1e7, 1e11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_by_its_formula(dim: int, width: int, theta: float, dtype: torch.dtype) -> None:
    wide = torch.randn(len(FAR), 3 * width + 5).to(dtype)
    x, positions = wide[:, 2 : 3 * width + 2].view(len(FAR), 3, width), torch.tensor(FAR)
    before = wide.clone()
    found, expected = rotate(x, positions, dim, theta), rotary_ref(x, positions, dim, theta)
    assert found.dtype is dtype and found.is_contiguous() and torch.equal(wide, before)
    close(found, expected, 1e-6 if dtype is torch.float32 else 2**-8)
    assert torch.equal(found[..., dim:], x[..., dim:]) and torch.equal(found[0], x[0])
    assert not torch.equal(found[1:, :, :dim], x[1:, :, :dim])


@pytest.mark.parametrize("theta", [1e4, 1e7, 1e11])
def test_scores_depend_on_distances_only(theta: float) -> None:
    """What a head sees of a key is the same anywhere, as far as float32 angles go: they are the model's own."""
    query, key = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def score(at: int, distance: int) -> float:
        positions = torch.tensor([at + distance]), torch.tensor([at])
        return float((rotate(query, positions[0], 16, theta) * rotate(key, positions[1], 16, theta)).sum())

    for distance in (0, 1, 7, 100):
        scores = [score(at, distance) for at in (0, 1, 1000, 131071)]
        assert max(scores) - min(scores) < 0.1 and abs(scores[1] - scores[0]) < 1e-4


def test_the_plan_of_a_step_serves_rows_in_any_order() -> None:
    rotary, positions = Rotary(8, 1e6, "cpu"), torch.tensor([5, 131071, 5, 0])
    x = torch.randn(4, 2, 12)
    whole = rotary.apply(x, rotary.at(positions))
    for row in range(4):
        alone = rotary.apply(x[row : row + 1], rotary.at(positions[row : row + 1]))
        assert torch.equal(whole[row : row + 1], alone)


def of_transformers(module: Any, embedding: Any, x: Tensor, positions: Tensor) -> Tensor:
    cos, sin = embedding(x, positions[None])
    rotated, _ = module.apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    return rotated[0].transpose(0, 1)


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0])
def test_qwen3_next(factor: float) -> None:
    config = Qwen3NextConfig(
        head_dim=64,
        max_position_embeddings=262144,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": factor},
    )
    x, positions = torch.randn(len(FAR), 4, 64), torch.tensor(FAR)
    expected = of_transformers(qwen3_next, qwen3_next.Qwen3NextRotaryEmbedding(config), x, positions)
    close(rotate(x, positions, int(64 * factor), 1e7), expected)


@pytest.mark.parametrize("theta", [1e5, 1e11])
def test_falcon_h1(theta: float) -> None:
    config = FalconH1Config(
        head_dim=64, max_position_embeddings=262144, rope_parameters={"rope_type": "default", "rope_theta": theta}
    )
    x, positions = torch.randn(len(FAR), 4, 64), torch.tensor(FAR)
    expected = of_transformers(falcon_h1, falcon_h1.FalconH1RotaryEmbedding(config), x, positions)
    close(rotate(x, positions, 64, theta), expected)
