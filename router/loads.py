"""How much each target has to do: what its node reports, corrected by what this router has sent and seen end since.

    report ──► + shares begun since it was asked for
               − shares that it covers and that have ended since

A node without reports is known by this router's own shares alone. Loads are tokens in flight: those of prompts and of
answers so far, and `SEQUENCE_TOKENS` for each sequence, whose recurrent state a step reads and writes however short it
is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec

from common.json_body import BAD_JSON

if TYPE_CHECKING:
    from router.targets import Target

SEQUENCE_TOKENS = 256


_Count = Annotated[int, msgspec.Meta(le=2**53)]
"""What a float takes without loss."""


class RankLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a node tells of a rank, in `/health` and `/get_load`: sequences, and tokens of them. alive: takes them."""

    dp_rank: int = 0
    alive: bool = True
    num_reqs: _Count = 0
    num_tokens: _Count = 0

    @property
    def tokens(self) -> int:
        return max(0, self.num_tokens) + SEQUENCE_TOKENS * max(0, self.num_reqs)


@dataclass(slots=True, eq=False)
class Share:
    """What one leg adds to a load. asks: how many reports had been asked for when it began."""

    load: Load
    tokens: int
    asks: int

    def end(self) -> None:
        self.load.end(self)


class Load:
    """Of one target. covered: shares that the last report knew of; ended: those of them that have ended; since: shares
    that run and that it did not know of."""

    def __init__(self) -> None:
        self._open: set[Share] = set()
        self._asks = 0
        self._report_ask = 0
        self._reported = self._covered = self._ended = self._since = 0

    @property
    def num_shares(self) -> int:
        """Legs of this router that run there."""
        return len(self._open)

    @property
    def tokens(self) -> float:
        """An ended share takes away what it was estimated at, but no more than its part of what was reported."""
        if self._ended == 0:
            return self._reported + self._since
        return self._reported - self._ended * min(1.0, self._reported / self._covered) + self._since

    def begin(self, tokens: int) -> Share:
        share = Share(self, tokens, self._asks)
        self._open.add(share)
        self._since += tokens
        return share

    def end(self, share: Share) -> None:
        """Does nothing the second time."""
        if share not in self._open:
            return
        self._open.discard(share)
        if share.asks < self._report_ask:
            self._ended += share.tokens
        else:
            self._since -= share.tokens

    def ask(self) -> int:
        """To be called when a report is asked for; what it returns goes to `report`. Shares that begin before the
        answer is here count as unknown to the report: better twice than not at all."""
        self._asks += 1
        return self._asks

    def report(self, ask: int, tokens: int) -> None:
        if ask <= self._report_ask:
            return
        total = sum(share.tokens for share in self._open)
        self._covered = sum(share.tokens for share in self._open if share.asks < ask)
        self._report_ask, self._reported, self._ended, self._since = ask, tokens, 0, total - self._covered


_decode = msgspec.json.Decoder(list[RankLoad]).decode


def read_loads(body: bytes) -> list[RankLoad]:
    """What a worker says of its ranks; nothing when it has another shape."""
    try:
        return _decode(body)
    except BAD_JSON:
        return []


def ask_all(targets: Sequence[Target]) -> list[int]:
    return [target.load.ask() for target in targets]


def report_all(targets: Sequence[Target], asks: Sequence[int], reports: Sequence[RankLoad]) -> None:
    """asks: of the same targets. A target that the node says nothing of keeps what it has."""
    by_rank = {report.dp_rank: report for report in reports}
    for target, ask in zip(targets, asks, strict=True):
        if (report := by_rank.get(target.rank)) is not None:
            target.on_report(report.alive)
            target.load.report(ask, report.tokens)
