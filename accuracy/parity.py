"""Two servers, the same tokens: greedy answers must be equal, but where the baseline's two best tokens almost are."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import msgspec

from accuracy.client import Client
from accuracy.paired import first_difference
from accuracy.prompts import Prompt


class Likeness(enum.StrEnum):
    """NEAR_TIE: the first token that differs was one of two that the baseline found almost equally likely."""

    EQUAL = "equal"
    NEAR_TIE = "near tie"
    DIFFERENT = "different"


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt in one run. position: of the first token that differs, None when none does. gap: of the baseline's two
    best log-probabilities there. logprob_difference: the largest before that position."""

    run: str
    prompt: int
    likeness: Likeness
    position: int | None
    gap: float | None
    subject_token: int | None
    baseline_token: int | None
    logprob_difference: float
    cached_tokens: int | None


async def compare_tokens(
    subject: Client, baseline: Client, prompts: Sequence[Prompt], *, new_tokens: int, tie: float
) -> list[Comparison]:
    """Cold, then warm. tie: gap of log-probabilities below which either token will do. Raises WorkerError."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    options = {"sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
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
    gap = None if position is None else _gap(baseline, position)
    same = len(expected) if position is None else position
    return Comparison(
        run=run,
        prompt=prompt,
        likeness=_likeness(position, gap, tie),
        position=position,
        gap=gap,
        subject_token=_at(ids, position),
        baseline_token=_at(expected, position),
        logprob_difference=max(
            (abs(a[0] - b[0]) for a, b in zip(ours[:same], theirs[:same], strict=True)), default=0.0
        ),
        cached_tokens=subject["meta_info"].get("cached_tokens"),
    )


def _likeness(position: int | None, gap: float | None, tie: float) -> Likeness:
    if position is None:
        return Likeness.EQUAL
    return Likeness.NEAR_TIE if gap is not None and gap < tie else Likeness.DIFFERENT


def _gap(baseline: dict[str, Any], position: int) -> float | None:
    """Between the two best tokens there; None where the answer had ended or no alternatives are told."""
    alternatives = baseline["meta_info"].get("output_top_logprobs") or []
    if position >= len(alternatives) or len(alternatives[position]) < 2:
        return None
    first, second = sorted((entry[0] for entry in alternatives[position]), reverse=True)[:2]
    return float(first - second)


def _at(ids: Sequence[int], position: int | None) -> int | None:
    return ids[position] if position is not None and position < len(ids) else None
