"""Causal depthwise convolution with its state in slots, followed by silu.

Legend: T packed tokens, S sequences, B decode rows, C channels, W conv width.
    out[t] = silu(bias + sum over k of weight[:, k] * input[t - (W - 1) + k])
The state of a sequence is its last W - 1 inputs, oldest first: [C, W - 1].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops.slots import SlotIndex, read_slots, save_states, write_slots
from engine.tracking import Boundary


@dataclasses.dataclass(frozen=True, slots=True)
class ConvPlan:
    """Where the packed tokens lie in a buffer in which each sequence follows its own W - 1 earlier inputs.

    length: rows of that buffer, T + S (W - 1). heads, tails: int64 [S (W - 1)], the earlier inputs of each sequence
    and its last W - 1 ones. tokens: int64 [T]. With one sequence, heads and tokens are ranges and are not used.
    tracks: (slot, first of the W - 1 rows to save there).
    """

    sequences: int
    length: int
    heads: Tensor
    tails: Tensor
    tokens: Tensor
    tracks: tuple[tuple[int, int], ...]


def plan_conv(lengths: Sequence[int], width: int, tracks: Sequence[Boundary], device: torch.device | str) -> ConvPlan:
    """The plan for sequences of these lengths (each at least 1), packed one behind the other."""
    counts = torch.tensor(lengths)
    ends = torch.cumsum(counts + (width - 1), 0)  # [S]
    starts = ends - counts  # of the tokens, behind their heads
    window = torch.arange(width - 1)
    order = torch.arange(int(counts.sum())) + torch.repeat_interleave(
        (width - 1) * torch.arange(1, len(lengths) + 1), counts
    )
    return ConvPlan(
        sequences=len(lengths),
        length=int(ends[-1]),
        heads=(starts[:, None] - (width - 1) + window).flatten().to(device),
        tails=(ends[:, None] - (width - 1) + window).flatten().to(device),
        tokens=order.to(device),
        # A sequence's W - 1 heads come before its tokens: the inputs before token `offset` begin `offset` rows in.
        tracks=tuple((one.slot, int(starts[one.sequence]) - (width - 1) + one.offset) for one in tracks),
    )


def conv_prefill(
    x: Tensor, pool: Tensor, slots: SlotIndex, fresh: Tensor, plan: ConvPlan, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Convolve packed sequences, each continuing from its slot.

    x [T, C], pool [slots, C, W - 1] (mutated: the new last inputs; in track slots the inputs before the position to be
    kept, some of which may be the slot's), fresh bool [S]: begin with zeros whatever the slot holds. weight [W, C],
    bias [C] or None. Returns [T, C].
    """
    width, channels = weight.shape
    state = read_slots(pool, slots)
    heads = torch.where(fresh[:, None, None], 0, state).transpose(1, 2).reshape(-1, channels)  # [S (W - 1), C]
    buffer = _interleave(heads.to(x.dtype), x, plan)  # [T + S (W - 1), C]
    tails = buffer.index_select(0, plan.tails).view(plan.sequences, width - 1, channels)
    write_slots(pool, slots, tails.transpose(1, 2))
    save_states(pool, ((slot, buffer[begin : begin + width - 1].t()) for slot, begin in plan.tracks))
    out = _weighted(buffer, weight, bias)  # [length - (W - 1), C]
    out = out if plan.sequences == 1 else out.index_select(0, plan.tokens - (width - 1))
    return F.silu(out, inplace=True)


def conv_step(x: Tensor, pool: Tensor, slots: SlotIndex, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve one token of each of B sequences. x [B, C]; the rest and the result as `conv_prefill`."""
    state = read_slots(pool, slots)  # [B, C, W - 1]
    out = x * weight[-1]
    for k in range(state.shape[-1]):
        out.addcmul_(state[..., k], weight[k])
    # All windows move by one element as one flat copy; the last place of each, now wrong, is what the token fills.
    flat = state.flatten(1)
    flat[:, :-1] = flat[:, 1:].clone()
    state[..., -1] = x
    write_slots(pool, slots, state)
    return F.silu(out if bias is None else out.add_(bias), inplace=True)


def _interleave(heads: Tensor, x: Tensor, plan: ConvPlan) -> Tensor:
    if plan.sequences == 1:
        return torch.cat((heads, x))
    buffer = x.new_empty(plan.length, x.shape[1])
    buffer.index_copy_(0, plan.heads, heads)
    return buffer.index_copy_(0, plan.tokens, x)


def _weighted(buffer: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    width = weight.shape[0]
    rows = buffer.shape[0] - (width - 1)
    out = buffer[:rows] * weight[0]
    for k in range(1, width):
        out.addcmul_(buffer[k : k + rows], weight[k])
    return out if bias is None else out.add_(bias)


def conv_ref(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """One sequence, token by token, in float64: x [n, C], state [C, W - 1] -> out [n, C], new state [C, W - 1]."""
    window, outputs = state.double(), []
    for token in x.double():
        full = torch.cat((window, token[:, None]), dim=1)  # [C, W]
        total = (full * weight.double().t()).sum(1) + (0 if bias is None else bias.double())
        outputs.append(total / (1 + torch.exp(-total)))
        window = full[:, 1:]
    return torch.stack(outputs), window
