"""States in shares for several ranks: byte for byte what they were, and the right heads in every share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from common.errors import ConfigError
from engine.ops.shards import (
    Block,
    gated_delta_blocks,
    join_conv,
    join_heads,
    mamba2_blocks,
    split_conv,
    split_heads,
)

FAMILIES = {
    "mamba2": mamba2_blocks(heads=16, head_dim=6, groups=8, d_state=5),
    "gated_delta": gated_delta_blocks(key_heads=8, key_dim=5, value_heads=16, value_dim=6),
}
EVERY_FAMILY = pytest.mark.parametrize("blocks", FAMILIES.values(), ids=FAMILIES)
EVERY_COUNT = pytest.mark.parametrize("parts", [1, 2, 4, 8])


def any_bytes(*shape: int, dtype: torch.dtype) -> Tensor:
    """Every pattern of bits, NaNs of all kinds too."""
    torch.manual_seed(0)
    words = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    limits = torch.iinfo(words)
    return torch.randint(limits.min, limits.max, shape, dtype=words).view(dtype)


def same_bytes(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and torch.equal(as_bytes(found), as_bytes(expected))


def as_bytes(value: Tensor) -> Tensor:
    return value.contiguous().flatten().view(torch.uint8)


def channels(blocks: Sequence[Block]) -> int:
    return sum(block.heads * block.width for block in blocks)


@EVERY_FAMILY
@EVERY_COUNT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_conv_states_come_back_byte_for_byte(blocks: tuple[Block, ...], parts: int, dtype: torch.dtype) -> None:
    pool = any_bytes(3, 2, channels(blocks), 3, dtype=dtype)
    for state in (pool, pool[1], pool[:, 1], pool[1, 0]):
        shares = split_conv(state, blocks, parts)
        assert len(shares) == parts and all(share.is_contiguous() for share in shares)
        assert all(share.shape[-2] == state.shape[-2] // parts for share in shares)
        assert same_bytes(join_conv(shares, blocks), state)


@EVERY_FAMILY
@EVERY_COUNT
def test_a_share_has_its_own_heads_of_every_block(blocks: tuple[Block, ...], parts: int) -> None:
    names = [(block.name, head) for block in blocks for head in range(block.heads) for _ in range(block.width)]
    state = torch.arange(len(names)).unsqueeze(1).expand(-1, 3)
    for part, share in enumerate(split_conv(state, blocks, parts)):
        expected = [
            (block.name, head)
            for block in blocks
            for head in range(part * block.heads // parts, (part + 1) * block.heads // parts)
            for _ in range(block.width)
        ]
        assert [names[channel] for channel in share[:, 0]] == expected


@EVERY_FAMILY
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_a_run_of_channels_is_no_share(blocks: tuple[Block, ...], parts: int) -> None:
    """The cut that looks right, and gives one rank another's heads; joining what was cut so gives other bytes, too."""
    state = any_bytes(channels(blocks), 3, dtype=torch.float32)
    runs = state.chunk(parts, -2)
    assert all(run.shape == share.shape for run, share in zip(runs, split_conv(state, blocks, parts), strict=True))
    assert not any(same_bytes(*pair) for pair in zip(runs, split_conv(state, blocks, parts), strict=True))
    assert not same_bytes(join_conv(runs, blocks), state)


@EVERY_FAMILY
@EVERY_COUNT
def test_the_weights_of_a_share_convolve_its_channels(blocks: tuple[Block, ...], parts: int) -> None:
    torch.manual_seed(0)
    count = channels(blocks)
    weight, bias, window = torch.randn(count, 1, 4), torch.randn(count), torch.randn(count, 4)
    whole = (weight.squeeze(1) * window).sum(1) + bias
    weights, biases = split_conv(weight, blocks, parts, dim=0), split_conv(bias, blocks, parts, dim=0)
    windows = split_conv(window, blocks, parts)
    outputs = [(w.squeeze(1) * x).sum(1) + b for w, x, b in zip(weights, windows, biases, strict=True)]
    assert torch.equal(join_conv(outputs, blocks, dim=0), whole)
    assert same_bytes(join_conv(weights, blocks, dim=0), weight)


@EVERY_COUNT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recurrent_states_by_their_heads(parts: int, dtype: torch.dtype) -> None:
    pool = any_bytes(3, 2, 8, 4, 5, dtype=dtype)
    for state in (pool, pool[:, 1], pool[1, 0]):
        shares = split_heads(state, parts)
        assert all(share.is_contiguous() for share in shares) and same_bytes(join_heads(shares), state)
        each = 8 // parts
        for part, share in enumerate(shares):
            assert same_bytes(share, state[..., part * each : (part + 1) * each, :, :])


@pytest.mark.parametrize(
    ("blocks", "parts", "name"),
    [
        (mamba2_blocks(16, 4, 1, 8), 2, "B"),  # eight channels would divide, but a group is one
        (mamba2_blocks(6, 4, 4, 8), 4, "x"),
        (gated_delta_blocks(2, 8, 8, 4), 4, "q"),
        (gated_delta_blocks(4, 8, 6, 4), 4, "v"),
        (mamba2_blocks(16, 4, 8, 8), 0, "x"),
        (mamba2_blocks(16, 4, 8, 8), 16, "B"),
    ],
)
def test_what_does_not_divide_is_named(blocks: tuple[Block, ...], parts: int, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: \d+ heads .* {parts} parts") as caught:
        split_conv(torch.zeros(channels(blocks), 3), blocks, parts)
    assert caught.value.param == name
    if parts:
        with pytest.raises(ConfigError, match=f"^{name}: "):
            join_conv([torch.zeros(1, 3)] * parts, blocks)


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match="6 heads do not divide into 4 parts"):
        split_heads(torch.zeros(6, 2, 2), 4)


def test_other_channels_than_the_blocks() -> None:
    with pytest.raises(AssertionError, match="channels"):
        split_conv(torch.zeros(7, 3), FAMILIES["mamba2"], 2)
