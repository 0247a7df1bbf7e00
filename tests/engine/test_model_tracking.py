"""States saved on the way through the model: equal to cold runs that stop there, no trace in what else is computed,
and good to resume from."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from common.config import EngineConfig, ModelConfig
from engine.batch import Row, Track
from engine.runner import ModelRunner

CHUNKS = {
    "small": 8,
    "biased": 16,
    "nano_v2": 16,
    "nemotron3": 8,
    "nemotron3_latent": 16,
    "falcon": 8,
    "falcon_normed": 16,
    "granite": 8,
    "granite_sparse": 16,
    "qwen": 8,
    "qwen_dense": 16,
}
OF_EACH_FAMILY = pytest.mark.parametrize("name", ["small", "nemotron3_latent", "falcon", "granite_sparse", "qwen"])
TEXT_TOKENS = 128
NUM_SLOTS = 32
COLD_SLOT = 31  # of the runs compared with; no test uses it


class Lab:
    """A runner whose slots have pages of their own, and texts by seed: a shorter one is the beginning of a longer."""

    def __init__(self, folder: Path, chunk: int, page: int) -> None:
        self.chunk, self.page = chunk, page
        self.pages_each = TEXT_TOKENS // page
        self.runner = ModelRunner.load(
            ModelConfig(path=str(folder)),
            EngineConfig(page_size=page),
            num_pages=1 + NUM_SLOTS * self.pages_each,
            num_slots=NUM_SLOTS,
            allocate=None,
        )
        assert self.runner.config.chunk_size == chunk
        self._cold: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def text(self, seed: int) -> list[int]:
        return torch.randint(0, 97, (TEXT_TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()

    def pages(self, slot: int) -> list[int]:
        """A run for even slots, interleaved with the others' for odd ones."""
        if slot % 2 == 0:
            return list(range(1 + slot * self.pages_each, 1 + (slot + 1) * self.pages_each))
        runs = [1 + odd * self.pages_each + k for k in range(self.pages_each) for odd in range(1, NUM_SLOTS, 2)]
        return runs[slot // 2 :: NUM_SLOTS // 2]

    def row(self, slot: int, start: int, end: int, track: tuple[int, int] | None = None, logits: int = 1) -> Row:
        """Tokens [start, end) of text number `slot`."""
        tracked = None if track is None else Track(*track)
        return Row(self.text(slot)[start:end], start, self.pages(slot), slot, logits, tracked)

    def forward(self, *rows: Row) -> Tensor:
        return self.runner.forward(rows)

    def state(self, slot: int) -> tuple[Tensor, Tensor]:
        return self.runner.pools.slot_state(slot)

    def poison(self) -> None:
        """Nothing of an earlier test is left that could be taken for a state of this one."""
        for slot in range(NUM_SLOTS):
            self.runner.pools.poison_slot(slot)
        self.runner.pools.kv[:, :, 1:] = math.nan

    def poisoned(self, slot: int) -> bool:
        return all(bool(state.isnan().all()) for state in self.state(slot))

    def cold(self, seed: int, position: int) -> tuple[Tensor, Tensor]:
        """The state after the first `position` tokens of a text, run alone and in one piece."""
        if (seed, position) not in self._cold:
            row = Row(self.text(seed)[:position], 0, self.pages(COLD_SLOT), COLD_SLOT, 0, None)
            self.forward(row)
            self._cold[seed, position] = self.state(COLD_SLOT)
        return self._cold[seed, position]

    def digest(self, slot: int) -> str:
        return hashlib.sha256(b"".join(state.numpy().tobytes() for state in self.state(slot))).hexdigest()


Labs = Callable[..., Lab]


@pytest.fixture(scope="module")
def labs(folders: Callable[[str], Path]) -> Labs:
    made: dict[tuple[str, int], Lab] = {}

    def lab(name: str, page: int = 4) -> Lab:
        if (name, page) not in made:
            made[name, page] = Lab(folders(name), CHUNKS[name], page)
        made[name, page].poison()
        return made[name, page]

    return lab


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, rtol=1e-4, atol=2e-5)


def identical(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, rtol=0, atol=0, equal_nan=True)


EACH = pytest.mark.parametrize(
    ("name", "page"),
    [
        ("small", 4), ("small", 1), ("small", 16), ("biased", 4), ("nano_v2", 16),
        ("nemotron3", 1), ("nemotron3_latent", 4),
        ("falcon", 16), ("falcon_normed", 4),
        ("granite", 4), ("granite_sparse", 1),
        ("qwen", 4), ("qwen_dense", 16),
    ],
)  # fmt: skip


@EACH
def test_the_saved_state_is_that_of_a_cold_run(name: str, page: int, labs: Labs) -> None:
    """Lengths one around multiples of chunk, page and conv width; every position that can be saved."""
    lab, chunk = labs(name, page), CHUNKS[name]
    around = {unit * times + shift for unit in (chunk, page, 4) for times in (1, 2, 3) for shift in (-1, 0, 1)}
    for length in sorted(length for length in around if chunk <= length <= 49):
        for position in range(chunk, length + 1, chunk):
            lab.forward(lab.row(2, 0, length, (position, 7)))
            same(lab.state(7), lab.cold(2, position))
            if position == length:
                identical(lab.state(7), lab.state(2))
    assert all(lab.poisoned(slot) for slot in range(NUM_SLOTS) if slot not in (2, 7, COLD_SLOT))


def mixed_lengths(chunk: int) -> list[int]:
    return [3, chunk + 1, chunk, 2 * chunk, 1, chunk - 1, 3 * chunk + 2, 2 * chunk - 1, 4 * chunk, 2 * chunk + 3]


@EACH
@pytest.mark.parametrize("slots", [range(1, 11), [4, 9, 1, 2, 11, 3, 12, 7, 6, 13]])
@pytest.mark.parametrize("turn", [0, 1, 2])
def test_batches_save_for_some_of_their_rows(name: str, page: int, slots: Sequence[int], turn: int, labs: Labs) -> None:
    """No sequence but the first begins on a common grid; slots of rows and tracks are a run or have gaps."""
    lab, chunk = labs(name, page), CHUNKS[name]
    rows, tracked, following = [], {}, iter((14, 15, 16, 17, 19, 21, 22))
    for index, (slot, length) in enumerate(zip(slots, mixed_lengths(chunk), strict=True)):
        spots = range(chunk, length + 1, chunk)
        if spots and (index + turn) % 3:
            tracked[next(following)] = slot, spots[(index + turn) % len(spots)], length
        rows.append(lab.row(slot, 0, length))
    bare = lab.forward(*rows)
    states = {slot: lab.state(slot) for slot in slots}
    lab.poison()
    tracks = {slot: (position, target) for target, (slot, position, _) in tracked.items()}
    logits = lab.forward(*(lab.row(one.slot, 0, len(one.token_ids), tracks.get(one.slot)) for one in rows))
    assert len(tracked) >= 4 and torch.equal(logits, bare)
    for slot in slots:
        identical(lab.state(slot), states[slot])
    for target, (slot, position, length) in tracked.items():
        if position == length:
            identical(lab.state(target), lab.state(slot))
    assert all(lab.poisoned(slot) for slot in range(NUM_SLOTS) if slot not in (*slots, *tracked))
    for target, (slot, position, _) in tracked.items():
        same(lab.state(target), lab.cold(slot, position))


@EACH
def test_resumed_rows_and_decode_rows_save_in_one_step(name: str, page: int, labs: Labs) -> None:
    """First pieces, later pieces on and off the grid, pieces of one token, decode rows at any position; with and
    without tracks, and with none of them the step is bit for bit the same."""
    lab, c = labs(name, page), CHUNKS[name]
    plan = {  # slot: (start, end, tracked position or None)
        5: (c, 2 * c + 1, 2 * c),
        1: (0, 2 * c + 3, c),
        9: (2 * c, 2 * c + 1, 2 * c + 1),
        2: (c + 4, c + 5, c + 5),
        12: (c, 3 * c, 3 * c),
        3: (0, 3, None),
        4: (c - 1, c, c),
        13: (2, 3, None),
        8: (3 * c, 4 * c + 2, 4 * c),
        6: (c - 2, 3 * c - 1, c),
        7: (2 * c - 1, 3 * c + 2, 2 * c),
        10: (3 * c - 1, 3 * c, 3 * c),
        11: (c, c + 2, None),
    }
    for slot, (start, _, _) in plan.items():
        if start:
            lab.forward(lab.row(slot, 0, start))
    begun = lab.runner.pools.conv.clone(), lab.runner.pools.ssm.clone(), lab.runner.pools.kv.clone()
    bare = lab.forward(*(lab.row(slot, start, end) for slot, (start, end, _) in plan.items()))
    states = {slot: lab.state(slot) for slot in plan}
    for step in (1, 2, 3):
        for pool, then in zip((lab.runner.pools.conv, lab.runner.pools.ssm, lab.runner.pools.kv), begun, strict=True):
            pool.copy_(then)
        kept = {slot: 14 + slot for slot, (*_, spot) in plan.items() if spot and slot % step == 0}
        rows = [lab.row(s, a, b, (spot, kept[s]) if spot and s in kept else None) for s, (a, b, spot) in plan.items()]
        assert torch.equal(lab.forward(*rows), bare)
        for slot, (_, end, spot) in plan.items():
            identical(lab.state(slot), states[slot])
            if slot in kept and spot == end:
                identical(lab.state(kept[slot]), states[slot])
            elif slot in kept:
                assert spot
                same(lab.state(kept[slot]), lab.cold(slot, spot))
        untouched = [slot for slot in range(NUM_SLOTS - 1) if slot not in (*plan, *kept.values())]
        assert all(lab.poisoned(slot) for slot in untouched)
    for slot, (_, end, _) in plan.items():
        same(states[slot], lab.cold(slot, end))


@EACH
def test_decode_rows_save_in_runs_and_in_gaps(name: str, page: int, labs: Labs) -> None:
    """A pure decode step at, before and behind a multiple of chunk; only some rows are due."""
    lab, c = labs(name, page), CHUNKS[name]
    for slots in ([3, 4, 5, 6], [9, 2, 11, 5]):
        lab.poison()
        ends = dict(zip(slots, (c - 1, c, 2 * c, c + 1), strict=True))
        for slot, end in ends.items():
            lab.forward(lab.row(slot, 0, end - 1))
        due = {slots[0]: 20, slots[2]: 18, slots[3]: 21}
        rows = [lab.row(s, end - 1, end, (end, due[s]) if s in due else None) for s, end in ends.items()]
        lab.forward(*rows)
        for slot, target in due.items():
            identical(lab.state(target), lab.state(slot))
            same(lab.state(target), lab.cold(slot, ends[slot]))
        assert all(lab.poisoned(slot) for slot in (1, 7, 8, 17, 19, 22))


def resume(lab: Lab, slot: int, shared: int, start: int, end: int, track: tuple[int, int] | None = None) -> Row:
    """Tokens [start, end) of text 2 in another slot: the state is a copy of `shared`, the pages up to start are text
    2's own, the others are the slot's."""
    lab.runner.pools.copy_slots([shared], [slot])
    pages = lab.pages(2)[: start // lab.page] + lab.pages(slot)[start // lab.page :]
    tracked = None if track is None else Track(*track)
    return Row(lab.text(2)[start:end], start, pages, slot, end - start, tracked)


@EACH
def test_resuming_is_as_if_it_had_never_stopped(name: str, page: int, labs: Labs) -> None:
    """Suffixes of 1 ... chunk + 1 tokens and longer behind a hit, then a decode step; the shared state stays as it is,
    and a state that a resumed row saves in turn is as good."""
    lab, c = labs(name, page), CHUNKS[name]
    hit, length = max(c, page), max(c, page) + 2 * c + 4
    full = lab.forward(lab.row(2, 0, length, (hit, 7), logits=length))
    shared = lab.digest(7)
    kv = lab.runner.pools.kv[:, :, lab.pages(2)].clone()
    for count in (*range(1, c + 2), 2 * c - 1, 2 * c, 2 * c + 1):
        end = hit + count
        spots = range(hit + c, end + 1, c)
        lab.runner.pools.poison_slot(9)
        logits = lab.forward(resume(lab, 5, 7, hit, end, (spots[-1], 9) if spots else None))
        same((logits, *lab.state(5)), (full[hit:end], *lab.cold(2, end)))
        if spots:
            same(lab.state(9), lab.cold(2, spots[-1]))
        pages = lab.pages(2)[: hit // page] + lab.pages(5)[hit // page :]
        step = lab.forward(Row(lab.text(2)[end : end + 1], end, pages, 5, 1, None))
        same((step, *lab.state(5)), (full[end : end + 1], *lab.cold(2, end + 1)))
        assert lab.digest(7) == shared, "a saved state is read, never written"
    identical([lab.runner.pools.kv[:, :, lab.pages(2)]], [kv])


@EACH
def test_a_wrong_saved_state_shows(name: str, page: int, labs: Labs) -> None:
    """The comparison above would notice: a state of another position, of another text, zeros, half of the pair."""
    lab, c = labs(name, page), CHUNKS[name]
    hit = 2 * max(c, page)
    full = lab.forward(lab.row(2, 0, hit + 2, (hit, 7), logits=hit + 2))
    right, other, zeros = lab.state(7), lab.cold(4, hit), tuple(torch.zeros_like(state) for state in lab.state(7))
    wrong = [lab.cold(2, hit - 1), other, zeros, (right[0], other[1]), (other[0], right[1])]
    for conv, ssm in (right, *wrong):
        lab.runner.pools.conv[7], lab.runner.pools.ssm[7] = conv, ssm
        off = (lab.forward(resume(lab, 5, 7, hit, hit + 2)) - full[hit:]).abs().max()
        assert off < 1e-4 if conv is right[0] and ssm is right[1] else off > 1e-2


@OF_EACH_FAMILY
def test_requests_share_a_saved_state(name: str, labs: Labs) -> None:
    """Suffixes shorter than the conv window, all from one saved state in one step, beside a decode row."""
    lab, c = labs(name), CHUNKS[name]
    full = lab.forward(lab.row(2, 0, 3 * c, (2 * c, 7), logits=3 * c))
    lab.forward(lab.row(12, 0, c))
    shared = lab.digest(7)
    counts = {5: 1, 8: 2, 9: 3, 10: c, 11: 4}
    rows = [resume(lab, slot, 7, 2 * c, 2 * c + count, None) for slot, count in counts.items()]
    rows[3] = Row(rows[3].token_ids, 2 * c, rows[3].page_table, 10, c, Track(3 * c, 20))
    logits = lab.forward(*rows, lab.row(12, c, c + 1))
    assert lab.digest(7) == shared
    for (slot, count), part in zip(counts.items(), logits[:-1].split(list(counts.values())), strict=True):
        same((part, *lab.state(slot)), (full[2 * c : 2 * c + count], *lab.cold(2, 2 * c + count)))
    identical(lab.state(20), lab.state(10))
    same(lab.state(12), lab.cold(12, c + 1))


def test_a_position_inside_a_chunk_cannot_be_saved(labs: Labs) -> None:
    lab = labs("small")
    for position in (1, 7, 9, 20):
        with pytest.raises(AssertionError, match="not known"):
            lab.forward(lab.row(2, 0, 20, (position, 7)))


# Layer by layer


def layer_state(lab: Lab, rows: Sequence[Row], layer: int) -> list[Tensor]:
    """Clones of what the rows own of a layer: KV pages, conv and SSM state of slots and track slots, or all of it."""
    pools = lab.runner.pools
    found = []
    if layer in pools.kv_layers:
        kv = pools.kv[pools.kv_layers.index(layer)]
        found += [kv[:, list(row.page_table)].clone() for row in rows]
    if layer in pools.state_layers:
        index = pools.state_layers.index(layer)
        slots = [slot for row in rows for slot in (row.slot, *([row.track.slot] if row.track else []))]
        found += [state[slot, index].clone() for slot in slots for state in (pools.conv, pools.ssm)]
    return found


@OF_EACH_FAMILY
def test_a_layer_is_reported_when_its_state_is_final_and_no_later_layer_has_begun(labs: Labs, name: str) -> None:
    lab = labs(name)
    c = lab.chunk
    for slot, start in ((3, c), (4, c + 5), (5, 2 * c)):
        lab.forward(lab.row(slot, 0, start))
    rows = [lab.row(2, 0, 2 * c + 3, (2 * c, 7)), lab.row(3, c, 3 * c, (2 * c, 8)), lab.row(4, c + 5, c + 6)]
    rows += [lab.row(5, 2 * c, 2 * c + 1), lab.row(6, 0, 1)]
    layers = len(lab.runner.config.layers)
    before = [layer_state(lab, rows, layer) for layer in range(layers)]
    reported: dict[int, list[Tensor]] = {}

    def on_layer(layer: int) -> None:
        assert list(reported) == list(range(layer)), "layers are reported in order, each once"
        reported[layer] = layer_state(lab, rows, layer)
        for later in range(layer + 1, layers):
            found = layer_state(lab, rows, later)
            assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, before[later], strict=True))

    logits = lab.runner.forward(rows, on_layer)
    assert len(reported) == layers
    for layer, states in reported.items():
        final = layer_state(lab, rows, layer)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(states, final, strict=True)), layer
        changed = [not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(final, before[layer], strict=True)]
        assert all(changed), f"layer {layer} was computed"
    assert logits.shape[0] == len(rows)
