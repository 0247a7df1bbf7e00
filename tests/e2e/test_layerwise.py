"""Layer by layer: what a step completes in a layer is at decode before the next layer is computed.

In every family of models, whose layers may have keys and values, a state, or both; what is deeper, in tandem-mini.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.config import EngineConfig
from engine.batch import OnLayer, Row
from engine.families import read_config
from engine.model import HybridModel
from engine.runner import ModelRunner
from engine.scheduler import Chunk
from engine.sequence import Phase
from tests.support.models import FAMILIES, Models
from tests.support.ranks import (
    Ranks,
    Request,
    Snapshots,
    assert_bytes_crossed_unchanged,
    assert_equivalent,
    disaggregated_ranks,
    unified_ranks,
)

PAGE = CHUNK = 16  # of the families
EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES)
MINI_CHUNK = 64
UNTOUCHED = 0.37
LANDS_WITHIN_S = 20.0


def engine(budget: int = 2048, *, overlap: bool = False) -> EngineConfig:
    return EngineConfig(
        max_total_tokens=16384,
        max_state_slots=24,
        max_running_requests=20,
        chunked_prefill_size=budget,
        disable_overlap_schedule=not overlap,
        local_prefill_max_tokens=0,
    )


def prompt(length: int, seed: int = 0) -> list[int]:
    return [3 + (seed * 131 + i * 37 + i * i % 11) % 90 for i in range(length)]


def state_of(ranks: Ranks, chunk: Chunk, layer: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(what, prefill's, decode's) of all that a chunk leaves in a layer and that crosses; views of the pools."""
    sequence = chunk.sequence
    room = ranks.decode.rooms[ranks.prefill.room_of[sequence].room]
    theirs = room.sequence
    here, there = ranks.prefill.host.runner.pools, ranks.decode.host.runner.pools
    if layer in here.kv_layers:
        index = here.kv_layers.index(layer)
        first, end = max(chunk.start // PAGE, theirs.num_cached_pages), -(-chunk.end // PAGE)
        for page, their_page in zip(sequence.page_table[first:end], theirs.page_table[first:end], strict=True):
            yield "kv", here.kv[index, :, page], there.kv[index, :, their_page]
    if layer not in here.state_layers or not ends_prompt(chunk):
        return
    index = here.state_layers.index(layer)
    slots = [("final", sequence.slot, theirs.slot)]
    tracked = sequence.tracked
    if tracked is not None and tracked.position < chunk.end:
        slots.append(("track", tracked.slot, room.track_slot))
    for what, slot, their_slot in slots:
        yield f"{what} conv", here.conv[slot, index], there.conv[their_slot, index]
        yield f"{what} ssm", here.ssm[slot, index], there.ssm[their_slot, index]


def ends_prompt(chunk: Chunk) -> bool:
    return chunk.sequence.phase is Phase.HELD and chunk.end == chunk.sequence.num_computed_tokens


class Watch:
    """Stops the prefill step after each layer until decode has what was made of it. seen: (layer, what), in order."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.seen: list[tuple[int, str]] = []
        self.steps = 0
        self._listen = ranks.prefill._listen
        ranks.prefill._listen = self._watched  # type: ignore[method-assign]

    def _watched(self, chunks: list[Chunk]) -> OnLayer:
        on_layer = self._listen(chunks)
        self.steps += 1

        def stopping(layer: int) -> None:
            self._nothing_yet(chunks, layer)
            on_layer(layer)
            for chunk in chunks:
                for what, ours, theirs in state_of(self.ranks, chunk, layer):
                    await_equal(ours, theirs, f"layer {layer}: {what}")
                    self.seen.append((layer, what))

        return stopping

    def _nothing_yet(self, chunks: list[Chunk], layer: int) -> None:
        """No final state of this layer is at decode before the layer is done. (A saved one may have been here.)"""
        for chunk in chunks:
            for what, ours, theirs in state_of(self.ranks, chunk, layer):
                if not what.startswith("track"):
                    assert not torch.equal(ours, theirs), f"layer {layer}: {what} is there already"


def await_equal(ours: Tensor, theirs: Tensor, what: str) -> None:
    deadline = time.monotonic() + LANDS_WITHIN_S
    while not torch.equal(ours, theirs):
        assert time.monotonic() < deadline, f"{what} did not leave before the next layer"
        time.sleep(0.0005)


def fill_decode(ranks: Ranks) -> None:
    pools = ranks.decode.host.runner.pools
    for pool in (pools.kv, pools.conv, pools.ssm):
        pool.fill_(UNTOUCHED)


waiting_ranks = partial(disaggregated_ranks, disable_early_prefill=True)
"""Nothing leaves before decode has opened the room, so a prompt that is computed early has nothing to wait for."""


@EACH_FAMILY
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [CHUNK, 2048])
def test_every_part_of_every_layer_leaves_before_the_next_layer(
    budget: int, overlap: bool, family: str, models: Models
) -> None:
    """Prompts on the grid (nothing but the final state), off it (with a saved state), short, two in one step."""
    lengths = [(2 * CHUNK,), (3 * CHUNK + 7,), (5,), (CHUNK + 6, 2 * CHUNK + 9)]
    tasks = [[Request(prompt=prompt(n, seed=n), max_new_tokens=4) for n in batch] for batch in lengths]
    model = models(family, CHUNK)
    with unified_ranks(model=model, engine=engine()) as ranks:
        expected = [outcome for batch in tasks for outcome in ranks.run(batch)]
    with waiting_ranks(model=model, engine=engine(budget, overlap=overlap)) as ranks:
        fill_decode(ranks)
        pools = ranks.prefill.host.runner.pools
        watch, snapshots = Watch(ranks), Snapshots()
        snapshots.watch(ranks.prefill, ranks.decode)
        outcomes = [outcome for batch in tasks for outcome in ranks.run(batch)]
        ranks.assert_all_free()
        assert_bytes_crossed_unchanged(snapshots, sum(map(len, lengths)))
    for got, undisturbed in zip(outcomes, expected, strict=True):
        assert_equivalent(got, undisturbed)
    state = ("final conv", "final ssm", "track conv", "track ssm")
    wanted = {(layer, "kv") for layer in pools.kv_layers}
    assert set(watch.seen) == wanted | {(layer, what) for layer in pools.state_layers for what in state}


@EACH_FAMILY
@pytest.mark.parametrize("budget", [CHUNK, 2048])
def test_after_a_prefix_hit_what_the_cache_had_leaves_first(budget: int, family: str, models: Models) -> None:
    common = prompt(4 * CHUNK)
    tasks = [Request(prompt=[*common, *prompt(n, seed=n)], max_new_tokens=4) for n in (9, 1, CHUNK + 5, 2 * CHUNK)]
    model = models(family, CHUNK)
    with unified_ranks(model=model, engine=engine()) as ranks:
        expected = [ranks.run([task])[0] for task in tasks]
    with waiting_ranks(model=model, engine=engine(budget)) as ranks:
        watch, snapshots = Watch(ranks), Snapshots()
        snapshots.watch(ranks.prefill, ranks.decode)
        outcomes = [ranks.run([task])[0] for task in tasks]
        assert_bytes_crossed_unchanged(snapshots, len(tasks))
        assert [outcome.cached for outcome in outcomes[1:]] == [4 * CHUNK] * 3
    for got, undisturbed in zip(outcomes, expected, strict=True):
        assert_equivalent(got, undisturbed)
    assert watch.steps >= len(tasks)


# What must be noticed


def run_two(ranks: Ranks) -> Snapshots:
    snapshots = Snapshots()
    snapshots.watch(ranks.prefill, ranks.decode)
    ranks.run([Request(prompt=prompt(150 + i, seed=i), max_new_tokens=3) for i in range(2)])
    assert_bytes_crossed_unchanged(snapshots, 2)
    return snapshots


def reported_before_it_is_written(patch: pytest.MonkeyPatch, layer: int) -> None:
    """The engine speaks of this layer one layer too early."""
    original = HybridModel.forward

    def forward(self: HybridModel, batch: object, on_layer: OnLayer | None = None) -> Tensor:
        def early(done: int) -> None:
            if on_layer is not None and done == layer - 1:
                on_layer(done)
                on_layer(layer)
            elif on_layer is not None and done != layer:
                on_layer(done)

        return original(self, batch, early)  # type: ignore[arg-type]

    patch.setattr(HybridModel, "forward", forward)


def never_reported(patch: pytest.MonkeyPatch, layer: int) -> None:
    original = HybridModel.forward

    def forward(self: HybridModel, batch: object, on_layer: OnLayer | None = None) -> Tensor:
        said = on_layer or (lambda _: None)
        return original(self, batch, lambda done: None if done == layer else said(done))  # type: ignore[arg-type]

    patch.setattr(HybridModel, "forward", forward)


def layers_with_state(model: Path) -> list[int]:
    config = read_config(str(model))
    return sorted({*config.state_layers, *config.kv_layers})


@EACH_FAMILY
def test_a_layer_that_leaves_too_early_is_noticed(family: str, models: Models) -> None:
    model = models(family, CHUNK)
    for layer in layers_with_state(model)[1:]:  # nothing comes before the first one
        with pytest.MonkeyPatch.context() as patch, waiting_ranks(model=model, engine=engine()) as ranks:
            reported_before_it_is_written(patch, layer)
            fill_decode(ranks)
            Watch(ranks)
            with pytest.raises(AssertionError):
                run_two(ranks)


@EACH_FAMILY
def test_a_layer_that_is_not_reported_fails_its_request(family: str, models: Models) -> None:
    """Also the only layer with keys and values, which no other one can be compared with."""
    model = models(family, CHUNK)
    for layer in layers_with_state(model):
        with pytest.MonkeyPatch.context() as patch, waiting_ranks(model=model, engine=engine()) as ranks:
            never_reported(patch, layer)
            (outcome,) = ranks.run([Request(prompt=prompt(100))])
            assert outcome.error is not None and outcome.error.code == "incomplete"
            ranks.assert_all_free()


# Steps and requests that fail when layers have left already


def test_logits_that_are_not_finite_abort_what_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two prompts one fails when every layer of it has left. It is never committed; the other is right."""
    tasks = [Request(prompt=prompt(150, seed=1)), Request(prompt=prompt(90, seed=2))]
    with unified_ranks(engine=engine()) as ranks:
        expected = ranks.run([tasks[1]])[0]
    original = ModelRunner.forward

    def broken(self: ModelRunner, rows: list[Row], on_layer: OnLayer | None = None) -> Tensor:
        logits = original(self, rows, on_layer).clone()
        logits[[len(row.token_ids) == 150 for row in rows]] = torch.nan
        return logits

    monkeypatch.setattr(ModelRunner, "forward", broken)
    with waiting_ranks(engine=engine()) as ranks:
        watch = Watch(ranks)
        outcomes = ranks.run(tasks)
        pools = ranks.prefill.host.runner.pools
        assert {layer for layer, _ in watch.seen} == {*pools.state_layers, *pools.kv_layers}
        assert outcomes[0].error is not None and outcomes[0].tokens == []
        assert_equivalent(outcomes[1], expected)
        assert ranks.decode.transfer.stats()["rooms_total"] == {"failed": 1, "committed": 1}
        ranks.assert_all_free()


def stop_at(ranks: Ranks, layer: int, act: Callable[[], None]) -> None:
    """Do something in the middle of a prefill step, once, when this layer is done."""
    listen, pending = ranks.prefill._listen, [act]

    def watched(chunks: list[Chunk]) -> OnLayer:
        on_layer = listen(chunks)

        def each(done: int) -> None:
            on_layer(done)
            if done == layer and pending:
                pending.pop()()

        return each

    ranks.prefill._listen = watched  # type: ignore[method-assign]


@pytest.mark.parametrize("layer", [0, 3, 10])
@pytest.mark.parametrize("budget", [MINI_CHUNK, 2048])
def test_an_abort_in_the_middle_of_a_step(layer: int, budget: int) -> None:
    task = Request(prompt=prompt(150))
    with unified_ranks(engine=engine()) as ranks:
        expected = ranks.run([task])[0]
    with waiting_ranks(engine=engine(budget)) as ranks:
        first = ranks.submit(task)
        stop_at(ranks, layer, lambda: ranks.abort(first))
        ranks.run_until(lambda: first.ended)
        assert first.error is not None and first.error.code == "aborted" and first.tokens == []
        ranks.assert_all_free()
        assert_equivalent(ranks.run([task])[0], expected)
        ranks.assert_all_free()


def test_a_step_that_breaks_ends_its_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `run_rank` does: the exception ends the loop, and closing the role tells decode."""
    with waiting_ranks(engine=engine()) as ranks:
        outcome = ranks.submit(Request(prompt=prompt(150)))
        stop_at(ranks, 4, lambda: 1 // 0)  # type: ignore[arg-type, return-value]
        with pytest.raises(ZeroDivisionError):
            ranks.run_until(lambda: outcome.ended)
        ranks.prefill.close()
        ranks.roles.pop(0)
        ranks.run_until(lambda: outcome.ended)
        assert outcome.error is not None and outcome.error.code == "worker_unavailable"
        ranks.assert_all_free()
