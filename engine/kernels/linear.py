"""A matrix product for few rows, limited by reading the weight once: x W^T with what comes before and after it.

Legend: T rows (few), I inputs, O outputs. The twin is `engine.ops.linear.Projection` between `rms_norm` and the
residual's addition.
The weight is cut into blocks of outputs and each block into steps of inputs. All steps of all blocks, in this order,
are dealt out evenly to as many programs as the card runs at a time, so that all of them end together. A block that
several programs share is added up by the one that ends last, in the order of the programs.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.common import EARLY, MIN_DOT, dot, enter, padded


@dataclasses.dataclass(frozen=True, slots=True)
class Tiling:
    """outputs, inputs: of a step. programs: how many share the steps. warps, stages: of the launch."""

    outputs: int
    inputs: int
    programs: int
    warps: int
    stages: int


class Workspace:
    """Partial sums of shared blocks. For products that run one after the other on one stream."""

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
    to and returned (mutated).
    """
    rows, inputs = x.shape
    outputs = weight.shape[0]
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device) if residual is None else residual
    blocks, steps = triton.cdiv(outputs, tiling.outputs), triton.cdiv(inputs, tiling.inputs)
    programs, padded_rows = min(tiling.programs, blocks * steps), padded(rows, MIN_DOT)
    assert (programs + blocks) * (tiling.outputs + 1) * padded_rows <= workspace.partial.numel()
    assert blocks <= workspace.arrived.numel()
    _project[(programs,)](
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
        blocks,
        steps,
        programs,
        eps,
        NORM=norm is not None,
        SQUARE=square,
        ADD=residual is not None,
        ROWS=padded_rows,
        OUTPUTS=tiling.outputs,
        INPUTS=tiling.inputs,
        EVEN=inputs % tiling.inputs == 0,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        launch_pdl=EARLY,
        enable_fp_fusion=x.dtype is not torch.float32,  # with it, threads that share a sum of squares round differently
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
    blocks,
    steps,
    programs,
    eps,
    NORM: tl.constexpr,
    SQUARE: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    EVEN: tl.constexpr,
):
    enter()
    program, total = tl.program_id(0), blocks * steps
    first, last = program * total // programs, (program + 1) * total // programs
    t, cells = tl.arange(0, ROWS), tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    size: tl.constexpr = (OUTPUTS + 1) * ROWS
    for block in range(first // steps, tl.cdiv(last, steps)):
        o = block * OUTPUTS + tl.arange(0, OUTPUTS)
        weights = weight + tl.minimum(o, outputs - 1)[:, None] * inputs
        low, high = tl.maximum(first - block * steps, 0), tl.minimum(last - block * steps, steps)
        acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
        squares = tl.zeros((ROWS,), tl.float32)
        for step in range(low, high):
            i = step * INPUTS + tl.arange(0, INPUTS)
            values = x + t[None, :] * x_stride + i[:, None]
            if EVEN:
                w = tl.load(weights + i[None, :])  # [OUTPUTS, INPUTS]
                v = tl.load(values, mask=(t < rows)[None, :], other=0.0)  # [INPUTS, ROWS]
            else:
                w = tl.load(weights + i[None, :], mask=(i < inputs)[None, :], other=0.0)
                v = tl.load(values, mask=(t < rows)[None, :] & (i < inputs)[:, None], other=0.0)
            if NORM:
                wide = v.to(tl.float32)
                squares += tl.sum(wide * wide, 0)
                v = (wide * tl.load(norm + i, mask=i < inputs, other=0.0)[:, None]).to(w.dtype)
            acc = dot(w, v, acc)
        ready = high - low == steps
        if not ready:
            own = partial + (program + block) * size  # no other program and block have this sum
            tl.store(own + cells, acc)
            tl.store(own + OUTPUTS * ROWS + t, squares)
            tl.debug_barrier()
            ready = tl.atomic_add(arrived + block, high - low, sem="acq_rel") + high - low == steps
            if ready:
                acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
                squares = tl.zeros((ROWS,), tl.float32)
                lowest = ((block * steps + 1) * programs - 1) // total
                highest = ((block + 1) * steps * programs - 1) // total
                for other in range(lowest, highest + 1):
                    theirs = partial + (other + block) * size
                    acc += tl.load(theirs + cells, cache_modifier=".cg")
                    squares += tl.load(theirs + OUTPUTS * ROWS + t, cache_modifier=".cg")
                tl.store(arrived + block, 0)
        if ready:
            if NORM:
                acc *= (1 / tl.sqrt(squares / inputs + eps))[None, :]
            kept = (o < outputs)[:, None] & (t < rows)[None, :]
            place = out + t[None, :] * outputs + o[:, None]
            if SQUARE:
                acc = tl.maximum(acc.to(out.dtype.element_ty).to(tl.float32), 0.0)
                acc *= acc
            if ADD:
                acc += tl.load(place, mask=kept, other=0.0).to(tl.float32)
            tl.store(place, acc.to(out.dtype.element_ty), mask=kept)
