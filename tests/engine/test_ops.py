"""Every op against its slow twin: outputs and mutated state, and nothing else mutated."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from engine.batch import Row, build_batch
from engine.ops.attention import attend_decode, attend_prefill, attention_ref, write_kv
from engine.ops.chunks import plan_chunks
from engine.ops.conv import conv_prefill, conv_ref, conv_step, plan_conv
from engine.ops.linear import Projection, projection_ref
from engine.ops.norm import gated_rms_norm, gated_rms_norm_ref, rms_norm, rms_norm_ref
from engine.ops.slots import index_slots, read_slots, save_states, write_slots
from engine.ops.ssd import ssd_prefill, ssd_sequential_ref, ssd_step
from engine.tracking import Boundary

SLOTS = 9
NAN = float("nan")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def close(found: Tensor, expected: Tensor, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    assert_close(found.double(), expected.double(), rtol=rtol, atol=atol)


def strided_pool(*item: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """One layer's slots out of three layers: [SLOTS, *item], not contiguous over slots."""
    return torch.randn(SLOTS, 3, *item).to(dtype)[:, 1]


def test_norms() -> None:
    x, gate, weight = torch.randn(5, 12) * 3, torch.randn(5, 12), torch.rand(12) + 0.5
    close(rms_norm(x, weight, 1e-5), rms_norm_ref(x, weight, 1e-5))
    close(gated_rms_norm(x.clone(), gate, weight, 3, 1e-5), gated_rms_norm_ref(x, gate, weight, 3, 1e-5))
    half = x.bfloat16()
    assert rms_norm(half, weight, 1e-5).dtype is torch.bfloat16
    close(rms_norm(half, weight, 1e-5), rms_norm_ref(half, weight, 1e-5), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 33])
@pytest.mark.parametrize("with_bias", [False, True])
def test_projections(tokens: int, with_bias: bool) -> None:
    weight, bias = torch.randn(40, 24), torch.randn(40) if with_bias else None
    wide = torch.randn(tokens, 50)
    x, residual = wide[:, 3:27], torch.randn(tokens, 40)  # rows of a wider tensor, as after a split
    before, kept = x.clone(), residual.clone()
    expected = projection_ref(x, weight, bias)
    for projection in (Projection(weight, bias), Projection(weight, bias, pack=False)):
        close(projection(x), expected)
        close(projection.add_to(residual, x), expected + residual)
    assert torch.equal(x, before) and torch.equal(residual, kept)
    close(Projection(weight.bfloat16())(x.bfloat16()), projection_ref(x, weight, None), rtol=5e-2, atol=2e-1)


def test_slots_in_a_run_are_a_view() -> None:
    pool = strided_pool(2)
    assert index_slots([3, 4, 5], "cpu") == slice(3, 6)
    assert isinstance(index_slots([3, 5], "cpu"), Tensor) and isinstance(index_slots([4, 3], "cpu"), Tensor)
    for slots in ([3, 4, 5], [5, 2, 7], [6]):
        index = index_slots(slots, "cpu")
        items = read_slots(pool, index)
        assert torch.equal(items, pool[torch.tensor(slots)])
        write_slots(pool, index, items.clone() + 1)
        assert torch.equal(pool[torch.tensor(slots)], items + 1 if isinstance(index, Tensor) else items)


def test_states_are_saved_where_they_belong_and_nowhere_else() -> None:
    pool = strided_pool(2, dtype=torch.bfloat16)
    before, items = pool.clone(), torch.randn(3, 2)
    save_states(pool, [(4, items[2]), (7, items[0])])
    before[4], before[7] = items[2].bfloat16(), items[0].bfloat16()
    assert torch.equal(pool, before)


LENGTHS = [[1], [2], [7], [1, 1], [3, 1, 2], [2, 9, 1, 4], [4, 4, 4], [1, 2, 3, 4, 5]]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("width", [2, 3, 4])
def test_conv_prefill(lengths: list[int], width: int) -> None:
    channels = 6
    pool, bias = strided_pool(channels, width - 1), torch.randn(channels)
    weight = torch.randn(width, channels)
    x = torch.randn(sum(lengths), channels + 3)[:, 1 : channels + 1]
    slots = [7, 2, 5, 1, 4][: len(lengths)]
    fresh = torch.tensor([i % 2 == 0 for i in range(len(lengths))])
    for slot, is_fresh in zip(slots, fresh, strict=True):
        if is_fresh:
            pool[slot] = NAN
    before = pool.clone()
    out = conv_prefill(x, pool, index_slots(slots, "cpu"), fresh, plan_conv(lengths, width, [], "cpu"), weight, bias)
    for part, found, slot, is_fresh in zip(x.split(lengths), out.split(lengths), slots, fresh, strict=True):
        state = torch.zeros_like(before[slot]) if is_fresh else before[slot]
        expected, after = conv_ref(part, state, weight, bias)
        close(found, expected)
        close(pool[slot], after)
    untouched = [slot for slot in range(SLOTS) if slot not in slots]
    assert torch.equal(pool[untouched], before[untouched])


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_conv_prefill_saves_the_window_before_any_token(lengths: list[int], width: int, dtype: torch.dtype) -> None:
    """Each round saves another offset of every second sequence; the windows may lie in the slot, partly or wholly."""
    channels, slots = 6, [7, 2, 5, 1, 4][: len(lengths)]
    weight, x = torch.randn(width, channels).to(dtype), torch.randn(sum(lengths), channels).to(dtype)
    fresh = torch.tensor([i % 2 == 1 for i in range(len(lengths))])
    original = strided_pool(channels, width - 1, dtype=dtype)
    plain = original.clone()
    index = index_slots(slots, "cpu")
    out = conv_prefill(x, plain, index, fresh, plan_conv(lengths, width, [], "cpu"), weight, None)
    for shift, first in itertools.product(range(max(lengths)), range(min(2, len(lengths)))):
        tracks = [
            Boundary(s, 1 + (s + shift) % lengths[s], slot)
            for s, slot in zip(range(first, len(lengths), 2), (6, 3, 8), strict=False)
        ]
        pool, expected = original.clone(), plain.clone()
        for track in tracks:
            part = x.split(lengths)[track.sequence][: track.offset]
            state = original[slots[track.sequence]] * (0 if fresh[track.sequence] else 1)
            expected[track.slot] = conv_ref(part, state, weight, None)[1]
        found = conv_prefill(x, pool, index, fresh, plan_conv(lengths, width, tracks, "cpu"), weight, None)
        assert torch.equal(found, out) and torch.equal(pool, expected)


@pytest.mark.parametrize("slots", [[3], [2, 3, 4], [6, 1, 4]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_conv_step(slots: list[int], dtype: torch.dtype) -> None:
    pool, weight = strided_pool(6, 3, dtype=dtype), torch.randn(4, 6).to(dtype)
    bias, x = torch.randn(6).to(dtype), torch.randn(len(slots), 6).to(dtype)
    before = pool.clone()
    tolerance = 1e-4 if dtype is torch.float32 else 5e-2
    out = conv_step(x, pool, index_slots(slots, "cpu"), weight, bias)
    for row, slot in enumerate(slots):
        expected, after = conv_ref(x[row : row + 1], before[slot], weight, bias)
        close(out[row], expected[0], tolerance, tolerance)
        close(pool[slot], after, 0, 0)
    untouched = [slot for slot in range(SLOTS) if slot not in slots]
    assert torch.equal(pool[untouched], before[untouched])


def scan_inputs(tokens: int, heads: int, dim: int, groups: int, size: int) -> tuple[Tensor, ...]:
    """x, dt, a, b, c, d; x, b and c are slices of one wider tensor, as the model's are."""
    wide = torch.randn(tokens, heads * dim + 2 * groups * size + 5)
    x, b, c, _ = wide.split([heads * dim, groups * size, groups * size, 5], dim=1)
    dt, a = torch.rand(tokens, heads) * 0.5 + 0.001, -torch.rand(heads) * 8 - 0.5
    shapes = x.view(tokens, heads, dim), b.view(tokens, groups, size), c.view(tokens, groups, size)
    return shapes[0], dt, a, shapes[1], shapes[2], torch.randn(heads)


CHUNK = 4
PIECES = [
    [(0, 1)],
    [(0, 4)],
    [(0, 5)],
    [(0, 23)],
    [(4, 4), (0, 9)],
    [(0, 3), (0, 17), (5, 1), (8, 6)],
    [(1, 2), (2, 2), (3, 2), (3, 9)],
    [(0, 4), (0, 8), (0, 12), (7, 5), (6, 1)],
]


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (3, 1), (4, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ssd_prefill(pieces: list[tuple[int, int]], heads: int, groups: int, dtype: torch.dtype) -> None:
    dim, size = 3, 5
    starts, lengths = [start for start, _ in pieces], [length for _, length in pieces]
    x, dt, a, b, c, d = scan_inputs(sum(lengths), heads, dim, groups, size)
    pool = strided_pool(heads, dim, size, dtype=dtype)
    slots = [7, 2, 5, 1, 4][: len(pieces)]
    fresh = torch.tensor([start == 0 for start in starts])
    for slot, is_fresh in zip(slots, fresh, strict=True):
        if is_fresh:
            pool[slot] = NAN
    before, inputs = pool.clone(), (x.clone(), dt.clone(), b.clone(), c.clone())
    y = ssd_prefill(
        x, dt, a, b, c, d, pool, index_slots(slots, "cpu"), fresh, plan_chunks(starts, lengths, CHUNK, [], "cpu")
    )
    ends = list(itertools.accumulate(lengths))
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    for end, length, slot, is_fresh in zip(ends, lengths, slots, fresh, strict=True):
        part = slice(end - length, end)
        state = torch.zeros_like(before[slot]) if is_fresh else before[slot]
        expected, after = ssd_sequential_ref(x[part], dt[part], a, b[part], c[part], d, state)
        close(y[part], expected)
        close(pool[slot], after, tolerance, tolerance)
    untouched = [slot for slot in range(SLOTS) if slot not in slots]
    assert torch.equal(pool[untouched], before[untouched])
    assert all(torch.equal(now, then) for now, then in zip((x, dt, b, c), inputs, strict=True))


@pytest.mark.parametrize("pieces", [*PIECES, [(3, 1), (0, 8), (4, 9), (2, 2), (1, 11)]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ssd_prefill_saves_the_state_between_any_two_chunks(pieces: list[tuple[int, int]], dtype: torch.dtype) -> None:
    """Each round saves another position of the sequences; the rest is bit for bit what it is without."""
    heads, groups, dim, size = 4, 2, 3, 5
    starts, lengths = [start for start, _ in pieces], [length for _, length in pieces]
    x, dt, a, b, c, d = scan_inputs(sum(lengths), heads, dim, groups, size)
    original, slots = strided_pool(heads, dim, size, dtype=dtype), [7, 2, 5, 1, 4][: len(pieces)]
    fresh, index = torch.tensor([start == 0 for start in starts]), index_slots(slots, "cpu")

    def run(tracks: list[Boundary]) -> tuple[Tensor, Tensor]:
        pool, plan = original.clone(), plan_chunks(starts, lengths, CHUNK, tracks, "cpu")
        return ssd_prefill(x, dt, a, b, c, d, pool, index, fresh, plan), pool

    y, plain = run([])
    spots = [[at for at in range(1, length + 1) if (start + at) % CHUNK == 0] for start, length in pieces]
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    for shift in range(max(len(found) for found in spots)):
        wanted = [(s, found[(s + shift) % len(found)]) for s, found in enumerate(spots) if found and (s + shift) % 3]
        tracks = [Boundary(s, offset, slot) for (s, offset), slot in zip(wanted, (8, 3, 6, 0), strict=False)]
        found, pool = run(tracks)
        kept = [slot for slot in range(SLOTS) if slot not in {track.slot for track in tracks}]
        assert torch.equal(found, y) and torch.equal(pool[kept], plain[kept])
        for s, offset, slot in ((track.sequence, track.offset, track.slot) for track in tracks):
            part = slice(sum(lengths[:s]), sum(lengths[:s]) + offset)
            state = original[slots[s]] * (0 if fresh[s] else 1)
            close(
                pool[slot],
                ssd_sequential_ref(x[part], dt[part], a, b[part], c[part], d, state)[1],
                tolerance,
                tolerance,
            )
            assert offset < lengths[s] or torch.equal(pool[slot], pool[slots[s]])


def test_only_states_on_the_grid_can_be_saved() -> None:
    for offset in (1, 2, 4, 5):
        with pytest.raises(AssertionError, match="not known"):
            plan_chunks([5], [5], CHUNK, [Boundary(0, offset, 3)], "cpu")
    assert plan_chunks([5], [5], CHUNK, [Boundary(0, 3, 3)], "cpu").tracks == ((3, 1),)


def test_chunks_lie_on_the_grid_of_their_own_sequence() -> None:
    """A sequence's chunk rows are the same whatever is packed before it."""
    plan = plan_chunks([0, 6, 3], [5, 7, 1], CHUNK, [], "cpu")
    row_of = [place // plan.width for place in plan.tokens.tolist()]
    cells = [(0, t // CHUNK) for t in range(5)] + [(1, t // CHUNK) for t in range(6, 13)] + [(2, 0)]
    assert len(set(row_of)) == plan.rows == 2 + 3 + 1
    assert all((row_of[i] == row_of[j]) == (cells[i] == cells[j]) for i in range(13) for j in range(13))
    assert plan.width == CHUNK and plan_chunks([0, 8], [3, 2], CHUNK, [], "cpu").width == 3


def test_ssd_prefill_keeps_its_precision_after_strong_decay() -> None:
    """A chunk whose beginning decays by e^-1000 and more; what its later tokens pass each other must not feel it."""
    x, dt, a, b, c, d = scan_inputs(256, 2, 4, 1, 8)
    dt[:128] *= 20
    dt[128:] *= 0.05
    pool = strided_pool(2, 4, 8)
    y = ssd_prefill(x, dt, a, b, c, d, pool, slice(1, 2), torch.tensor([True]), plan_chunks([0], [256], 256, [], "cpu"))
    expected, after = ssd_sequential_ref(x, dt, a, b, c, d, torch.zeros(2, 4, 8))
    close(y, expected, 1e-5, 1e-5)
    close(pool[1], after, 1e-5, 1e-5)


@pytest.mark.parametrize("slots", [[3], [2, 3, 4], [6, 1, 4]])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (3, 1), (4, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ssd_step(slots: list[int], heads: int, groups: int, dtype: torch.dtype) -> None:
    x, dt, a, b, c, d = scan_inputs(len(slots), heads, 3, groups, 5)
    pool = strided_pool(heads, 3, 5, dtype=dtype)
    before = pool.clone()
    y = ssd_step(x, dt, a, b, c, d, pool, index_slots(slots, "cpu"))
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    for row, slot in enumerate(slots):
        one = slice(row, row + 1)
        expected, after = ssd_sequential_ref(x[one], dt[one], a, b[one], c[one], d, before[slot])
        close(y[one], expected)
        close(pool[slot], after, tolerance, tolerance)
    untouched = [slot for slot in range(SLOTS) if slot not in slots]
    assert torch.equal(pool[untouched], before[untouched])


PAGE = 4


def paged_rows(pieces: list[tuple[int, int]], contiguous: bool) -> list[Row]:
    """Rows of (start, length) whose pages are a run each, or interleaved; page 0 is nobody's."""
    counts = [-(-(start + length) // PAGE) for start, length in pieces]
    rows, following = [], 1
    for index, ((start, length), count) in enumerate(zip(pieces, counts, strict=True)):
        if contiguous:
            pages, following = list(range(following, following + count)), following + count
        else:
            pages = [1 + index + len(pieces) * k for k in reversed(range(count))]
        rows.append(Row([1] * length, start, pages, index + 1, 0, None))
    return rows


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize(
    "pieces",
    [
        [(0, 1)],
        [(0, 9), (0, 4)],
        [(5, 6), (0, 3), (4, 4), (3, 1)],
        [(3, 1)],
        [(1, 1), (8, 1), (15, 1)],
        [(7, 1), (7, 1)],
        [(8189, 1), (3, 1)],
        [(2, 1), (0, 5), (6, 7), (11, 1)],
    ],
)
@pytest.mark.parametrize("scale", [6**-0.5, 0.125])
def test_attention(pieces: list[tuple[int, int]], contiguous: bool, scale: float) -> None:
    rows = paged_rows(pieces, contiguous)
    batch = build_batch(rows, page_size=PAGE, with_positions=False, device="cpu")
    tokens, decode = sum(length for _, length in pieces), batch.decode.rows if batch.decode else 0
    num_pages = max(max(row.page_table) for row in rows) + 2
    kv = torch.randn(2, num_pages, PAGE, 2, 6)
    kv[:, 0] = 1e4
    past = {row.page_table[place // PAGE] for row in rows for place in range(row.start)}
    kv[:, [page for page in range(1, num_pages) if page not in past]] = NAN
    query, fresh_kv = torch.randn(tokens, 4, 6), torch.randn(tokens, 2, 2, 6)
    before = kv.clone()
    if batch.begun_pages is not None:
        before[:, batch.begun_pages] = 0
    write_kv(kv, batch.locations, fresh_kv, batch.begun_pages)
    parts = []
    if batch.decode:
        parts.append(attend_decode(query[:decode], kv, batch.decode.spans, scale))
    if batch.prefill:
        parts.append(attend_prefill(query[decode:], fresh_kv[decode:], kv, batch.prefill.spans, scale))
    out = torch.cat(parts)

    packed = [row for row in rows if row.start and len(row.token_ids) == 1]
    packed += [row for row in rows if row not in packed]
    position = 0
    for row in packed:
        length = len(row.token_ids)
        for offset in range(length):
            place = row.start + offset
            page = row.page_table[place // PAGE]
            assert torch.equal(kv[:, page, place % PAGE], fresh_kv[position + offset])
            before[:, page, place % PAGE] = fresh_kv[position + offset]
        expected = attention_ref(query[position : position + length], kv, list(row.page_table), row.start, scale)
        close(out[position : position + length], expected)
        position += length
    assert_close(kv, before, rtol=0, atol=0, equal_nan=True)
