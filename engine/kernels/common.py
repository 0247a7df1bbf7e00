"""What several kernels need."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Triton's interpreter multiplies the bits of bfloat16 as integers; there, operands are widened first, which is exact.
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# Whether a kernel may be launched while the one before it still runs (programmatic dependent launch), and waits inside
# for what that one writes. Such a kernel calls `enter` before it reads or writes anything but constants.
EARLY = (
    not triton.knobs.runtime.interpret and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
)
_EARLY = tl.constexpr(EARLY)

MIN_DOT = 16  # the least that each side of a `tl.dot` may have


def padded(count: int, least: int = 1) -> int:
    """The next power of two, at least `least`: what a block dimension may be."""
    return max(least, 1 << (count - 1).bit_length())


@triton.jit
def enter():
    """Let the next kernel be launched, and wait for what earlier ones write."""
    if _EARLY:
        gdc_launch_dependents()
        gdc_wait()


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
