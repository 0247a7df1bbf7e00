"""Matrix products of the model: cuBLAS for many rows, one kernel that reads the weight once for few.

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.common import MIN_DOT, padded
from engine.kernels.linear import Tiling, Workspace, project
from engine.kernels.norm import rms_norm, square_relu_

FEW_ROWS = 16


class Linear:
    """x W^T + bias, behind an RMS norm when there is one. weight [O, I], bias [O] or None, norm float32 [I] or None."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        norm: Tensor | None,
        eps: float,
        *,
        few_rows: int,
        tiling: Tiling,
        workspace: Workspace,
    ) -> None:
        """few_rows: up to how many the kernel for few rows is used; not with a bias."""
        self.weight, self.bias, self.norm, self.eps = weight, bias, norm, eps
        self._few_rows = 0 if bias is not None else few_rows
        self._tiling, self._workspace = tiling, workspace

    def __call__(self, x: Tensor, *, square: bool = False) -> Tensor:
        """x [T, I] -> [T, O]; square: relu(.)^2 of it."""
        if x.shape[0] <= self._few_rows:
            return self._project(x, square, None)
        x = x if self.norm is None else rms_norm(x, self.norm, self.eps)
        out = torch.mm(x, self.weight.t()) if self.bias is None else torch.addmm(self.bias, x, self.weight.t())
        return square_relu_(out) if square else out

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """residual [T, O] += the product of x [T, I]."""
        assert self.norm is None
        if x.shape[0] <= self._few_rows:
            self._project(x, False, residual)
            return
        residual.addmm_(x, self.weight.t())
        if self.bias is not None:
            residual.add_(self.bias)

    def _project(self, x: Tensor, square: bool, residual: Tensor | None) -> Tensor:
        return project(
            x,
            self.weight,
            norm=self.norm,
            eps=self.eps,
            square=square,
            residual=residual,
            tiling=self._tiling,
            workspace=self._workspace,
        )


def tiling(device: torch.device) -> Tiling:
    """Two programs fit on each multiprocessor."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return Tiling(outputs=64, inputs=128, programs=2 * processors, warps=4, stages=4)


def workspace(tiling: Tiling, max_outputs: int, few_rows: int, device: torch.device) -> Workspace:
    """Room for any product of `few_rows` rows and at most max_outputs outputs."""
    blocks = -(-max_outputs // tiling.outputs)
    return Workspace((tiling.programs + blocks) * (tiling.outputs + 1) * padded(few_rows, MIN_DOT), blocks, device)
