"""A matrix product for few rows, limited by reading the weight once: x W^T with what comes before and after it.

Legend: T rows (few), I inputs, O outputs. The twin is `engine.ops.linear.Projection` between `rms_norm` and the
residual's addition.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.common import EARLY, MIN_DOT, allow_next, dot, padded, prefetch, wait_for_previous


@dataclasses.dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut: outputs and inputs of a block, how many programs share the inputs, launch options,
    and how many cache lines (128 bytes) of each weight row are asked for ahead of time."""

    outputs: int
    inputs: int
    splits: int
    warps: int
    stages: int
    ahead: int


class Workspace:
    """Partial sums of products whose inputs are split. For products that run one after the other on one stream."""

    def __init__(self, max_values: int, max_blocks: int, device: torch.device | str) -> None:
        self.partial = torch.empty(max_values, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(max_blocks, dtype=torch.int32, device=device)


def project(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None,
    eps: float,
    square: bool,
    residual: Tensor | None,
    tiling: Tiling,
    workspace: Workspace,
) -> Tensor:
    """x [T, I] (rows may be strided), weight [O, I] -> [T, O].

    norm: float32 [I], the RMS norm to apply to x first, with `eps`. square: relu(out)^2. residual [T, O]: what is added
    to and returned (mutated). A norm and split inputs exclude each other.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0]
    assert norm is None or tiling.splits == 1, "every program must see the whole row"
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device) if residual is None else residual
    blocks = triton.cdiv(outputs, tiling.outputs)
    if tiling.splits > 1:
        assert tiling.splits * rows * outputs <= workspace.partial.numel() and blocks <= workspace.arrived.numel()
    _project[(blocks, tiling.splits)](
        x,
        x.stride(0),
        weight,
        weight if norm is None else norm,
        out,
        workspace.partial,
        workspace.arrived,
        rows,
        outputs,
        inputs,
        eps,
        NORM=norm is not None,
        SQUARE=square,
        ADD=residual is not None,
        SPLITS=tiling.splits,
        ROWS=padded(rows, MIN_DOT),
        OUTPUTS=tiling.outputs,
        INPUTS=tiling.inputs,
        EVEN=inputs % (tiling.inputs * tiling.splits) == 0,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        AHEAD=tiling.ahead,
        launch_pdl=EARLY,
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _project(
    x,
    x_stride,
    weight,
    norm,
    out,
    partial,
    arrived,
    rows,
    outputs,
    inputs,
    eps,
    NORM: tl.constexpr,
    SQUARE: tl.constexpr,
    ADD: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    EVEN: tl.constexpr,
    AHEAD: tl.constexpr,
):
    allow_next()
    block, split = tl.program_id(0), tl.program_id(1)
    o = block * OUTPUTS + tl.arange(0, OUTPUTS)
    t = tl.arange(0, ROWS)
    share = tl.cdiv(tl.cdiv(inputs, SPLITS), INPUTS) * INPUTS
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    weights = weight + tl.minimum(o, outputs - 1)[:, None] * inputs
    if AHEAD:
        # The weight is constant: some of it comes into the cache while the kernel before this one still runs.
        line = split * share + tl.arange(0, AHEAD) * (128 // (weight.dtype.element_ty.primitive_bitwidth // 8))
        prefetch(weights + tl.minimum(line, inputs - 1)[None, :])
    wait_for_previous()
    for low in range(split * share, tl.minimum(split * share + share, inputs), INPUTS):
        i = low + tl.arange(0, INPUTS)
        if EVEN:
            w = tl.load(weights + i[None, :])  # [OUTPUTS, INPUTS]
            v = tl.load(x + t[None, :] * x_stride + i[:, None], mask=(t < rows)[None, :], other=0.0)  # [INPUTS, ROWS]
        else:
            w = tl.load(weights + i[None, :], mask=(i < inputs)[None, :], other=0.0)
            v = tl.load(
                x + t[None, :] * x_stride + i[:, None], mask=(t < rows)[None, :] & (i < inputs)[:, None], other=0.0
            )
        if NORM:
            wide = v.to(tl.float32)
            squares += tl.sum(wide * wide, 0)
            v = (wide * tl.load(norm + i, mask=i < inputs, other=0.0)[:, None]).to(w.dtype)
        acc = dot(w, v, acc)
    kept = (o < outputs)[:, None] & (t < rows)[None, :]
    if SPLITS > 1:
        # Every split leaves its sum; the last one to arrive adds them up in the order of the splits.
        own = partial + (split * rows + t)[None, :] * outputs + o[:, None]
        tl.store(own, acc, mask=kept)
        tl.debug_barrier()
        if tl.atomic_add(arrived + block, 1, sem="acq_rel") < SPLITS - 1:
            return
        acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for other in range(SPLITS):
            theirs = partial + (other * rows + t)[None, :] * outputs + o[:, None]
            acc += tl.load(theirs, mask=kept, other=0.0, cache_modifier=".cg")
        tl.store(arrived + block, 0)
    if NORM:
        acc *= (1 / tl.sqrt(squares / inputs + eps))[None, :]
    place = out + t[None, :] * outputs + o[:, None]
    if SQUARE:
        acc = tl.maximum(acc.to(out.dtype.element_ty).to(tl.float32), 0.0)
        acc *= acc
    if ADD:
        acc += tl.load(place, mask=kept, other=0.0).to(tl.float32)
    tl.store(place, acc.to(out.dtype.element_ty), mask=kept)
