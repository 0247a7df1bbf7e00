"""Compiles kernels for a card that need not be there: `python -m tests.kernels.compiled` prints their shared memory.

Not where Triton interprets (TRITON_INTERPRET): what is compiled is the text of the kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels import gated_delta

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {"bias": "*fp32", "rate": "*fp32", "weight": "*fp32", "factors": "*fp32", "pool": "*fp32"}
POINTERS |= dict.fromkeys(("begins", "starts", "slots", "track_slots", "track_offsets"), "*i32")
POINTERS |= dict.fromkeys(("qkv", "a", "b", "w", "u", "p", "y", "gate", "out"), "*bf16")
FLOATS = {"scale": "fp32", "eps": "fp32"}


def shared_bytes(kernel: Any, constants: Mapping[str, int | str], *, warps: int, stages: int = 1) -> int:
    """Shared memory of a program, compiled as when every pointer and integer is a multiple of 16."""
    names = kernel.arg_names
    types = {name: POINTERS.get(name) or FLOATS.get(name, "i32") for name in names}
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = [[("tt.divisibility"), 16]]
    attributes = {(i,): aligned for i, name in enumerate(names) if signature[name] not in ("constexpr", "fp32")}
    source = ASTSource(kernel, signature, {(names.index(key),): value for key, value in constants.items()}, attributes)
    return int(
        triton.compile(source, target=HOPPER, options={"num_warps": warps, "num_stages": stages}).metadata.shared
    )


def main() -> None:
    """The kernels of the gated delta recurrence at the shape of Qwen3-Next, cut as they are."""
    cell: dict[str, int | str] = {"CELL": 64, "TOKENS": 64, "DIM": 128}
    prepare = cell | {"LEVELS": 2, "PRECISION": "tf32"}
    cut = gated_delta._prepare_cut(128, torch.bfloat16)
    print("_prepare", shared_bytes(gated_delta._prepare, prepare | {"SIZE": cut.values}, warps=cut.warps))
    for name, programs in (("_advance_narrow", 32), ("_advance_wide", 256)):
        cut = gated_delta._advance_cut(programs, 128, torch.bfloat16)
        advance = cell | {"SIZE": cut.values}
        print(name, shared_bytes(gated_delta._advance, advance, warps=cut.warps, stages=cut.stages))
    print("_step", shared_bytes(gated_delta._step, {"DIM": 128, "SIZE": 16}, warps=4))
    norm: dict[str, int | str] = {"HEADS": 16, "SIZE": 128}
    print("_head_rms_norm_gated", shared_bytes(gated_delta._head_rms_norm_gated, norm, warps=4))


if __name__ == "__main__":
    main()
