"""SSM states that cross as bfloat16: rounded as torch does, half the bytes, checked in transit, widened at decode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transfer_rig import Decode, Prefill, make_layout, metadata

from common.config import DType, LoopbackFaults, TransferConfig, Verify
from common.errors import ConfigError
from common.layout import StateKind, StateLayout
from transfer import Committed, Released, RoomFailed, RoomOpened, TrackState
from transfer.narrow import landing, narrow, staging_bytes, widen, wire_dtype
from transfer.posting import Piece

Make = Callable[..., Any]
Config = Callable[..., TransferConfig]

HERE, THERE = [7, 8, 9, 2], [3, 4, 11, 20]
SLOT_HERE, SLOT_THERE, TRACK_HERE, TRACK_THERE = 1, 2, 6, 5


def bits(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


EDGES = bits(
    0, 0x80000000, 1, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001,
    0x3F807FFF, 0x7F7F7FFF, 0x7F7F8000,
)  # fmt: skip


def narrowed(wide: np.ndarray) -> np.ndarray:
    out = np.empty(len(wide), np.uint16)
    narrow(memoryview(wide).cast("B"), memoryview(out).cast("B"))
    return out


def test_rounds_as_torch_does() -> None:
    wide = np.concatenate([EDGES, np.random.default_rng(1).integers(0, 2**32, 20_000, np.uint32)])
    numbers = wide[~np.isnan(wide.view(np.float32))]
    expected = torch.from_numpy(numbers.view(np.float32).copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert (narrowed(numbers) == expected).all()


def test_nan_stays_nan() -> None:
    wide = bits(0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001, 0x7FC00000)
    back = (narrowed(wide).astype(np.uint32) << 16).view(np.float32)
    assert np.isnan(back).all()


@pytest.mark.parametrize("count", [1, 2, 3, 7, 1000])
def test_widens_in_place(count: int) -> None:
    wide = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    item = np.zeros(count, np.float32)
    view = memoryview(item).cast("B")
    narrow(memoryview(wide).cast("B"), landing(view))
    widen(view)
    assert (item == torch.from_numpy(wide).bfloat16().float().numpy()).all()


def with_bfloat16_states(layout: StateLayout) -> StateLayout:
    changed = {True: {"dtype": "bfloat16"}, False: {}}
    pools = (msgspec.structs.replace(pool, **changed[pool.kind is StateKind.SSM]) for pool in layout.pools)
    return make_layout(pools=tuple(pools))


def test_which_dtype_crosses() -> None:
    wide, narrow_pools = make_layout(), with_bfloat16_states(make_layout())
    assert wire_dtype(wide, None) == wire_dtype(wide, DType.FLOAT32) == "float32"
    assert wire_dtype(wide, DType.BFLOAT16) == "bfloat16"
    assert wire_dtype(narrow_pools, None) == wire_dtype(narrow_pools, DType.BFLOAT16) == "bfloat16"
    attention = make_layout(pools=tuple(p for p in wide.pools if p.kind is StateKind.KV))
    assert wire_dtype(attention, DType.BFLOAT16) == ""
    with pytest.raises(ConfigError, match="--ssm-wire-dtype float32: the SSM state is bfloat16"):
        wire_dtype(narrow_pools, DType.FLOAT32)
    assert staging_bytes(wide) == 1024


def open_room(p: Prefill, d: Decode, room: int = 1) -> None:
    p.transfer.expect(room, "r", 5)
    d.transfer.open(p.address(room), "r", THERE, SLOT_THERE, TRACK_THERE)
    p.wait_for(RoomOpened, room)


def assert_narrowed(p: Prefill, d: Decode, mine: int, theirs: int) -> None:
    for pool in p.pools.of(StateKind.CONV):
        assert (p.pools.item(pool, mine) == d.pools.item(pool, theirs)).all()
    for pool in p.pools.of(StateKind.SSM):
        sent, found = (side.pools.item(pool, slot).view(np.float32) for side, slot in ((p, mine), (d, theirs)))
        assert np.array_equal(torch.from_numpy(sent).bfloat16().float().numpy(), found, equal_nan=True)


@pytest.mark.parametrize("verify", list(Verify))
@pytest.mark.parametrize("layerwise", [False, True])
def test_half_the_bytes_cross_and_come_out_rounded(
    config: Config, prefill: Make, decode: Make, verify: Verify, layerwise: bool
) -> None:
    asked = config(verify=verify, ssm_wire_dtype=DType.BFLOAT16)
    p, d = prefill(asked), decode(asked)
    before = p.pools.bytes.copy()
    for room in (1, 2):  # the second one meets a staging area that was used
        d.pools.bytes[:] = 0
        open_room(p, d, room)
        p.transfer.send_pages(room, 0, HERE)
        outgoing = p.transfer.announce(room, Piece(0, (), SLOT_HERE, TRACK_HERE))
        for layer in (3, 0, 2) if layerwise else ():
            outgoing.layer_done(layer)
        if not layerwise:
            outgoing.all_done()
        p.transfer.commit(room, metadata(room))
        committed = d.wait_for(Committed, room)
        assert committed.track is TrackState.RECEIVED
        assert committed.bytes_by_part == {"kv": 4096, "conv": 3 * 144, "ssm": 3 * 512, "track": 3 * (144 + 512)}
        assert d.pools.state(THERE, 0)[:4096] == p.pools.state(HERE, 0)[:4096]
        assert_narrowed(p, d, SLOT_HERE, SLOT_THERE)
        assert_narrowed(p, d, TRACK_HERE, TRACK_THERE)
        p.wait_for(Released, room)
    assert (p.pools.bytes == before).all(), "prefill's own state stays as it was"


@pytest.mark.parametrize("part", ["ssm", "track", "conv"])
@pytest.mark.parametrize("kind", ["flip", "zero", "drop"])
def test_a_fault_is_caught(config: Config, prefill: Make, decode: Make, kind: str, part: str) -> None:
    asked = config(ssm_wire_dtype=DType.BFLOAT16)
    p = prefill(config(LoopbackFaults(**{kind: part}), ssm_wire_dtype=DType.BFLOAT16))
    d = decode(asked)
    open_room(p, d)
    p.send(1, HERE, SLOT_HERE, TRACK_HERE)
    error = d.wait_for(RoomFailed, 1).error
    assert (error.code, error.param) == ("digest_mismatch", part)


@pytest.mark.parametrize("here", [None, DType.BFLOAT16])
def test_both_ends_must_agree(config: Config, prefill: Make, decode: Make, here: DType | None) -> None:
    there = DType.BFLOAT16 if here is None else DType.FLOAT32
    p, d = prefill(config(ssm_wire_dtype=there)), decode(config(ssm_wire_dtype=here))
    d.transfer.open(p.address(1), "r", THERE, SLOT_THERE)
    error = d.wait_for(RoomFailed, 1).error
    assert (error.code, error.param) == ("layout_mismatch", "ssm_wire_dtype")
    assert "float32" in error.message and "bfloat16" in error.message


def test_decode_ranks_that_come_and_go_share_the_staging_memory(config: Config, prefill: Make, decode: Make) -> None:
    asked = config(ssm_wire_dtype=DType.BFLOAT16)
    p = prefill(asked)
    for room in range(3):
        d = decode(asked, node_id=f"decode-{room}")
        open_room(p, d, room)
        p.send(room, HERE, SLOT_HERE)
        d.wait_for(Committed, room)
        assert_narrowed(p, d, SLOT_HERE, SLOT_THERE)
        d.transfer.close()
        p.until(lambda: len(p.transfer._spare_stagings) == 1)
    assert len(p.transport._own) == 2, "the pools and one staging area"
