"""The gated delta recurrence (Qwen3-Next): chunked for prefill, one token for decode.

Legend: T packed tokens, S sequences, B decode rows, J key heads, H value heads (H / J in a row share a key head), K key
dim, V value dim, R chunk rows of a step, L tokens in a chunk row (see `engine.ops.chunks`).
    S <- exp(decay[t]) S;  u[t] = beta[t] (v[t] - S^T k[t]);  S <- S + k[t] u[t]^T;  y[t] = S^T q[t]     S [K, V]
for each value head, decay <= 0, 0 <= beta <= 1; k has length 1 and q length K^-0.5. Within a chunk that begins with S0,
D[t] its decay up to token t, the u are the solution of a unit lower triangular system:
    u[t] + beta[t] sum over s < t of exp(D[t] - D[s]) (k[t] k[s]) u[s] = beta[t] (v[t] - exp(D[t]) S0^T k[t])
Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2025, section 3.3. All arithmetic is float32 and larger.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from engine.ops.chunks import ChunkPlan, to_rows
from engine.ops.slots import SlotIndex, read_slots, save_states, write_slots

EPS = 1e-6  # added to the squared length of q and k


def gated_delta_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    pool: Tensor,
    slots: SlotIndex,
    fresh: Tensor,
    plan: ChunkPlan,
) -> Tensor:
    """Run packed sequences through the recurrence, each continuing from its slot.

    q, k [T, J, K] before they are normalised and v [T, H, V], any float dtype; decay (its logarithm, <= 0) and beta
    [T, H] float32. pool [slots, H, K, V], any float dtype (mutated: the state after the last token; in track slots, the
    state of the position to be kept). fresh bool [S]: begin with zeros.
    Returns y [T, H, V] float32.
    """
    parts = (_unit(q) * q.shape[-1] ** -0.5, _unit(k), v, decay, beta)
    rows = [to_rows(part, plan).transpose(1, 2) for part in parts]  # [R, J or H, L, ...]
    before = torch.where(fresh[:, None, None, None], 0, read_slots(pool, slots).float())
    state = before.index_select(0, plan.order)  # [S, H, K, V], the longest sequence first
    y = torch.empty_like(rows[2])  # [R, H, L, V]
    for low, high in itertools.pairwise(plan.edges):
        save_states(pool, ((slot, state[row - low]) for slot, row in plan.tracks if low <= row < high))
        y[low:high] = _chunk(state[: high - low], *(part[low:high] for part in rows))
    final = torch.empty_like(state).index_copy_(0, plan.order, state)
    write_slots(pool, slots, final)
    save_states(pool, ((slot, final[row - plan.rows]) for slot, row in plan.tracks if row >= plan.rows))
    return y.transpose(1, 2).reshape(plan.rows * plan.width, *v.shape[1:]).index_select(0, plan.tokens)  # [T, H, V]


def _unit(x: Tensor) -> Tensor:
    """x of any float dtype at length 1 over the last dimension, float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def _chunk(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """One chunk of each of R sequences.

    state [R, H, K, V] (mutated: that after the chunk), q, k [R, J, L, K], v [R, H, L, V], decay, beta [R, H, L]. Where
    a row has no token, decay and beta are 0 and nothing changes. Returns y [R, H, L, V].
    """
    share, width = v.shape[1] // k.shape[1], v.shape[2]
    past = torch.cumsum(decay.double(), -1)  # [R, H, L], from before the chunk to after the token
    future = torch.ones(width, width, dtype=torch.bool, device=v.device).triu(1)
    weight = (past.unsqueeze(-1) - past.unsqueeze(-2)).masked_fill_(future, -torch.inf).exp_().float()  # [R, H, L, L]
    since = torch.exp(past).float().unsqueeze(-1)  # [R, H, L, 1], what is left of the old state at each token
    left = torch.exp(past[..., -1:] - past).float().unsqueeze(-1)  # [R, H, L, 1], of a token at the chunk's end
    q, k = (part.repeat_interleave(share, 1) for part in (q, k))  # [R, H, L, K]

    known = torch.matmul(k, state).mul_(since)  # [R, H, L, V], what the old state says of v
    system = torch.matmul(k, k.mT).mul_(weight).mul_(beta.unsqueeze(-1))  # [R, H, L, L], ones on the diagonal
    wanted = (v - known).mul_(beta.unsqueeze(-1))
    u = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)  # [R, H, L, V]
    y = torch.matmul(q, state).mul_(since)
    y += torch.matmul(torch.matmul(q, k.mT).mul_(weight), u)
    state.mul_(since[:, :, -1:]).add_(torch.matmul((k * left).mT, u))
    return y


def gated_delta_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, pool: Tensor, slots: SlotIndex
) -> Tensor:
    """One token of each of B sequences.

    q, k [B, J, K] before they are normalised and v [B, H, V], any float dtype; decay and beta [B, H] float32.
    pool [slots, H, K, V] (mutated). Returns y [B, H, V] float32.
    """
    share = v.shape[1] // k.shape[1]
    queries, keys = (_unit(part).repeat_interleave(share, 1) for part in (q, k))  # [B, H, K]
    queries *= q.shape[-1] ** -0.5
    state = read_slots(pool, slots).float()  # [B, H, K, V], a view of a float32 pool when slots are a run
    kept = torch.exp(decay)[..., None, None]
    known, read = torch.matmul(torch.stack((keys, queries), -2), state).mul_(kept).unbind(-2)  # [B, H, V], of S alone
    u = (v - known).mul_(beta.unsqueeze(-1))
    state.mul_(kept).addcmul_(keys.unsqueeze(-1), u.unsqueeze(-2))
    write_slots(pool, slots, state)
    return torch.addcmul(read, (queries * keys).sum(-1, keepdim=True), u)


def gated_delta_sequential_ref(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One sequence, token by token, in float64.

    q, k [n, J, K], v [n, H, V], decay, beta [n, H], state [H, K, V] -> y [n, H, V], new state [H, K, V].
    """
    q, k, v, decay, beta, state = (value.double() for value in (q, k, v, decay, beta, state))
    share = v.shape[1] // k.shape[1]
    outputs = []
    for t in range(v.shape[0]):
        query, key = (
            (one[t] / torch.sqrt((one[t] ** 2).sum(-1, keepdim=True) + EPS)).repeat_interleave(share, 0)
            for one in (q, k)
        )  # [H, K]
        state = torch.exp(decay[t])[:, None, None] * state
        error = v[t] - (state * key[:, :, None]).sum(1)  # [H, V]
        state = state + key[:, :, None] * (beta[t, :, None] * error)[:, None, :]
        outputs.append((state * query[:, :, None]).sum(1) / key.shape[-1] ** 0.5)
    return torch.stack(outputs), state
