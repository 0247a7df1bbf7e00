"""The kernels of the gated delta recurrence against float64: outputs and mutated state, and nothing else mutated."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import gated_delta as kernels
from engine.kernels.gated_delta import Cut, gated_delta_prefill, gated_delta_step, head_rms_norm_gated
from engine.ops.gated_delta import gated_delta_prefill as twin_prefill
from engine.ops.gated_delta import gated_delta_sequential_ref
from engine.ops.norm import head_rms_norm_gated_ref
from engine.ops.slots import index_slots
from tests.engine.test_gated_delta import HARD, hard
from tests.kernels.test_kernels import NAN, SLOTS, TOLERANCE, close, packed, randn, strided_pool
from tests.support.stack import REPO

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning")]

CELL = 16
PIECES = [
    [(0, 1)],
    [(0, 40)],
    [(0, 3), (0, 33), (5, 1), (32, 17)],
    [(15, 2), (1, 1), (31, 34)],
]
SHAPES = [  # key heads, heads, key dim, value dim
    (2, 4, 16, 20, torch.float32, torch.float32),
    (1, 3, 5, 7, torch.bfloat16, torch.float32),
    (2, 2, 20, 16, torch.bfloat16, torch.bfloat16),
    (1, 1, 16, 16, torch.float16, torch.float32),
]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def make_inputs(
    device: torch.device, tokens: int, key_heads: int, heads: int, dim: int, size: int, dtype: torch.dtype
) -> Inputs:
    """qkv, a, b, bias, rate; a and b are slices of one tensor, as the model's are."""
    qkv = randn(device, tokens, 2 * key_heads * dim + heads * size, dtype=dtype)
    a, _, b = randn(device, tokens, 2 * heads + 3, dtype=dtype).split([heads, 3, heads], dim=1)
    return qkv, a, b, torch.randn(heads, device=device) - 3, -torch.rand(heads, device=device) * 15 - 0.1


def unpacked(inputs: Inputs, key_heads: int, dim: int) -> tuple[Tensor, ...]:
    """q, k, v, decay, beta as the twin takes them, the last two in float64."""
    qkv, a, b, bias, rate = inputs
    heads = rate.shape[0]
    q, k, v = qkv.split([key_heads * dim, key_heads * dim, qkv.shape[1] - 2 * key_heads * dim], dim=1)
    decay, beta = rate.double() * F.softplus(a.double() + bias), torch.sigmoid(b.double())
    return q.unflatten(1, (key_heads, dim)), k.unflatten(1, (key_heads, dim)), v.unflatten(1, (heads, -1)), decay, beta


def reference(inputs: Inputs, key_heads: int, state: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Tokens low .. high - 1 of one row in float64: y [n, H V] and the new state."""
    parts = [value[low:high] for value in unpacked(inputs, key_heads, state.shape[1])]
    y, after = gated_delta_sequential_ref(*parts, state)
    return y.flatten(1), after


def tolerance(*dtypes: torch.dtype) -> float:
    return max({torch.float16: 1e-2, **TOLERANCE}[dtype] for dtype in dtypes)


def check_prefill(
    inputs: Inputs,
    key_heads: int,
    before: Tensor,
    pool: Tensor,
    y: Tensor,
    pieces: Sequence[tuple[int, int]],
    slots: Sequence[int],
    tracks: dict[int, tuple[int, int]],
) -> None:
    """Outputs, states in slots and track slots; every other slot as before."""
    at = 0
    for i, ((start, length), slot) in enumerate(zip(pieces, slots, strict=True)):
        state = before[slot] if start else torch.zeros_like(before[slot])
        expected, after = reference(inputs, key_heads, state, at, at + length)
        close(y[at : at + length], expected, tolerance(y.dtype))
        close(pool[slot], after, tolerance(y.dtype, pool.dtype))
        if i in tracks and tracks[i][0]:
            kept = reference(inputs, key_heads, state, at, at + tracks[i][1])[1]
            close(pool[tracks[i][0]], kept, tolerance(y.dtype, pool.dtype))
        at += length
    written = {*slots, *(track for track, _ in tracks.values() if track)}
    untouched = [slot for slot in range(SLOTS) if slot not in written]
    assert torch.equal(pool[untouched], before[untouched])


def spots(pieces: Sequence[tuple[int, int]], chunk: int) -> list[list[int]]:
    return [[at for at in range(1, n + 1) if (start + at) % chunk == 0] for start, n in pieces]


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize(("key_heads", "heads", "dim", "size", "dtype", "state_dtype"), SHAPES)
def test_prefill(
    pieces: list[tuple[int, int]],
    key_heads: int,
    heads: int,
    dim: int,
    size: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    device: torch.device,
) -> None:
    starts, lengths = [start for start, _ in pieces], [length for _, length in pieces]
    slots, track_slots = [7, 2, 5, 1][: len(pieces)], [3, 6, 0, 8]  # 0: nowhere
    inputs = make_inputs(device, sum(lengths), key_heads, heads, dim, size, dtype)
    pool = strided_pool(device, heads, dim, size, dtype=state_dtype)
    for slot, start in zip(slots, starts, strict=True):
        if start == 0:
            pool[slot] = NAN
    tracks = {i: (track_slots[i], found[-1 - i % 2 :][0]) for i, found in enumerate(spots(pieces, CELL)) if found}
    before, copies = pool.clone(), tuple(value.clone() for value in inputs)
    rows = packed(starts, lengths, slots, device, tracks=tracks)
    y = gated_delta_prefill(*inputs, pool, rows, key_heads=key_heads, chunk=CELL)
    assert y.dtype is dtype
    check_prefill(inputs, key_heads, before, pool, y, pieces, slots, tracks)
    assert all(torch.equal(now, then) for now, then in zip(inputs, copies, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_equals_its_twin(dtype: torch.dtype, device: torch.device) -> None:
    from engine.ops.chunks import plan_chunks
    from engine.tracking import Boundary

    pieces, slots = [(0, 21), (5, 11), (16, 16)], [4, 2, 7]
    starts, lengths = [start for start, _ in pieces], [length for _, length in pieces]
    inputs = make_inputs(device, sum(lengths), 1, 2, 16, 16, dtype)
    pool = strided_pool(device, 2, 16, 16)
    twin_pool = pool.clone()
    rows = packed(starts, lengths, slots, device, tracks={0: (3, 16), 1: (5, 11), 2: (8, 16)})
    y = gated_delta_prefill(*inputs, pool, rows, key_heads=1, chunk=CELL)
    q, k, v, decay, beta = unpacked(inputs, 1, 16)
    plan = plan_chunks(starts, lengths, CELL, [Boundary(0, 16, 3), Boundary(1, 11, 5), Boundary(2, 16, 8)], device)
    fresh = torch.tensor([True, False, False], device=device)
    index = index_slots(slots, device)
    expected = twin_prefill(q, k, v, decay.float(), beta.float(), twin_pool, index, fresh, plan)
    close(y, expected.flatten(1), TOLERANCE[dtype])
    close(pool, twin_pool, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("chunk", "dtype"),
    [(4, torch.float32), (24, torch.float32), (96, torch.bfloat16), (64, torch.bfloat16), (256, torch.bfloat16)],
)
def test_any_chunk_can_end_where_a_state_is_kept(chunk: int, dtype: torch.dtype, device: torch.device) -> None:
    length = chunk + min(chunk, 70) + 3
    inputs = make_inputs(device, length, 1, 1, 4, 8, dtype)
    pool = strided_pool(device, 1, 4, 8)
    before, tracks = pool.clone(), {0: (5, chunk)}
    rows = packed([chunk], [length], [2], device, tracks=tracks)
    y = gated_delta_prefill(*inputs, pool, rows, key_heads=1, chunk=chunk)
    check_prefill(inputs, 1, before, pool, y, [(chunk, length)], [2], tracks)


def test_rows_of_a_batch_are_bit_for_bit_as_alone(device: torch.device) -> None:
    pieces, slots = [(0, 18), (7, 1), (16, 16), (3, 15)], [7, 2, 5, 1]
    starts, lengths = [start for start, _ in pieces], [length for _, length in pieces]
    inputs = make_inputs(device, sum(lengths), 1, 1, 16, 16, torch.float32)
    pool = strided_pool(device, 1, 16, 16)
    before, at = pool.clone(), 0
    y = gated_delta_prefill(*inputs, pool, packed(starts, lengths, slots, device), key_heads=1, chunk=CELL)
    qkv, a, b, bias, rate = inputs
    for start, length, slot in zip(starts, lengths, slots, strict=True):
        own, alone = slice(at, at + length), before.clone()
        rows = packed([start], [length], [slot], device)
        found = gated_delta_prefill(qkv[own], a[own], b[own], bias, rate, alone, rows, key_heads=1, chunk=CELL)
        assert torch.equal(found, y[own]) and torch.equal(alone[slot], pool[slot])
        at += length


@pytest.mark.parametrize("kind", HARD)
def test_precision_is_kept(kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cell of 64, as in bfloat16, and one of 6, then steps, in float32; decay and beta come from raw values."""
    monkeypatch.setattr(kernels, "_largest_cell", lambda dtype: 64)
    q, k, v, decay, beta = (value.to(device) for value in hard(kind, 70, 1, 1, 16, 16))
    qkv = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=1)
    zeros, rate = torch.zeros(1, device=device), torch.full((1,), -1.0, device=device)
    a = torch.where(decay < -20, -decay, torch.log(torch.expm1(-decay.double()))).float()  # softplus(a) = -decay
    b = torch.logit(beta.double()).float()
    pool = strided_pool(device, 1, 16, 16)
    before, inputs = pool.clone(), (qkv, a.clamp(min=-1e4), b.clamp(-80, 80), zeros, rate)
    y = gated_delta_prefill(*inputs, pool, packed([64], [70], [3], device), key_heads=1, chunk=64)
    stepped, rows = before.clone(), packed([64], [1], [3], device)
    ones = [(*(value[t : t + 1] for value in inputs[:3]), zeros, rate) for t in range(4)]
    steps = torch.cat([gated_delta_step(*one, stepped, rows, key_heads=1) for one in ones])
    (expected, after), (first, soon) = (reference(inputs, 1, before[3], 0, n) for n in (70, 4))
    for found, wanted in ((y, expected), (pool[3], after), (steps, first), (stepped[3], soon)):
        assert float((found - wanted).abs().max()) <= 4e-6 * float(wanted.abs().max())


def test_a_launch_can_be_cut_otherwise(device: torch.device) -> None:
    inputs = make_inputs(device, 20, 1, 2, 16, 40, torch.float32)
    pool = strided_pool(device, 2, 16, 40)
    narrow, rows = pool.clone(), packed([0], [20], [3], device)
    y = gated_delta_prefill(*inputs, pool, rows, key_heads=1, chunk=CELL)
    cut = Cut(values=16, warps=2)
    found = gated_delta_prefill(*inputs, narrow, rows, key_heads=1, chunk=CELL, prepare=cut, advance=cut)
    close(found, y, 1e-5)
    close(narrow, pool, 1e-5)
    rows = packed([9], [1], [3], device)
    one = tuple(value[:1] for value in inputs[:3]) + inputs[3:]
    close(
        gated_delta_step(*one, narrow, rows, key_heads=1, cut=Cut(values=64, warps=2)),
        gated_delta_step(*one, pool, rows, key_heads=1),
        1e-5,
    )


@pytest.mark.parametrize(("slots", "padding"), [([3], 0), ([6, 1, 4], 2), ([1, 2, 3, 4, 5, 6, 7, 8], 1)])
@pytest.mark.parametrize(("key_heads", "heads", "dim", "size", "dtype", "state_dtype"), SHAPES)
def test_step(
    slots: list[int],
    padding: int,
    key_heads: int,
    heads: int,
    dim: int,
    size: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    device: torch.device,
) -> None:
    count = len(slots) + padding
    inputs = make_inputs(device, count, key_heads, heads, dim, size, dtype)
    inputs[0][len(slots) :] = NAN
    pool = strided_pool(device, heads, dim, size, dtype=state_dtype)
    before = pool.clone()
    rows = packed([9] * len(slots) + [-1] * padding, [1] * count, slots + [0] * padding, device)
    y = gated_delta_step(*inputs, pool, rows, key_heads=key_heads)
    assert y.dtype is dtype
    for row, slot in enumerate(slots):
        expected, after = reference(inputs, key_heads, before[slot], row, row + 1)
        close(y[row], expected[0], tolerance(dtype))
        close(pool[slot], after, tolerance(state_dtype) if dtype is torch.float32 else tolerance(dtype, state_dtype))
    untouched = [slot for slot in range(SLOTS) if slot not in slots]
    assert torch.equal(pool[untouched], before[untouched])


def test_a_state_goes_from_prefill_to_steps_and_back(device: torch.device) -> None:
    inputs = make_inputs(device, 24, 1, 2, 16, 20, torch.float32)
    pool = strided_pool(device, 2, 16, 20)
    parts, at = [], 0
    for length in (17, 1, 1, 5):
        own = (*(value[at : at + length] for value in inputs[:3]), *inputs[3:])
        rows = packed([at], [length], [4], device)
        if length == 1:
            parts.append(gated_delta_step(*own, pool, rows, key_heads=1))
        else:
            parts.append(gated_delta_prefill(*own, pool, rows, key_heads=1, chunk=CELL))
        at += length
    expected, after = reference(inputs, 1, torch.zeros_like(pool[4]), 0, 24)
    close(torch.cat(parts), expected, 1e-4)
    close(pool[4], after, 1e-4)


@pytest.mark.parametrize(("middle", "rate"), [(-14, -1e5), (30, -1e-2)])
def test_softplus_of_small_and_large_values(middle: int, rate: float, device: torch.device) -> None:
    """Where it is around 1e-6, 1 + exp(a) has one digit of it; where a is large, exp(a) may be infinite."""
    qkv, a, b, bias, _ = make_inputs(device, 2, 1, 2, 16, 16, torch.float32)
    inputs = (qkv, a * 0.1 + middle, b, bias * 0, torch.full((2,), rate, device=device))
    pool = strided_pool(device, 2, 16, 16)
    before = pool.clone()
    gated_delta_step(
        *(value[:1] for value in inputs[:3]), *inputs[3:], pool, packed([9], [1], [2], device), key_heads=1
    )
    gated_delta_prefill(*inputs, pool, packed([9], [2], [3], device), key_heads=1, chunk=CELL)
    close(pool[2], reference(inputs, 1, before[2], 0, 1)[1], 1e-5)
    close(pool[3], reference(inputs, 1, before[3], 0, 2)[1], 1e-5)


@pytest.mark.parametrize(("heads", "size"), [(3, 7), (4, 16), (40, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_of_the_heads(heads: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    y, weight = randn(device, 3, heads * size, dtype=dtype) * 3, torch.rand(size, device=device) + 0.5
    gate = randn(device, 3, heads * size + 9, dtype=dtype)[:, 4 : heads * size + 4]
    found = head_rms_norm_gated(y, gate, weight, 1e-6)
    assert found.dtype is dtype
    parts = y.unflatten(1, (heads, size)), gate.unflatten(1, (heads, size))
    close(found, head_rms_norm_gated_ref(*parts, weight, 1e-6), TOLERANCE[dtype])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are run on the card")
def test_what_the_interpreter_takes_can_be_compiled_for_a_card(tmp_path: Path) -> None:
    """At the shape of Qwen3-Next for an H100 or H200, whose programs have 227 KiB of shared memory."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.kernels.compiled"]
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shared = {name: int(nbytes) for name, nbytes in (line.split() for line in done.stdout.splitlines())}
    assert set(shared) == {"_prepare", "_advance_narrow", "_advance_wide", "_step", "_head_rms_norm_gated"}
    assert max(shared.values()) <= 227 * 1024


def test_the_benchmark_can_be_tried_without_a_card(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if torch.cuda.is_available():
        pytest.skip("Triton does not interpret here")
    from bench import gated_delta

    monkeypatch.setattr(sys, "argv", ["bench/gated_delta.py", "--dry-run", "--out", str(tmp_path)])
    gated_delta.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line[:16].strip() for line in lines[-4:]] == ["prefill 1x70", "prefill 2x20", "decode 1", "decode 3"]
    assert not list(tmp_path.iterdir())


# --- the shape of Qwen3-Next ------------------------------------------------------------------------------------------

on_card = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
REAL = (16, 32, 128, 128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pieces", [[(0, 1)], [(0, 1000)], [(0, 63), (64, 64), (40, 300), (0, 129)]])
class TestRealShape:
    pytestmark = on_card

    def test_prefill(self, pieces: list[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> None:
        starts, lengths = [start for start, _ in pieces], [length for _, length in pieces]
        slots = [7, 2, 5, 1][: len(pieces)]
        tracks = {i: ([3, 6, 4, 8][i], found[-1]) for i, found in enumerate(spots(pieces, 64)) if found}
        inputs, pool = make_inputs(device, sum(lengths), *REAL, dtype), strided_pool(device, *REAL[1:])
        before, rows = pool.clone(), packed(starts, lengths, slots, device, tracks=tracks)
        y = gated_delta_prefill(*inputs, pool, rows, key_heads=REAL[0], chunk=64)
        check_prefill(inputs, REAL[0], before, pool, y, pieces, slots, tracks)

    def test_step(self, pieces: list[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> None:
        slots = [1 + i % (SLOTS - 1) for i in range(len(pieces))]
        inputs, pool = make_inputs(device, len(slots), *REAL, dtype), strided_pool(device, *REAL[1:])
        before, rows = pool.clone(), packed([9] * len(slots), [1] * len(slots), slots, device)
        y = gated_delta_step(*inputs, pool, rows, key_heads=REAL[0])
        for row, slot in enumerate(slots):
            expected, after = reference(inputs, REAL[0], before[slot], row, row + 1)
            close(y[row], expected[0], TOLERANCE[dtype])
            close(pool[slot], after, TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize("kind", HARD)
def test_hard_values_of_the_real_shape_in_bfloat16(kind: str, device: torch.device) -> None:
    q, k, v, decay, beta = (value.to(device) for value in hard(kind, 300, *REAL))
    qkv = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=1).bfloat16()
    a = torch.where(decay < -20, -decay, torch.log(torch.expm1(-decay.double()))).float().clamp(min=-1e4)
    b = torch.logit(beta.double()).float().clamp(-80, 80)
    ones = torch.ones(REAL[1], device=device)
    pool = strided_pool(device, *REAL[1:])
    before, inputs = pool.clone(), (qkv, a, b, 0 * ones, -ones)
    y = gated_delta_prefill(*inputs, pool, packed([64], [300], [3], device), key_heads=REAL[0], chunk=64)
    expected, after = reference(inputs, REAL[0], before[3], 0, 300)
    for found, wanted in ((y, expected), (pool[3], after)):
        assert float((found.double() - wanted).norm()) <= 3e-2 * float(wanted.norm()) + 1e-12  # a state may die away
