"""A prompt that is computed before decode has opened its room: the same answers, and nothing that anybody waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from common.config import EngineConfig
from engine.batch import OnLayer, Row
from engine.runner import ModelRunner
from engine.sequence import Phase, Sequence
from node.messages import Abort, Failure, Updates
from tests.e2e.test_rooms import leg
from tests.support.models import FAMILIES, Models
from tests.support.ranks import (
    MODEL,
    Ranks,
    Request,
    Snapshots,
    assert_all_owned,
    assert_bytes_crossed_unchanged,
    assert_equivalent,
    disaggregated_ranks,
)
from transfer.posting import Piece

CHUNK, LITTLE = 64, 256
FORWARD = ModelRunner.forward
FAMILY_CHUNK = 16


def engine(
    budget: int = CHUNK, *, overlap: bool = False, tokens: int = 16384, slots: int = 24, **settings: Any
) -> EngineConfig:
    return EngineConfig(
        max_total_tokens=tokens,
        max_state_slots=slots,
        max_running_requests=20,
        chunked_prefill_size=budget,
        disable_overlap_schedule=not overlap,
        **settings,
    )


def prompt(length: int, seed: int = 0) -> list[int]:
    return [3 + (seed * 131 + i * 37 + i * i % 11) % 90 for i in range(length)]


def prefill_alone(ranks: Ranks, done: Callable[[], bool] | None = None) -> None:
    """Step the prefill rank alone, deaf to what decode says. done: by default, nothing is left to be computed."""
    done = done or (lambda: not ranks.prefill.host.scheduler.has_work())
    for _ in range(100):
        ranks.prefill.step()
        assert_all_owned(ranks.prefill)
        if done():
            return
    raise AssertionError("the prefill rank did not get there")


def forget(ranks: Ranks) -> None:
    """Prefill has cached nothing any more; decode has."""
    ranks.run_until(lambda: not ranks.prefill.rooms)
    ranks.prefill.host.scheduler.memory.flush()


def steps(ranks: Ranks) -> int:
    return int(ranks.prefill.host.scheduler.counters.prefill_steps)


# The same answers

KINDS = [("tandem-mini", False, True), ("tandem-mini", True, True), ("tandem-mini", True, False)]
KINDS += [(family, False, True) for family in FAMILIES]


@pytest.mark.parametrize(("family", "overlap", "layerwise"), KINDS)
def test_computed_early_is_computed_in_time(family: str, overlap: bool, layerwise: bool, models: Models) -> None:
    """All of a prompt, a piece of it or nothing is computed when decode opens the room: cold, and after a prefix hit.
    Prompts on the grid, off it, of one token."""
    is_mini = family == "tandem-mini"
    chunk = CHUNK if is_mini else FAMILY_CHUNK
    begun = prompt(2 * chunk)
    tasks = [Request(prompt=prompt(n, seed=n)) for n in (1, chunk - 1, 3 * chunk, 3 * chunk + 1, 2 * chunk + 7)]
    tasks += [Request(prompt=begun), Request(prompt=[*begun, *prompt(2 * chunk + 5, seed=9)])]
    ranks_of = partial(
        disaggregated_ranks,
        model=MODEL if is_mini else models(family, chunk),
        engine=engine(chunk, overlap=overlap, local_prefill_max_tokens=0),
        disable_layerwise_transfer=not layerwise,
    )
    with ranks_of(disable_early_prefill=True) as ranks:
        expected = [ranks.run([task])[0] for task in tasks]
    for num_steps in (0, 1, 100):
        with ranks_of() as ranks:
            snapshots = Snapshots()
            snapshots.watch(ranks.prefill, ranks.decode)
            for task, in_time in zip(tasks, expected, strict=True):
                before = steps(ranks)
                outcome = ranks.submit(task)
                for _ in range(num_steps):
                    ranks.prefill.step()
                assert (steps(ranks) > before) == (num_steps > 0)
                assert ranks.prefill.transfer.room_states()[int(outcome.rid.removeprefix("r"))] == "expected"
                ranks.run_until(lambda outcome=outcome: outcome.ended)  # type: ignore[misc]
                assert_equivalent(outcome, in_time)
                assert outcome.cached == in_time.cached
            assert_bytes_crossed_unchanged(snapshots, len(tasks))
            ranks.assert_all_free()


def test_what_passes_until_decode_opens_is_no_time_of_the_transfer() -> None:
    with disaggregated_ranks(engine=engine()) as ranks:
        outcome = ranks.submit(Request(prompt=prompt(100)))
        prefill_alone(ranks)
        time.sleep(0.5)
        ranks.run_until(lambda: outcome.ended)
        assert outcome.timing is not None and 0 < outcome.timing.transfer_s < 0.5


def test_a_room_that_opens_late_has_the_time_of_a_transfer_from_then_on() -> None:
    with disaggregated_ranks(engine=engine(), transfer_timeout_s=1.0) as ranks:
        outcome = ranks.submit(Request(prompt=prompt(100)))
        prefill_alone(ranks)
        time.sleep(1.2)
        ranks.run_until(lambda: outcome.ended)
        assert outcome.error is None


# Who may begin early


def test_one_begins_early_and_the_next_when_it_has_its_room() -> None:
    with disaggregated_ranks(engine=engine()) as ranks:
        outcomes = [ranks.submit(Request(prompt=prompt(100, seed=n))) for n in range(3)]
        prefill_alone(ranks)
        phases = [room.sequence.phase for room in ranks.prefill.rooms.values()]
        assert phases == [Phase.HELD, Phase.WAITING, Phase.WAITING] and steps(ranks) == 2
        ranks.run_until(lambda: all(outcome.ended for outcome in outcomes))
        assert all(outcome.error is None for outcome in outcomes)
        early = ranks.submit(Request(prompt=prompt(100, seed=3)))
        before = steps(ranks)
        prefill_alone(ranks)
        assert steps(ranks) == before + 2
        ranks.run_until(lambda: early.ended)
        ranks.assert_all_free()


def test_nobody_begins_early_while_there_is_something_to_compute() -> None:
    with disaggregated_ranks(engine=engine()) as ranks:
        first = ranks.submit(Request(prompt=prompt(20 * CHUNK)))
        ranks.run_until(lambda: ranks.prefill.early is None)
        assert steps(ranks) < 20
        second = ranks.submit(Request(prompt=prompt(CHUNK, seed=1)))
        assert ranks.prefill.early is None
        ranks.run_until(lambda: first.ended and second.ended)
        ranks.assert_all_free()


@pytest.mark.parametrize("tokens", [8192 + 128, 8192 + 144])
def test_who_begins_early_leaves_memory_for_any_other(tokens: int) -> None:
    """A page is reserved. 8,192 tokens are the longest prompt; it runs beside an early one whose room nobody opens."""
    settings = engine(2048, tokens=tokens)
    with disaggregated_ranks(engine=settings, first_token_timeout_s=20.0) as ranks:
        stray = leg(ranks, ranks.prefill, rid="stray", room=99, prompt=prompt(128))
        prefill_alone(ranks)
        begins = tokens > 8192 + 128
        assert steps(ranks) == begins and (ranks.prefill.early is not None) == begins
        (longest,) = ranks.run([Request(prompt=prompt(8191), max_new_tokens=1)])
        assert longest.error is None and not stray.ended
        ranks.prefill.abort(Abort(rid="stray"))
        ranks.assert_all_free()


@pytest.mark.parametrize("slots", [5, 6])
def test_who_begins_early_leaves_a_slot(slots: int) -> None:
    with disaggregated_ranks(engine=engine(slots=slots)) as ranks:
        stray = leg(ranks, ranks.prefill, rid="stray", room=99, prompt=prompt(100))
        assert (ranks.prefill.early is not None) == (slots > 5)
        outcomes = ranks.run([Request(prompt=prompt(90, seed=n)) for n in range(6)])
        assert all(outcome.error is None for outcome in outcomes) and not stray.ended
        ranks.prefill.abort(Abort(rid="stray"))
        ranks.assert_all_free()


def test_what_decode_is_likely_to_decline_waits() -> None:
    with disaggregated_ranks(engine=engine()) as ranks:
        begun = prompt(5 * CHUNK)
        ranks.run([Request(prompt=begun)])
        before = steps(ranks)
        declined = ranks.submit(Request(prompt=[*begun, *prompt(LITTLE, seed=1)]))
        prefill_alone(ranks)
        assert steps(ranks) == before
        ranks.run_until(lambda: declined.ended)
        assert ranks.prefill.transfer.stats()["rooms_total"]["declined"] == 1
        long = ranks.submit(Request(prompt=[*begun, *prompt(LITTLE + CHUNK + 1, seed=2)]))
        prefill_alone(ranks)
        assert steps(ranks) > before
        ranks.run_until(lambda: long.ended)
        assert long.error is None
        ranks.assert_all_free()


# The end of one that has begun

POINTS = {
    "before a step": lambda ranks: True,
    "between two steps": lambda ranks: steps(ranks) == 2,
    "with everything computed": lambda ranks: not ranks.prefill.host.scheduler.has_work(),
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("point", POINTS)
def test_decode_declines_what_has_begun(point: str, overlap: bool) -> None:
    """It holds the prompt, and prefill no longer does."""
    task = Request(prompt=prompt(5 * CHUNK + 9))
    with disaggregated_ranks(engine=engine(overlap=overlap)) as ranks:
        (first,) = ranks.run([task])
        forget(ranks)
        computed = steps(ranks)
        ranks.prefill.host.scheduler.counters.prefill_steps = 0
        again = ranks.submit(task)
        assert ranks.prefill.early is not None
        if point != "before a step":
            prefill_alone(ranks, lambda: POINTS[point](ranks))
        ranks.run_until(lambda: again.ended and ranks.legs[again.rid].ended)
        assert_equivalent(again, first)
        assert again.local == 5 * CHUNK and ranks.legs[again.rid].tokens == []
        if point == "between two steps":
            assert steps(ranks) < computed
        ranks.assert_all_free()
        assert ranks.prefill.early is None


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("point", POINTS)
def test_a_client_leaves_one_that_has_begun(point: str, overlap: bool) -> None:
    task = Request(prompt=prompt(5 * CHUNK + 9))
    with disaggregated_ranks(engine=engine(overlap=overlap)) as ranks:
        leaving = ranks.submit(task)
        if point != "before a step":
            prefill_alone(ranks, lambda: POINTS[point](ranks))
        ranks.abort(leaving)
        ranks.run_until(lambda: leaving.ended)
        assert leaving.error is not None and leaving.error.code == "aborted"
        ranks.assert_all_free()
        assert ranks.prefill.early is None
        (again,) = ranks.run([task])
        assert again.error is None


def test_nobody_opens_the_room() -> None:
    with disaggregated_ranks(engine=engine(), first_token_timeout_s=0.5) as ranks:
        stray = leg(ranks, ranks.prefill, rid="stray", room=99, prompt=prompt(100))
        prefill_alone(ranks)
        ranks.run_until(lambda: stray.ended)
        assert stray.error is not None and stray.error.code == "bootstrap_timeout"
        ranks.assert_all_free()
        assert ranks.prefill.early is None


def broken(self: ModelRunner, rows: list[Row], on_layer: OnLayer | None = None) -> Tensor:
    return torch.full_like(FORWARD(self, rows, on_layer), torch.nan)


def test_one_that_fails_before_decode_has_opened_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode hears why, at once."""
    with disaggregated_ranks(engine=engine(), bootstrap_timeout_s=20.0) as ranks:
        task = Request(prompt=prompt(100))
        with monkeypatch.context() as patch:
            patch.setattr(ModelRunner, "forward", broken)
            failing = ranks.submit(task)
            prefill_alone(ranks)
        ranks.run_until(lambda: failing.ended, 5)
        for error in (failing.error, ranks.legs[failing.rid].error):
            assert error is not None and error.code == "non_finite_logits"
        ranks.assert_all_free()
        assert ranks.run([task])[0].error is None


def test_a_failed_room_is_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor against who uses its number again."""
    with disaggregated_ranks(engine=engine(), bootstrap_timeout_s=0.3) as ranks:
        refusals = ranks.prefill.transfer._refusals
        for again in (False, True):
            leg(ranks, ranks.prefill, rid="a", room=7, prompt=prompt(100))
            ranks.prefill.abort(Abort(rid="a"))
            ranks.prefill.poll()
            assert list(refusals) == [7]
            if again:
                leg(ranks, ranks.prefill, rid="b", room=7, prompt=prompt(100))
                leg(ranks, ranks.decode, rid="b", room=7, prompt=prompt(100))
                ranks.run_until(lambda: ranks.outcomes["b"].ended)
                assert ranks.outcomes["b"].error is None
            until(lambda: not ranks.prefill.transfer._refusals)
            refusals = ranks.prefill.transfer._refusals
        ranks.assert_all_free()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# What comes while decode's word has not been taken in yet


@contextmanager
def declined_unread(**settings: Any) -> Iterator[Ranks]:
    """An early prompt in room 77 that decode has declined; the rank does not know of it yet."""
    cached = prompt(5 * CHUNK + 9)
    with disaggregated_ranks(engine=engine(2048), **settings) as ranks:
        ranks.run([Request(prompt=cached)])
        forget(ranks)
        leg(ranks, ranks.prefill, rid="a", room=77, prompt=cached)
        leg(ranks, ranks.decode, rid="a", room=77, prompt=cached)
        until(lambda: 77 not in ranks.prefill.transfer._rooms)
        yield ranks
        ranks.run_until(lambda: not ranks.decode.host.scheduler.has_work())
        ranks.assert_all_free()
        assert ranks.prefill.early is None


def ends(ranks: Ranks) -> list[str]:
    """Of requests, as the prefill rank tells its front."""
    found: list[str] = []
    for message in ranks.prefill.take_outbox():
        match message:
            case Failure(error=error):
                found.append(str(error.code))
            case Updates(items=items):
                found += [str(update.finish) for update in items]
    return found


def test_it_fails_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    with declined_unread() as ranks:
        with monkeypatch.context() as patch:
            patch.setattr(ModelRunner, "forward", broken)
            ranks.prefill.step()
        ranks.prefill.poll()
        assert ends(ranks) == ["non_finite_logits"]


def test_its_client_leaves_meanwhile_and_its_rid_comes_back() -> None:
    with declined_unread() as ranks:
        ranks.prefill.abort(Abort(rid="a"))
        assert ends(ranks) == ["aborted"]
        leg(ranks, ranks.prefill, rid="a", room=78, prompt=prompt(100, seed=4))
        ranks.prefill.poll()
        assert ends(ranks) == []
        ranks.prefill.abort(Abort(rid="a"))
        ends(ranks)


@pytest.mark.parametrize("second", ["declined", "opened"])
def test_decode_uses_its_number_again_meanwhile(second: str) -> None:
    """The end of its prompt is nothing to the room that has the number now."""
    with declined_unread() as ranks:
        again = prompt(5 * CHUNK + 9) if second == "declined" else prompt(100, seed=5)
        other = leg(ranks, ranks.decode, rid="b", room=77, prompt=again)
        while ranks.decode.step():  # what it computes itself comes first
            continue
        ranks.decode.poll()
        until(lambda: 77 in ranks.prefill.transfer._rooms)
        ranks.prefill.step()
        assert steps(ranks) > 0
        ranks.prefill.abort(Abort(rid="a"))
        ranks.prefill.poll()
        theirs = leg(ranks, ranks.prefill, rid="b", room=77, prompt=again)
        ranks.run_until(lambda: other.ended and theirs.ended)
        assert other.error is None and theirs.error is None


class LateGrammar:
    """Not compiled yet."""

    def is_ready(self, timeout_s: float) -> bool:
        return False


def test_one_whose_grammar_is_not_there_yet_does_not_begin() -> None:
    """Whoever passes it with the same prefix would cache pages that it then holds beside its own."""
    task = Request(prompt=prompt(100))
    with disaggregated_ranks(engine=engine()) as ranks:
        sequence = Sequence(
            rid="a", prompt_ids=task.prompt, sampling=task.params(), logprobs=task.logprobs, arrival_s=0.0
        )
        assert ranks.prefill._may_begin_early(sequence)
        sequence.grammar = LateGrammar()  # type: ignore[assignment]
        assert not ranks.prefill._may_begin_early(sequence)


def test_a_room_that_is_over_is_no_question_to_the_transport() -> None:
    """It may have let go of the peer, and would reach it anew."""
    with disaggregated_ranks(engine=engine(2048)) as ranks:
        outcome = ranks.submit(Request(prompt=prompt(100)))
        transfer = ranks.prefill.transfer
        asked: list[str] = []
        ranks.prefill.transport.bursts = lambda session: not asked.append(session)  # type: ignore[method-assign,func-returns-value]
        outgoing = transfer.announce(1, Piece(0, ()))
        ranks.decode.poll()
        until(lambda: any(room.peer for room in transfer._rooms.values()))
        outgoing.layer_done(0)
        assert len(asked) == 1
        ranks.abort(outcome)
        for layer in range(1, 4):
            outgoing.layer_done(layer)
        assert len(asked) == 1
        ranks.run_until(lambda: outcome.ended)
        ranks.assert_all_free()
