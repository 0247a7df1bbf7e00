"""Continuous batching: which sequences run in the next step, and who owns which page and slot.

    add ──► waiting ──► prefilling ──► running ──► done
               ▲        (in chunks)   │      │
               └──────── retract ◄────┘      └── hold_after_prefill: held ──► release
    adopt (state received from another rank) ─► running

One thread calls it; nothing else touches the sequences, the allocators or the pools. A step is either a prefill step
(whole prompts or chunks of them, within the token budget) or one decode token for every running sequence.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from common.errors import CapacityError, ServingError
from common.sampling import FinishReason, TokenLogprob
from engine.allocator import PageAllocator, SlotAllocator
from engine.batch import Row
from engine.sampler import NonFiniteLogits, SampleRow, prompt_logprobs, sample
from engine.sequence import Emission, Phase, Sequence
from engine.stopping import StopChecker


class Runner(Protocol):
    """The part of `ModelRunner` that scheduling needs."""

    def forward(self, rows: Seq[Row]) -> Tensor:
        """Logits float32 [sum of num_logits, vocabulary]; the state of every row is advanced in the pools."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """prefill_budget: tokens a prefill step may take. prefill_grid: chunks end on its multiples (cache_chunk)."""

    page_size: int
    prefill_budget: int
    prefill_grid: int
    max_running: int


@dataclass(slots=True, kw_only=True)
class Counters:
    """Totals since the start of the process."""

    prefill_tokens_computed: int = 0
    decode_tokens_computed: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    retractions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Positions start … end - 1 of a sequence were prefilled in this step."""

    sequence: Sequence
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """chunks: what was prefilled. emissions: new tokens and ends. failures: sequences that ended with an error."""

    chunks: list[Chunk]
    emissions: list[Emission]
    failures: list[tuple[Sequence, ServingError]]


class Scheduler:
    """hold_after_prefill: a prefill rank's scheduler, which parks a sequence once its first token is known."""

    def __init__(
        self,
        *,
        runner: Runner,
        pages: PageAllocator,
        slots: SlotAllocator,
        stopping: StopChecker,
        eos_ids: frozenset[int],
        limits: Limits,
        hold_after_prefill: bool,
    ) -> None:
        self.runner = runner
        self.pages = pages
        self.slots = slots
        self.stopping = stopping
        self.eos_ids = eos_ids
        self.limits = limits
        self.hold_after_prefill = hold_after_prefill
        self.counters = Counters()
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []

    # -- entering and leaving ----------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose prompt is to be computed here."""
        self.waiting.append(sequence)

    def adopt(self, sequence: Sequence, first_token: TokenLogprob) -> Emission:
        """Take over a sequence whose state another rank computed: pages and slot hold its whole prompt."""
        assert sequence.slot is not None and sequence.num_computed_tokens == sequence.num_prompt_tokens
        emission = self._accept_token(sequence, first_token)
        if emission.finish is None:
            sequence.phase = Phase.RUNNING
            self.running.append(sequence)
        return emission

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence wherever it stands; its pages and slot stay its own until `release`."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        for queue in (self.prefilling, self.running):
            if sequence in queue:
                queue.remove(sequence)
        sequence.phase = Phase.DONE

    def release(self, sequence: Sequence) -> None:
        """Give back the pages and the slot of a sequence that no step and no transfer uses any more."""
        if sequence.page_table:
            self.pages.free(sequence.page_table)
            sequence.page_table = []
        if sequence.slot is not None:
            self.slots.free(sequence.slot)
            sequence.slot = None

    def num_active(self) -> int:
        return len(self.prefilling) + len(self.running)

    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.page_size)

    def has_memory_for(self, num_pages: int) -> bool:
        """Whether a sequence with so many pages may enter. Every running one keeps a page to grow into, so that what
        was retracted does not come back only to be retracted again."""
        growth = len(self.running)
        return self.slots.can_allocate() and self.pages.can_allocate(num_pages + growth)

    # -- one step ----------------------------------------------------------------------------------

    def step(self) -> StepReport | None:
        """Run one batch. None when there is nothing that can run."""
        self._admit()
        if self.prefilling:
            return self._prefill_step()
        if self.running:
            return self._decode_step()
        return None

    def _admit(self) -> None:
        """Move waiting sequences to prefilling, in order, while pages, slots and places last."""
        while self.waiting and self.num_active() < self.limits.max_running:
            sequence = self.waiting[0]
            num_pages = self.pages_for(sequence.num_tokens)
            if not self.has_memory_for(num_pages):
                return
            self.waiting.popleft()
            sequence.page_table = self.pages.allocate(num_pages, sequence.rid)
            sequence.slot = self.slots.allocate(sequence.rid)
            sequence.num_computed_tokens = 0
            sequence.phase = Phase.PREFILL
            if sequence.prefill_start_s is None:
                sequence.prefill_start_s = time.monotonic()
            self.prefilling.append(sequence)

    def _plan_chunks(self) -> list[Chunk]:
        """Share the token budget in order; every chunk but a sequence's last ends on the grid."""
        budget, chunks = self.limits.prefill_budget, []
        for sequence in self.prefilling:
            start = sequence.num_computed_tokens
            end = min(sequence.num_tokens, start + budget)
            if end < sequence.num_tokens:
                end -= end % self.limits.prefill_grid
            if end <= start:
                break
            chunks.append(Chunk(sequence=sequence, start=start, end=end))
            budget -= end - start
        return chunks

    def _prefill_step(self) -> StepReport:
        chunks = self._plan_chunks()
        rows = [
            Row(
                token_ids=c.sequence.tokens(c.start, c.end),
                start=c.start,
                page_table=c.sequence.page_table,
                slot=_slot(c.sequence),
                num_logits=_num_logits(c),
                track=None,
            )
            for c in chunks
        ]
        logits = self.runner.forward(rows)
        self.counters.prefill_steps += 1
        self.counters.prefill_tokens_computed += sum(c.end - c.start for c in chunks)
        last_rows, complete, at = [], [], 0
        for chunk, row in zip(chunks, rows, strict=True):
            sequence = chunk.sequence
            sequence.num_computed_tokens = chunk.end
            _record_prompt_logprobs(chunk, logits[at : at + row.num_logits])
            at += row.num_logits
            if chunk.end == sequence.num_tokens:
                complete.append(sequence)
                last_rows.append(at - 1)
        emissions, failures = self._finish_prefill(complete, logits[last_rows])
        return StepReport(chunks=chunks, emissions=emissions, failures=failures)

    def _finish_prefill(
        self, complete: list[Sequence], logits: Tensor
    ) -> tuple[list[Emission], list[tuple[Sequence, ServingError]]]:
        for sequence in complete:
            self.prefilling.remove(sequence)
            sequence.phase = Phase.HELD if self.hold_after_prefill else Phase.RUNNING
            sequence.prefill_end_s = time.monotonic()
        emissions, failures = self._sample(complete, logits)
        if not self.hold_after_prefill:
            self.running.extend(e.sequence for e in emissions if e.finish is None)
        return emissions, failures

    def _decode_step(self) -> StepReport:
        failures = self._make_room()
        batch = list(self.running)
        if not batch:
            return StepReport(chunks=[], emissions=[], failures=failures)
        rows = [
            Row(
                token_ids=s.output_ids[-1:],
                start=s.num_computed_tokens,
                page_table=s.page_table,
                slot=_slot(s),
                num_logits=1,
                track=None,
            )
            for s in batch
        ]
        logits = self.runner.forward(rows)
        self.counters.decode_steps += 1
        self.counters.decode_tokens_computed += len(batch)
        for sequence in batch:
            sequence.num_computed_tokens += 1
        emissions, sampling_failures = self._sample(batch, logits)
        ended = {id(e.sequence) for e in emissions if e.finish} | {id(s) for s, _ in sampling_failures}
        self.running = [s for s in self.running if id(s) not in ended]
        return StepReport(chunks=[], emissions=emissions, failures=failures + sampling_failures)

    # -- pages for the next token ------------------------------------------------------------------

    def _make_room(self) -> list[tuple[Sequence, ServingError]]:
        """Give every running sequence the page of its next position; retract the latest arrivals when none is left."""
        failures: list[tuple[Sequence, ServingError]] = []
        for sequence in sorted(self.running, key=lambda s: s.arrival_s):
            while sequence.phase is Phase.RUNNING and not self._grow(sequence):
                victim = max(self.running, key=lambda s: s.arrival_s)
                if self.pages_for(victim.num_computed_tokens + 1) > self.pages.num_usable:
                    self.remove(victim)
                    failures.append((victim, CapacityError("the answer outgrew every page of this rank")))
                else:
                    self.retract(victim)
        return failures

    def _grow(self, sequence: Sequence) -> bool:
        missing = self.pages_for(sequence.num_computed_tokens + 1) - len(sequence.page_table)
        if missing <= 0:
            return True
        if not self.pages.can_allocate(missing):
            return False
        last = sequence.page_table[-1]
        sequence.page_table.extend(self.pages.allocate(missing, sequence.rid, after=last))
        return True

    def retract(self, sequence: Sequence) -> None:
        """Give up a running sequence's memory; prompt and answer so far are prefilled again when there is room."""
        self.running.remove(sequence)
        self.release(sequence)
        sequence.num_computed_tokens = 0
        sequence.phase = Phase.WAITING
        self.waiting.appendleft(sequence)
        self.counters.retractions += 1

    # -- tokens ------------------------------------------------------------------------------------

    def _sample(
        self, sequences: list[Sequence], logits: Tensor
    ) -> tuple[list[Emission], list[tuple[Sequence, ServingError]]]:
        """One token for each sequence. Rows with non-finite logits fail alone."""
        empty = [s for s in sequences if s.sampling.max_new_tokens == 0]
        emissions = [
            Emission(sequence=s, token=None, finish=_end(s, FinishReason(type="length", length=0))) for s in empty
        ]
        keep = [i for i, s in enumerate(sequences) if s.sampling.max_new_tokens > 0]
        failures: list[tuple[Sequence, ServingError]] = []
        while keep:
            rows = [_sample_row(sequences[i]) for i in keep]
            try:
                tokens = sample(logits[keep], rows, eos_ids=self.eos_ids)
            except NonFiniteLogits as error:
                broken = {keep[row] for row in error.rows}
                failures += [(sequences[i], error) for i in broken]
                keep = [i for i in keep if i not in broken]
                continue
            emissions += [self._accept_token(sequences[i], token) for i, token in zip(keep, tokens, strict=True)]
            break
        for sequence, _ in failures:
            sequence.phase = Phase.DONE
        return emissions, failures

    def _accept_token(self, sequence: Sequence, token: TokenLogprob) -> Emission:
        if sequence.sampling.max_new_tokens == 0:
            return Emission(sequence=sequence, token=None, finish=_end(sequence, FinishReason(type="length", length=0)))
        sequence.output_ids.append(token.token_id)
        if self.hold_after_prefill:
            return Emission(sequence=sequence, token=token, finish=None)
        finish = self.stopping.check(sequence.sampling, sequence.output_ids)
        if finish is not None:
            _end(sequence, finish)
        return Emission(sequence=sequence, token=token, finish=finish)


def _end(sequence: Sequence, finish: FinishReason) -> FinishReason:
    sequence.phase = Phase.DONE
    return finish


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None
    return sequence.slot


def _sample_row(sequence: Sequence) -> SampleRow:
    return SampleRow(
        params=sequence.sampling,
        logprobs=sequence.logprobs,
        prompt_ids=sequence.prompt_ids,
        output_ids=sequence.output_ids,
    )


def _first_wanted(sequence: Sequence) -> int | None:
    """The first position whose logits the prompt's logprobs need; None when none are wanted."""
    options = sequence.logprobs
    if not options.wanted or options.start_len < 0 or options.start_len >= sequence.num_prompt_tokens:
        return None
    return max(0, options.start_len - 1)


def _num_logits(chunk: Chunk) -> int:
    """How many of the chunk's last tokens need logits: for the next token, and for the prompt's logprobs."""
    sequence = chunk.sequence
    last = 1 if chunk.end == sequence.num_tokens else 0
    first = _first_wanted(sequence)
    if first is None or len(sequence.prompt_logprobs) >= sequence.num_prompt_tokens - sequence.logprobs.start_len:
        return last
    return max(last, chunk.end - max(first, chunk.start))


def _record_prompt_logprobs(chunk: Chunk, logits: Tensor) -> None:
    """Append what this chunk says about the prompt. logits: [k, vocabulary], of the chunk's last k positions."""
    sequence, options = chunk.sequence, chunk.sequence.logprobs
    first = _first_wanted(sequence)
    if first is None or not len(logits):
        return
    known = options.start_len + len(sequence.prompt_logprobs)
    if known == 0:
        sequence.prompt_logprobs.append(TokenLogprob(logprob=None, token_id=sequence.prompt_ids[0]))
        known = 1
    offset = chunk.end - len(logits)  # position of logits[0]; row r speaks of position offset + r + 1
    end = min(chunk.end + 1, sequence.num_prompt_tokens)
    if end <= known:
        return
    rows = logits[known - 1 - offset : end - 1 - offset]
    sequence.prompt_logprobs += prompt_logprobs(rows, sequence.prompt_ids[known:end], options.top_num)
