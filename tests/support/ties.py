"""Near ties in the choice of experts: where rounding decides, another batch shape may choose another expert."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import engine.ops.moe

ROUNDING = 1e-5


class Routing:
    """gap: the smallest difference seen between an expert that was chosen and one that was not."""

    def __init__(self) -> None:
        self.gap = float("inf")

    def see(self, scores: Tensor, k: int) -> None:
        if k < scores.shape[-1]:
            best = torch.topk(scores, k + 1, dim=-1).values
            self.gap = min(self.gap, float((best[:, k - 1] - best[:, k]).nan_to_num(torch.inf).min()))

    def take(self) -> float:
        """The gap since the last call."""
        gap, self.gap = self.gap, float("inf")
        return gap


@contextmanager
def watched_routing() -> Iterator[Routing]:
    """Of all mixtures of experts that run meanwhile."""
    routing, best = Routing(), engine.ops.moe._best

    def watched(scores: Tensor, k: int) -> Tensor:
        routing.see(scores, k)
        return best(scores, k)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.ops.moe, "_best", watched)
        yield routing
