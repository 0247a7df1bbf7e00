"""Runs planned steps in order: forward pass, then sampling. With overlap, on a thread of its own.

A plan may contain a sequence whose newest token is still being sampled by the step before it. Such a row says so
(`waits`), and gets the token here, where the step before it has ended: sampled tokens reach the next step without
passing through the scheduler. Everything that a plan says of a sequence is fixed when it is made; nothing here reads or
changes the scheduler's sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from common.sampling import LogprobOptions, SamplingParams, TokenLogprob
from engine.batch import Row
from engine.sampler import NonFiniteLogits, SampleRow, prompt_logprobs, sample


class Runner(Protocol):
    """The part of `ModelRunner` that a step needs."""

    def forward(self, rows: Seq[Row]) -> Tensor:
        """Logits float32 [sum of num_logits, vocabulary]; the state of every row is advanced in the pools."""
        ...

    def copy_slots(self, sources: Seq[int], targets: Seq[int]) -> None:
        """Copy conv and SSM state of all layers, source by source."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Which prompt logprobs a row's logits give: of these tokens, from its logit row `first_row` on."""

    token_ids: Seq[int]
    first_row: int
    top_num: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRow:
    """One sequence's share of a step. key: names the sequence between steps.

    waits: the row's one token is what the step before samples for `key`; `row.token_ids` is then a placeholder.
    output_ids: the answer so far, without the token that is waited for. samples: whether the row's last logits give
    the sequence's next token. prompt: what the other logits are for.
    """

    key: int
    row: Row
    waits: bool
    samples: bool
    sampling: SamplingParams
    logprobs: LogprobOptions
    prompt_ids: Seq[int]
    output_ids: Seq[int]
    prompt: PromptLogprobs | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """tokens: what was sampled, by key. failed: keys whose logits were not finite. prompt_logprobs: by key."""

    tokens: dict[int, TokenLogprob]
    failed: dict[int, NonFiniteLogits]
    prompt_logprobs: dict[int, list[TokenLogprob]]


NO_RESULT = StepResult(tokens={}, failed={}, prompt_logprobs={})


class Device:
    """overlap: run steps on a thread, so that the caller may go on; otherwise `launch` returns a finished step."""

    def __init__(self, runner: Runner, eos_ids: frozenset[int], *, overlap: bool) -> None:
        self.runner = runner
        self._eos_ids = eos_ids
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device") if overlap else None
        self._last = NO_RESULT

    def launch(self, rows: Seq[PlannedRow]) -> Future[StepResult]:
        """Run these rows after every step launched before."""
        if self._thread is not None:
            return self._thread.submit(self._run, rows)
        done: Future[StepResult] = Future()
        done.set_result(self._run(rows))
        return done

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def _run(self, planned: Seq[PlannedRow]) -> StepResult:
        rows = [self._resolve(p) for p in planned]
        logits = self.runner.forward([p.row for p in rows])
        starts, at = [], 0
        for p in rows:
            starts.append(at)
            at += p.row.num_logits
        tokens, failed = self._sample(rows, starts, logits)
        prompts, broken = _prompt_logprobs(rows, starts, logits)
        result = StepResult(tokens=tokens, failed=failed | broken, prompt_logprobs=prompts)
        self._last = result
        return result

    def _resolve(self, planned: PlannedRow) -> PlannedRow:
        """Put the token that the step before sampled in the place of the placeholder."""
        if not planned.waits:
            return planned
        token = self._last.tokens.get(planned.key)
        if token is None:  # its logits were not finite: the row runs for nothing, its result is dropped
            return planned
        return dataclasses.replace(
            planned,
            row=dataclasses.replace(planned.row, token_ids=[token.token_id]),
            output_ids=[*planned.output_ids, token.token_id],
        )

    def _sample(
        self, rows: Seq[PlannedRow], starts: Seq[int], logits: Tensor
    ) -> tuple[dict[int, TokenLogprob], dict[int, NonFiniteLogits]]:
        """One token for each row that samples. Rows with non-finite logits fail alone."""
        wanted = [(p, start + p.row.num_logits - 1) for p, start in zip(rows, starts, strict=True) if p.samples]
        failed: dict[int, NonFiniteLogits] = {}
        while wanted:
            chosen = logits if len(wanted) == len(logits) else logits[[at for _, at in wanted]]
            try:
                tokens = sample(chosen, [_sample_row(p) for p, _ in wanted], eos_ids=self._eos_ids)
            except NonFiniteLogits as error:
                failed |= {wanted[i][0].key: error for i in error.rows}
                wanted = [pair for pair in wanted if pair[0].key not in failed]
                continue
            return {p.key: token for (p, _), token in zip(wanted, tokens, strict=True)}, failed
        return {}, failed


def _sample_row(planned: PlannedRow) -> SampleRow:
    return SampleRow(
        params=planned.sampling,
        logprobs=planned.logprobs,
        prompt_ids=planned.prompt_ids,
        output_ids=planned.output_ids,
    )


def _prompt_logprobs(
    rows: Seq[PlannedRow], starts: Seq[int], logits: Tensor
) -> tuple[dict[int, list[TokenLogprob]], dict[int, NonFiniteLogits]]:
    """What was asked of the prompts, and whose logits were not finite."""
    found: dict[int, list[TokenLogprob]] = {}
    failed: dict[int, NonFiniteLogits] = {}
    for planned, start in zip(rows, starts, strict=True):
        wanted = planned.prompt
        if wanted is not None:
            first = start + wanted.first_row
            positions = logits[first : first + len(wanted.token_ids)]
            try:
                found[planned.key] = prompt_logprobs(positions, wanted.token_ids, wanted.top_num)
            except NonFiniteLogits as error:
                failed[planned.key] = error
    return found, failed
