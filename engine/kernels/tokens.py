"""Token ids into the model and out of it, and copies of whole slots.

Legend: R rows, T packed tokens, D hidden size, V vocabulary. Twins: `torch.nn.functional.embedding`, indexing,
`StatePools.copy_slots`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.common import EARLY, enter, padded
from engine.kernels.rows import PackedRows

_COPY = 4096


def embed(
    token_ids: Tensor, last_tokens: Tensor, rows: PackedRows, embeddings: Tensor, *, multiplier: float = 1.0
) -> Tensor:
    """Embeddings of token_ids int32 [T], times multiplier -> [T, D]. An id of -1, in one of the first R tokens, each of
    which is then its row's only one, stands for the token that its slot sampled last: last_tokens int32 [slots]."""
    dim = embeddings.shape[1]
    out = torch.empty(token_ids.shape[0], dim, dtype=embeddings.dtype, device=embeddings.device)
    _embed[(token_ids.shape[0],)](
        token_ids,
        last_tokens,
        rows.slots,
        rows.count,
        embeddings,
        out,
        dim,
        multiplier,
        SCALED=multiplier != 1,
        BLOCK=padded(dim),
        num_warps=4,
        launch_pdl=EARLY,
    )
    return out


def keep_tokens(
    best: Tensor, tokens: Tensor, slots: Tensor, last_tokens: Tensor, *, places: Tensor | None = None
) -> Tensor:
    """last_tokens[slots] = tokens, and a report of what was sampled: float32 [2, R], the best logits, then the tokens.

    best [L] any float dtype, tokens int64 [L], less than 2^24; slots int32 [R]: slot 0, of padding, keeps nothing.
    places int32 [R]: which entry of best and tokens is a row's; None: R is L, one behind the other.
    """
    count = slots.shape[0]
    report = torch.empty(2, count, dtype=torch.float32, device=tokens.device)
    _keep_tokens[(1,)](
        best,
        tokens,
        slots,
        slots if places is None else places,
        last_tokens,
        report,
        count,
        PLACES=places is not None,
        BLOCK=padded(count),
        launch_pdl=EARLY,
    )
    return report


def copy_slots(pools: tuple[Tensor, ...], pairs: Tensor) -> None:
    """Copy whole slots: pools [slots, ...] contiguous (mutated), pairs int32 [2, n], sources then targets."""
    for pool in pools:
        size = pool[0].numel()
        _copy_slots[(triton.cdiv(size, _COPY), pairs.shape[1])](pool, pairs, pairs.shape[1], size, BLOCK=_COPY)


@triton.jit(do_not_specialize=["count"])
def _embed(
    token_ids,
    last_tokens,
    slots,
    count,
    embeddings,
    out,
    dim,
    multiplier,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    enter()
    t = tl.program_id(0)
    token = tl.load(token_ids + t)
    if (token < 0) & (t < count):
        token = tl.load(last_tokens + tl.load(slots + t))
    c = tl.arange(0, BLOCK)
    value = tl.load(embeddings + tl.maximum(token, 0).to(tl.int64) * dim + c, mask=c < dim)
    if SCALED:
        value = (value.to(tl.float32) * multiplier).to(value.dtype)
    tl.store(out + t.to(tl.int64) * dim + c, value, mask=c < dim)


@triton.jit(do_not_specialize=["count"])
def _keep_tokens(best, tokens, slots, places, last_tokens, report, count, PLACES: tl.constexpr, BLOCK: tl.constexpr):
    enter()
    r = tl.arange(0, BLOCK)
    mask = r < count
    place = tl.load(places + r, mask=mask, other=0) if PLACES else r
    token = tl.load(tokens + place, mask=mask, other=0)
    slot = tl.load(slots + r, mask=mask, other=0)
    tl.store(last_tokens + slot, token.to(tl.int32), mask=slot > 0)
    tl.store(report + r, tl.load(best + place, mask=mask, other=0.0).to(tl.float32), mask=mask)
    tl.store(report + count + r, token.to(tl.float32), mask=mask)


@triton.jit(do_not_specialize=["count"])
def _copy_slots(pool, pairs, count, size, BLOCK: tl.constexpr):
    pair = tl.program_id(1)
    source, target = tl.load(pairs + pair).to(tl.int64), tl.load(pairs + count + pair).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(pool + target * size + i, tl.load(pool + source * size + i, mask=i < size), mask=i < size)
