"""Decode steps as captured graphs: one for each batch size of a ladder, replayed with other rows.

A graph reads its rows from `inputs` and leaves the sampled tokens in `tokens`. Rows that a step does not need are
padding (start -1), of which nothing is read or written: slot 0 and page 0 stay as they are.
"""

from __future__ import annotations

import bisect
import dataclasses

import numpy as np
import torch
from torch import Tensor

from engine.cuda.batch import CudaBatch, decode_capacity, decode_values, decode_views
from engine.cuda.model import CudaModel
from engine.kernels.tokens import keep_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Sampled:
    """What a step gives: logits [L, V] in the model's dtype, and the report of `keep_tokens` for the rows that want a
    token (at least): best logits (NaN wins) and tokens (the lowest id among equals). Of a graph: overwritten by its
    next replay."""

    logits: Tensor
    report: Tensor


def ladder(max_rows: int) -> tuple[int, ...]:
    """The batch sizes to capture: close together where a row more costs most, max_rows the last."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 257, 16), *range(320, 1025, 64)]
    return (*(size for size in sizes if size < max_rows), max_rows)


class DecodeGraphs:
    """The graphs of one model. inputs int32: what `decode_values` fills, one buffer for all of them."""

    def __init__(self, model: CudaModel, last_tokens: Tensor, *, max_rows: int, max_pages: int) -> None:
        """last_tokens int32 [slots]: read and written by the graphs. Captures at once, the largest first."""
        device = last_tokens.device
        self.sizes = ladder(max_rows)
        self.inputs = torch.zeros(decode_capacity(max_rows, max_pages), dtype=torch.int32, device=device)
        self._model, self._last_tokens = model, last_tokens
        self._begins = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._nothing = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Sampled]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.sizes):
            self._graphs[size] = self._capture(size)

    def size_for(self, rows: int) -> int | None:
        """The smallest captured size that holds so many rows; None when there is none."""
        at = bisect.bisect_left(self.sizes, rows)
        return self.sizes[at] if at < len(self.sizes) else None

    def replay(self, size: int) -> Sampled:
        """Run the step whose rows are in `inputs`. The first rows of the result are the step's."""
        graph, sampled = self._graphs[size]
        graph.replay()
        return sampled

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, Sampled]:
        self.inputs.copy_(self._padding(size))
        batch = decode_views(self.inputs, size, self._begins, self._nothing)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run(batch)  # compiles, and lets libraries allocate
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            sampled = self._run(batch)
        return graph, sampled

    def _padding(self, size: int) -> Tensor:
        """Inputs of a step in which every row is padding."""
        values = np.zeros(len(self.inputs), np.int32)
        decode_values([], size, 1, values)
        return torch.from_numpy(values)

    def _run(self, batch: CudaBatch) -> Sampled:
        assert batch.decode is not None
        logits = self._model.forward(batch, self._last_tokens)
        best, tokens = logits.max(dim=-1)
        return Sampled(logits=logits, report=keep_tokens(best, tokens, batch.decode.slots, self._last_tokens))
