"""Which states are kept for a later request, and at which positions: arithmetic over plain integers, no tensors.

A recurrent state cannot be cut back to an earlier token as KV can, so a sequence can only be resumed where a state was
saved. Positions count the tokens of one sequence, from its start, whatever it is batched with. A state "at p" has seen
tokens 0 .. p - 1. Terms: chunk, of the model's scan; cache_chunk, on whose multiples states are saved; track_interval,
the distance of checkpoints while decoding; branch, a multiple of cache_chunk at which other requests part from this
one, 0 when there is none.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import assert_never

from common.errors import ConfigError


class Strategy(enum.StrEnum):
    """NO_BUFFER: a sequence has its own slot only, whose last state is what can be kept. EXTRA_BUFFER: track slots."""

    NO_BUFFER = "no_buffer"
    EXTRA_BUFFER = "extra_buffer"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tracking:
    """Settings that fit together, made by `resolve_tracking`.

    cache_chunk: saved states lie on its multiples; None without a cache. prefill_grid: every piece of a prompt but the
    last ends on its multiples. track_interval: None when nothing is saved while decoding.
    """

    strategy: Strategy
    radix_cache: bool
    overlap: bool
    cache_chunk: int | None
    prefill_grid: int
    track_interval: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Boundary:
    """A state to save inside a prefill step: the `sequence`-th one's, after `offset` >= 1 tokens of its piece."""

    sequence: int
    offset: int
    slot: int


def cache_chunk(chunk: int, page_size: int) -> int:
    """The larger of the two. Raises ConfigError unless the smaller divides it."""
    if max(chunk, page_size) % min(chunk, page_size):
        raise ConfigError(
            f"--page-size {page_size}: it must divide the model's chunk of {chunk} tokens, or be a multiple of it",
            param="page_size",
        )
    return max(chunk, page_size)


def prefill_target(start: int, end: int, *, cache_chunk: int, branch: int) -> int | None:
    """The one position to save while tokens [start, end) of a sequence are prefilled; None: there is none.

    start: a resume point, a multiple of cache_chunk. The branch goes before the last multiple of cache_chunk.
    """
    assert start % cache_chunk == 0 and branch % cache_chunk == 0, "states lie on multiples of cache_chunk"
    if start < branch < end:
        return branch
    last = end - end % cache_chunk
    return last if last > start else None


def target_in_piece(piece_start: int, piece_end: int, target: int | None) -> int | None:
    """The target if it is reached by the piece [piece_start, piece_end) of a prompt that is prefilled in pieces."""
    return target if target is not None and piece_start < target <= piece_end else None


def decode_due(num_computed_tokens: int, track_interval: int) -> bool:
    """Whether the state of this position, reached by decoding, is a checkpoint."""
    return num_computed_tokens > 0 and num_computed_tokens % track_interval == 0


def boundary_chunk(start: int, length: int, offset: int, chunk: int) -> int | None:
    """Which chunk (0, 1, ...) of the piece [start, start + length) begins with the state after `offset` of its tokens.

    None: the piece ends there, so that it is its final state. Chunks are cells of the sequence's own grid.
    """
    assert 1 <= offset <= length and (start + offset) % chunk == 0, "a state between chunks is not known"
    return None if offset == length else (start + offset) // chunk - start // chunk


def resolve_tracking(
    *,
    strategy: str,
    radix_cache: bool,
    overlap: bool,
    chunk: int,
    page_size: int,
    chunked_prefill_size: int,
    track_interval: int,
) -> Tracking:
    """The settings of state tracking, checked. chunk: the model's. chunked_prefill_size: tokens, -1 without pieces.

    Raises ConfigError naming the flag, its value and the reason.
    """
    found = _strategy(strategy)
    grid = cache_chunk(chunk, page_size)
    _check_pieces(chunked_prefill_size, grid)
    match found:
        case Strategy.EXTRA_BUFFER:
            _check_extra_buffer(radix_cache, grid, page_size, track_interval)
        case Strategy.NO_BUFFER:
            _check_no_buffer(radix_cache, overlap, page_size)
        case _:
            assert_never(found)
    extra = found is Strategy.EXTRA_BUFFER
    return Tracking(
        strategy=found,
        radix_cache=radix_cache,
        overlap=overlap,
        cache_chunk=(grid if extra else page_size) if radix_cache else None,
        prefill_grid=grid,
        track_interval=track_interval if extra else None,
    )


def _strategy(value: str) -> Strategy:
    try:
        return Strategy(value)
    except ValueError:
        raise ConfigError(
            f"--mamba-scheduler-strategy {value}: {' or '.join(Strategy)}",
            param="mamba_scheduler_strategy",
        ) from None


def _check_pieces(chunked_prefill_size: int, grid: int) -> None:
    if chunked_prefill_size != -1 and chunked_prefill_size < grid:
        raise ConfigError(
            f"--chunked-prefill-size {chunked_prefill_size}: at least {grid} (the larger of the model's chunk and the "
            "page size), or -1; the pieces of a prompt end where a state can be saved",
            param="chunked_prefill_size",
        )


def _check_extra_buffer(radix_cache: bool, grid: int, page_size: int, track_interval: int) -> None:
    if not radix_cache:
        raise ConfigError(
            "--mamba-scheduler-strategy extra_buffer: not with --disable-radix-cache, the cache is what it saves "
            "states for; use no_buffer",
            param="mamba_scheduler_strategy",
        )
    for unit, name in ((page_size, "the page size"), (grid, "the larger of the model's chunk and the page size")):
        if track_interval < unit or track_interval % unit:
            raise ConfigError(
                f"--mamba-track-interval {track_interval}: a multiple of {unit} ({name}), at least {unit}; only there "
                "can a sequence be resumed",
                param="mamba_track_interval",
            )


def _check_no_buffer(radix_cache: bool, overlap: bool, page_size: int) -> None:
    if not radix_cache:
        return
    if page_size != 1:
        raise ConfigError(
            f"--page-size {page_size}: --mamba-scheduler-strategy no_buffer caches the state after the last token, "
            "which only a page of 1 token ends at; use 1, extra_buffer or --disable-radix-cache",
            param="page_size",
        )
    if overlap:
        raise ConfigError(
            "--mamba-scheduler-strategy no_buffer: not with overlap scheduling, the next step would already have "
            "changed the state to be cached; use --disable-overlap-schedule, extra_buffer or --disable-radix-cache",
            param="mamba_scheduler_strategy",
        )
