"""Matrix products of the model: cuBLAS for many rows, one kernel that reads the weight once for few.

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
        workspace: Workspace,
    ) -> None:
        """few_rows: up to how many the kernel for few rows is used; not with a bias."""
        self.weight, self.bias, self.norm, self.eps = weight, bias, norm, eps
        self._few_rows = 0 if bias is not None else few_rows
        self._workspace = workspace

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
            tiling=tiling(self.weight.shape[0], self.weight.shape[1], x.element_size(), normed=self.norm is not None),
            workspace=self._workspace,
        )


def tiling(outputs: int, inputs: int, itemsize: int, *, normed: bool) -> Tiling:
    """How to cut a product so that about four blocks reach every multiprocessor of a large card."""
    width = 128 if itemsize == 2 else 64
    blocks = -(-outputs // 64)
    splits = 1
    while not normed and blocks * splits < 400 and inputs >= 2 * splits * 4 * width:
        splits *= 2
    return Tiling(outputs=64, inputs=width, splits=splits, warps=4, stages=4, ahead=8)


def workspace(device: torch.device | str, max_outputs: int, few_rows: int) -> Workspace:
    """Room for any product of `few_rows` rows and at most max_outputs outputs."""
    return Workspace(16 * max(1, few_rows) * max_outputs, -(-max_outputs // 16), device)
