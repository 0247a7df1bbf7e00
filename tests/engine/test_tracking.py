"""The arithmetic of state tracking: every small case against the sentence that defines it, and the settings refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from common.errors import ConfigError
from engine.tracking import (
    Strategy,
    Tracking,
    boundary_chunk,
    cache_chunk,
    decode_due,
    prefill_target,
    resolve_tracking,
    target_in_piece,
)

SMALL = range(1, 25)


def test_cache_chunk_is_the_larger_and_a_multiple_of_both() -> None:
    for chunk, page_size in itertools.product(SMALL, SMALL):
        common = [unit for unit in (chunk, page_size) if unit % chunk == 0 and unit % page_size == 0]
        if common:
            assert cache_chunk(chunk, page_size) == common[0]
        else:
            with pytest.raises(ConfigError, match=rf"--page-size {page_size}: .* chunk of {chunk} tokens") as caught:
                cache_chunk(chunk, page_size)
            assert caught.value.param == "page_size"


def grids(longest: int) -> list[tuple[int, int, int]]:
    """(unit, start, end): every resume point of every grid of at most 6, and every end behind it."""
    return [
        (unit, start, end)
        for unit in range(1, 7)
        for start in range(0, longest, unit)
        for end in range(start + 1, longest)
    ]


def test_prefill_target_is_the_branch_or_the_last_multiple() -> None:
    for unit, start, end in grids(26):
        passed = [position for position in range(start + 1, end + 1) if position % unit == 0]
        for branch in range(0, 32, unit):
            found = prefill_target(start, end, cache_chunk=unit, branch=branch)
            if branch in passed:
                assert found == branch, "a branch at the end is the last multiple too"
            else:
                assert found == max(passed, default=None), (unit, start, end, branch)


@pytest.mark.parametrize(("start", "branch"), [(3, 0), (4, 6)])
def test_resume_points_and_branches_lie_on_the_grid(start: int, branch: int) -> None:
    with pytest.raises(AssertionError, match="multiples"):
        prefill_target(start, 20, cache_chunk=4, branch=branch)


def test_a_prompt_in_pieces_saves_its_target_once_where_it_was_planned() -> None:
    """Whatever the budget: exactly one piece has the target, and it lies on the grid of that piece's end or inside."""
    for unit, start, end in grids(20):
        for branch, budget in itertools.product(range(0, end, unit), range(unit, 21)):
            target = prefill_target(start, end, cache_chunk=unit, branch=branch)
            pieces, at = [], start
            while at < end:
                stop = min(end, at + budget - budget % unit)
                pieces.append((at, stop))
                at = stop
            found = [target_in_piece(*piece, target) for piece in pieces]
            hits = [(piece, hit) for piece, hit in zip(pieces, found, strict=True) if hit is not None]
            assert [hit for _, hit in hits] == ([] if target is None else [target])
            assert all(begin < hit <= stop for (begin, stop), hit in hits)


def test_target_in_piece() -> None:
    for begin, end, target in itertools.product(range(8), range(9), range(10)):
        if begin < end:
            expected = target if target in range(begin + 1, end + 1) else None
            assert target_in_piece(begin, end, target) == expected
    assert target_in_piece(0, 8, None) is None


def test_decode_is_due_at_every_multiple_but_zero() -> None:
    for interval in SMALL:
        due = [position for position in range(100) if decode_due(position, interval)]
        assert due == list(range(interval, 100, interval))


def test_boundary_chunk_counts_the_chunks_of_the_piece() -> None:
    """Found token by token: the chunk that the next token opens. Pieces may begin inside a chunk."""
    for chunk, start, length in itertools.product(range(1, 6), range(13), range(1, 14)):
        cells = [position // chunk for position in range(start, start + length)]
        for offset in range(1, length + 1):
            if (start + offset) % chunk:
                with pytest.raises(AssertionError, match="not known"):
                    boundary_chunk(start, length, offset, chunk)
            elif offset == length:
                assert boundary_chunk(start, length, offset, chunk) is None
            else:
                opened = sorted(set(cells)).index(cells[offset])
                assert boundary_chunk(start, length, offset, chunk) == opened
                assert cells[offset - 1] != cells[offset]
    for offset in (-4, 0, 9, 12):
        with pytest.raises(AssertionError):
            boundary_chunk(4, 8, offset, 4)


RIGHT: dict[str, Any] = {
    "strategy": "extra_buffer",
    "radix_cache": True,
    "overlap": True,
    "chunk": 8,
    "page_size": 4,
    "chunked_prefill_size": 32,
    "track_interval": 24,
}
NO_BUFFER = {"strategy": "no_buffer", "page_size": 1, "overlap": False}


def test_settings_that_fit() -> None:
    right = Tracking(
        strategy=Strategy.EXTRA_BUFFER,
        radix_cache=True,
        overlap=True,
        cache_chunk=8,
        prefill_grid=8,
        track_interval=24,
    )
    assert resolve_tracking(**RIGHT) == right
    assert not resolve_tracking(**RIGHT | {"overlap": False}).overlap
    wide = resolve_tracking(**RIGHT | {"page_size": 16, "track_interval": 16, "chunked_prefill_size": 16})
    assert (wide.cache_chunk, wide.prefill_grid, wide.track_interval) == (16, 16, 16)
    assert resolve_tracking(**RIGHT | {"chunked_prefill_size": -1}) == right


def test_no_buffer_caches_at_every_token() -> None:
    found = resolve_tracking(**RIGHT | NO_BUFFER)
    assert found.strategy is Strategy.NO_BUFFER
    assert (found.cache_chunk, found.prefill_grid, found.track_interval) == (1, 8, None)
    free = resolve_tracking(**RIGHT | {"strategy": "no_buffer", "radix_cache": False})
    assert (free.cache_chunk, free.prefill_grid, free.overlap) == (None, 8, True)
    assert resolve_tracking(**RIGHT | NO_BUFFER | {"track_interval": 5}).track_interval is None


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"radix_cache": False}, "mamba_scheduler_strategy", "extra_buffer: not with --disable-radix-cache"),
        ({"track_interval": 4}, "mamba_track_interval", "--mamba-track-interval 4: a multiple of 8 .*chunk"),
        ({"track_interval": 0}, "mamba_track_interval", "--mamba-track-interval 0: .* at least 4"),
        ({"track_interval": -8}, "mamba_track_interval", "--mamba-track-interval -8: .* at least 4"),
        ({"track_interval": 12}, "mamba_track_interval", "--mamba-track-interval 12: a multiple of 8"),
        ({"track_interval": 10}, "mamba_track_interval", r"interval 10: a multiple of 4 \(the page size\)"),
        ({"page_size": 16}, "mamba_track_interval", r"interval 24: a multiple of 16 \(the page size\)"),
        ({"page_size": 32}, "mamba_track_interval", "interval 24: a multiple of 32 .* at least 32"),
        ({"page_size": 6}, "page_size", "--page-size 6: .* chunk of 8"),
        ({"page_size": 12}, "page_size", "--page-size 12: .* chunk of 8"),
        ({"chunked_prefill_size": 7}, "chunked_prefill_size", "--chunked-prefill-size 7: at least 8"),
        ({"chunked_prefill_size": 0}, "chunked_prefill_size", "--chunked-prefill-size 0: at least 8"),
        ({"page_size": 64}, "chunked_prefill_size", "--chunked-prefill-size 32: at least 64"),
        (NO_BUFFER | {"chunked_prefill_size": 7}, "chunked_prefill_size", "--chunked-prefill-size 7: at least 8"),
        (NO_BUFFER | {"page_size": 4}, "page_size", "--page-size 4: --mamba-scheduler-strategy no_buffer"),
        (NO_BUFFER | {"overlap": True}, "mamba_scheduler_strategy", "no_buffer: not with overlap .*--disable-overlap"),
        ({"strategy": "buffer"}, "mamba_scheduler_strategy", "strategy buffer: no_buffer or extra_buffer"),
    ],
)
def test_settings_refused(change: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_tracking(**RIGHT | change)
    assert caught.value.param == param
