"""Matrix products with fixed weights.

Legend: T packed tokens, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

# One token is a matrix-vector product, for which the plain layout is read faster.
_PACKED_TOKENS = 2


class Projection:
    """x [T, I] -> x W^T + bias [T, O], kept in the layouts that the device multiplies fastest.

    matrix [I, O] serves every device and dtype. On a CPU, float32 weights are also kept in oneDNN's packed layout:
    about twice as fast as the BLAS product from a few tokens on, for twice the memory.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pack: bool = True) -> None:
        """weight [O, I], bias [O] or None, of one dtype. pack False: the plain product only."""
        self.matrix = weight.t().contiguous()
        self.bias = bias
        self.packed: Tensor | None = None
        if pack and weight.device.type == "cpu" and weight.dtype is torch.float32 and _has_packed_products():
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)

    def matrices(self) -> tuple[Tensor, ...]:
        """Every layout that is kept of the weights."""
        return (self.matrix,) if self.packed is None else (self.matrix, self.packed)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, I] -> [T, O]."""
        if self.packed is not None and x.shape[0] >= _PACKED_TOKENS:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
            return product
        return torch.mm(x, self.matrix) if self.bias is None else torch.addmm(self.bias, x, self.matrix)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [T, O] plus the projection of x [T, I], in one product; both arguments stay as they are."""
        if self.packed is not None and x.shape[0] >= _PACKED_TOKENS:
            total: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.packed, self.bias, "add")
            return total
        total = torch.addmm(residual, x, self.matrix)
        return total if self.bias is None else total.add_(self.bias)


def _has_packed_products() -> bool:
    return bool(torch._C._has_mkldnn) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def projection_ref(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, I], weight [O, I], bias [O] or None -> [T, O] in float64, output by output."""
    columns = [(x.double() * row).sum(1) for row in weight.double()]
    return torch.stack(columns, dim=1) + (0 if bias is None else bias.double())
