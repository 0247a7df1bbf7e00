"""Runs planned steps in order: forward pass, then sampling. With overlap, on a thread of its own.

A plan may contain a sequence whose newest token is still being sampled by the step before it. Such a row says so
(no token_ids), and gets the token here, where the step before it has ended: sampled tokens reach the next step without
passing through the scheduler. Everything that a plan says of a sequence is fixed when it is made; nothing here reads or
changes the scheduler's sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

from torch import Tensor

from common.errors import ServingError
from common.sampling import LogprobOptions, SamplingParams, TokenLogprob
from engine.batch import OnLayer, Row, Track
from engine.grammar import Grammar, GrammarError
from engine.sampler import NonFiniteLogits, SampleRow, prompt_logprobs, sample


class Runner(Protocol):
    """The part of `ModelRunner` that a step needs."""

    def forward(self, rows: Seq[Row], on_layer: OnLayer | None = None) -> Tensor:
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


class Pending(Protocol):
    """A launched step; a finished `Future` is one."""

    def result(self) -> StepResult:
        """What the step gave; waits for it. Raises what the step raised."""
        ...


class PlannedRow(NamedTuple):
    """One sequence's share of a step; see `Row` for token_ids … track. key: names the sequence between steps.

    token_ids: None when it is the one token that the step before samples for `key`. output_ids: the answer so far,
    without that token. samples: whether the row's last logits give the sequence's next token. prompt: what the other
    logits are for. grammar: what the next token has to obey.
    """

    key: int
    token_ids: Seq[int] | None
    start: int
    page_table: Seq[int]
    slot: int
    num_logits: int
    track: Track | None
    samples: bool
    sampling: SamplingParams
    logprobs: LogprobOptions
    prompt_ids: Seq[int]
    output_ids: Seq[int]
    prompt: PromptLogprobs | None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """tokens: what was sampled, by key. failed: keys whose logits were not finite, or whose answer cannot follow its
    grammar. prompt_logprobs: by key."""

    tokens: dict[int, TokenLogprob]
    failed: Mapping[int, ServingError]
    prompt_logprobs: dict[int, list[TokenLogprob]]


Candidate = tuple[int, int, SampleRow]  # key, its row of the logits, how to sample
PLACEHOLDER = 0
NO_RESULT = StepResult(tokens={}, failed={}, prompt_logprobs={})


class Device:
    """overlap: run steps on a thread, so that the caller may go on; otherwise `launch` returns a finished step."""

    def __init__(self, runner: Runner, eos_ids: frozenset[int], *, overlap: bool) -> None:
        self.runner = runner
        self._eos_ids = eos_ids
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device") if overlap else None
        self._last = NO_RESULT

    def launch(self, rows: Seq[PlannedRow], on_layer: OnLayer | None = None) -> Pending:
        """Run these rows after every step launched before."""
        if self._thread is not None:
            return self._thread.submit(self._run, rows, on_layer)
        done: Future[StepResult] = Future()
        done.set_result(self._run(rows, on_layer))
        return done

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def _run(self, planned: Seq[PlannedRow], on_layer: OnLayer | None) -> StepResult:
        resolved = [self._tokens(p) for p in planned]
        logits = self.runner.forward(
            [
                Row(token_ids, p.start, p.page_table, p.slot, p.num_logits, p.track)
                for p, (token_ids, _) in zip(planned, resolved, strict=True)
            ],
            on_layer,
        )
        starts = [0, *accumulate(p.num_logits for p in planned)]
        candidates: list[Candidate] = []
        stuck: dict[int, ServingError] = {}
        for p, (_, answer), end in zip(planned, resolved, starts[1:], strict=True):
            if p.samples:
                try:
                    candidates.append((p.key, end - 1, _sample_row(p, answer)))
                except GrammarError as error:
                    stuck[p.key] = error
        tokens, failed = self._sample(candidates, logits)
        prompts, broken = _prompt_logprobs(planned, starts, logits)
        result = StepResult(tokens=tokens, failed=stuck | failed | broken, prompt_logprobs=prompts)
        self._last = result
        return result

    def _tokens(self, planned: PlannedRow) -> tuple[Seq[int], Seq[int]]:
        """The row's tokens and the answer before the next one, now that the step before has sampled its."""
        if planned.token_ids is not None:
            return planned.token_ids, planned.output_ids
        token = self._last.tokens.get(planned.key)
        if token is None:  # its logits were not finite: the row runs for nothing, its result is dropped
            return [PLACEHOLDER], planned.output_ids
        return [token.token_id], [*planned.output_ids, token.token_id]

    def _sample(
        self, candidates: list[Candidate], logits: Tensor
    ) -> tuple[dict[int, TokenLogprob], dict[int, ServingError]]:
        """One token for each candidate. Those with non-finite logits fail alone."""
        failed: dict[int, ServingError] = {}
        while candidates:
            chosen = logits if len(candidates) == len(logits) else logits[[at for _, at, _ in candidates]]
            try:
                tokens = sample(chosen, [row for _, _, row in candidates], eos_ids=self._eos_ids)
            except NonFiniteLogits as error:
                failed |= {candidates[i][0]: error for i in error.rows}
                candidates = [c for c in candidates if c[0] not in failed]
                continue
            return {key: token for (key, _, _), token in zip(candidates, tokens, strict=True)}, failed
        return {}, failed


def _sample_row(planned: PlannedRow, answer: Seq[int]) -> SampleRow:
    """Raises GrammarError."""
    return SampleRow(
        params=planned.sampling,
        logprobs=planned.logprobs,
        prompt_ids=planned.prompt_ids,
        output_ids=answer,
        allowed=None if planned.grammar is None else planned.grammar.allowed(answer),
    )


def _prompt_logprobs(
    rows: Seq[PlannedRow], starts: Seq[int], logits: Tensor
) -> tuple[dict[int, list[TokenLogprob]], dict[int, ServingError]]:
    """What was asked of the prompts, and whose logits were not finite."""
    found: dict[int, list[TokenLogprob]] = {}
    failed: dict[int, ServingError] = {}
    for planned, start in zip(rows, starts, strict=False):
        wanted = planned.prompt
        if wanted is not None:
            first = start + wanted.first_row
            positions = logits[first : first + len(wanted.token_ids)]
            try:
                found[planned.key] = prompt_logprobs(positions, wanted.token_ids, wanted.top_num)
            except NonFiniteLogits as error:
                failed[planned.key] = error
    return found, failed
