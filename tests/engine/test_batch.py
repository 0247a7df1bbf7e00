"""build_batch: packing order, locations, logit rows, and that nothing of a row is dropped."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Sequence

import pytest
import torch

from engine.batch import ForwardBatch, Row, Track, build_batch
from engine.mixers.mixer import Step
from engine.ops.chunks import plan_chunks
from engine.ops.conv import plan_conv
from engine.ops.rotary import Rotary
from engine.tracking import Boundary

PAGE = 4


def metadata_types(*roots: typing.Any) -> Iterator[type]:
    """The dataclasses that the annotations of the roots lead to, these included."""
    for root in roots:
        if isinstance(root, type) and dataclasses.is_dataclass(root):
            yield root
            yield from metadata_types(*typing.get_type_hints(root).values())
        yield from metadata_types(*typing.get_args(root))


def build(rows: Sequence[Row]) -> ForwardBatch:
    return build_batch(rows, page_size=PAGE, with_positions=True, device="cpu")


METADATA = sorted(set(metadata_types(Row, Step)), key=lambda cls: cls.__name__)


def test_every_type_between_rows_and_kernels_is_looked_at() -> None:
    names = "Boundary ChunkPlan ConvPlan DecodePart DecodeSpan ForwardBatch PrefillPart PrefillSpan Row Step Track"
    assert [cls.__name__ for cls in METADATA] == names.split()


@pytest.mark.parametrize("cls", METADATA)
def test_no_field_has_a_default(cls: type) -> None:
    """A field that a constructor forgets must fail, not silently be off."""
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    for field in dataclasses.fields(cls):
        assert field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING, field.name


ROWS = [
    Row([10, 11, 12, 13, 14], 0, [5, 3], 6, 2, None),
    Row([20], 9, [1, 2, 4], 8, 1, None),
    Row([30, 31], 3, [6, 7, 9], 2, 0, None),
    Row([40], 3, [8], 7, 1, None),
    Row([50], 0, [10], 1, 1, None),
]


# Decode and prefill rows that make every optional field of every type necessary.
EVERYTHING = [
    Row([1] * 9, 4, [1, 2, 3, 4], 6, 1, Track(8, 20)),
    Row([2], 9, [5, 6, 7], 2, 1, Track(10, 3)),
    Row([3] * 4, 4, [8, 9], 9, 0, None),
    Row([4], 3, [10], 12, 1, None),
    Row([5] * 8, 8, [11, 12, 13, 14], 4, 2, Track(16, 5)),
    Row([6], 7, [15, 16], 10, 1, Track(8, 1)),
]


def unset(value: object, path: str) -> list[str]:
    """Paths of fields, at any depth, that hold nothing."""
    if dataclasses.is_dataclass(value):
        fields = [(getattr(value, field.name), f"{path}.{field.name}") for field in dataclasses.fields(value)]
        return [found for inner, inner_path in fields for found in unset(inner, inner_path)]
    if isinstance(value, tuple) and value:
        return [found for index, inner in enumerate(value) for found in unset(inner, f"{path}[{index}]")]
    return [path] if value is None or value == () else []


def test_every_field_is_set_when_there_is_something_to_say() -> None:
    batch = build(EVERYTHING)
    part = batch.prefill
    assert part is not None and batch.positions is not None
    step = Step(
        batch=batch,
        conv_plan=plan_conv(part.lengths, 4, part.tracks, "cpu"),
        chunk_plan=plan_chunks(part.starts, part.lengths, 8, part.tracks, "cpu"),
        turn=Rotary(4, 10000.0, "cpu").at(batch.positions),
    )
    assert unset(step, "step") == []


def test_positions_count_from_the_start_of_each_sequence() -> None:
    """Decode rows first, by slot."""
    assert build(ROWS).positions.tolist() == [3, 9, 0, 1, 2, 3, 4, 3, 4, 0]  # type: ignore[union-attr]
    assert build_batch(ROWS, page_size=PAGE, with_positions=False, device="cpu").positions is None


def test_tracks_follow_their_rows() -> None:
    batch = build(EVERYTHING)
    assert batch.decode is not None and batch.prefill is not None
    assert batch.decode.tracks == ((2, 3), (10, 1))
    assert batch.prefill.tracks == (Boundary(0, 4, 20), Boundary(2, 8, 5))
    without = [dataclasses.replace(row, track=None) for row in EVERYTHING]
    bare = build(without)
    assert bare.decode is not None and bare.prefill is not None
    assert bare.decode.tracks == () and bare.prefill.tracks == ()


@pytest.mark.parametrize(
    ("row", "track"),
    [(0, Track(4, 20)), (0, Track(14, 20)), (0, Track(8, 0)), (1, Track(9, 3)), (1, Track(11, 3)), (4, Track(0, 5))],
)
def test_a_step_saves_only_states_that_it_passes(row: int, track: Track) -> None:
    rows = list(EVERYTHING)
    rows[row] = dataclasses.replace(rows[row], track=track)
    with pytest.raises(AssertionError, match=r"does not reach|nobody"):
        build(rows)


@pytest.mark.parametrize("slot", [6, 2, 9, 12, 4, 10, 3, 5, 1])
def test_a_track_slot_is_nobody_elses(slot: int) -> None:
    """Not its own row's slot, not another row's, not another track slot."""
    rows = [dataclasses.replace(EVERYTHING[0], track=Track(8, slot)), *EVERYTHING[1:]]
    with pytest.raises(AssertionError, match="one row"):
        build(rows)


def test_decode_rows_come_first_by_slot_then_the_others_as_given() -> None:
    batch = build(ROWS)
    assert batch.token_ids.tolist() == [40, 20, 10, 11, 12, 13, 14, 30, 31, 50]
    assert batch.locations.tolist() == [35, 17, 20, 21, 22, 23, 12, 27, 28, 40]
    assert batch.decode is not None and batch.decode.rows == 2 and batch.decode.slots == slice(7, 9)
    assert batch.prefill is not None
    assert (batch.prefill.starts, batch.prefill.lengths) == ((0, 3, 0), (5, 2, 1))
    assert batch.prefill.fresh.tolist() == [True, False, True]
    assert isinstance(batch.prefill.slots, torch.Tensor) and batch.prefill.slots.tolist() == [6, 2, 1]


def test_pages_that_are_begun_and_not_filled() -> None:
    def begun(start: int, length: int) -> list[int] | None:
        found = build([Row([1] * length, start, [7, 8, 9], 1, 0, None)]).begun_pages
        return None if found is None else found.tolist()

    assert begun(0, 1) == [7] and begun(0, 4) is None and begun(0, 5) == [8]
    assert begun(4, 1) == [8] and begun(5, 1) is None and begun(3, 1) is None
    assert begun(3, 2) == [8] and begun(2, 6) is None and begun(2, 9) == [9]


def test_logits_are_asked_for_in_the_order_given() -> None:
    batch = build(ROWS)
    wanted = [13, 14, 20, 40, 50]
    assert batch.token_ids[batch.logit_tokens].tolist() == wanted
    nothing = build([dataclasses.replace(ROWS[0], num_logits=0)])
    assert nothing.logit_tokens.shape == (0,)


def test_spans_cover_the_pages_in_use_and_no_more() -> None:
    batch = build(ROWS)
    assert batch.decode is not None and batch.prefill is not None
    (span,) = batch.decode.spans
    assert isinstance(span.pages, torch.Tensor) and span.pages.tolist() == [8, 0, 0, 1, 2, 4]
    assert span.mask is not None and span.length == 10
    assert span.mask[:, 0, 0].sum(1).tolist() == [4, 10]
    first, second, third = batch.prefill.spans
    assert (first.begin, first.end, first.mask) == (0, 5, None)
    assert (second.begin, second.end, second.pages) == (5, 7, slice(6, 8))
    assert second.mask is not None and second.mask.int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert (third.begin, third.end, third.pages) == (7, 8, slice(10, 11))


def test_pure_batches_have_one_part() -> None:
    decode = build([ROWS[1], ROWS[3]])
    assert decode.prefill is None and decode.decode is not None
    prefill = build([ROWS[0], ROWS[2]])
    assert prefill.decode is None and prefill.prefill is not None


def test_large_decode_batches_are_attended_row_by_row() -> None:
    rows = [Row([1], 4095, list(range(1 + slot * 1024, 1 + (slot + 1) * 1024)), slot + 1, 1, None) for slot in range(3)]
    batch = build(rows)
    assert batch.decode is not None
    assert [(span.begin, span.end, span.length, span.mask) for span in batch.decode.spans] == [
        (0, 1, 4096, None),
        (1, 2, 4096, None),
        (2, 3, 4096, None),
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"slot": 0},
        {"token_ids": []},
        {"num_logits": 6},
        {"page_table": [5]},
        {"start": -1},
    ],
)
def test_rows_that_cannot_be_are_our_own_bugs(change: dict[str, object]) -> None:
    with pytest.raises(AssertionError):
        build([dataclasses.replace(ROWS[0], **change)])  # type: ignore[arg-type]


def test_a_slot_belongs_to_one_row() -> None:
    with pytest.raises(AssertionError, match="one row"):
        build([ROWS[0], dataclasses.replace(ROWS[1], slot=6)])
