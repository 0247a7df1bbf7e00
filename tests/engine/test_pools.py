"""StatePools: where items lie, what the layout says, and what copies and poison touch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.layout import StateKind
from engine.families import read_config
from engine.model_config import HybridConfig
from engine.pools import ALIGNMENT_BYTES, StatePools


@pytest.fixture
def config(folders: Callable[[str], Path]) -> HybridConfig:
    return read_config(folders("biased"))  # *M-M*M-


def make(
    config: HybridConfig,
    dtype: torch.dtype = torch.float32,
    ssm_dtype: torch.dtype = torch.float32,
    allocate: Callable[[int], Tensor] | None = None,
    num_slots: int = 4,
) -> StatePools:
    return StatePools(
        config,
        num_pages=5,
        num_slots=num_slots,
        page_size=3,
        dtype=dtype,
        ssm_dtype=ssm_dtype,
        device="cpu",
        revision="0123456789abcdef",
        allocate=allocate,
    )


def item(pools: StatePools, kind: StateKind, layer: int, part: str, index: int) -> Tensor:
    """The tensor of one item, found without placements."""
    match kind:
        case StateKind.KV:
            return pools.kv[pools.kv_layers.index(layer), "kv".index(part), index]
        case StateKind.CONV:
            return pools.conv[index, pools.state_layers.index(layer)]
        case StateKind.SSM:
            return pools.ssm[index, pools.state_layers.index(layer)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_placements_are_where_the_items_lie(config: HybridConfig, dtype: torch.dtype) -> None:
    pools = make(config, dtype)
    for pool in (pools.kv, pools.conv, pools.ssm):
        pool.copy_(torch.randn(pool.shape))
    layout, placements = pools.layout(), pools.placements()
    (block,) = pools.ranges()
    assert len(layout.pools) == len(placements) == 2 * 5
    for pool, place in zip(layout.pools, placements, strict=True):
        assert place.count == (5 if pool.kind is StateKind.KV else 4)
        for index in range(place.count):
            address = place.base + index * place.stride_bytes
            assert block.address <= address and address + pool.item_bytes <= block.address + block.nbytes
            expected = item(pools, pool.kind, pool.layer, pool.part, index).contiguous().view(torch.uint8)
            assert ctypes.string_at(address, pool.item_bytes) == expected.numpy().tobytes()


def test_layout_follows_the_layers(config: HybridConfig) -> None:
    layout = make(config, torch.bfloat16).layout()
    assert [(pool.layer, pool.part) for pool in layout.pools] == [
        (0, "k"),
        (0, "v"),
        (1, "conv"),
        (1, "ssm"),
        (3, "conv"),
        (3, "ssm"),
        (4, "k"),
        (4, "v"),
        (5, "conv"),
        (5, "ssm"),
    ]
    keys, _, conv, ssm = layout.pools[:4]
    assert (keys.dtype, keys.item_shape, keys.item_bytes) == ("bfloat16", (3, 1, 10), 3 * 10 * 2)
    assert (conv.dtype, conv.item_shape) == (
        "bfloat16",
        (config.recurrence.conv_dim, config.recurrence.conv_kernel - 1),
    )
    assert (ssm.dtype, ssm.item_shape, ssm.item_bytes) == ("float32", (6, 8, 20), 6 * 8 * 20 * 4)
    assert (layout.model, layout.revision, layout.vocab_size) == ("nemotron_h", "0123456789abcdef", 97)
    assert (layout.page_size, layout.chunk, layout.conv_width) == (3, 16, 3)
    assert layout.fingerprint() == make(config, torch.bfloat16).layout().fingerprint()
    assert layout.fingerprint() != make(config).layout().fingerprint()


def test_a_slot_of_all_layers_is_one_block(config: HybridConfig) -> None:
    pools = make(config)
    for pool in (pools.conv, pools.ssm):
        assert pool[2].is_contiguous() and pool.is_contiguous()


@pytest.mark.parametrize("shift", [0, 4, 60])
def test_memory_comes_from_the_allocator_and_is_aligned(config: HybridConfig, shift: int) -> None:
    asked: list[int] = []
    whole: list[Tensor] = []

    def allocate(nbytes: int) -> Tensor:
        asked.append(nbytes)
        whole.append(torch.zeros(nbytes + shift, dtype=torch.uint8))
        return whole[0][shift:]

    pools = make(config, torch.bfloat16, allocate=allocate)
    (block,) = pools.ranges()
    assert len(asked) == 1
    assert block.address == whole[0].data_ptr() + shift and block.nbytes == asked[0]
    for pool in (pools.kv, pools.conv, pools.ssm):
        assert pool.data_ptr() % ALIGNMENT_BYTES == 0
        assert whole[0].data_ptr() <= pool.data_ptr() < whole[0].data_ptr() + whole[0].nbytes
        assert not pool.any()


def test_copy_slot_copies_all_layers_and_nothing_else(config: HybridConfig) -> None:
    pools = make(config)
    for pool in (pools.conv, pools.ssm):
        pool.copy_(torch.randn(pool.shape))
    before = [pools.slot_state(slot) for slot in range(4)]
    pools.copy_slot(1, 3)
    for slot, source in ((0, 0), (1, 1), (2, 2), (3, 1)):
        assert all(torch.equal(now, then) for now, then in zip(pools.slot_state(slot), before[source], strict=True))
    with pytest.raises(AssertionError):
        pools.copy_slot(1, 0)


@pytest.mark.parametrize(("sources", "targets"), [([1], [3]), ([1, 2], [5, 4]), ([6, 6, 2], [3, 1, 4]), ([], [])])
@pytest.mark.parametrize("ssm_dtype", [torch.float32, torch.bfloat16])
def test_copy_slots_copies_each_and_nothing_else(
    config: HybridConfig, sources: list[int], targets: list[int], ssm_dtype: torch.dtype
) -> None:
    pools = make(config, ssm_dtype=ssm_dtype, num_slots=7)
    for pool in (pools.conv, pools.ssm):
        pool.copy_(torch.randn(pool.shape))
    origin = dict(zip(targets, sources, strict=True))
    before = [pools.slot_state(slot) for slot in range(7)]
    pools.copy_slots(sources, targets)
    for slot in range(7):
        expected = before[origin.get(slot, slot)]
        assert all(torch.equal(now, then) for now, then in zip(pools.slot_state(slot), expected, strict=True))


@pytest.mark.parametrize(
    ("sources", "targets"), [([0], [1]), ([1], [0]), ([1, 2], [3]), ([1, 2], [3, 3]), ([1], [1]), ([1, 2], [3, 1])]
)
def test_copies_that_would_depend_on_their_order(config: HybridConfig, sources: list[int], targets: list[int]) -> None:
    with pytest.raises(AssertionError):
        make(config).copy_slots(sources, targets)


def test_poison_touches_only_what_it_names(config: HybridConfig) -> None:
    pools = make(config)
    pools.poison_slot(2)
    pools.poison_pages([1, 4])
    assert all(state.isnan().all() for state in pools.slot_state(2))
    assert not any(state.any() for slot in (0, 1, 3) for state in pools.slot_state(slot))
    assert pools.kv[:, :, [1, 4]].isfinite().all() and (pools.kv[:, :, [1, 4]] > 1e3).all()
    assert not pools.kv[:, :, [0, 2, 3]].any()


def test_room_for_the_reserved_page_and_slot(config: HybridConfig) -> None:
    with pytest.raises(AssertionError, match="reserved"):
        StatePools(
            config,
            num_pages=1,
            num_slots=4,
            page_size=3,
            dtype=torch.float32,
            ssm_dtype=torch.float32,
            device="cpu",
            revision="",
            allocate=None,
        )
