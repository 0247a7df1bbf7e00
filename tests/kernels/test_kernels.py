"""Every kernel against its twin in plain torch or in float64: outputs and mutated state, and nothing else mutated."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from engine.kernels import scan
from engine.kernels.attention import attend_decode, attend_prefill, prepare_attention, write_kv
from engine.kernels.conv import conv_prefill
from engine.kernels.linear import Tiling, Workspace, project
from engine.kernels.norm import gated_rms_norm, gated_silu, rms_norm, square_relu_
from engine.kernels.rows import PackedRows
from engine.kernels.scan import scan_prefill
from engine.kernels.step import conv_step, scan_step
from engine.kernels.tokens import copy_slots, embed, keep_tokens
from engine.ops.attention import attention_ref
from engine.ops.conv import conv_ref
from engine.ops.linear import projection_ref
from engine.ops.norm import gated_rms_norm_ref, rms_norm_ref
from engine.ops.rotary import Rotary, rotary_ref
from engine.ops.ssd import ssd_sequential_ref

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning")]

NAN = float("nan")
SLOTS = 9
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
DTYPES = [torch.float32, torch.bfloat16]


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Element by element against the largest one, and as a whole: ||found - expected|| / ||expected||."""
    found, expected = found.double(), expected.double()
    assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()) + 1e-12)
    assert float((found - expected).norm()) <= tolerance / 2 * float(expected.norm()) + 1e-12


def packed(
    starts: Sequence[int],
    lengths: Sequence[int],
    slots: Sequence[int],
    device: torch.device,
    *,
    tracks: dict[int, tuple[int, int]] | None = None,
    tables: Sequence[Sequence[int]] = (),
) -> PackedRows:
    """tracks: row -> (slot, offset)."""
    tracks = tracks or {}
    width = max((len(table) for table in tables), default=1)
    table = [[*pages, *[0] * (width - len(pages))] for pages in tables]

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return PackedRows(
        count=len(starts),
        longest=max(lengths),
        begins=ints([0, *itertools.accumulate(lengths)]),
        starts=ints(starts),
        slots=ints(slots),
        track_slots=ints([tracks.get(i, (0, 0))[0] for i in range(len(starts))]),
        track_offsets=ints([tracks.get(i, (0, 0))[1] for i in range(len(starts))]),
        table=ints([page for pages in table for page in pages] or [0]),
        width=ints([width]),
    )


def randn(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def strided_pool(device: torch.device, *item: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """One layer's slots out of three layers, not contiguous over slots."""
    return randn(device, SLOTS, 3, *item, dtype=dtype)[:, 1]


# --- norms and products -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype: torch.dtype, device: torch.device) -> None:
    x, wide, weight = randn(device, 5, 24, dtype=dtype) * 3, randn(device, 5, 60, dtype=dtype), torch.rand(24) + 0.5
    gate, weight = wide[:, 7:31], weight.to(device)
    close(rms_norm(x, weight, 1e-5), rms_norm_ref(x, weight, 1e-5), TOLERANCE[dtype])
    close(gated_rms_norm(x, gate, weight, 3, 1e-5), gated_rms_norm_ref(x, gate, weight, 3, 1e-5), TOLERANCE[dtype])
    found = gated_rms_norm(x, gate, weight, 3, 1e-5, norm_first=True)
    close(found, gated_rms_norm_ref(x, gate, weight, 3, 1e-5, norm_first=True), TOLERANCE[dtype])
    close(gated_silu(gate, wide[:, 30:54]), F.silu(gate.double()) * wide[:, 30:54].double(), TOLERANCE[dtype])
    expected = torch.relu(x).square()
    assert square_relu_(x) is x
    close(x, expected, TOLERANCE[dtype])


@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.bfloat16), (3, torch.float32), (17, torch.bfloat16)])
@pytest.mark.parametrize(("outputs", "inputs", "programs"), [(37, 50, 4), (64, 128, 3), (37, 200, 1), (37, 200, 8)])
def test_products_of_few_rows(
    rows: int, outputs: int, inputs: int, programs: int, dtype: torch.dtype, device: torch.device
) -> None:
    x = randn(device, rows, inputs + 6, dtype=dtype)[:, 3 : inputs + 3]
    weight, norm = randn(device, outputs, inputs, dtype=dtype), torch.rand(inputs, device=device) + 0.5
    residual = randn(device, rows, outputs, dtype=dtype)
    workspace = Workspace(10_000, 8, device)
    tiling = Tiling(outputs=16, inputs=32, programs=programs, warps=4, stages=2)
    plain = {"norm": None, "eps": 1e-5, "square": False, "residual": None, "tiling": tiling, "workspace": workspace}
    expected, tolerance = projection_ref(x, weight, None), TOLERANCE[dtype]
    for _ in range(2):  # a second time: the workspace is as it was
        close(project(x, weight, **plain), expected, tolerance)
    total = expected + residual.double()
    found = project(x, weight, **(plain | {"residual": residual}))
    assert found is residual
    close(found, total, tolerance)
    squared = torch.relu(expected).square()
    close(project(x, weight, **(plain | {"square": True})), squared, tolerance)
    normed = projection_ref(rms_norm_ref(x, norm, 1e-5), weight, None)
    close(project(x, weight, **(plain | {"norm": norm})), normed, tolerance)


# --- convolution and scan ---------------------------------------------------------------------------------------------

CELL = 16
PIECES = [
    [(0, 1)],
    [(0, 40)],
    [(5, 1), (16, 3)],
    [(0, 3), (0, 33), (21, 2), (32, 17)],
    [(15, 2), (1, 1), (31, 40)],
]


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize(("width", "dtype"), [(2, torch.float32), (3, torch.bfloat16), (4, torch.float32)])
def test_conv_prefill(pieces: list[tuple[int, int]], width: int, dtype: torch.dtype, device: torch.device) -> None:
    channels, tolerance = 140, TOLERANCE[dtype]
    starts, lengths = [start for start, _ in pieces], [length for _, length in pieces]
    slots, track_slots = [7, 2, 5, 1][: len(pieces)], [3, 6, 4, 8]
    pool, weight = strided_pool(device, channels, width - 1, dtype=dtype), randn(device, width, channels, dtype=dtype)
    bias = randn(device, channels, dtype=dtype)
    x = randn(device, sum(lengths), channels + 4, dtype=dtype)[:, 2 : channels + 2]
    for slot, start in zip(slots, starts, strict=True):
        if start == 0:
            pool[slot] = NAN
    tracks = {i: (track_slots[i], 1 + lengths[i] // 2) for i in range(0, len(pieces), 2) if lengths[i] > 1}
    before, rows = pool.clone(), packed(starts, lengths, slots, device, tracks=tracks)
    out = conv_prefill(x, pool, rows, weight, bias)
    expected_pool = before.clone()
    for i, (part, found, slot, start) in enumerate(
        zip(x.split(lengths), out.split(lengths), slots, starts, strict=True)
    ):
        state = before[slot] if start else torch.zeros_like(before[slot])
        expected, after = conv_ref(part, state, weight, bias)
        close(found, expected, tolerance)
        expected_pool[slot] = after
        if i in tracks:
            track, offset = tracks[i]
            expected_pool[track] = conv_ref(part[:offset], state, weight, bias)[1]
    assert torch.equal(pool, expected_pool)
    assert torch.equal(conv_prefill(x, before.clone(), rows, weight, None).isnan(), torch.zeros_like(x).bool())


def scan_inputs(device: torch.device, tokens: int, heads: int, dim: int, groups: int, size: int) -> tuple[Tensor, ...]:
    xbc = randn(device, tokens, heads * dim + 2 * groups * size)
    dt = torch.randn(tokens, heads + 5, device=device)[:, 2 : heads + 2]
    a = -torch.rand(heads, device=device) * 8 - 0.5
    return xbc, dt, torch.randn(heads, device=device) - 3, a, torch.randn(heads, device=device)


def scan_reference(
    xbc: Tensor, dt: Tensor, bias: Tensor, a: Tensor, d: Tensor, state: Tensor, groups: int, limit: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """One row in float64: y [n, H P] and the new state."""
    heads, dim, size = state.shape
    x, b, c = xbc.split([heads * dim, groups * size, groups * size], dim=1)
    steps = F.softplus(dt.double() + bias).clamp(*limit)
    shapes = (x.view(-1, heads, dim), steps, a, b.view(-1, groups, size), c.view(-1, groups, size))
    y, after = ssd_sequential_ref(*shapes, d, state)
    return y.flatten(1), after


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize(
    ("heads", "dim", "groups", "size", "dtype", "limit"),
    [
        (4, 20, 2, 16, torch.float32, (0.0, float("inf"))),
        (3, 5, 1, 20, torch.bfloat16, (0.0, float("inf"))),
        (2, 5, 1, 16, torch.float32, (0.02, 0.05)),
    ],
)
def test_scan_prefill(
    pieces: list[tuple[int, int]],
    heads: int,
    dim: int,
    groups: int,
    size: int,
    dtype: torch.dtype,
    limit: tuple[float, float],
    device: torch.device,
) -> None:
    starts, lengths = [start for start, _ in pieces], [length for _, length in pieces]
    slots, track_slots = [7, 2, 5, 1][: len(pieces)], [3, 6, 4, 8]
    xbc, dt, bias, a, d = scan_inputs(device, sum(lengths), heads, dim, groups, size)
    xbc, dt = xbc.to(dtype), dt.to(dtype)
    pool = strided_pool(device, heads, dim, size)
    for slot, start in zip(slots, starts, strict=True):
        if start == 0:
            pool[slot] = NAN
    spots = [[at for at in range(1, n + 1) if (start + at) % CELL == 0] for start, n in pieces]
    tracks = {i: (track_slots[i], found[-1 - i % 2 :][0]) for i, found in enumerate(spots) if found}
    before, rows = pool.clone(), packed(starts, lengths, slots, device, tracks=tracks)
    y = scan_prefill(xbc, dt, bias, limit, a, d, pool, rows, groups=groups, chunk=CELL)
    tolerance = TOLERANCE[dtype]
    for i, (part, steps, found) in enumerate(zip(xbc.split(lengths), dt.split(lengths), y.split(lengths), strict=True)):
        state = before[slots[i]] if starts[i] else torch.zeros_like(before[slots[i]])
        expected, after = scan_reference(part, steps, bias, a, d, state, groups, limit)
        close(found, expected, tolerance)
        close(pool[slots[i]], after, tolerance)
        if i in tracks:
            track, offset = tracks[i]
            kept = scan_reference(part[:offset], steps[:offset], bias, a, d, state, groups, limit)[1]
            close(pool[track], kept, tolerance)
    written = {*slots, *(track for track, _ in tracks.values())}
    untouched = [slot for slot in range(SLOTS) if slot not in written]
    assert torch.equal(pool[untouched], before[untouched])


def test_a_large_state_is_shared_by_several_programs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    xbc, dt, bias, a, d = scan_inputs(device, 40, 2, 40, 1, 16)
    pools = [strided_pool(device, 2, 40, 16)]
    pools.append(pools[0].clone())
    rows, found = packed([16], [40], [3], device, tracks={0: (5, 16)}), []
    for pool, largest in zip(pools, (16384, 256), strict=True):
        monkeypatch.setattr(scan, "_LARGEST_STATE", largest)
        found.append(scan_prefill(xbc, dt, bias, (0.0, 1.0), a, d, pool, rows, groups=1, chunk=CELL))
    close(found[1], found[0], 1e-6)
    close(pools[1], pools[0], 1e-6)


@pytest.mark.parametrize("chunk", [4, 24, 64, 256])
def test_any_chunk_can_end_where_a_state_is_kept(chunk: int, device: torch.device) -> None:
    heads, dim, groups, size, length = 2, 4, 1, 8, 2 * chunk + 3
    xbc, dt, bias, a, d = scan_inputs(device, length, heads, dim, groups, size)
    pool = strided_pool(device, heads, dim, size)
    state, rows = pool[2].clone(), packed([chunk], [length], [2], device, tracks={0: (5, chunk)})
    scan_prefill(xbc, dt, bias, (0.0, 1.0), a, d, pool, rows, groups=groups, chunk=chunk)
    expected = scan_reference(xbc[:chunk], dt[:chunk], bias, a, d, state, groups, (0.0, 1.0))[1]
    close(pool[5], expected, 1e-4)


@pytest.mark.parametrize(("slots", "padding"), [([3], 0), ([6, 1, 4], 2), ([1, 2, 3, 4, 5, 6, 7, 8], 1)])
@pytest.mark.parametrize(
    ("heads", "dim", "groups", "size", "dtype", "state_dtype"),
    [
        (4, 20, 2, 16, torch.float32, torch.float32),
        (3, 5, 1, 20, torch.bfloat16, torch.float32),
        (3, 5, 1, 16, torch.bfloat16, torch.bfloat16),
    ],
)
def test_one_token_through_a_mixer(
    slots: list[int],
    padding: int,
    heads: int,
    dim: int,
    groups: int,
    size: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    device: torch.device,
) -> None:
    count, width, channels, limit = len(slots) + padding, 4, heads * dim + 2 * groups * size, (0.0, float("inf"))
    wide = randn(device, count, channels + 2 * heads * dim + heads, dtype=dtype)
    _, xbc, _, dt = wide.split([heads * dim, channels, heads * dim, heads], dim=1)
    _, _, dt_bias, a, d = scan_inputs(device, 1, heads, dim, groups, size)
    conv, pool = strided_pool(device, channels, width - 1, dtype=dtype), strided_pool(device, heads, dim, size)
    pool = pool.to(state_dtype)
    weight, bias = randn(device, width, channels, dtype=dtype), randn(device, channels, dtype=dtype)
    rows = packed([9] * len(slots) + [-1] * padding, [1] * count, slots + [0] * padding, device)
    old_conv, old_pool = conv.clone(), pool.clone()
    convolved = conv_step(xbc, conv, rows, weight, bias)
    y = scan_step(convolved, dt, dt_bias, limit, a, d, pool, rows, groups=groups)
    tolerance = max(TOLERANCE[dtype], TOLERANCE[state_dtype])
    for row, slot in enumerate(slots):
        expected, window = conv_ref(xbc[row : row + 1], old_conv[slot], weight, bias)
        close(convolved[row], expected[0], TOLERANCE[dtype])
        assert torch.equal(conv[slot].double(), window)
        part = convolved[row : row + 1], dt[row : row + 1]
        expected, after = scan_reference(*part, dt_bias, a, d, old_pool[slot], groups, limit)
        close(y[row], expected[0], tolerance)
        close(pool[slot], after, tolerance)
    untouched = [slot for slot in range(SLOTS) if slot not in slots]
    assert torch.equal(pool[untouched], old_pool[untouched]) and torch.equal(conv[untouched], old_conv[untouched])


# --- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_keys_and_values_are_written_where_they_belong(page_size: int, device: torch.device) -> None:
    heads, dim = 2, 5
    pieces, total = [(0, 3), (6, 1), (7, 9), (-1, 1), (page_size, 1)], 15
    counts = [-(-(start + n) // page_size) for start, n in pieces]
    ids = iter(np.random.default_rng(0).permutation(np.arange(1, sum(counts) + 1)).tolist())
    tables = [list(itertools.islice(ids, count)) for count in counts]
    kv = torch.full((2, sum(counts) + 1, page_size, heads, dim), NAN, device=device)
    wide = randn(device, total, 2 * heads * dim + 3)
    rows = packed([s for s, _ in pieces], [n for _, n in pieces], [1, 2, 3, 0, 4], device, tables=tables)
    write_kv(kv, wide[:, 3:], rows)
    expected, at = torch.full_like(kv, NAN), 0
    for (start, n), table in zip(pieces, tables, strict=True):
        for position in range(start, start + n) if start >= 0 else ():
            page = table[position // page_size]
            if position % page_size == 0:
                expected[:, page] = 0
            token = wide[at + position - start, 3:]
            expected[:, page, position % page_size] = token.view(2, heads, dim)
        at += n
    assert_close(kv, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("rotary_dim", "theta"), [(0, 0.0), (4, 1e7), (10, 1e4)])
@pytest.mark.parametrize(("page_size", "dtype"), [(4, torch.float32), (16, torch.bfloat16)])
def test_queries_and_keys_are_normed_and_turned(
    normed: bool, rotary_dim: int, theta: float, page_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Rows of more and of fewer tokens than a program takes, on far positions; pages as `write_kv` leaves them."""
    query_heads, heads, dim = 4, 2, 10
    pieces, total = [(0, 19), (150, 1), (7, 9), (-1, 1), (page_size, 1)], 31
    positions = torch.cat([torch.arange(start, start + n) for start, n in pieces])
    counts = [-(-(start + n) // page_size) for start, n in pieces]
    ids = iter(np.random.default_rng(0).permutation(np.arange(1, sum(counts) + 1)).tolist())
    tables = [list(itertools.islice(ids, count)) for count in counts]
    wide = randn(device, total, (query_heads + 2 * heads) * dim + 7, dtype=dtype)
    norms = torch.rand(2, dim, device=device) + 0.5 if normed else None
    frequencies = Rotary(rotary_dim, theta, device).frequencies if rotary_dim else None
    kv = torch.full((2, sum(counts) + 1, page_size, heads, dim), NAN, device=device, dtype=dtype)
    twin, before = kv.clone(), wide.clone()
    rows = packed([s for s, _ in pieces], [n for _, n in pieces], [1, 2, 3, 0, 4], device, tables=tables)
    found = prepare_attention(wide, kv, rows, heads=query_heads, norms=norms, eps=1e-5, frequencies=frequencies)
    query, key, value = wide[:, :-7].view(total, -1, dim).split([query_heads, heads, heads], dim=1)
    expected = []
    for part, norm in zip((query, key), (None, None) if norms is None else norms, strict=True):
        part = part if norm is None else rms_norm_ref(part, norm, 1e-5).to(dtype)
        expected.append(rotary_ref(part.cpu(), positions, rotary_dim, theta).to(dtype).to(device))
    write_kv(twin, torch.cat((expected[1], value), dim=1).flatten(1), rows)
    known = positions >= 0
    close(found[known], expected[0].flatten(1)[known], TOLERANCE[dtype])
    assert torch.equal(kv.isnan(), twin.isnan()) and torch.equal(kv[1].nan_to_num(), twin[1].nan_to_num())
    close(kv[0].nan_to_num(), twin[0].nan_to_num(), TOLERANCE[dtype])
    assert torch.equal(wide, before)


def test_far_positions_are_turned_exactly(device: torch.device) -> None:
    kv, wide = torch.zeros(2, 2, 1, 1, 16, device=device), randn(device, 1, 48)
    rotary = Rotary(16, 1e4, device)
    for position in (8191, 131071, 262143):
        rows = packed([position], [1], [1], device, tables=[[1] * (position + 1)])
        found = prepare_attention(wide, kv, rows, heads=1, norms=None, eps=1e-5, frequencies=rotary.frequencies)
        expected = rotary_ref(wide[:, :16].view(1, 1, 16).cpu(), torch.tensor([position]), 16, 1e4)
        assert_close(found.cpu().double(), expected.flatten(1), rtol=1e-6, atol=1e-6)


def paged(device: torch.device, lengths: Sequence[int], heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    page_size = 4
    counts = [-(-n // page_size) for n in lengths]
    order = np.random.default_rng(0).permutation(np.arange(1, sum(counts) + 1)).tolist()
    tables = [order[sum(counts[:i]) : sum(counts[: i + 1])] for i in range(len(counts))]
    kv = randn(device, 2, sum(counts) + 1, page_size, heads, dim, dtype=dtype)
    kv[:, 0] = NAN
    for n, table in zip(lengths, tables, strict=True):
        if n % page_size:
            kv[:, table[-1], n % page_size :] = NAN  # beyond the row's end: never read
    return kv, tables


@pytest.mark.parametrize(
    ("query_heads", "heads", "dim", "dtype"), [(5, 1, 16, torch.bfloat16), (4, 2, 10, torch.float32)]
)
@pytest.mark.parametrize("splits", [1, 3])
def test_attend_decode(
    query_heads: int, heads: int, dim: int, splits: int, dtype: torch.dtype, device: torch.device
) -> None:
    lengths = [1, 63, 130, 64, 7]
    kv, tables = paged(device, lengths, heads, dim, dtype)
    query = randn(device, len(lengths) + 1, query_heads * dim + 3, dtype=dtype)[:, : query_heads * dim]
    starts = [*(n - 1 for n in lengths), -1]
    rows = packed(starts, [1] * len(starts), [1, 2, 3, 4, 5, 0], device, tables=[*tables, [0]])
    gate = randn(device, len(starts), query_heads * dim + 9, dtype=dtype)[:, 4 : 4 + query_heads * dim]
    for scale, opened in ((dim**-0.5, None), (0.7, gate)):
        out = attend_decode(query, kv, rows, scale=scale, splits=splits, gate=opened)
        for row, table in enumerate(tables):
            expected = attention_ref(query[row].view(1, query_heads, dim), kv, table, lengths[row] - 1, scale)[0]
            factor = 1 if opened is None else opened[row].double().sigmoid().view(query_heads, dim)
            close(out[row], expected * factor, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("query_heads", "heads", "dim", "dtype"), [(5, 1, 16, torch.bfloat16), (4, 2, 10, torch.float32)]
)
def test_attend_prefill(query_heads: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    pieces = [(0, 1), (0, 70), (9, 2), (66, 35)]
    kv, tables = paged(device, [start + n for start, n in pieces], heads, dim, dtype)
    query = randn(device, 108, query_heads * dim + 3, dtype=dtype)[:, : query_heads * dim]
    rows = packed([s for s, _ in pieces], [n for _, n in pieces], [1, 2, 3, 4], device, tables=tables)
    gate = randn(device, 108, query_heads * dim + 9, dtype=dtype)[:, 4 : 4 + query_heads * dim]
    for scale, opened in ((dim**-0.5, None), (0.7, gate)):
        out = attend_prefill(query, kv, rows, scale=scale, gate=opened)
        factors = torch.ones_like(gate) if opened is None else opened.double().sigmoid()
        parts = (value.split([n for _, n in pieces]) for value in (query, out, factors))
        for part, found, factor, (start, _), table in zip(*parts, pieces, tables, strict=True):
            expected = attention_ref(part.view(-1, query_heads, dim), kv, table, start, scale)
            close(found, expected * factor.view(expected.shape), TOLERANCE[dtype])


# --- tokens and slots -------------------------------------------------------------------------------------------------


def test_tokens_come_from_the_host_or_from_the_slot(device: torch.device) -> None:
    table, rows = randn(device, 11, 24), packed([5, 6, -1], [1, 1, 1], [3, 2, 0], device)
    last = torch.tensor([9, 9, 7, 4], dtype=torch.int32, device=device)
    ids = torch.tensor([-1, 5, 0, 10, 2], dtype=torch.int32, device=device)
    assert torch.equal(embed(ids, last, rows, table), table[[4, 5, 0, 10, 2]])
    assert torch.equal(embed(ids, last, rows, table, multiplier=3.0), table[[4, 5, 0, 10, 2]] * 3)
    best, tokens = torch.tensor([0.5, NAN, 2.0], device=device), torch.tensor([1, 8, 70000], device=device)
    report = keep_tokens(best, tokens, rows.slots, last)
    assert last.tolist() == [9, 9, 8, 1]
    assert_close(report, torch.stack((best, tokens.float())), equal_nan=True)
    places = torch.tensor([2, 0], dtype=torch.int32, device=device)
    report = keep_tokens(best.bfloat16(), tokens, rows.slots[:2], last, places=places)
    assert last.tolist() == [9, 9, 1, 70000] and report.tolist() == [[2.0, 0.5], [70000.0, 1.0]]


@pytest.mark.parametrize("size", [5, 9000])
def test_whole_slots_are_copied(size: int, device: torch.device) -> None:
    pools = randn(device, 7, 2, size), randn(device, 7, 3, dtype=torch.bfloat16)
    expected = [pool.clone() for pool in pools]
    for pool in expected:
        pool[5], pool[1] = pool[2].clone(), pool[6].clone()
    copy_slots(pools, torch.tensor([[2, 6], [5, 1]], dtype=torch.int32, device=device))
    assert all(torch.equal(pool, wanted) for pool, wanted in zip(pools, expected, strict=True))
