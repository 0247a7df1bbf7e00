"""The model against transformers, against a float64 recurrence, and against itself in batches of every composition."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from common.config import DType, EngineConfig, ModelConfig
from engine.batch import Row
from engine.families import read_config
from engine.runner import ModelRunner
from engine.weights import load_weights
from tests.support.families import FAMILY_SHAPES
from tests.support.sequential import sequential

PAGE = 4
PAGES_EACH = 112
NUM_SLOTS = 14
DEEP = ("nano_v2", "nano_3", "falcon_deep", "granite_4", "qwen_deep")  # patterns of real models
SHAPES = tuple(name for names in FAMILY_SHAPES.values() for name in names)
SHALLOW = tuple(name for name in SHAPES if name == "nano_v2" or name not in DEEP)

Folders = Callable[[str], Path]


def load(folder: Path, dtype: DType = DType.FLOAT32, ssm_dtype: DType = DType.FLOAT32) -> ModelRunner:
    return ModelRunner.load(
        ModelConfig(path=str(folder), dtype=dtype, ssm_dtype=ssm_dtype),
        EngineConfig(page_size=PAGE),
        num_pages=1 + NUM_SLOTS * PAGES_EACH,
        num_slots=NUM_SLOTS,
        allocate=None,
    )


@pytest.fixture(scope="module")
def runners(folders: Folders) -> Callable[[str], ModelRunner]:
    made: dict[str, ModelRunner] = {}

    def runner(name: str) -> ModelRunner:
        if name not in made:
            made[name] = load(folders(name))
        return made[name]

    return runner


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randint(0, 97, (length,), generator=generator).tolist()


def pages_of(slot: int) -> list[int]:
    """The pages of the sequence in a slot: interleaved with the others' for odd slots, a run for even ones."""
    if slot % 2:
        return [1 + slot + NUM_SLOTS * k for k in range(PAGES_EACH // 2)]
    return [1 + NUM_SLOTS * (PAGES_EACH // 2) + slot * (PAGES_EACH // 2) + k for k in range(PAGES_EACH // 2)]


def row(tokens: Sequence[int], start: int, slot: int, num_logits: int | None = None) -> Row:
    return Row(tokens, start, pages_of(slot), slot, len(tokens) if num_logits is None else num_logits, None)


def poison(runner: ModelRunner) -> None:
    """What no sequence of this test has written must not matter: NaN, but for page 0, which is finite always."""
    for slot in range(NUM_SLOTS):
        runner.pools.poison_slot(slot)
    runner.pools.poison_pages([0])
    runner.pools.kv[:, :, 1:] = math.nan


def alone(runner: ModelRunner, tokens: Sequence[int], slot: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of every token, conv and ssm state after one undivided prefill."""
    logits = runner.forward([row(tokens, 0, slot)])
    return (logits, *runner.pools.slot_state(slot))


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, rtol=1e-4, atol=2e-5)


def lengths_around(chunk: int) -> list[int]:
    return [1, 2, 3, 4, 5, chunk - 1, chunk, chunk + 1, 2 * chunk + 1, 91]


@pytest.mark.parametrize("name", SHAPES)
def test_prefill_equals_transformers(
    name: str, runners: Callable[[str], ModelRunner], reference_models: Callable[[str], Any]
) -> None:
    runner, model = runners(name), reference_models(name)
    poison(runner)
    for length in lengths_around(runner.config.chunk_size):
        tokens = prompt(length)
        with torch.no_grad():
            expected = model(torch.tensor([tokens])).logits[0]
        assert (alone(runner, tokens)[0] - expected).abs().max() <= 1e-3


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("length", [1, 5, 23])
def test_greedy_tokens_equal_transformers(
    name: str, length: int, runners: Callable[[str], ModelRunner], reference_models: Callable[[str], Any]
) -> None:
    """64 greedy steps; transformers then reads the whole text at once and would have chosen the same at each step."""
    runner, tokens = runners(name), prompt(length)
    poison(runner)
    steps = [runner.forward([row(tokens, 0, 5, 1)])]
    text = [*tokens, int(steps[0].argmax())]
    for _ in range(63):
        steps.append(runner.forward([row(text[-1:], len(text) - 1, 5)]))
        text.append(int(steps[-1].argmax()))
    with torch.no_grad():
        expected = reference_models(name)(torch.tensor([text[:-1]])).logits[0, length - 1 :]
    assert (torch.cat(steps) - expected).abs().max() <= 1e-3
    best = expected.topk(2).values
    clear = best[:, 0] - best[:, 1] > 1e-4
    assert clear.sum() >= 60
    assert torch.equal(expected.argmax(1)[clear], torch.tensor(text[length:])[clear])


@pytest.mark.parametrize("name", SHAPES)
def test_model_equals_the_float64_recurrence(
    name: str, runners: Callable[[str], ModelRunner], folders: Folders
) -> None:
    runner = runners(name)
    weights = load_weights(folders(name), runner.config, torch.float32, "cpu")
    poison(runner)
    tokens = prompt(2 * runner.config.chunk_size + 3)
    expected, conv_states, ssm_states = sequential(runner.config, weights, tokens)
    logits, conv, ssm = alone(runner, tokens)
    assert (logits.double() - expected).abs().max() <= 1e-3
    assert_close(conv.double(), torch.stack(conv_states), rtol=1e-3, atol=1e-4)
    assert_close(ssm.double(), torch.stack(ssm_states), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("limit", [(0.0, 0.02), (0.03, math.inf), (0.01, 0.05)])
def test_dt_is_bounded_in_prefill_and_decode(limit: tuple[float, float], folders: Folders, tmp_path: Path) -> None:
    import json
    import shutil

    folder = Path(shutil.copytree(folders("small"), tmp_path / "limited"))
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "time_step_limit": limit}))
    runner, tokens = load(folder), prompt(20)
    expected, _, _ = sequential(runner.config, load_weights(folder, runner.config, torch.float32, "cpu"), tokens)
    found = [runner.forward([row(tokens[:12], 0, 2)])]
    found += [runner.forward([row(tokens[at : at + 1], at, 2)]) for at in range(12, 20)]
    assert (torch.cat(found).double() - expected).abs().max() <= 1e-3


@pytest.mark.parametrize("name", SHALLOW)
def test_batched_equals_alone(name: str, runners: Callable[[str], ModelRunner]) -> None:
    """Lengths around chunk, page and conv width, packed so that no sequence but the first begins on a common grid."""
    runner = runners(name)
    chunk = runner.config.chunk_size
    poison(runner)
    lengths = [3, chunk + 1, 1, 2 * chunk, 2, chunk - 1, 5, 4, 3 * chunk + 2, chunk]
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    expected = [alone(runner, tokens) for tokens in prompts]
    poison(runner)
    slots = [4, 9, 1, 2, 11, 3, 12, 7, 6, 13]
    logits = runner.forward([row(tokens, 0, slot) for tokens, slot in zip(prompts, slots, strict=True)])
    for part, slot, one in zip(logits.split(lengths), slots, expected, strict=True):
        same((part, *runner.pools.slot_state(slot)), one)
    assert all(state.isnan().all() for slot in (0, 5, 8, 10) for state in runner.pools.slot_state(slot))
    assert (runner.pools.kv[:, :, 0] > 1e3).all()


@pytest.mark.parametrize("name", SHALLOW)
@pytest.mark.parametrize("sizes", [(1,), (2, 1), (3, 5), (8,), (13, 1, 4), (16, 32)])
def test_chunked_equals_alone(name: str, sizes: tuple[int, ...], runners: Callable[[str], ModelRunner]) -> None:
    """Pieces of any size, on and off the grid, also of one token, in turn until the prompt ends."""
    runner = runners(name)
    tokens = prompt(3 * runner.config.chunk_size + 5)
    poison(runner)
    expected = alone(runner, tokens)
    poison(runner)
    parts, start = [], 0
    while start < len(tokens):
        piece = tokens[start : start + sizes[len(parts) % len(sizes)]]
        parts.append(runner.forward([row(piece, start, 8)]))
        start += len(piece)
    same((torch.cat(parts), *runner.pools.slot_state(8)), expected)


@pytest.mark.parametrize("name", SHALLOW)
def test_mixed_steps_equal_alone(name: str, runners: Callable[[str], ModelRunner]) -> None:
    """Sequences join while others decode; each step mixes first pieces, later pieces and decode rows in any order."""
    runner = runners(name)
    chunk = runner.config.chunk_size
    poison(runner)
    plan = {2: (0, chunk + 3), 7: (1, 2 * chunk), 3: (2, 5), 12: (3, 2), 9: (4, 3 * chunk + 1), 4: (0, 1)}
    texts = {slot: prompt(length + 9, slot) for slot, (_, length) in plan.items()}
    expected = {slot: alone(runner, text) for slot, text in texts.items()}
    poison(runner)
    done, found = dict.fromkeys(plan, 0), {slot: [] for slot in plan}
    for step in range(60):
        rows = []
        for slot, (joins, length) in plan.items():
            if step >= joins and done[slot] < len(texts[slot]):
                size = min(chunk, length - done[slot]) if done[slot] < length else 1
                rows.append(row(texts[slot][done[slot] : done[slot] + size], done[slot], slot))
        if not rows:
            break
        logits = runner.forward(rows).split([len(one.token_ids) for one in rows])
        for one, part in zip(rows, logits, strict=True):
            found[one.slot].append(part)
            done[one.slot] += len(one.token_ids)
    for slot in plan:
        same((torch.cat(found[slot]), *runner.pools.slot_state(slot)), expected[slot])


def test_many_decode_rows_equal_alone(runners: Callable[[str], ModelRunner]) -> None:
    """Slots that are one run (updated as a view) and slots that are not; the caller's order is kept."""
    runner = runners("small")
    poison(runner)
    texts = {slot: prompt(6 + slot, slot) for slot in range(1, 13)}
    expected = {slot: alone(runner, text) for slot, text in texts.items()}
    for slots in ([5, 4, 6, 3], [12, 1, 7, 2, 9], list(range(12, 0, -1))):
        poison(runner)
        for slot in slots:
            runner.forward([row(texts[slot][:-2], 0, slot, 0)])
        for back in (2, 1):
            at = {slot: len(texts[slot]) - back for slot in slots}
            logits = runner.forward([row([texts[slot][at[slot]]], at[slot], slot) for slot in slots])
        for index, slot in enumerate(slots):
            state = runner.pools.slot_state(slot)
            same((logits[index : index + 1], *state), (expected[slot][0][-1:], *expected[slot][1:]))


def test_only_the_logits_asked_for(runners: Callable[[str], ModelRunner]) -> None:
    runner, tokens = runners("small"), prompt(21)
    full = alone(runner, tokens)[0]
    assert runner.forward([row(tokens, 0, 2, 0)]).shape == (0, 97)
    rows = [row(tokens, 0, 2, 3), row(tokens, 0, 3, 0), row(tokens, 0, 4, 21), row(tokens, 0, 5, 1)]
    logits = runner.forward(rows)
    assert logits.dtype is torch.float32
    same([logits], [torch.cat((full[-3:], full, full[-1:]))])


@pytest.mark.parametrize("name", ["nano_v2", "nemotron3", "falcon", "granite_sparse", "qwen"])
def test_the_state_is_needed(name: str, runners: Callable[[str], ModelRunner]) -> None:
    """Random weights whose states did not matter would make every test above blind to them."""
    runner, tokens = runners(name), prompt(40)
    poison(runner)
    right = alone(runner, tokens)[0][-1]
    for lose in (
        lambda pools: pools.ssm[3].zero_(),
        lambda pools: pools.conv[3].zero_(),
        lambda pools: pools.kv.zero_(),
    ):
        runner.forward([row(tokens[:-1], 0, 3, 0)])
        lose(runner.pools)
        assert (runner.forward([row(tokens[-1:], 39, 3)])[0] - right).abs().max() > 0.05


@pytest.mark.parametrize("name", ["small", "nemotron3", "falcon", "granite", "qwen_dense"])
@pytest.mark.parametrize("ssm_dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_bfloat16_stays_close_to_float32(
    name: str, ssm_dtype: DType, folders: Folders, runners: Callable[[str], ModelRunner]
) -> None:
    runner, tokens = load(folders(name), DType.BFLOAT16, ssm_dtype), prompt(30)
    assert runner.pools.kv.dtype is runner.pools.conv.dtype is torch.bfloat16
    assert runner.pools.ssm.dtype is (torch.float32 if ssm_dtype is DType.FLOAT32 else torch.bfloat16)
    expected = alone(runners(name), tokens)[0]
    found = [runner.forward([row(tokens[:17], 0, 2), row(tokens[:3], 0, 6)])[:17]]
    found += [runner.forward([row(tokens[at : at + 1], at, 2), row(tokens[:1], 3, 6)])[:1] for at in range(17, 30)]
    logits = torch.cat(found)
    assert logits.dtype is torch.float32
    away = (logits - expected).abs()
    assert away.mean() < 0.03
    if runner.config.moe is None:
        assert away.max() < 0.3
    else:  # a token's experts may be others after rounding
        assert (away.amax(1) < 0.3).sum() >= 25


def test_pools_live_in_the_memory_given(folders: Folders) -> None:
    taken: list[Tensor] = []

    def allocate(nbytes: int) -> Tensor:
        taken.append(torch.zeros(nbytes, dtype=torch.uint8))
        return taken[-1]

    runner = ModelRunner.load(
        ModelConfig(path=str(folders("small"))),
        EngineConfig(page_size=PAGE),
        num_pages=20,
        num_slots=3,
        allocate=allocate,
    )
    assert [block.address for block in runner.pools.ranges()] == [memory.data_ptr() for memory in taken]
    layout = runner.pools.layout()
    assert layout.page_size == PAGE and len(layout.revision) == 16
    assert runner.config == read_config(folders("small"))
