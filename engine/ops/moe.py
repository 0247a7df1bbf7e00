"""Mixtures of experts: which experts a token goes to, and what they make of it.

Legend: T tokens, X experts, k experts of a token, D width that the experts read and write (hidden or latent size),
I width inside an expert.
Routing is float32. Among equal scores the expert with the lower number is chosen, so that a token's experts depend on
nothing but its own logits: routers that compute in bfloat16 do produce equal ones.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model_config import Activation


def softmax_of_top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits, and the softmax over these alone (Granite).

    logits [T, X] float32 -> chosen int64 [T, k], best first, and weights float32 [T, k].
    """
    chosen = _best(logits, k)
    return chosen, torch.softmax(logits.gather(1, chosen), dim=-1)


def top_k_of_softmax(logits: Tensor, k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """The k largest of the softmax over all experts (Qwen3-Next). Shapes as `softmax_of_top_k`.

    normalise: weights are divided by their sum (`norm_topk_prob`).
    """
    scores = torch.softmax(logits, dim=-1)
    chosen = _best(scores, k)
    weights = scores.gather(1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True) if normalise else weights


def top_k_of_sigmoid(
    logits: Tensor, bias: Tensor, k: int, groups: int, top_groups: int, normalise: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The k largest of sigmoid + bias within the best groups of experts (Nemotron 3). Shapes as `softmax_of_top_k`.

    bias [X] float32 (`e_score_correction_bias`) has a say in the choice only; weights are the sigmoids. groups: equal
    runs of two or more experts (`n_group`); the top_groups (`topk_group`) of them stay whose two best experts have the
    highest sum, and hold at least k experts. normalise: weights are divided by their sum (`norm_topk_prob`). scale: and
    multiplied with this (`routed_scaling_factor`).
    """
    scores = torch.sigmoid(logits)
    chosen = _best(_of_best_groups(scores + bias, groups, top_groups), k)
    weights = scores.gather(1, chosen)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * scale


def _best(scores: Tensor, k: int) -> Tensor:
    """Numbers of the k highest scores of each row [T, k], highest first, lower numbers before higher ones."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k]


def _of_best_groups(scores: Tensor, groups: int, top_groups: int) -> Tensor:
    """scores [T, X], -inf for experts that are not in the best groups."""
    if groups == top_groups:
        return scores
    grouped = scores.view(scores.shape[0], groups, -1)  # [T, groups, X / groups]
    best = _best(grouped.topk(2, dim=-1).values.sum(-1), top_groups)  # [T, top_groups]
    left = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, False)
    return grouped.masked_fill(left.unsqueeze(-1), -torch.inf).view_as(scores)


class Experts:
    """X small MLPs of one layer. `x -> sum over a token's experts of weight * down(activation(up(x)))`.

    up [X, I, D], or [X, 2 I, D] with gate before up where that is gated; down [X, D, I]. Kept as they are: the weights
    are by far the largest part of such a model. grouped: torch multiplies all experts at once and need not ask the
    device how many rows each one has; on a CPU that gains little, and visits all X of them for a single token.
    """

    def __init__(self, up: Tensor, down: Tensor, activation: Activation) -> None:
        inner = down.shape[2] * (2 if activation is Activation.GATED_SILU else 1)
        assert up.shape == (down.shape[0], inner, down.shape[1]), f"{tuple(up.shape)} and {tuple(down.shape)}"
        self.up, self.down, self.activation = up, down, activation
        self.grouped = _has_grouped_products(up) and _has_grouped_products(down)

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [T, D], chosen int64 [T, k] (no expert twice in a row), weights float32 [T, k] -> [T, D] in x's dtype.

        Tokens are sorted by expert: each expert that has any makes one product, the others cost nothing. The sum over a
        token's experts is float32 and in the order in which they were chosen, whatever the token is batched with. This
        takes memory of at most T k (2 D + 3 I) values.
        """
        tokens, count = chosen.shape
        owners, order = torch.sort(chosen.flatten(), stable=True)  # [T k]: pairs of token and expert, by expert
        by_expert = self._at_once if self.grouped else self._one_by_one
        parts = (
            by_expert(x, order // count, owners).index_select(0, torch.argsort(order)).view(tokens, count, x.shape[1])
        )
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for part, weight in zip(parts.unbind(1), torch.split(weights, 1, dim=1), strict=True):
            total.addcmul_(part, weight)
        return total.to(x.dtype)

    def _at_once(self, x: Tensor, tokens: Tensor, owners: Tensor) -> Tensor:
        """What experts owners int64 [T k], ascending, make of these tokens of x: [T k, D]."""
        ends = torch.searchsorted(owners, torch.arange(self.up.shape[0], device=x.device), right=True).int()
        inner = self._activate(F.grouped_mm(x.index_select(0, tokens), self.up.transpose(1, 2), offs=ends))
        return F.grouped_mm(inner, self.down.transpose(1, 2), offs=ends)

    def _one_by_one(self, x: Tensor, tokens: Tensor, owners: Tensor) -> Tensor:
        """The same."""
        made = x.new_empty(owners.shape[0], self.down.shape[1])
        experts, counts = torch.unique_consecutive(owners, return_counts=True)
        runs = (torch.split(value, counts.tolist()) for value in (tokens, made))
        for expert, own, out in zip(experts.tolist(), *runs, strict=True):
            inner = self._activate(x.index_select(0, own) @ self.up[expert].t())
            torch.mm(inner, self.down[expert].t(), out=out)
        return made

    def _activate(self, wide: Tensor) -> Tensor:
        """[rows, I or 2 I] (overwritten) -> [rows, I]."""
        match self.activation:
            case Activation.RELU2:
                wide = torch.relu_(wide)
                return wide.mul_(wide)
            case Activation.GATED_SILU:
                gate, up = wide.chunk(2, dim=-1)
                return F.silu(gate).mul_(up)


def _has_grouped_products(weights: Tensor) -> bool:
    is_aligned = all(size % 8 == 0 for size in weights.shape[1:])  # rows of 16 bytes
    return weights.is_cuda and weights.dtype is torch.bfloat16 and is_aligned and hasattr(F, "grouped_mm")


# -- slow twins --------------------------------------------------------------------------------------------------------


def softmax_of_top_k_ref(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`softmax_of_top_k` row by row, in float64."""
    rows = [(chosen := _best_ref(row, k), torch.softmax(row[chosen], 0)) for row in logits.double()]
    return _stack(rows)


def top_k_of_softmax_ref(logits: Tensor, k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """`top_k_of_softmax` row by row, in float64."""
    rows = []
    for row in logits.double():
        scores = torch.exp(row - row.max()) / torch.exp(row - row.max()).sum()
        chosen = _best_ref(scores, k)
        rows.append((chosen, scores[chosen] / (scores[chosen].sum() if normalise else 1)))
    return _stack(rows)


def top_k_of_sigmoid_ref(
    logits: Tensor, bias: Tensor, k: int, groups: int, top_groups: int, normalise: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """`top_k_of_sigmoid` row by row, in float64."""
    rows, size = [], logits.shape[1] // groups
    for row in logits.double():
        scores = 1 / (1 + torch.exp(-row))
        choice = scores + bias.double()
        worth = torch.stack([part.sort().values[-2:].sum() for part in torch.split(choice, size)])
        kept = [expert for expert in range(len(row)) if expert // size in _best_ref(worth, top_groups)]
        chosen = [kept[index] for index in _best_ref(choice[kept], k)]
        rows.append((chosen, scores[chosen] / (scores[chosen].sum() + 1e-20 if normalise else 1) * scale))
    return _stack(rows)


def _best_ref(scores: Tensor, k: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda index: (-float(scores[index]), index))[:k]


def _stack(rows: list[tuple[list[int], Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.tensor([chosen for chosen, _ in rows]), torch.stack([weights for _, weights in rows])


def experts_ref(x: Tensor, chosen: Tensor, weights: Tensor, up: Tensor, down: Tensor, activation: Activation) -> Tensor:
    """`Experts` token by token and expert by expert, in float64: [T, D]."""
    x, weights, up, down = (value.double() for value in (x, weights, up, down))
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for expert, weight in zip(chosen[t].tolist(), weights[t], strict=True):
            wide = up[expert] @ x[t]
            if activation is Activation.RELU2:
                inner = wide.clamp(min=0) ** 2
            else:
                gate, value = wide.chunk(2)
                inner = gate / (1 + torch.exp(-gate)) * value
            out[t] += weight * (down[expert] @ inner)
    return out
