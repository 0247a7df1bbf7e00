"""What a front measures of its sequences for /metrics: exact times of tokens, and where the time of each went."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Protocol

from common.histogram import Histogram
from node.messages import Failure, Timing, Update

PHASES = ("queue", "prefill", "transfer", "decode")


class Measured(Protocol):
    """A running sequence. token_s: when its last token came, 0 before the first. Times: of the monotonic clock."""

    rank: int
    arrival_s: float
    token_s: float


class RankMeter:
    """Of one rank, seconds. first_token: from a request's arrival. phases: a prefill rank counts what it did for a
    hand-off, a decode rank what came after it, so that their sums are those of the requests."""

    def __init__(self) -> None:
        self.first_token = Histogram()
        self.between_tokens = Histogram()
        self.whole = Histogram()
        self.phases = {phase: Histogram() for phase in PHASES}
        self.failures: Counter[str] = Counter()


class Meter:
    """http_errors: requests that were answered with an error status, by code."""

    def __init__(self) -> None:
        self.ranks: defaultdict[int, RankMeter] = defaultdict(RankMeter)
        self.http_errors: Counter[str] = Counter()

    def on_update(self, entry: Measured, update: Update, now: float) -> None:
        """Called for each token of each sequence. Sets entry.token_s."""
        meter = self.ranks[entry.rank]
        if update.token_ids:
            if entry.token_s:
                meter.between_tokens.observe(now - entry.token_s)
            else:
                meter.first_token.observe(now - entry.arrival_s)
            entry.token_s = now
        if update.finish is not None:
            meter.whole.observe(now - entry.arrival_s)
            _add_phases(meter, update.timing or Timing())

    def on_failure(self, entry: Measured, failure: Failure) -> None:
        self.ranks[entry.rank].failures[failure.error.code] += 1


def _add_phases(meter: RankMeter, timing: Timing) -> None:
    handed_over, decoded = bool(timing.transfer_bytes), timing.decode_s > 0
    if not (handed_over or decoded):
        return  # the prefill leg of a request that decode served alone
    if decoded:
        meter.phases["decode"].observe(timing.decode_s)
    if handed_over and decoded:
        return  # the prefill rank has counted the rest
    meter.phases["queue"].observe(timing.queue_s)
    meter.phases["prefill"].observe(timing.prefill_s)
    if handed_over:
        meter.phases["transfer"].observe(timing.transfer_s)
