"""The Mamba2 recurrence (state space duality): chunked for prefill, one token for decode.

Legend: T packed tokens, S sequences, B decode rows, H heads, P head dim, G groups (H / G heads share b and c),
N state, K chunk rows of a step, L tokens in a chunk row (see `engine.ops.chunks`).
    h[t] = exp(dt[t] * a) h[t-1] + dt[t] * x[t] b[t]^T        h [P, N] for each head, a < 0
    y[t] = h[t] c[t] + d * x[t]
Source: Dao and Gu, "Transformers are SSMs", 2024, section 6. All arithmetic is float32 and larger.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.chunks import ChunkPlan, to_rows
from engine.ops.slots import SlotIndex, read_slots, save_states, write_slots


def ssd_prefill(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    pool: Tensor,
    slots: SlotIndex,
    fresh: Tensor,
    plan: ChunkPlan,
) -> Tensor:
    """Run packed sequences through the recurrence, each continuing from its slot.

    x [T, H, P], b and c [T, G, N] any float dtype; dt [T, H] > 0, a [H] < 0, d [H] float32.
    pool [slots, H, P, N] (mutated: the state after the last token; in track slots, the state of the position to be
    kept). fresh bool [S]: begin with zeros.
    Returns y [T, H, P] float32.
    """
    x_rows, b_rows, c_rows, dt_rows = (to_rows(value, plan) for value in (x, b, c, dt))  # [K, L, ...]
    x_rows.mul_(dt_rows.unsqueeze(-1))  # dt * x; rows beyond a sequence's end have dt 0: no decay, no input
    decay = torch.cumsum((dt_rows * a).transpose(1, 2).double(), -1)  # [K, H, L]
    xs = _by_group(x_rows.flatten(2), b.shape[1])  # [K, G, L, H / G * P]
    bs, cs = b_rows.transpose(1, 2), c_rows.transpose(1, 2)  # [K, G, L, N]

    before = _state_before_rows(xs, bs, decay, read_slots(pool, slots), fresh, plan)  # [K + S, H, P, N]
    write_slots(pool, slots, before[plan.rows :])
    save_states(pool, ((slot, before[row]) for slot, row in plan.tracks))
    y = _within_rows(xs, bs, cs, decay)  # [K, H, L, P]
    y.addcmul_(_from_state(cs, before[: plan.rows]), torch.exp(decay.float()).unsqueeze(-1))
    packed = y.transpose(1, 2).reshape(plan.rows * plan.width, *x.shape[1:]).index_select(0, plan.tokens)
    return packed.addcmul_(x, d.unsqueeze(-1))  # [T, H, P]


def _by_group(rows: Tensor, groups: int) -> Tensor:
    """[K, L, channels] -> [K, G, L, channels / G]."""
    return rows.view(*rows.shape[:2], groups, -1).transpose(1, 2)


def _by_head(xs: Tensor, heads: int) -> Tensor:
    """[K, G, L, H / G * P] -> [K, G, L, H / G, P]."""
    return xs.view(*xs.shape[:3], heads // xs.shape[1], -1)


def _within_rows(xs: Tensor, bs: Tensor, cs: Tensor, decay: Tensor) -> Tensor:
    """What the tokens of a chunk get from each other: y [K, H, L, P]."""
    rows, groups, width, _ = xs.shape
    heads = decay.shape[1]
    future = torch.ones(width, width, dtype=torch.bool, device=xs.device).triu(1)
    gap = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).float()  # [K, H, L, L], from column to row
    weight = gap.masked_fill_(future, -torch.inf).exp_()
    scores = torch.matmul(cs, bs.transpose(-1, -2))  # [K, G, L, L]
    weight.view(rows, groups, heads // groups, width, width).mul_(scores.unsqueeze(2))
    values = _by_head(xs, heads).transpose(2, 3).reshape(rows, heads, width, -1)  # [K, H, L, P]
    return torch.matmul(weight, values)


def _state_before_rows(
    xs: Tensor, bs: Tensor, decay: Tensor, initial: Tensor, fresh: Tensor, plan: ChunkPlan
) -> Tensor:
    """The state each chunk row begins with [K, H, P, N], followed by the final state of each sequence [S, H, P, N]."""
    rows, groups, width, _ = xs.shape
    heads, sequences = decay.shape[1], fresh.shape[0]
    left = torch.exp(decay[..., -1:] - decay).float()  # [K, H, L], what is left of a token at the end of its row
    weighted = _by_head(xs, heads) * left.view(rows, groups, -1, width).transpose(2, 3).unsqueeze(-1)
    added = torch.matmul(weighted.flatten(-2).transpose(-1, -2), bs)  # [K, G, H / G * P, N]
    added = added.view(rows, *initial.shape[1:])  # [K, H, P, N]
    kept = torch.exp(decay[..., -1]).float()[..., None, None]  # [K, H, 1, 1]

    before = torch.empty(rows + sequences, *initial.shape[1:], dtype=torch.float32, device=xs.device)
    before[:sequences] = torch.where(fresh[:, None, None, None], 0, initial.float()).index_select(0, plan.order)
    for low, high, following in zip(plan.edges, plan.edges[1:], plan.edges[2:], strict=False):
        size = following - high  # sequences that have another row
        now = slice(low, low + size)
        torch.addcmul(added[now], before[now], kept[now], out=before[high:following])
    last = plan.last_rows
    torch.addcmul(added[last], before[last], kept[last], out=before[rows:])
    return before


def _from_state(cs: Tensor, states: Tensor) -> Tensor:
    """What tokens read from the state their row began with, before decay: cs [K, G, L, N] -> [K, H, L, P]."""
    rows, groups, width, size = cs.shape
    heads, dim = states.shape[1:3]
    read = torch.matmul(states.reshape(rows, groups, -1, size), cs.transpose(-1, -2))  # [K, G, H / G * P, L]
    return read.view(rows, heads, dim, width).transpose(2, 3)


def ssd_step(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, pool: Tensor, slots: SlotIndex
) -> Tensor:
    """One token of each of B sequences.

    x [B, H, P], b and c [B, G, N] any float dtype; dt [B, H] > 0, a [H], d [H] float32.
    pool [slots, H, P, N] (mutated). Returns y [B, H, P] float32.
    """
    rows, heads, dim = x.shape
    groups, size = b.shape[1:]
    state = read_slots(pool, slots).float()  # [B, H, P, N], a view of a float32 pool when slots are a run
    state.mul_(torch.exp(dt * a)[..., None, None])
    grouped = state.view(rows, groups, -1, size)  # [B, G, H / G * P, N]
    grouped.addcmul_((x * dt.unsqueeze(-1)).view(rows, groups, -1, 1), b.float().unsqueeze(2))
    write_slots(pool, slots, state)
    # One product reads every head with the c of every group; the diagonal keeps each head's own group.
    read = torch.bmm(c.float(), state.view(rows, heads * dim, size).transpose(1, 2))  # [B, G, H * P]
    own = read.view(rows, groups, groups, -1).diagonal(dim1=1, dim2=2).transpose(1, 2)  # [B, G, H / G * P]
    return torch.addcmul(own.reshape(rows, heads, dim), x, d.unsqueeze(-1))


def ssd_sequential_ref(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One sequence, token by token, in float64.

    x [n, H, P], dt [n, H], a [H], b and c [n, G, N], d [H], state [H, P, N] -> y [n, H, P], new state [H, P, N].
    """
    x, dt, a, b, c, d, state = (value.double() for value in (x, dt, a, b, c, d, state))
    share = x.shape[1] // b.shape[1]
    outputs = []
    for t in range(x.shape[0]):
        b_heads, c_heads = b[t].repeat_interleave(share, 0), c[t].repeat_interleave(share, 0)  # [H, N]
        update = (dt[t, :, None] * x[t])[:, :, None] * b_heads[:, None, :]  # [H, P, N]
        state = torch.exp(dt[t] * a)[:, None, None] * state + update
        outputs.append((state * c_heads[:, None, :]).sum(-1) + d[:, None] * x[t])
    return torch.stack(outputs), state
