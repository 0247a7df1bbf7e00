"""Faults that have happened in public, put in on purpose: the sweep's comparison with cold runs must notice each.

Digests are off and unwritten memory holds numbers that are possible, so that only wrong answers can tell. Each case
passes unbroken. Broken, its requests still run to their end, and it is the comparison that fails.

Every break has to be noticed in every family: in all cases of nemotron_h, and in a sample of those of the others, in
which each break is tried in one of them at least and each family meets each kind of break; the rest is slow. All breaks
apply to all families, but for the one of positions: it needs a family that has any.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import engine.batch
import engine.faults
import engine.model
import engine.ops.conv
import engine.ops.gated_delta
import engine.ops.ssd
import engine.runner
import engine.scheduler
from common.config import LoopbackFaults, Verify
from decode_node.rank import DecodeRole
from engine.batch import ForwardBatch, OnLayer, Row, Track
from engine.faults import ENGINE_FAULTS
from engine.pools import StatePools
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.tracking import Boundary
from tests.e2e.test_state_tracking import Case, References, assert_cold, run
from tests.support.models import FAMILIES, Models
from transfer.posting import Piece
from transfer.sender import Outgoing, PrefillTransfer

Patch = pytest.MonkeyPatch
Break = Callable[[Patch], dict[str, Any] | None]  # may return settings of the ranks

ONE = Case(
    family="nemotron_h", chunk=8, page=1, s=11, u=1, batch="three", strategy="extra_buffer", overlap=True, cut=0,
    mixed=False, disaggregated=False, local=256, answer="none",
)  # fmt: skip
SHORT = dataclasses.replace(ONE, answer="short")
LONG = dataclasses.replace(ONE, answer="long", page=16, chunk=16)
PLAIN_SHORT, PLAIN_LONG = (dataclasses.replace(case, overlap=False) for case in (SHORT, LONG))
MIXED = dataclasses.replace(SHORT, mixed=True, cut=1)
MIXED_LONG = dataclasses.replace(MIXED, answer="long", batch="sixteen")
APART, APART_SHORT, APART_LONG = (dataclasses.replace(case, disaggregated=True) for case in (ONE, SHORT, LONG))
APART_SENT = dataclasses.replace(APART, local=0)
CASES = {
    "one": ONE,
    "short": SHORT,
    "long": LONG,
    "short-plain": PLAIN_SHORT,
    "long-plain": PLAIN_LONG,
    "mixed": MIXED,
    "mixed-long": MIXED_LONG,
    "apart": APART,
    "apart-sent": APART_SENT,
    "apart-short": APART_SHORT,
    "apart-long": APART_LONG,
}
TURNED = ("falcon_h1", "qwen3_next")  # with a rotary embedding: the others have nothing that counts positions
RECURRENCES = (engine.ops.ssd, engine.ops.gated_delta)
SEED = 12  # prefixes of 3c + 7, c + 1 and 2c + 1 tokens


Table = Sequence[tuple[Break, Sequence[Case]]]


@pytest.fixture(scope="module")
def references(models: Models) -> References:
    return References(models)


def each(table: Table, families: Sequence[str] = FAMILIES) -> Any:
    """Parametrise by (break, case): all cases of the table in all of these families."""
    chosen = set(sample(table, families))
    parameters = []
    for broken, cases in table:
        for family in families:
            for case in (dataclasses.replace(case, family=family) for case in cases):
                slow = family != "nemotron_h" and (broken, case) not in chosen
                parameters.append(
                    pytest.param(
                        broken,
                        case,
                        id=f"{broken.__name__}-{name_of(case)}-{family}",
                        marks=[pytest.mark.slow] if slow else [],
                    )
                )
    return pytest.mark.parametrize(("broken", "case"), parameters)


def sample(table: Table, families: Sequence[str] = FAMILIES) -> Iterator[tuple[Break, Case]]:
    """Every break in one family beside nemotron_h at least, and one break at least in each of these."""
    others = [family for family in families if family != "nemotron_h"]
    for turn in range(max(len(table), len(others))):
        broken, cases = table[turn % len(table)]
        family = others[turn % len(others)]
        yield broken, dataclasses.replace(cases[turn % len(cases)], family=family)


def name_of(case: Case) -> str:
    return next(name for name, one in CASES.items() if one == dataclasses.replace(case, family=one.family))


def must_differ(broken: Break, case: Case, models: Models, references: References) -> None:
    with pytest.MonkeyPatch.context() as patch:
        settings = broken(patch) or {}
        found = run(case, SEED, models, plausible=True, verify=Verify.OFF, **settings)
    assert not [outcome.error for outcome in found.outcomes if outcome.error]
    with pytest.raises(AssertionError):
        assert_cold(found, case, references)


# -- what is saved -------------------------------------------------------------------------------------------------


def prefill_copies_skipped(patch: Patch) -> None:
    for module in (engine.ops.conv, *RECURRENCES):
        patch.setattr(module, "save_states", lambda pool, states: None)


def prefill_ssm_copy_skipped(patch: Patch) -> None:
    for module in RECURRENCES:
        patch.setattr(module, "save_states", lambda pool, states: None)


def decode_copy_skipped(patch: Patch) -> None:
    original = engine.batch._decode_part
    patch.setattr(engine.batch, "_decode_part", lambda *args: dataclasses.replace(original(*args), tracks=()))


def conv_window_off_by_one(patch: Patch) -> None:
    original = engine.model.plan_conv

    def shifted(*args: Any) -> Any:
        plan = original(*args)
        return dataclasses.replace(plan, tracks=tuple((slot, begin - 1) for slot, begin in plan.tracks))

    patch.setattr(engine.model, "plan_conv", shifted)


def global_grid(patch: Patch) -> None:
    """Chunks are cells of the packed batch, and the state that is saved is the one that such a cell begins with."""
    original = engine.model.plan_chunks

    def packed(
        starts: Sequence[int], lengths: Sequence[int], chunk: int, tracks: Sequence[Boundary], device: Any
    ) -> Any:
        offsets = [sum(lengths[:i]) for i in range(len(lengths))]
        plan = original(offsets, lengths, chunk, (), device)

        def row(one: Boundary) -> int:
            if one.offset == lengths[one.sequence]:
                return plan.rows + one.sequence
            return int(plan.tokens[offsets[one.sequence] + one.offset]) // plan.width

        return dataclasses.replace(plan, tracks=tuple((one.slot, row(one)) for one in tracks))

    patch.setattr(engine.model, "plan_chunks", packed)


def recorded_a_chunk_too_late(patch: Patch) -> None:
    """Prefill saves the state of the multiple of the chunk before the position that it is recorded under."""
    original = ModelRunner.forward

    def early(row: Row, chunk: int) -> Row:
        if row.track is None or len(row.token_ids) == 1 or row.track.position - chunk <= row.start:
            return row
        track = Track(row.track.position - chunk, row.track.slot)
        return Row(row.token_ids, row.start, row.page_table, row.slot, row.num_logits, track)

    patch.setattr(
        ModelRunner,
        "forward",
        lambda self, rows, *rest: original(self, [early(row, self.config.chunk_size) for row in rows], *rest),
    )


def checkpoint_a_step_late(patch: Patch) -> None:
    """Decode saves its state a step after the interval and records it under the interval."""
    due, donate = engine.scheduler.decode_due, Scheduler._donate

    def late(self: Scheduler, share: Any, track: Track) -> None:
        donate(self, share, track if share.chunk else Track(track.position - 1, track.slot))

    patch.setattr(engine.scheduler, "decode_due", lambda position, interval: due(position - 1, interval))
    patch.setattr(Scheduler, "_donate", late)


def donated_slot_also_written(patch: Patch) -> None:
    """A sequence that has saved a state goes on writing into the slot that it gave away."""
    original = ModelRunner.forward

    def forward(self: ModelRunner, rows: Sequence[Row], on_layer: OnLayer | None = None) -> Tensor:
        logits = original(self, rows, on_layer)
        given = given_away(id(self))
        for row in rows:
            if row.start == 0:
                given.pop(row.slot, None)
            if row.track is not None:
                given[row.slot] = row.track.slot
            elif row.slot in given:
                self.pools.copy_slot(row.slot, given[row.slot])
        return logits

    @cache
    def given_away(runner: int) -> dict[int, int]:
        return {}

    patch.setattr(ModelRunner, "forward", forward)


SAVED: Table = [
    (prefill_copies_skipped, [ONE, SHORT, PLAIN_SHORT, MIXED, APART, APART_SHORT]),
    (prefill_ssm_copy_skipped, [ONE, APART]),
    (decode_copy_skipped, [LONG, PLAIN_LONG, APART_LONG]),
    (conv_window_off_by_one, [ONE, SHORT, MIXED, APART]),
    (global_grid, [SHORT, PLAIN_SHORT, APART_SHORT]),
    (recorded_a_chunk_too_late, [SHORT, PLAIN_SHORT, APART_SHORT]),
    (checkpoint_a_step_late, [LONG, PLAIN_LONG, MIXED_LONG, APART_LONG]),
    (donated_slot_also_written, [ONE, SHORT, LONG, PLAIN_LONG, APART_LONG]),
]


@each(SAVED)
def test_a_wrong_saved_state_is_noticed(broken: Break, case: Case, models: Models, references: References) -> None:
    must_differ(broken, case, models, references)


# -- what is read --------------------------------------------------------------------------------------------------


def initial_state_ignored_on_a_hit(patch: Patch) -> None:
    original = engine.batch._prefill_part

    def fresh(*args: Any) -> Any:
        part = original(*args)
        return dataclasses.replace(part, fresh=torch.ones_like(part.fresh))

    patch.setattr(engine.batch, "_prefill_part", fresh)


def conv_state_not_copied_on_a_hit(patch: Patch) -> None:
    def copy_slots(self: StatePools, sources: Sequence[int], targets: Sequence[int]) -> None:
        for source, target in zip(sources, targets, strict=True):
            self.ssm[target], self.conv[target] = self.ssm[source], 0

    patch.setattr(StatePools, "copy_slots", copy_slots)


READ: Table = [
    (initial_state_ignored_on_a_hit, [ONE, SHORT, LONG, APART]),
    (conv_state_not_copied_on_a_hit, [ONE, SHORT, LONG, APART]),
]


@each(READ)
def test_a_saved_state_that_is_not_read_is_noticed(
    broken: Break, case: Case, models: Models, references: References
) -> None:
    must_differ(broken, case, models, references)


def positions_counted_from_the_hit(patch: Patch) -> None:
    """What resumes is turned as if it began at position 0."""
    original = engine.runner.build_batch

    def build(rows: Sequence[Row], **where: Any) -> ForwardBatch:
        batch = original(rows, **where)
        part = batch.prefill
        if part is None:
            return batch
        assert batch.positions is not None, "this family turns nothing"
        counted = torch.cat([torch.arange(length) for length in part.lengths])
        return dataclasses.replace(batch, positions=torch.cat((batch.positions[: -len(counted)], counted)))

    patch.setattr(engine.runner, "build_batch", build)


POSITIONS: Table = [(positions_counted_from_the_hit, [ONE, SHORT, LONG, APART])]


@each(POSITIONS, TURNED)
def test_wrong_positions_are_noticed(broken: Break, case: Case, models: Models, references: References) -> None:
    must_differ(broken, case, models, references)


# -- metadata of steps that mix prefill and decode -----------------------------------------------------------------


def dropped(part: str, field: str, lost: Callable[[Any], Any]) -> Break:
    """The field of a step's metadata is lost where the step has both kinds of rows."""

    def broken(patch: Patch) -> None:
        original = engine.runner.build_batch

        def build(rows: Sequence[Row], **where: Any) -> ForwardBatch:
            batch = original(rows, **where)
            if batch.decode is None or batch.prefill is None:
                return batch
            whole = getattr(batch, part)
            changed = dataclasses.replace(whole, **{field: lost(getattr(whole, field))})
            return dataclasses.replace(batch, **{part: changed})

        patch.setattr(engine.runner, "build_batch", build)

    broken.__name__ = f"{part}_{field}_lost"
    return broken


FIELDS: Table = [
    (dropped("prefill", "tracks", lambda tracks: ()), [MIXED]),
    (dropped("decode", "tracks", lambda tracks: ()), [MIXED_LONG]),
    (dropped("prefill", "fresh", torch.zeros_like), [MIXED, MIXED_LONG]),
]


@each(FIELDS)
def test_a_field_lost_in_mixed_steps_is_noticed(
    broken: Break, case: Case, models: Models, references: References
) -> None:
    must_differ(broken, case, models, references)


# -- what crosses the wire -----------------------------------------------------------------------------------------


def clear(role: DecodeRole, slot: int | None) -> None:
    pools = role.host.runner.pools
    pools.conv[slot], pools.ssm[slot] = 0, 0


def received_slot_cleared(patch: Patch) -> None:
    adopt = DecodeRole._adopt

    def cleared(self: DecodeRole, room: Any, event: Any) -> None:
        clear(self, room.sequence.slot)
        adopt(self, room, event)

    patch.setattr(DecodeRole, "_adopt", cleared)


def received_track_slot_cleared(patch: Patch) -> None:
    cache_prompt = DecodeRole._cache_prompt

    def cleared(self: DecodeRole, room: Any, event: Any) -> None:
        cache_prompt(self, room, event)
        if room.sequence.checkpoint is not None:
            clear(self, room.sequence.checkpoint.slot)

    patch.setattr(DecodeRole, "_cache_prompt", cleared)


def anothers_track_slot_sent(patch: Patch) -> None:
    announce, slots = PrefillTransfer.announce, list[int]()

    def swapped(self: PrefillTransfer, room: int, piece: Piece) -> Outgoing:
        if piece.track_slot is not None:
            slots.append(piece.track_slot)
            piece = piece._replace(track_slot=slots[-2:][0])
        return announce(self, room, piece)

    patch.setattr(PrefillTransfer, "announce", swapped)


def lost_track_slot(fault: str) -> Break:
    """The transport drops or zeroes it."""

    def broken(patch: Patch) -> dict[str, Any]:
        return {"faults": LoopbackFaults(**{fault: "track"})}  # type: ignore[arg-type]

    broken.__name__ = f"track_slot_{fault}"
    return broken


WIRE: Table = [
    (received_slot_cleared, [APART_SENT, APART_SHORT, APART_LONG]),
    (received_track_slot_cleared, [APART, APART_SHORT]),
    (anothers_track_slot_sent, [APART_SHORT]),
    (lost_track_slot("drop"), [APART, APART_SHORT]),
    (lost_track_slot("zero"), [APART, APART_SHORT]),
]


@each(WIRE)
def test_a_wrong_state_from_the_wire_is_noticed(
    broken: Break, case: Case, models: Models, references: References
) -> None:
    must_differ(broken, case, models, references)


# -- those that a rank can be started with -------------------------------------------------------------------------


def switched_on(name: str) -> Break:
    def broken(patch: Patch) -> None:
        patch.setattr(engine.faults, "_put", patch.setattr)
        ENGINE_FAULTS[name]()

    broken.__name__ = name
    return broken


SHOWN_BY: Mapping[str, Sequence[Case]] = {
    "track-not-written": [ONE, SHORT, APART],
    "track-of-the-chunk-before": [SHORT, APART_SHORT],
    "track-conv-off-by-one": [ONE, MIXED, APART],
    "saved-state-not-read": [ONE, LONG, APART],
    "saved-conv-not-read": [ONE, LONG, APART],
    "received-state-cleared": [APART_SENT, APART_LONG],
    "received-ssm-rounded": [APART_SENT, APART_LONG],
    "received-page-lost": [APART_SENT, APART_LONG],
    "wrong-slot": [APART_SENT, APART_LONG],
    "position-off-by-one": [ONE, LONG, APART],
}
SWITCHED: Table = [(switched_on(name), SHOWN_BY[name]) for name in ENGINE_FAULTS]


@each(SWITCHED)
def test_a_fault_of_the_engine_is_noticed(broken: Break, case: Case, models: Models, references: References) -> None:
    must_differ(broken, case, models, references)


# -- without any ---------------------------------------------------------------------------------------------------


def unbroken() -> Iterator[Any]:
    """Every case in every family; quick where something above is tried in it."""
    tried = {case for table in (SAVED, READ, FIELDS, WIRE, SWITCHED) for _, case in sample(table)}
    tried |= {case for _, case in sample(POSITIONS, TURNED)}
    for family in FAMILIES:
        for name, one in CASES.items():
            case = dataclasses.replace(one, family=family)
            quick = family == "nemotron_h" or case in tried
            yield pytest.param(case, id=f"{name}-{family}", marks=[] if quick else [pytest.mark.slow])


@pytest.mark.parametrize("case", list(unbroken()))
def test_unbroken_every_case_is_equivalent_to_a_cold_run(case: Case, models: Models, references: References) -> None:
    assert_cold(run(case, SEED, models, verify=Verify.OFF), case, references)
