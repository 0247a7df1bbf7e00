"""Continuous batching: which sequences run in the next step.

    add ──► waiting ──► prefilling ──► running ──► done
               ▲        (in pieces)   │      │
               └──────── retract ◄────┘      └── hold_after_prefill: held ──► release
    adopt (state received from another rank) ─► running

A step is planned, launched and, when the device has run it, applied:

    plan k+1 ──► launch k+1 ──► (device runs k, then k+1) ──► apply k ──► plan k+2 …        with overlap
    plan k ──► launch k ──► apply k ──► plan k+1 …                                           without

With overlap a step is planned before the tokens of the step before it are known. What follows from them (an end, a
stop string, an abort) is seen one step late: the sequence's row in the step in flight runs for nothing, its token is
dropped, and its memory comes back when that step has landed.

One thread calls this; nothing else touches the sequences or their memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from common.errors import CapacityError, ServingError
from common.sampling import FinishReason, TokenLogprob
from engine.batch import OnLayer, Track
from engine.device import Device, Pending, PlannedRow, PromptLogprobs
from engine.memory import SequenceMemory
from engine.sequence import Emission, Phase, Sequence
from engine.stopping import StopChecker
from engine.tracking import decode_due, prefill_target, target_in_piece

GRAMMAR_WAIT_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """prefill_budget: tokens a prefill step may take. cache_chunk: pieces end, and states are saved, on its multiples.

    track_interval: tokens between the states that decode saves; None: it saves none. tracks_prefill: whether prefill
    saves one. caches_final_state: a sequence that ends leaves its own state in the cache (no_buffer).
    mixed: prefill and decode rows may share a step.
    """

    page_size: int
    prefill_budget: int
    cache_chunk: int
    max_running: int
    track_interval: int | None
    tracks_prefill: bool
    caches_final_state: bool
    mixed: bool


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


Listen = Callable[[list[Chunk]], OnLayer]
"""Told of the chunks that a step is about to prefill; returns what is to be called as layer after layer is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """chunks: what was prefilled. emissions: new tokens and ends. failures: sequences that ended with an error."""

    chunks: list[Chunk]
    emissions: list[Emission]
    failures: list[tuple[Sequence, ServingError]]


class _Share(NamedTuple):
    """One sequence's row in a planned step. chunk: what it prefills, None for a decode row."""

    sequence: Sequence
    chunk: Chunk | None
    track: Track | None
    samples: bool


class _Launched(NamedTuple):
    shares: list[_Share]
    result: Pending


class Scheduler:
    """hold_after_prefill: a prefill rank's scheduler, which parks a sequence once its first token is known."""

    def __init__(
        self,
        *,
        device: Device,
        memory: SequenceMemory,
        stopping: StopChecker,
        limits: Limits,
        overlap: bool,
        hold_after_prefill: bool,
    ) -> None:
        self.device = device
        self.memory = memory
        self.stopping = stopping
        self.limits = limits
        self.overlap = overlap
        self.hold_after_prefill = hold_after_prefill
        self.counters = Counters()
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []
        self._in_flight: _Launched | None = None
        self._failures: list[tuple[Sequence, ServingError]] = []

    # -- entering and leaving --------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose prompt is to be computed here."""
        self.waiting.append(sequence)

    def adopt(self, sequence: Sequence, first_token: TokenLogprob) -> Emission:
        """Take over a sequence whose state another rank computed: pages and slot hold all of its tokens."""
        assert sequence.slot is not None and sequence.num_computed_tokens == sequence.num_tokens
        emission = self._accept_token(sequence, first_token)
        if emission.finish is None:
            sequence.phase = Phase.RUNNING
            self.running.append(sequence)
        return emission

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence wherever it stands; its memory stays its own until `release`."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        for queue in (self.prefilling, self.running):
            if sequence in queue:
                queue.remove(sequence)
        sequence.phase = Phase.DONE

    def release(self, sequence: Sequence) -> None:
        """Give back the memory of a sequence that no transfer uses any more, as soon as no step does."""
        sequence.released = True
        if sequence.in_flight == 0:
            self.memory.release(sequence)

    def num_active(self) -> int:
        return len(self.prefilling) + len(self.running)

    @property
    def shares_in_flight(self) -> Seq[_Share]:
        """The rows of the step that the device has."""
        return () if self._in_flight is None else self._in_flight.shares

    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running or self._in_flight)

    # -- one step --------------------------------------------------------------------------------

    def step(self, listen: Listen | None = None) -> StepReport | None:
        """Plan and launch the next step and report one that has run. None when there is nothing that can run."""
        launched = self._launch(listen)
        if self.overlap:
            launched, self._in_flight = self._in_flight, launched
        if launched is not None:
            return self._apply(launched)
        if self._in_flight is None and not self._failures:
            return None
        return self._report([], [], [])

    def _launch(self, listen: Listen | None) -> _Launched | None:
        shares = self._plan()
        if not shares:
            return None
        rows = [_planned_row(share) for share in shares]
        for share in shares:
            self._advance(share)
        self._count(shares)
        chunks = [share.chunk for share in shares if share.chunk]
        on_layer = listen(chunks) if listen is not None and chunks else None
        return _Launched(shares=shares, result=self.device.launch(rows, on_layer))

    def _advance(self, share: _Share) -> None:
        """Move the sequence to where it will be once this step has run."""
        sequence = share.sequence
        sequence.in_flight += 1
        sequence.pending += share.samples
        if share.chunk is None:
            sequence.num_computed_tokens += 1
            return
        sequence.num_computed_tokens = share.chunk.end
        if not _is_complete(share):
            return
        self.prefilling.remove(sequence)
        if share.samples and not self.hold_after_prefill:
            sequence.phase = Phase.RUNNING
            self.running.append(sequence)
        else:
            sequence.phase = Phase.HELD

    def _count(self, shares: Seq[_Share]) -> None:
        prefilled = sum(share.chunk.end - share.chunk.start for share in shares if share.chunk)
        decoded = sum(share.chunk is None for share in shares)
        self.counters.prefill_tokens_computed += prefilled
        self.counters.decode_tokens_computed += decoded
        self.counters.prefill_steps += prefilled > 0
        self.counters.decode_steps += decoded > 0

    # -- planning --------------------------------------------------------------------------------

    def _plan(self) -> list[_Share]:
        self._admit()
        shares = self._plan_prefill()
        if not shares or self.limits.mixed:
            shares += self._plan_decode()
        return shares

    def _admit(self) -> None:
        """Move waiting sequences to prefilling, in order, while memory and places last. Every running one keeps a page
        to grow into, so that what was retracted does not come back only to be retracted again."""
        while self.num_active() < self.limits.max_running:
            sequence = self._next_waiting()
            if sequence is None or not self._acquire(sequence):
                return
            self.waiting.remove(sequence)
            start, end = sequence.num_computed_tokens, sequence.num_tokens
            if len(sequence.output_ids) == sequence.num_resumed_tokens:  # not one that was retracted
                sequence.num_cached_tokens = sequence.num_local_cached_tokens = start
            sequence.track_target = self._target(start, end, sequence.branch_position)
            saved = sequence.checkpoint
            sequence.tracked = Track(position=saved.position, slot=saved.slot) if saved else None
            sequence.phase = Phase.PREFILL
            sequence.prefill_start_s = sequence.prefill_start_s or time.monotonic()
            self.prefilling.append(sequence)

    def _next_waiting(self) -> Sequence | None:
        """The first in line, past those whose grammar is being compiled."""
        if self.waiting and not self.num_active() and self._in_flight is None:
            self.waiting[0].is_ready(GRAMMAR_WAIT_S)  # there is nothing else to do
        return next((sequence for sequence in self.waiting if sequence.is_ready()), None)

    def _acquire(self, sequence: Sequence) -> bool:
        keep, spare = self.hold_after_prefill, len(self.running)
        return self.memory.acquire(sequence, resume=True, keep_state=keep, spare_pages=spare)

    def _target(self, start: int, end: int, branch: int) -> int | None:
        if not self.limits.tracks_prefill:
            return None
        return prefill_target(start, end, cache_chunk=self.limits.cache_chunk, branch=branch)

    def _plan_prefill(self) -> list[_Share]:
        """Share the token budget in order; every piece but a sequence's last ends on a multiple of cache_chunk."""
        budget, shares = self.limits.prefill_budget, []
        for sequence in self.prefilling:
            start = sequence.num_computed_tokens
            end = min(sequence.num_tokens, start + budget)
            if end < sequence.num_tokens:
                end -= end % self.limits.cache_chunk
            if end <= start:
                break
            target = target_in_piece(start, end, sequence.track_target)
            track = None if target is None else self._track(sequence, target)
            sequence.tracked = track or sequence.tracked
            shares.append(
                _Share(
                    sequence=sequence,
                    chunk=Chunk(sequence=sequence, start=start, end=end),
                    track=track,
                    samples=end == sequence.num_tokens and sequence.sampling.max_new_tokens > 0,
                )
            )
            budget -= end - start
        return shares

    def _plan_decode(self) -> list[_Share]:
        """A token for every running sequence that may have another one."""
        due = [s for s in self.running if len(s.output_ids) + s.pending < s.sampling.max_new_tokens]
        if not due or not self._make_room(due):
            return []
        shares = []
        for sequence in due:
            if sequence.phase is not Phase.RUNNING:  # retracted, or failed, to make room
                continue
            position, interval = sequence.num_computed_tokens + 1, self.limits.track_interval
            saves = interval is not None and decode_due(position, interval)
            track = self._track(sequence, position) if saves else None
            shares.append(_Share(sequence=sequence, chunk=None, track=track, samples=True))
        return shares

    def _track(self, sequence: Sequence, position: int) -> Track | None:
        slot = self.memory.take_track_slot(sequence)
        return None if slot is None else Track(position=position, slot=slot)

    # -- pages for the next token ----------------------------------------------------------------

    def _make_room(self, due: Seq[Sequence]) -> bool:
        """Give every sequence the page of its next position; retract the latest arrivals when none is left.

        False when that has to wait: what a step in flight uses cannot be taken from it.
        """
        for sequence in sorted(due, key=lambda s: s.arrival_s):
            while sequence.phase is Phase.RUNNING and not self.memory.grow(sequence, sequence.num_computed_tokens + 1):
                if self._in_flight is not None:
                    return False
                self._give_up_latest()
        return True

    def _give_up_latest(self) -> None:
        """Retract the latest arrival, be it the only one: others may hold pages, a prompt or a room. One that needs
        more pages than there are fails."""
        victim = max(self.running, key=lambda s: s.arrival_s)
        if self.memory.pages_for(victim.num_computed_tokens + 1) <= self.memory.pages.num_usable:
            self.retract(victim)
            return
        self.remove(victim)
        self._failures.append((victim, CapacityError("the answer outgrew every page of this rank")))

    def retract(self, sequence: Sequence) -> None:
        """Give up a running sequence's memory. It is prefilled again from its last saved state when there is room."""
        assert sequence.in_flight == 0
        self.running.remove(sequence)
        self.memory.release(sequence)
        sequence.phase = Phase.WAITING
        self.waiting.appendleft(sequence)
        self.counters.retractions += 1

    # -- applying --------------------------------------------------------------------------------

    def _apply(self, launched: _Launched) -> StepReport:
        """Take in what a step has made. Of sequences that ended meanwhile nothing is taken."""
        result = launched.result.result()
        chunks: list[Chunk] = []
        emissions: list[Emission] = []
        failures: list[tuple[Sequence, ServingError]] = []
        for share in launched.shares:
            sequence = share.sequence
            sequence.in_flight -= 1
            sequence.pending -= share.samples
            if sequence.phase is Phase.DONE:
                self._drop(share)
                continue
            failed = result.failed.get(id(sequence))
            if share.track is not None and failed is None:
                self._donate(share, share.track)
            elif share.track is not None:  # nor may the state be cached whose logits were not finite
                self._discard(sequence, share.track)
            if share.chunk is not None:
                chunks.append(share.chunk)
                _record_prompt_logprobs(sequence, result.prompt_logprobs.get(id(sequence)))
            if failed is not None:
                self.remove(sequence)
                failures.append((sequence, failed))
            elif _is_complete(share) or share.chunk is None:
                emissions.append(self._take_token(share, result.tokens.get(id(sequence))))
        return self._report(chunks, emissions, failures)

    def _report(
        self, chunks: list[Chunk], emissions: list[Emission], failures: list[tuple[Sequence, ServingError]]
    ) -> StepReport:
        early, self._failures = self._failures, []
        return StepReport(chunks=chunks, emissions=emissions, failures=early + failures)

    def _drop(self, share: _Share) -> None:
        """The row ran for nothing: its sequence had ended."""
        if share.track is not None:
            self._discard(share.sequence, share.track)
        if share.sequence.released and share.sequence.in_flight == 0:
            self.memory.release(share.sequence)

    def _discard(self, sequence: Sequence, track: Track) -> None:
        """The saved state is not wanted; a hand-off may be reading it."""
        if self.hold_after_prefill:
            sequence.spare_slots.append(track.slot)
        else:
            self.memory.return_track_slot(track.slot)

    def _donate(self, share: _Share, track: Track) -> None:
        self.memory.donate(
            share.sequence,
            track.position,
            track.slot,
            ends_prompt=share.chunk is not None,
            keep_state=self.hold_after_prefill,
        )

    def _take_token(self, share: _Share, token: TokenLogprob | None) -> Emission:
        sequence = share.sequence
        if share.chunk is not None:
            sequence.prefill_end_s = time.monotonic()
        if token is None:  # max_new_tokens is 0
            return self._finish(sequence, None, FinishReason(type="length", length=0))
        return self._accept_token(sequence, token)

    def _accept_token(self, sequence: Sequence, token: TokenLogprob) -> Emission:
        if sequence.sampling.max_new_tokens == 0:
            return self._finish(sequence, None, FinishReason(type="length", length=0))
        sequence.output_ids.append(token.token_id)
        if self.hold_after_prefill:
            return Emission(sequence=sequence, token=token, finish=None)
        return self._finish(sequence, token, self._why_over(sequence))

    def _why_over(self, sequence: Sequence) -> FinishReason | None:
        """What a client or the model said ends it comes before the end of its grammar, and this before length."""
        finish = self.stopping.check(sequence.sampling, sequence.output_ids)
        if finish is not None and finish.type == "stop":
            return finish
        is_complete = sequence.grammar is not None and sequence.grammar.is_over(sequence.output_ids)
        return FinishReason(type="stop") if is_complete else finish

    def _finish(self, sequence: Sequence, token: TokenLogprob | None, finish: FinishReason | None) -> Emission:
        if finish is not None and not self.hold_after_prefill:
            if self.limits.caches_final_state and sequence.in_flight == 0:
                self.memory.donate_final(sequence)
            self.remove(sequence)
        return Emission(sequence=sequence, token=token, finish=finish)


def _record_prompt_logprobs(sequence: Sequence, found: list[TokenLogprob] | None) -> None:
    if not sequence.prompt_logprobs and sequence.first_logits_wanted is not None and sequence.logprobs.start_len == 0:
        sequence.prompt_logprobs.append(TokenLogprob(logprob=None, token_id=sequence.prompt_ids[0]))
    sequence.prompt_logprobs += found or []


def _is_complete(share: _Share) -> bool:
    return share.chunk is not None and share.chunk.end == share.sequence.num_tokens


def _planned_row(share: _Share) -> PlannedRow:
    sequence, chunk = share.sequence, share.chunk
    prompt, num_prompt_logits = (None, 0) if chunk is None else _prompt_logprobs(chunk)
    assert sequence.slot is not None
    token_ids: list[int] | None = None  # the step in flight samples it
    if chunk is not None:
        token_ids = sequence.tokens(chunk.start, chunk.end)
    elif not sequence.pending:
        token_ids = sequence.output_ids[-1:]
    return PlannedRow(
        key=id(sequence),
        token_ids=token_ids,
        start=sequence.num_computed_tokens,
        page_table=list(sequence.page_table),
        slot=sequence.slot,
        num_logits=max(num_prompt_logits, int(share.samples)),
        track=share.track,
        samples=share.samples,
        sampling=sequence.sampling,
        logprobs=sequence.logprobs,
        prompt_ids=sequence.prompt_ids,
        output_ids=list(sequence.output_ids),
        prompt=prompt,
        grammar=sequence.grammar,
    )


def _prompt_logprobs(chunk: Chunk) -> tuple[PromptLogprobs | None, int]:
    """What this piece says about the prompt's tokens, and how many of its last positions need logits for it."""
    sequence, options = chunk.sequence, chunk.sequence.logprobs
    first = sequence.first_logits_wanted
    if first is None or sequence.knows_prompt_logprobs:
        return None, 0
    # The logits of position i speak of the token at i + 1.
    low, high = max(chunk.start, first), min(chunk.end, sequence.num_prompt_tokens - 1)
    if low >= high:
        return None, 0
    count = chunk.end - low
    wanted = PromptLogprobs(token_ids=sequence.prompt_ids[low + 1 : high + 1], first_row=0, top_num=options.top_num)
    return wanted, count
