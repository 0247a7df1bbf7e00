"""Two servers, the same tokens: greedy answers must be equal, but where the baseline's two best tokens almost are.

A state that was saved wrong shows only when a later prompt resumes from it, so each finding says whether it is of a
prefix hit, and `hits` sets answers after hits against the others.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from accuracy.client import Client
from accuracy.paired import SIGNIFICANCE, first_difference
from accuracy.prompts import Prompt

ALTERNATIVES = 8
"""Asked of each token: how likely the baseline finds another server's token is known when it is one of them."""


class Likeness(enum.StrEnum):
    """NEAR_TIE: the first token that differs is one that the baseline found almost as likely as its own."""

    EQUAL = "equal"
    NEAR_TIE = "near tie"
    DIFFERENT = "different"


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt in one run. position: of the first token that differs, None when none does. gap: of the baseline's two
    best log-probabilities there. shortfall: by how much the baseline finds the subject's token less likely than its own
    there, at least that much where it is not among the best ones that were told. logprob_difference: the largest before
    that position. cached_tokens, prompt_tokens: of the subject, None where it does not tell. prefix_hit: it has resumed
    from a saved state."""

    run: str
    prompt: int
    likeness: Likeness
    position: int | None
    gap: float | None
    shortfall: float | None
    subject_token: int | None
    baseline_token: int | None
    logprob_difference: float
    cached_tokens: int | None
    prompt_tokens: int | None
    prefix_hit: bool


class Hits(msgspec.Struct, frozen=True, kw_only=True):
    """Answers after a prefix hit and without one, and how many of them are different (not near ties)."""

    hits: int
    different_hits: int
    others: int
    different_others: int

    @property
    def are_suspected(self) -> bool:
        """Whether hits differ more often than chance would have it, at 5 %: Fisher's exact test, one-sided."""
        different, count = self.different_hits + self.different_others, self.hits + self.others
        ways = sum(
            math.comb(self.hits, k) * math.comb(self.others, different - k)
            for k in range(self.different_hits, min(self.hits, different) + 1)
        )
        return ways < SIGNIFICANCE * math.comb(count, different)


def hits(found: Sequence[Comparison]) -> Hits:
    own = [(one.prefix_hit, one.likeness is Likeness.DIFFERENT) for one in found]
    return Hits(
        hits=sum(hit for hit, _ in own),
        different_hits=sum(hit and differs for hit, differs in own),
        others=sum(not hit for hit, _ in own),
        different_others=sum(differs and not hit for hit, differs in own),
    )


async def compare_tokens(
    subject: Client, baseline: Client, prompts: Sequence[Prompt], *, new_tokens: int, tie: float
) -> list[Comparison]:
    """Cold, then warm. tie: gap of log-probabilities below which either token will do. Raises WorkerError."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    options = {"sampling_params": sampling, "return_logprob": True, "top_logprobs_num": ALTERNATIVES}
    bodies = [{**prompt, **options} for prompt in prompts]
    found = []
    for run in ("cold", "warm"):
        if run == "cold":
            await subject.flush()
            await baseline.flush()
        theirs = await baseline.generate_all(bodies)
        ours = await subject.generate_all(bodies)
        pairs = enumerate(zip(ours, theirs, strict=True))
        found += [_compare(run, number, one, other, tie) for number, (one, other) in pairs]
    return found


def _compare(run: str, prompt: int, subject: dict[str, Any], baseline: dict[str, Any], tie: float) -> Comparison:
    ours, theirs = (answer["meta_info"]["output_token_logprobs"] for answer in (subject, baseline))
    ids, expected = [t[1] for t in ours], [t[1] for t in theirs]
    position = first_difference(ids, expected)
    gap, shortfall = (None, None) if position is None else _gaps(baseline, position, _at(ids, position))
    meta = subject["meta_info"]
    same = len(expected) if position is None else position
    return Comparison(
        run=run,
        prompt=prompt,
        likeness=_likeness(position, shortfall, tie),
        position=position,
        gap=gap,
        shortfall=shortfall,
        subject_token=_at(ids, position),
        baseline_token=_at(expected, position),
        logprob_difference=max(
            (abs(a[0] - b[0]) for a, b in zip(ours[:same], theirs[:same], strict=True)), default=0.0
        ),
        cached_tokens=meta.get("cached_tokens"),
        prompt_tokens=meta.get("prompt_tokens"),
        prefix_hit=bool(meta.get("cached_tokens")),
    )


def _likeness(position: int | None, shortfall: float | None, tie: float) -> Likeness:
    if position is None:
        return Likeness.EQUAL
    return Likeness.NEAR_TIE if shortfall is not None and shortfall < tie else Likeness.DIFFERENT


def _gaps(baseline: dict[str, Any], position: int, token: int | None) -> tuple[float | None, float | None]:
    """Between the baseline's two best tokens there, and from its best one to `token`; None where an answer had ended or
    no alternatives are told."""
    alternatives = baseline["meta_info"].get("output_top_logprobs") or []
    if position >= len(alternatives) or len(alternatives[position]) < 2 or token is None:
        return None, None
    best, second, *_ = ordered = sorted((entry[0] for entry in alternatives[position]), reverse=True)
    told = {entry[1]: entry[0] for entry in alternatives[position]}
    return float(best - second), float(best - told.get(token, ordered[-1]))


def _at(ids: Sequence[int], position: int | None) -> int | None:
    return ids[position] if position is not None and position < len(ids) else None
