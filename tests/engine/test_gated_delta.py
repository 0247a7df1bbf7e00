"""The gated delta recurrence against the float64 one, token by token, and against transformers; and its norms."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from engine.ops.chunks import plan_chunks
from engine.ops.gated_delta import gated_delta_prefill, gated_delta_sequential_ref, gated_delta_step
from engine.ops.norm import gated_rms_norm, gated_rms_norm_ref, head_rms_norm_gated, head_rms_norm_gated_ref
from engine.ops.slots import index_slots
from engine.tracking import Boundary

SLOTS, CHUNK, K, V = 9, 4, 6, 5
NAN = float("nan")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = [torch.float32, torch.bfloat16]
HEADS = [(2, 2), (1, 3), (2, 4)]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


def strided_pool(*item: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """One layer's slots out of three layers: [SLOTS, *item], not contiguous over slots."""
    return torch.randn(SLOTS, 3, *item).to(dtype)[:, 1]


def make_inputs(
    tokens: int, key_heads: int, heads: int, k_dim: int = K, v_dim: int = V, dtype: torch.dtype = torch.float32
) -> Inputs:
    """q, k, v, decay, beta; q, k and v are slices of one wider tensor, as the model's are."""
    widths = [key_heads * k_dim, key_heads * k_dim, heads * v_dim, 3]
    q, k, v, _ = (torch.randn(tokens, sum(widths)) * 2).to(dtype).split(widths, dim=1)
    decay = -(torch.rand(tokens, heads) ** 3) * 4  # from hardly any to e^-4 a token
    beta = torch.sigmoid(torch.randn(tokens, heads) * 2)
    shapes = (tokens, key_heads, k_dim), (tokens, key_heads, k_dim), (tokens, heads, v_dim)
    return q.view(shapes[0]), k.view(shapes[1]), v.view(shapes[2]), decay, beta


def part(inputs: Inputs, low: int, high: int) -> Inputs:
    q, k, v, decay, beta = (value[low:high] for value in inputs)
    return q, k, v, decay, beta


def run(
    inputs: Inputs,
    pool: Tensor,
    slots: Sequence[int],
    pieces: Sequence[tuple[int, int]],
    tracks: Sequence[Boundary] = (),
    chunk: int = CHUNK,
) -> Tensor:
    """`gated_delta_prefill` of pieces (start, length); those that start at 0 are fresh."""
    plan = plan_chunks([start for start, _ in pieces], [n for _, n in pieces], chunk, tracks, "cpu")
    fresh = torch.tensor([start == 0 for start, _ in pieces])
    return gated_delta_prefill(*inputs, pool, index_slots(slots, "cpu"), fresh, plan)


PIECES = [
    [(0, 1)],
    [(0, 3)],
    [(0, 4)],
    [(0, 5)],
    [(0, 23)],
    [(4, 4), (0, 9)],
    [(0, 3), (0, 17), (5, 1), (8, 6)],
    [(1, 2), (2, 2), (3, 2), (3, 9)],
    [(0, 4), (0, 8), (0, 12), (7, 5), (6, 1)],
    [(3, 1), (0, 8), (4, 9), (2, 2), (1, 11)],
]
SLOTS_OF_PIECES = [7, 2, 5, 1, 4]


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize(("key_heads", "heads"), HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill(pieces: list[tuple[int, int]], key_heads: int, heads: int, dtype: torch.dtype) -> None:
    """Packed sequences, fresh ones and ones that go on anywhere; only their slots change, and no input."""
    inputs = make_inputs(sum(n for _, n in pieces), key_heads, heads, dtype=dtype)
    pool, slots = strided_pool(heads, K, V, dtype=dtype), SLOTS_OF_PIECES[: len(pieces)]
    for slot, (start, _) in zip(slots, pieces, strict=True):
        if start == 0:
            pool[slot] = NAN
    before, copies = pool.clone(), tuple(value.clone() for value in inputs)
    y, at = run(inputs, pool, slots, pieces), 0
    assert y.dtype is torch.float32 and y.shape == inputs[2].shape
    for slot, (start, length) in zip(slots, pieces, strict=True):
        state = before[slot] if start else torch.zeros_like(before[slot])
        expected, after = gated_delta_sequential_ref(*part(inputs, at, at + length), state)
        close(y[at : at + length], expected)
        close(pool[slot], after, TOLERANCE[dtype])
        at += length
    untouched = [slot for slot in range(SLOTS) if slot not in slots]
    assert torch.equal(pool[untouched], before[untouched])
    assert all(torch.equal(now, then) for now, then in zip(inputs, copies, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_in_a_run_and_scattered_ones_end_alike(dtype: torch.dtype) -> None:
    pieces = [(0, 9), (5, 4), (0, 6)]
    inputs, pool = make_inputs(19, 2, 4), strided_pool(4, K, V, dtype=dtype)
    in_run, scattered, slots = pool.clone(), pool.clone(), [7, 2, 6]
    scattered[slots] = pool[[3, 4, 5]]
    found = run(inputs, in_run, [3, 4, 5], pieces)
    assert torch.equal(found, run(inputs, scattered, slots, pieces))
    assert torch.equal(in_run[[3, 4, 5]], scattered[slots]) and not torch.equal(in_run[3:6], pool[3:6])
    assert torch.equal(in_run[[0, 1, 2, 6, 7, 8]], pool[[0, 1, 2, 6, 7, 8]])


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_saves_the_state_of_a_shorter_prefill(pieces: list[tuple[int, int]], dtype: torch.dtype) -> None:
    """Each round saves another position of the sequences; the rest is bit for bit what it is without."""
    lengths, slots = [n for _, n in pieces], SLOTS_OF_PIECES[: len(pieces)]
    inputs, original = make_inputs(sum(lengths), 2, 4, dtype=dtype), strided_pool(4, K, V, dtype=dtype)
    plain = original.clone()
    y = run(inputs, plain, slots, pieces)
    spots = [[at for at in range(1, length + 1) if (start + at) % CHUNK == 0] for start, length in pieces]
    for shift in range(max(len(found) for found in spots)):
        wanted = [(s, found[(s + shift) % len(found)]) for s, found in enumerate(spots) if found]
        tracks = [Boundary(s, offset, slot) for (s, offset), slot in zip(wanted, (8, 3, 6, 0), strict=False)]
        pool = original.clone()
        assert torch.equal(run(inputs, pool, slots, pieces, tracks), y)
        kept = [slot for slot in range(SLOTS) if slot not in {track.slot for track in tracks}]
        assert torch.equal(pool[kept], plain[kept])
        for track in tracks:
            at, (start, length) = sum(lengths[: track.sequence]), pieces[track.sequence]
            short = original.clone()
            run(part(inputs, at, at + track.offset), short, slots[track.sequence :][:1], [(start, track.offset)])
            close(pool[track.slot], short[slots[track.sequence]], TOLERANCE[dtype])
            assert track.offset < length or torch.equal(pool[track.slot], pool[slots[track.sequence]])


@pytest.mark.parametrize("start", range(CHUNK))
def test_every_length_around_the_chunk_equals_alone_and_in_two(start: int) -> None:
    """All lengths up to three chunks in one batch; each as alone, and as cut anywhere and resumed."""
    lengths = list(range(1, 3 * CHUNK + 1))
    inputs, states = make_inputs(sum(lengths), 1, 2), torch.randn(len(lengths), 2, K, V)
    pool = states.clone()
    y = run(inputs, pool, range(len(lengths)), [(start, n) for n in lengths])
    ends = list(itertools.accumulate(lengths))
    for i, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        own = part(inputs, end - length, end)
        alone = states[i : i + 1].clone()
        close(run(own, alone, [0], [(start, length)]), y[end - length : end])
        close(alone[0], pool[i])
        for cut in range(1, length):
            halves = states[i : i + 1].clone()
            if start == 0:
                halves.fill_(NAN)
            first = run(part(own, 0, cut), halves, [0], [(start, cut)])
            second = run(part(own, cut, length), halves, [0], [(start + cut, length - cut)])
            close(torch.cat((first, second)), y[end - length : end])
            close(halves[0], pool[i])


@pytest.mark.parametrize("lengths", list(itertools.permutations((1, 4, 6, 11))))
def test_any_order_of_a_batch_equals_alone(lengths: tuple[int, ...]) -> None:
    pieces = [(n, n) for n in lengths]
    inputs, pool = make_inputs(sum(lengths), 2, 2), strided_pool(2, K, V)
    before = pool.clone()
    y, at = run(inputs, pool, [1, 2, 3, 4], pieces), 0
    for slot, (start, length) in enumerate(pieces, 1):
        alone = before.clone()
        found = run(part(inputs, at, at + length), alone, [slot], [(start, length)])
        close(y[at : at + length], found)
        close(pool[slot], alone[slot])
        at += length


@pytest.mark.parametrize("chunk", [1, 3, 64, 100])
def test_any_chunk(chunk: int) -> None:
    inputs, pool, length = make_inputs(2 * chunk + 3, 2, 4), strided_pool(4, K, V), 2 * chunk + 3
    before = pool.clone()
    y = run(inputs, pool, [2], [(2, length)], chunk=chunk)
    expected, after = gated_delta_sequential_ref(*inputs, before[2])
    close(y, expected)
    close(pool[2], after)


def hard(kind: str, tokens: int, key_heads: int, heads: int, k_dim: int, v_dim: int) -> Inputs:
    q, k, v, decay, beta = make_inputs(tokens, key_heads, heads, k_dim, v_dim)
    match kind:
        case "no decay":
            decay = torch.zeros_like(decay)
        case "strong decay":
            decay = decay * 100
        case "strong, then weak decay":
            decay = torch.where(torch.arange(tokens)[:, None] % 64 < 32, decay - 40, decay * 0.01)
        case "beta 0":
            beta = torch.zeros_like(beta)
        case "beta 1, no decay":
            decay, beta = torch.zeros_like(decay), torch.ones_like(beta)
        case "parallel keys":
            k, beta, decay = k[:1] + 1e-3 * k, torch.ones_like(beta), decay * 1e-3
        case "opposite keys":
            signs = torch.where(torch.rand(tokens, 1, 1) < 0.5, -1.0, 1.0)
            k, beta, decay = signs * (k[:1] + 1e-3 * k), torch.ones_like(beta), torch.zeros_like(decay)
        case "no keys":
            k, q = torch.zeros_like(k), q * 1e-4
        case "large":
            q, k, v = q * 1e6, k * 1e6, v * 1e3
    return q, k, v, decay, beta


HARD = [
    "no decay",
    "strong decay",
    "strong, then weak decay",
    "beta 0",
    "beta 1, no decay",
    "parallel keys",
    "opposite keys",
    "no keys",
    "large",
]


def near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Against the largest element."""
    assert_close(found.double(), expected.double(), rtol=0, atol=tolerance * float(expected.abs().max()) + 1e-30)


@pytest.mark.parametrize("kind", HARD)
def test_prefill_keeps_its_precision(kind: str) -> None:
    inputs, pool = hard(kind, 200, 2, 4, 16, 12), strided_pool(4, 16, 12)
    before = pool.clone()
    y = run(inputs, pool, [1], [(3, 200)], chunk=64)
    expected, after = gated_delta_sequential_ref(*inputs, before[1])
    near(y, expected, 2e-6)
    near(pool[1], after, 2e-6)


@pytest.mark.parametrize("kind", HARD)
def test_steps_one_by_one_keep_their_precision(kind: str) -> None:
    inputs, pool = hard(kind, 100, 2, 4, 16, 12), strided_pool(4, 16, 12)
    before = pool.clone()
    y = torch.cat([gated_delta_step(*part(inputs, t, t + 1), pool, slice(1, 2)) for t in range(100)])
    expected, after = gated_delta_sequential_ref(*inputs, before[1])
    near(y, expected, 2e-6)
    near(pool[1], after, 2e-6)


@pytest.mark.parametrize("slots", [[3], [2, 3, 4], [6, 1, 4]])
@pytest.mark.parametrize(("key_heads", "heads"), HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_step(slots: list[int], key_heads: int, heads: int, dtype: torch.dtype) -> None:
    inputs = make_inputs(len(slots), key_heads, heads, dtype=dtype)
    pool = strided_pool(heads, K, V, dtype=dtype)
    before, copies = pool.clone(), tuple(value.clone() for value in inputs)
    y = gated_delta_step(*inputs, pool, index_slots(slots, "cpu"))
    assert y.dtype is torch.float32 and y.shape == inputs[2].shape
    for row, slot in enumerate(slots):
        expected, after = gated_delta_sequential_ref(*part(inputs, row, row + 1), before[slot])
        close(y[row], expected[0])
        close(pool[slot], after, TOLERANCE[dtype])
    untouched = [slot for slot in range(SLOTS) if slot not in slots]
    assert torch.equal(pool[untouched], before[untouched])
    assert all(torch.equal(now, then) for now, then in zip(inputs, copies, strict=True))


@pytest.mark.parametrize(("key_heads", "heads"), HEADS)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 150])
def test_as_transformers(key_heads: int, heads: int, length: int) -> None:
    """Its two forms of the rule, on the CPU plain torch, from a given state."""
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    inputs, pool = make_inputs(length, key_heads, heads, 16, 12), strided_pool(heads, 16, 12)
    state = pool[4].clone()
    args = {"initial_state": state[None], "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    stepped = pool.clone()
    y = run(inputs, pool, [4], [(64, length)], chunk=64)
    steps = [gated_delta_step(*part(inputs, t, t + 1), stepped, slice(4, 5)) for t in range(length)]
    q, k, v, decay, beta = (value[None] for value in inputs)
    for rule in (theirs.torch_chunk_gated_delta_rule, theirs.torch_recurrent_gated_delta_rule):
        expected, after = rule(q, k, v, decay, beta, **args)
        for found, left in ((y, pool), (torch.cat(steps), stepped)):
            close(found, expected[0])
            close(left[4], after[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_the_heads(dtype: torch.dtype) -> None:
    y, gate, weight = torch.randn(5, 3, 8) * 3, torch.randn(5, 3, 16).to(dtype)[..., 4:12], torch.rand(8) + 0.5
    before = gate.clone()
    found = head_rms_norm_gated(y.clone(), gate, weight, 1e-6)
    assert found.dtype is dtype and found.shape == (5, 24) and torch.equal(gate, before)
    close(found, head_rms_norm_gated_ref(y, gate, weight, 1e-6), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_first", [False, True])
def test_gate_before_or_after_the_norm(norm_first: bool, dtype: torch.dtype) -> None:
    y, gate, weight = torch.randn(5, 12) * 3, torch.randn(5, 14).to(dtype)[:, 1:13], torch.rand(12) + 0.5
    found = gated_rms_norm(y.clone(), gate, weight, 3, 1e-5, norm_first=norm_first)
    assert found.dtype is dtype
    close(found, gated_rms_norm_ref(y, gate, weight, 3, 1e-5, norm_first=norm_first), TOLERANCE[dtype])
    other = gated_rms_norm_ref(y, gate, weight, 3, 1e-5, norm_first=not norm_first)
    assert float((found - other).abs().max()) > 0.1


@pytest.mark.parametrize("norm_first", [False, True])
def test_norms_as_transformers(norm_first: bool) -> None:
    from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    y, gate, weight = torch.randn(5, 12) * 3, torch.randn(5, 12), torch.rand(12) + 0.5
    falcon = FalconH1RMSNormGated(12, eps=1e-5, n_groups=3, norm_before_gate=norm_first)
    qwen = Qwen3NextRMSNormGated(4, eps=1e-6)
    with torch.no_grad():
        falcon.weight.copy_(weight)
        qwen.weight.copy_(weight[:4])
        expected = qwen(y.view(5, 3, 4), gate.view(5, 3, 4)).flatten(1)
        close(head_rms_norm_gated(y.view(5, 3, 4), gate.view(5, 3, 4), weight[:4], 1e-6), expected)
        expected = falcon(y[None], gate[None])[0]
    close(gated_rms_norm(y.clone(), gate, weight, 3, 1e-5, norm_first=norm_first), expected)
