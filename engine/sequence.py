"""One request as the engine sees it."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field

from common.sampling import FinishReason, LogprobOptions, SamplingParams, TokenLogprob
from engine.batch import Track
from engine.grammar import Grammar
from engine.radix_cache import Lock


class Phase(enum.Enum):
    """WAITING → PREFILL → RUNNING → DONE; a prefill-only scheduler parks in HELD instead of RUNNING.

    Retraction leads from RUNNING back to WAITING.
    """

    WAITING = "waiting"
    PREFILL = "prefill"
    RUNNING = "running"
    HELD = "held"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The newest saved state of a sequence, the radix cache's now: after `position` tokens, in `slot`.

    lock protects the pages up to there, and where `keep_state` was asked the state as well.
    """

    position: int
    slot: int
    lock: Lock


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Filled by the front (the first five fields), then only by the scheduler thread.

    page_table: the pages of positions 0, page_size, 2·page_size …, in order. own_pages: those of them that it owns;
    the others are the radix cache's, protected by `locks` and `checkpoint`.
    slot: its conv and SSM state; None while it owns no memory.
    num_computed_tokens: the position that pages and slot stand for once every planned step has run. While RUNNING the
    newest token is not computed yet: num_computed_tokens == len(prompt_ids) + len(output_ids) + pending - 1.
    pending: tokens that planned steps sample and that are not in output_ids yet. in_flight: planned steps that have not
    landed. released: its memory is to be given back when the last of them has.
    track_target: the position whose state prefill saves; branch_position: what the cache's match asked for.
    tracked: the newest saved state, or the one that a planned step of the prefill saves. spare_slots: slots with saved
    states that the cache did not want; a hand-off may be reading them, so they are freed with the rest.
    grammar: its place in the grammar that the answer follows, if there is one.
    num_resumed_tokens: so many of output_ids were made by another rank before it came here.
    prompt_logprobs: positions `logprobs.start_len` … as far as they are known.
    """

    rid: str
    prompt_ids: list[int]
    sampling: SamplingParams
    logprobs: LogprobOptions
    arrival_s: float
    phase: Phase = Phase.WAITING
    output_ids: list[int] = field(default_factory=list)
    page_table: list[int] = field(default_factory=list)
    own_pages: set[int] = field(default_factory=set)
    locks: list[Lock] = field(default_factory=list)
    checkpoint: Checkpoint | None = None
    slot: int | None = None
    extra_key: str | None = None
    grammar: Grammar | None = None
    num_resumed_tokens: int = 0
    pending: int = 0
    in_flight: int = 0
    released: bool = False
    looked_up: bool = False
    branch_position: int = 0
    track_target: int | None = None
    tracked: Track | None = None
    spare_slots: list[int] = field(default_factory=list)
    num_cached_pages: int = 0
    num_local_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    reported_prompt_logprobs: bool = False
    prefill_start_s: float | None = None
    prefill_end_s: float | None = None

    def is_ready(self, timeout_s: float = 0.0) -> bool:
        """Whether it may run as soon as there is room: its grammar, if it has one, is compiled within this time."""
        return self.grammar is None or self.grammar.is_ready(timeout_s)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids of positions start … end - 1, prompt and answer alike."""
        n = len(self.prompt_ids)
        if end <= n:
            return self.prompt_ids[start:end]
        if start >= n:
            return self.output_ids[start - n : end - n]
        return self.prompt_ids[start:] + self.output_ids[: end - n]

    @property
    def first_logits_wanted(self) -> int | None:
        """The first position whose logits the prompt's logprobs need; None when none are wanted."""
        options = self.logprobs
        if not options.wanted or options.start_len < 0 or options.start_len >= self.num_prompt_tokens:
            return None
        return max(0, options.start_len - 1)

    @property
    def knows_prompt_logprobs(self) -> bool:
        return len(self.prompt_logprobs) >= self.num_prompt_tokens - self.logprobs.start_len

    @property
    def queue_s(self) -> float:
        """Seconds from arrival to the first prefill step; until now when there was none."""
        return max(0.0, (self.prefill_start_s or time.monotonic()) - self.arrival_s)

    @property
    def prefill_s(self) -> float:
        """Seconds from the first prefill step to the first token; 0 when this process did not prefill."""
        if self.prefill_start_s is None or self.prefill_end_s is None:
            return 0.0
        return self.prefill_end_s - self.prefill_start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """What one step made of one sequence: a token, an end, or both (max_new_tokens 0 ends without a token)."""

    sequence: Sequence
    token: TokenLogprob | None
    finish: FinishReason | None
