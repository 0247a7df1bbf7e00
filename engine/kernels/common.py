"""What several kernels need."""

from __future__ import annotations

import triton
import triton.language as tl

# Triton's interpreter multiplies the bits of bfloat16 as integers; there, operands are widened first, which is exact.
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

MIN_DOT = 16  # the least that each side of a `tl.dot` may have


def padded(count: int, least: int = 1) -> int:
    """The next power of two, at least `least`: what a block dimension may be."""
    return max(least, 1 << (count - 1).bit_length())


@triton.jit
def dot(a, b, acc):
    """a [m, k] b [k, n] + acc [m, n]: a and b of one dtype, acc float32. float32 is multiplied as float32, not tf32."""
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def silu(x):
    return x / (1 + tl.exp(-x))
