"""States cut into equal shares for several ranks, and put together again, byte for byte.

A convolution's channels are several blocks side by side: x, B and C of Mamba2, q, k and v of gated delta. A rank that
computes some of the heads needs the channels of those heads out of every block, which is not a run of channels: cutting
[x | B | C] in the middle gives one rank x alone. A recurrent state is one block of heads.

Legend: C channels, W conv width, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from common.errors import ConfigError


class Block(NamedTuple):
    """Channels that belong together: heads (or groups) of `width` channels each, which are never cut inside."""

    name: str
    heads: int
    width: int


def mamba2_blocks(heads: int, head_dim: int, groups: int, d_state: int) -> tuple[Block, ...]:
    """Of the convolution of a Mamba2 mixer."""
    return Block("x", heads, head_dim), Block("B", groups, d_state), Block("C", groups, d_state)


def gated_delta_blocks(key_heads: int, key_dim: int, value_heads: int, value_dim: int) -> tuple[Block, ...]:
    """Of the convolution of a gated delta mixer."""
    return Block("q", key_heads, key_dim), Block("k", key_heads, key_dim), Block("v", value_heads, value_dim)


def split_conv(value: Tensor, blocks: Sequence[Block], parts: int, dim: int = -2) -> tuple[Tensor, ...]:
    """One tensor for each of `parts` ranks, contiguous: its heads of every block, in the order of the blocks.

    value: anything with the convolution's channels in dimension `dim`: states [..., C, W - 1], also conv1d's weight and
    bias (dim 0). Raises ConfigError when a block's heads do not divide by parts.
    """
    _check(blocks, parts)
    assert value.shape[dim] == sum(block.heads * block.width for block in blocks), "other channels than the blocks'"
    whole = torch.split(value, [block.heads * block.width for block in blocks], dim)
    shares = [block.chunk(parts, dim) for block in whole]
    return tuple(torch.cat(share, dim) for share in zip(*shares, strict=True))


def join_conv(parts: Sequence[Tensor], blocks: Sequence[Block], dim: int = -2) -> Tensor:
    """What `split_conv` was given. Raises ConfigError when a block's heads do not divide by the number of parts."""
    count = len(parts)
    _check(blocks, count)
    widths = [block.heads * block.width // count for block in blocks]
    shares = [torch.split(part, widths, dim) for part in parts]
    return torch.cat([piece for block in zip(*shares, strict=True) for piece in block], dim)


def split_heads(state: Tensor, parts: int) -> tuple[Tensor, ...]:
    """A recurrent state [..., H, any, any] by its heads, contiguous. Raises ConfigError when H does not divide."""
    return split_conv(state, (Block("heads", state.shape[-3], 1),), parts, dim=-3)


def join_heads(parts: Sequence[Tensor]) -> Tensor:
    """What `split_heads` was given."""
    return torch.cat(list(parts), -3)


def _check(blocks: Sequence[Block], parts: int) -> None:
    for block in blocks:
        if parts < 1 or block.heads % parts:
            raise ConfigError(f"{block.name}: {block.heads} heads do not divide into {parts} parts", param=block.name)
