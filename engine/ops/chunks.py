"""Where the tokens of a prefill lie in the chunks of a recurrence.

Legend: T packed tokens, S sequences, K chunk rows of a step, L tokens in a chunk row.
A chunk is a cell of the grid of positions 0, chunk, 2 chunk, ... of one sequence. Chunks never cross sequences, and a
step that begins inside a cell has a shorter first chunk; so a token's chunk does not depend on what it is batched with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.tracking import Boundary, boundary_chunk


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Where the packed tokens of S sequences lie in K chunk rows of L tokens.

    Rows are ordered by their number within the sequence, then by sequence, longest first: the rows that are k-th in
    their sequence are the range [edges[k], edges[k + 1]), and each range is a prefix of the one before, shifted.
    tokens: int64 [T], place of token t in [K * L]. ranks: int64 [S], the place of each sequence among the first rows.
    order: int64 [S], its inverse: the sequence at each place. last_rows: int64 [S], the last row of each sequence.
    tracks: (slot, row that begins with the state to save there; K + s for the final state of sequence s).
    """

    rows: int
    width: int
    edges: tuple[int, ...]
    tokens: Tensor
    order: Tensor
    last_rows: Tensor
    tracks: tuple[tuple[int, int], ...]


def plan_chunks(
    starts: Sequence[int],
    lengths: Sequence[int],
    chunk: int,
    tracks: Sequence[Boundary],
    device: torch.device | str,
) -> ChunkPlan:
    """The plan for sequences that add lengths[s] >= 1 tokens from position starts[s], packed one behind the other.

    tracks: at positions on the grid of their sequence.
    """
    begin, count = torch.tensor(starts), torch.tensor(lengths)
    chunks = (begin + count - 1) // chunk - begin // chunk + 1  # [S]
    order = torch.argsort(chunks, descending=True, stable=True)
    ranks = torch.argsort(order)
    sizes = (chunks[None, :] > torch.arange(int(chunks.max()))[:, None]).sum(1)  # rows that are k-th
    edges = torch.cat((torch.zeros(1, dtype=torch.int64), torch.cumsum(sizes, 0)))

    owner = torch.repeat_interleave(torch.arange(len(lengths)), count)  # [T]
    inside = torch.arange(int(count.sum())) - (torch.cumsum(count, 0) - count)[owner]  # position in the packed piece
    number = (begin[owner] + inside) // chunk - begin[owner] // chunk  # which chunk of the piece
    first = torch.where(number == 0, 0, number * chunk - begin[owner] % chunk)
    place = inside - first
    width = int(place.max()) + 1

    def row_after(one: Boundary) -> int:
        number = boundary_chunk(starts[one.sequence], lengths[one.sequence], one.offset, chunk)
        return int(edges[-1]) + one.sequence if number is None else int(edges[number] + ranks[one.sequence])

    return ChunkPlan(
        rows=int(edges[-1]),
        width=width,
        edges=tuple(edges.tolist()),
        tokens=((edges[number] + ranks[owner]) * width + place).to(device),
        order=order.to(device),
        last_rows=(edges[chunks - 1] + ranks).to(device),
        tracks=tuple((one.slot, row_after(one)) for one in tracks),
    )


def to_rows(value: Tensor, plan: ChunkPlan) -> Tensor:
    """[T, ...] -> float32 [K, L, ...], zeros where a row has no token."""
    rows = torch.zeros(plan.rows * plan.width, *value.shape[1:], dtype=torch.float32, device=value.device)
    return rows.index_copy_(0, plan.tokens, value.float()).view(plan.rows, plan.width, *value.shape[1:])
