"""Runs planned steps on a CUDA device without waiting for them: the twin of `engine.device.Device` with overlap.

    scheduler thread   plan 1, queue 1 │ plan 2, queue 2 │ wait for 1, apply it │ plan 3, queue 3 │ …
    device                     step 1 ──────────────► step 2 ──────────────────────► step 3 ───────

Sampled tokens go from step to step in device memory (`CudaRunner.last_tokens`); what the host learns of them is copied
behind the step. This is so for steps whose rows are sampled greedily and want no log-probabilities. Any other step
waits for the one before it and is sampled by `engine.sampler`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from common.sampling import TokenLogprob
from engine.batch import OnLayer, Row
from engine.cuda.batch import LAST_TOKEN
from engine.cuda.layers import Watch
from engine.cuda.runner import CudaRunner
from engine.device import Device, Pending, PlannedRow, StepResult
from engine.sampler import NonFiniteLogits


class QueuedStep:
    """A step on its way. report float32 [2, >= n], pinned: best logits and tokens of the n keys, once `copied`."""

    def __init__(self, keys: Seq[int], report: Tensor, copied: torch.cuda.Event | None, watch: Watch) -> None:
        self._keys, self._report, self._copied, self._watch = keys, report, copied, watch
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        """What the step gave; waits for the device."""
        if self._result is None:
            if self._copied is not None:
                self._copied.synchronize()
            self._watch.finish()
            self._result = _result(self._keys, self._report)
        return self._result


class CudaDevice(Device):
    """Not thread-safe: one scheduler thread calls it."""

    def __init__(self, runner: CudaRunner, eos_ids: frozenset[int]) -> None:
        super().__init__(runner, eos_ids, overlap=False)
        self._cuda = runner
        self._before: Pending | None = None

    def launch(self, rows: Seq[PlannedRow], on_layer: OnLayer | None = None) -> Pending:
        """Queue these rows after every step launched before."""
        self._before = (
            self._queue(rows, on_layer) if all(map(_is_plain, rows)) else self._sample_on_host(rows, on_layer)
        )
        return self._before

    def close(self) -> None:
        self._cuda.close()

    def _queue(self, planned: Seq[PlannedRow], on_layer: OnLayer | None) -> Pending:
        watch = self._cuda.watcher.watch(on_layer)
        sampled = self._cuda.step(
            [
                Row(p.token_ids or (LAST_TOKEN,), p.start, p.page_table, p.slot, int(p.samples), p.track)
                for p in planned
            ],
            watch.on_queued,
        )
        report = sampled.report.to("cpu", non_blocking=True)
        copied = None
        if sampled.report.is_cuda:
            copied = torch.cuda.Event()
            copied.record()
        return QueuedStep([p.key for p in planned if p.samples], report, copied, watch)

    def _sample_on_host(self, planned: Seq[PlannedRow], on_layer: OnLayer | None) -> Pending:
        if self._before is not None:
            self._last = self._before.result()
        done = super().launch(planned, on_layer)
        tokens = done.result().tokens
        sampled = [(p.slot, tokens[p.key].token_id) for p in planned if p.key in tokens]
        self._cuda.set_last_tokens([slot for slot, _ in sampled], [token for _, token in sampled])
        return done


def _is_plain(planned: PlannedRow) -> bool:
    """Whether the row's next token, if it samples one, is the argmax of its logits, and nothing else is wanted."""
    params = planned.sampling
    return planned.prompt is None and (
        not planned.samples
        or (
            params.temperature == 0
            and planned.grammar is None
            and not planned.logprobs.wanted
            and not params.logit_bias
            and params.repetition_penalty == 1.0
            and params.frequency_penalty == 0.0
            and params.presence_penalty == 0.0
            and params.min_new_tokens <= len(planned.output_ids)
        )
    )


def _result(keys: Seq[int], report: Tensor) -> StepResult:
    best, tokens = report.tolist()
    failed = {key: NonFiniteLogits([i]) for i, key in enumerate(keys) if not math.isfinite(best[i])}
    return StepResult(
        tokens={key: TokenLogprob(None, int(tokens[i])) for i, key in enumerate(keys) if key not in failed},
        failed=failed,
        prompt_logprobs={},
    )
