"""The model on a CUDA device with its pools: rows in, logits and greedily sampled tokens out, without waiting.

Everything is queued on the current stream, in the order of the calls; nothing here waits for the device, except that
the memory for the next rows must have been sent. Twin: `engine.runner.ModelRunner`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch import OnLayer, Row
from engine.cuda.batch import Staging, decode_capacity, decode_values, host_batch, is_decode
from engine.cuda.graphs import DecodeGraphs, Sampled
from engine.cuda.layers import LayerWatcher
from engine.cuda.linear import FEW_ROWS
from engine.cuda.model import CudaModel
from engine.kernels.tokens import copy_slots, keep_tokens
from engine.model_config import HybridConfig
from engine.pools import StatePools


class CudaRunner:
    """Owns weights, pools and graphs of one device. Not thread-safe: one scheduler thread calls it."""

    def __init__(
        self,
        config: HybridConfig,
        weights: dict[str, Tensor],
        pools: StatePools,
        *,
        max_rows: int,
        max_tokens: int,
        max_pages: int,
        use_graphs: bool,
        few_rows: int | None = None,
    ) -> None:
        """weights: emptied, see `CudaModel`. max_rows, max_tokens: of a step. max_pages: of a row. few_rows None: what
        suits the dtype, see `Linear`."""
        self.config, self.pools = config, pools
        self._device = pools.ssm.device
        if few_rows is None:
            few_rows = FEW_ROWS if pools.kv.dtype is torch.bfloat16 else 0
        capacity = decode_capacity(max_rows, max_pages) + max_tokens * 2 + 64 * max_rows + 1024
        with torch.inference_mode():
            self.last_tokens = torch.zeros(pools.num_slots, dtype=torch.int32, device=self._device)
            self._model = CudaModel(config, weights, pools, few_rows=few_rows)
            self._staging = Staging(capacity, self._device)
            self.watcher = LayerWatcher(self._device)
            self._graphs: DecodeGraphs | None = None
            if use_graphs and self._model.can_be_captured:
                self._graphs = DecodeGraphs(self._model, self.last_tokens, max_rows=max_rows, max_pages=max_pages)

    @torch.inference_mode()
    def step(self, rows: Sequence[Row], on_queued: OnLayer | None = None) -> Sampled:
        """Advance every row by its tokens and keep the greedily sampled token of each that wants logits in its slot.

        A decode row with the token id LAST_TOKEN continues with that token. Results are in the order of the rows that
        want logits, and may be overwritten by the next step. on_queued: called when a layer has been queued.
        """
        size = self._graph_size(rows) if on_queued is None else None
        sampled = self._run_eagerly(rows, on_queued) if size is None else self._replay(rows, size)
        pairs = [(row.slot, row.track.slot) for row in rows if row.track is not None and is_decode(row)]
        if pairs:
            self.copy_slots(*zip(*pairs, strict=True))
        return sampled

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row], on_layer: OnLayer | None = None) -> Tensor:
        """Logits float32 [sum of num_logits, V], as `ModelRunner.forward`; with a listener the device is waited for."""
        watch = self.watcher.watch(on_layer)
        logits = self.step(rows, watch.on_queued).logits.to(torch.float32, copy=True)
        watch.finish()
        return logits

    @torch.inference_mode()
    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy conv and SSM state of all layers, sources[i] to targets[i]; see `StatePools.copy_slots`."""
        assert len(sources) == len(targets) == len(set(targets)) and not {*sources} & {*targets}
        assert 0 not in sources and 0 not in targets, "slot 0 belongs to nobody"
        if sources:
            pairs = self._send([*sources, *targets])
            copy_slots((self.pools.conv, self.pools.ssm), pairs.view(2, -1))

    @torch.inference_mode()
    def set_last_tokens(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """What decode rows of these slots continue with, where it was not sampled here greedily."""
        if slots:
            at, values = self._send([*slots, *tokens]).view(2, -1)
            self.last_tokens.index_copy_(0, at.long(), values)

    def close(self) -> None:
        self.watcher.close()

    def _graph_size(self, rows: Sequence[Row]) -> int | None:
        if self._graphs is None or not all(is_decode(row) and row.num_logits == 1 for row in rows):
            return None
        return self._graphs.size_for(len(rows))

    def _replay(self, rows: Sequence[Row], size: int) -> Sampled:
        assert self._graphs is not None
        count = decode_values(rows, size, self.pools.page_size, self._staging.begin())
        self._staging.send(count, self._graphs.inputs)
        sampled = self._graphs.replay(size)
        return Sampled(logits=sampled.logits[: len(rows)], report=sampled.report)

    def _run_eagerly(self, rows: Sequence[Row], on_queued: OnLayer | None) -> Sampled:
        host = host_batch(rows, self.pools.page_size)
        host.write(self._staging.begin())
        batch = host.on_device(self._staging.send(host.num_values))
        logits = self._model.forward(batch, self.last_tokens, on_queued)
        assert batch.sampled_slots is not None
        if not len(batch.sampled_slots):
            return Sampled(logits=logits, report=logits.new_empty(2, 0))
        best, tokens = logits.max(dim=-1)
        report = keep_tokens(best, tokens, batch.sampled_slots, self.last_tokens, places=batch.sampled_places)
        return Sampled(logits=logits, report=report)

    def _send(self, values: Sequence[int]) -> Tensor:
        self._staging.begin()[: len(values)] = values
        return self._staging.send(len(values))
