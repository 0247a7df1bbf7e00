"""The gated delta recurrence, state in and out of slots. Twin: `engine.ops.gated_delta`.

Legend: R rows, T packed tokens, J key heads, H value heads (H / J in a row share a key head), K key dim, V value dim, L
tokens in a cell, C channels of the convolution = 2 J K + H V: q, k, v, before q and k are normalised.
Cells lie on the row's own grid of positions 0, L, 2 L, ..., so a token's cell does not depend on what else is in the
batch, and a position to be kept, a multiple of the model's chunk and so of L, is always the end of a cell. Prefill is
two launches: `_prepare` does for every cell at once what needs no state, `_advance` goes through the cells of a row,
the state [K, V] of a head in registers, cut along V.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.common import EARLY, MIN_DOT, dot, enter, padded, silu
from engine.kernels.rows import PackedRows
from engine.ops.gated_delta import EPS

_EPS = tl.constexpr(EPS)
_BLOCK = tl.constexpr(MIN_DOT)


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """How a launch is cut: `values` of a head's V columns for a program, its warps and its pipeline's stages."""

    values: int
    warps: int
    stages: int = 1


def gated_delta_prefill(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    bias: Tensor,
    rate: Tensor,
    pool: Tensor,
    rows: PackedRows,
    *,
    key_heads: int,
    chunk: int,
    prepare: Cut | None = None,
    advance: Cut | None = None,
) -> Tensor:
    """Run every row through the recurrence from its slot, or from zeros where it starts at position 0.

    qkv [T, C] contiguous. a, b [T, H] with strided rows: decay = rate * softplus(a + bias), beta = sigmoid(b); bias and
    rate (below 0) [H] float32. pool [slots, H, K, V] (mutated: the state after the last token in the slot, that of the
    position to be kept in the track slot), a layer's strided view. Returns y [T, H V] in the dtype of qkv.
    """
    heads, dim, size = pool.shape[1:]
    tokens, channels = qkv.shape
    cell = math.gcd(chunk, _largest_cell(qkv.dtype))
    width = padded(cell, MIN_DOT)
    w, u, p = (qkv.new_empty(tokens, heads, each) for each in (dim, size, width))
    factors = torch.empty(3, tokens, heads, dtype=torch.float32, device=qkv.device)
    shapes = (tokens, heads, key_heads, dim, size)
    sizes = {"CELL": cell, "TOKENS": width, "DIM": padded(dim, MIN_DOT)}
    prepare = prepare or _prepare_cut(size, qkv.dtype)
    _prepare[((cell - 1 + rows.longest - 1) // cell + 1, heads, rows.count)](
        qkv,
        channels,
        a,
        a.stride(0),
        b,
        b.stride(0),
        bias,
        rate,
        w,
        u,
        p,
        factors,
        rows.begins,
        rows.starts,
        *shapes,
        dim**-0.5,
        **sizes,
        SIZE=prepare.values,
        LEVELS=(width // MIN_DOT).bit_length() - 1,
        PRECISION="ieee" if qkv.dtype is torch.float32 else "tf32",
        num_warps=prepare.warps,
        num_stages=prepare.stages,
    )
    y = qkv.new_empty(tokens, heads * size)
    advance = advance or _advance_cut(rows.count * heads, size, qkv.dtype)
    _advance[(triton.cdiv(size, advance.values), heads, rows.count)](
        qkv,
        channels,
        w,
        u,
        p,
        factors,
        pool,
        pool.stride(0),
        y,
        rows.begins,
        rows.starts,
        rows.slots,
        rows.track_slots,
        rows.track_offsets,
        *shapes,
        **sizes,
        SIZE=advance.values,
        num_warps=advance.warps,
        num_stages=advance.stages,
    )
    return y


def _largest_cell(dtype: torch.dtype) -> int:
    """Products of float32 have no tensor cores, and all of a larger cell would not fit into registers."""
    return 16 if dtype is torch.float32 else 64


def _prepare_cut(size: int, dtype: torch.dtype) -> Cut:
    wide = padded(size, MIN_DOT)
    return Cut(min(wide, 64), warps=8) if dtype is torch.float32 else Cut(wide, warps=4)


def _advance_cut(programs: int, size: int, dtype: torch.dtype) -> Cut:
    """programs: heads of all rows. Few of them: narrow columns, so that there are programs for the whole card."""
    wide = padded(size, MIN_DOT)
    if dtype is torch.float32:
        return Cut(min(wide, 32), warps=8)
    return Cut(64, warps=8, stages=2) if programs >= 128 and wide >= 64 else Cut(min(wide, 32), warps=4, stages=2)


def gated_delta_step(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    bias: Tensor,
    rate: Tensor,
    pool: Tensor,
    rows: PackedRows,
    *,
    key_heads: int,
    cut: Cut | None = None,
) -> Tensor:
    """Advance each row's state by one token. Of rows that are padding nothing is read, and nothing written.

    qkv [R, C] contiguous; a, b [R, H] with strided rows; bias, rate as `gated_delta_prefill`. pool [slots, H, K, V]
    (mutated), a layer's strided view. Returns y [R, H V] in the dtype of qkv.
    """
    heads, dim, size = pool.shape[1:]
    y = qkv.new_empty(rows.count, heads * size)
    cut = cut or Cut(values=min(padded(size), 16), warps=4)
    _step[(triton.cdiv(size, cut.values), heads, rows.count)](
        qkv,
        qkv.shape[1],
        a,
        a.stride(0),
        b,
        b.stride(0),
        bias,
        rate,
        pool,
        pool.stride(0),
        y,
        rows.starts,
        rows.slots,
        heads,
        key_heads,
        dim,
        size,
        dim**-0.5,
        DIM=padded(dim),
        SIZE=cut.values,
        num_warps=cut.warps,
        launch_pdl=EARLY,
        enable_fp_fusion=qkv.dtype is not torch.float32,  # with it, threads that share a sum could round it differently
    )
    return y


def head_rms_norm_gated(y: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm within each head, times weight, times silu(gate). Twin: `engine.ops.norm.head_rms_norm_gated`.

    y [T, H V] contiguous, gate [T, H V] with strided rows, weight [V] float32. Returns [T, H V] in the gate's dtype.
    """
    rows, channels = y.shape
    size = weight.shape[0]
    out = torch.empty(rows, channels, dtype=gate.dtype, device=y.device)
    heads = min(padded(channels // size), max(1, 2048 // padded(size)))  # of one program
    _head_rms_norm_gated[(rows, triton.cdiv(channels // size, heads))](
        y,
        gate,
        gate.stride(0),
        weight,
        out,
        channels,
        size,
        eps,
        HEADS=heads,
        SIZE=padded(size),
        num_warps=4,
        launch_pdl=EARLY,
    )
    return out


@triton.jit
def _log_decay(a, bias, rate):
    """rate * softplus(a + bias), to the last digits where it is near 0 too."""
    a += bias
    small = tl.exp(tl.minimum(a, 20.0))
    more = 1 + small
    grown = tl.where(more == 1, small, tl.log(more) * (small / tl.where(more == 1, 1.0, more - 1)))
    return rate * tl.where(a > 20, a, grown)


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _cell_of(begins, starts, row, cell, CELL: tl.constexpr):
    """The cell's first packed token, how many it has (none: it lies behind the row), its end counted in the row."""
    begin = tl.load(begins + row).to(tl.int64)
    count = (tl.load(begins + row + 1) - begin).to(tl.int32)
    shift = tl.load(starts + row) % CELL
    first, end = tl.maximum(cell * CELL - shift, 0), tl.minimum((cell + 1) * CELL - shift, count)
    return begin + first, end - first, end


@triton.jit
def _inverse(system, TOKENS: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """(I + system)^-1 for a strictly lower triangular system [L, L] float32, whose result has no element beyond 1.

    Substitution inside all diagonal blocks at once, then blocks of twice the size from pairs, until one is left.
    """
    place, inner = tl.arange(0, TOKENS), tl.arange(0, _BLOCK)
    own = (place // _BLOCK)[:, None, None] == tl.arange(0, TOKENS // _BLOCK)[None, :, None]  # [L, blocks, 1]
    system_3d = tl.reshape(system, (TOKENS, TOKENS // _BLOCK, _BLOCK))
    diagonal = tl.reshape(tl.sum(tl.where(own, system_3d, 0.0), 1), (TOKENS // _BLOCK, _BLOCK, _BLOCK))
    eye = tl.where(inner[:, None] == inner[None, :], 1.0, 0.0)
    blocks = tl.broadcast_to(eye[None, :, :], (TOKENS // _BLOCK, _BLOCK, _BLOCK))
    for i in range(_BLOCK - 1):
        column = tl.sum(tl.where((inner == i)[None, None, :], diagonal, 0.0), 2)  # [blocks, 16]
        line = tl.sum(tl.where((inner == i)[None, :, None], blocks, 0.0), 1)  # [blocks, 16], final
        blocks -= column[:, :, None] * line[:, None, :]
    spread = tl.where(own, tl.reshape(blocks, (TOKENS, 1, _BLOCK)), 0.0)
    inverse = tl.reshape(spread, (TOKENS, TOKENS))
    for level in tl.static_range(LEVELS):
        half = place // (_BLOCK << level)
        whole = half // 2
        pair = (whole[:, None] == whole[None, :]) & (half[:, None] != half[None, :])
        below = tl.dot(inverse, tl.where(pair, system, 0.0), input_precision=PRECISION)
        inverse -= tl.dot(below, inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def _prepare(
    qkv,
    qkv_stride,
    a,
    a_stride,
    b,
    b_stride,
    bias,
    rate,
    w,
    u,
    p,
    factors,
    begins,
    starts,
    tokens,
    heads,
    key_heads,
    dim,
    size,
    scale,
    CELL: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """With the inverse of a cell's system, D[t] the decay from its start: w = inverse (beta exp(D) k) [L, K],
    u = inverse (beta v) [L, V], so that the cell's update is u - w S; p [L, L] from update to y; factors of y from S,
    of the update to S, and (at the first token) of S to its end."""
    cell, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, length, _ = _cell_of(begins, starts, row, cell, CELL)
    if length <= 0:
        return
    place, x, z = tl.arange(0, TOKENS), tl.arange(0, DIM), tl.arange(0, SIZE)
    here = place < length
    decay = _log_decay(
        tl.load(a + first * a_stride + head + place * a_stride, mask=here, other=0.0).to(tl.float32),
        tl.load(bias + head),
        tl.load(rate + head),
    )
    decay = tl.where(here, decay, 0.0).to(tl.float64)
    beta = tl.load(b + first * b_stride + head + place * b_stride, mask=here, other=0.0).to(tl.float32)
    beta = tl.where(here, _sigmoid(beta), 0.0)
    past, total = tl.cumsum(decay, 0), tl.sum(decay, 0)
    high = past.to(tl.float32)
    low = (past - high).to(tl.float32)
    gap = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])  # as in float64, where exp(gap) is not 0
    weight = tl.exp(tl.where(place[:, None] >= place[None, :], gap, -float("inf")))  # [L, L], from column to row
    since = tl.exp(high)

    key_head = head // (heads // key_heads)
    inside = here[:, None] & (x < dim)[None, :]
    token = qkv + first * qkv_stride
    rows = place[:, None] * qkv_stride
    q = tl.load(token + key_head * dim + rows + x[None, :], mask=inside, other=0.0)  # [L, K]
    k = tl.load(token + (key_heads + key_head) * dim + rows + x[None, :], mask=inside, other=0.0)  # [L, K]
    wide_q, wide_k = q.to(tl.float32), k.to(tl.float32)
    q_scale = scale / tl.sqrt(tl.sum(wide_q * wide_q, 1) + _EPS)  # [L]
    k_scale = 1 / tl.sqrt(tl.sum(wide_k * wide_k, 1) + _EPS)  # [L]
    nothing = tl.zeros((TOKENS, TOKENS), tl.float32)
    weight *= k_scale[None, :]
    to_y = dot(q, tl.trans(k), nothing) * weight * q_scale[:, None]
    own, following = first * heads + head, place * heads  # [L]: the places of these tokens' values of this head
    p_at = p + own * TOKENS + following[:, None] * TOKENS + place[None, :]
    tl.store(p_at, to_y.to(p.dtype.element_ty), mask=here[:, None])
    system = dot(k, tl.trans(k), nothing) * weight * (beta * k_scale)[:, None]
    inverse = _inverse(tl.where(place[:, None] > place[None, :], system, 0.0), TOKENS, LEVELS, PRECISION)

    from_k = (inverse * (beta * since * k_scale)[None, :]).to(k.dtype)
    out = dot(from_k, k, tl.zeros((TOKENS, DIM), tl.float32))
    tl.store(w + own * dim + following[:, None] * dim + x[None, :], out.to(w.dtype.element_ty), mask=inside)
    from_v = (inverse * beta[None, :]).to(k.dtype)
    for column in range(0, size, SIZE):
        in_v = here[:, None] & (column + z < size)[None, :]
        v_at = token + 2 * key_heads * dim + head * size + column
        v = tl.load(v_at + rows + z[None, :], mask=in_v, other=0.0)  # [L, V]
        update = dot(from_v, v, tl.zeros((TOKENS, SIZE), tl.float32))
        u_at = u + own * size + column + following[:, None] * size + z[None, :]
        tl.store(u_at, update.to(u.dtype.element_ty), mask=in_v)
    plane = tokens.to(tl.int64) * heads
    tl.store(factors + own + following, since * q_scale, mask=here)
    tl.store(factors + plane + own + following, tl.exp((total - past).to(tl.float32)) * k_scale, mask=here)
    tl.store(factors + 2 * plane + own, tl.exp(total.to(tl.float32)))


@triton.jit
def _advance(
    qkv,
    qkv_stride,
    w,
    u,
    p,
    factors,
    pool,
    pool_stride,
    y,
    begins,
    starts,
    slots,
    track_slots,
    track_offsets,
    tokens,
    heads,
    key_heads,
    dim,
    size,
    CELL: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
):
    head, row = tl.program_id(1), tl.program_id(2)
    x, z, place = tl.arange(0, DIM), tl.program_id(0) * SIZE + tl.arange(0, SIZE), tl.arange(0, TOKENS)
    start, track, boundary = tl.load(starts + row), tl.load(track_slots + row), tl.load(track_offsets + row)
    cells = head * dim * size + x[:, None] * size + z[None, :]
    inside = (x < dim)[:, None] & (z < size)[None, :]
    slot = pool + tl.load(slots + row).to(tl.int64) * pool_stride
    begun = tl.where(start > 0, dim, 0)  # of a row that starts at 0 nothing is read
    state = tl.load(slot + cells, mask=inside & (x < begun)[:, None], other=0.0).to(tl.float32)  # [K, V]
    in_x, in_z = (x < dim)[None, :], (z < size)[None, :]
    following = place * heads
    q_at = head // (heads // key_heads) * dim + place[:, None] * qkv_stride + x[None, :]
    w_at, u_at = following[:, None] * dim + x[None, :], following[:, None] * size + z[None, :]
    p_at = following[:, None] * TOKENS + place[None, :]
    plane = tokens.to(tl.int64) * heads
    count = tl.load(begins + row + 1) - tl.load(begins + row)
    for cell in range(tl.cdiv(start % CELL + count, CELL)):
        first, length, end = _cell_of(begins, starts, row, cell, CELL)
        here = place < length
        token, own = qkv + first * qkv_stride, first * heads + head
        q = tl.load(token + q_at, mask=here[:, None] & in_x, other=0.0)  # [L, K]
        k = tl.load(token + key_heads * dim + q_at, mask=here[:, None] & in_x, other=0.0)  # [L, K]
        from_state = tl.load(w + own * dim + w_at, mask=here[:, None] & in_x, other=0.0)  # [L, K]
        update = tl.load(u + own * size + u_at, mask=here[:, None] & in_z, other=0.0).to(tl.float32)  # [L, V]
        to_y = tl.load(p + own * TOKENS + p_at, mask=here[:, None], other=0.0)  # [L, L]
        read = tl.load(factors + own + following, mask=here, other=0.0)
        left = tl.load(factors + plane + own + following, mask=here, other=0.0)
        kept = tl.load(factors + 2 * plane + own)
        narrow = state.to(q.dtype)
        update -= dot(from_state, narrow, tl.zeros((TOKENS, SIZE), tl.float32))
        out = dot(q, narrow, tl.zeros((TOKENS, SIZE), tl.float32)) * read[:, None]
        out = dot(to_y, update.to(q.dtype), out)
        tl.store(y + own * size + u_at, out.to(y.dtype.element_ty), mask=here[:, None] & in_z)
        state = dot(tl.trans(k), (update * left[:, None]).to(k.dtype), state * kept)
        if (track > 0) & (end == boundary):
            kept_slot = pool + track.to(tl.int64) * pool_stride
            tl.store(kept_slot + cells, state.to(pool.dtype.element_ty), mask=inside)
    tl.store(slot + cells, state.to(pool.dtype.element_ty), mask=inside)


@triton.jit
def _step(
    qkv,
    qkv_stride,
    a,
    a_stride,
    b,
    b_stride,
    bias,
    rate,
    pool,
    pool_stride,
    y,
    starts,
    slots,
    heads,
    key_heads,
    dim,
    size,
    scale,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
):
    enter()
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    start, slot = tl.load(starts + row), tl.load(slots + row).to(tl.int64)
    if start < 0:
        return
    x, z = tl.arange(0, DIM), tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mask = (x < dim)[:, None] & (z < size)[None, :]
    cells = pool + slot * pool_stride + head * dim * size + x[:, None] * size + z[None, :]
    old = tl.load(cells, mask=mask, other=0.0).to(tl.float32)  # [K, V]
    token = qkv + row * qkv_stride
    q_at = token + head // (heads // key_heads) * dim + x
    q = tl.load(q_at, mask=x < dim, other=0.0).to(tl.float32)
    k = tl.load(q_at + key_heads * dim, mask=x < dim, other=0.0).to(tl.float32)
    v = tl.load(token + 2 * key_heads * dim + head * size + z, mask=z < size, other=0.0).to(tl.float32)
    decay = _log_decay(tl.load(a + row * a_stride + head).to(tl.float32), tl.load(bias + head), tl.load(rate + head))
    kept = tl.exp(decay)
    beta = _sigmoid(tl.load(b + row * b_stride + head).to(tl.float32))
    q_scale = scale / tl.sqrt(tl.sum(q * q, 0) + _EPS)
    k_scale = 1 / tl.sqrt(tl.sum(k * k, 0) + _EPS)
    known, read = tl.sum(old * k[:, None], 0), tl.sum(old * q[:, None], 0)  # no sum waits for another
    update = (v - known * (kept * k_scale)) * beta
    new = old * kept + (k * k_scale)[:, None] * update[None, :]
    tl.store(cells, new.to(pool.dtype.element_ty), mask=mask)
    out = read * (kept * q_scale) + tl.sum(q * k, 0) * (q_scale * k_scale) * update
    tl.store(y + row * heads * size + head * size + z, out.to(y.dtype.element_ty), mask=z < size)


@triton.jit
def _head_rms_norm_gated(
    y, gate, gate_stride, weight, out, channels, size, eps, HEADS: tl.constexpr, SIZE: tl.constexpr
):
    enter()
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS * size
    z = tl.arange(0, SIZE)
    c = first + tl.arange(0, HEADS)[:, None] * size + z[None, :]
    mask = (c < channels) & (z < size)[None, :]
    value = tl.load(y + row * channels + c, mask=mask, other=0.0).to(tl.float32)  # [heads, V]
    value *= (1 / tl.sqrt(tl.sum(value * value, 1) / size + eps))[:, None]
    value *= tl.load(weight + z, mask=z < size, other=0.0)[None, :]
    value *= silu(tl.load(gate + row * gate_stride + c, mask=mask, other=0.0).to(tl.float32))
    tl.store(out + row * channels + c, value.to(out.dtype.element_ty), mask=mask)
