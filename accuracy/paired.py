"""The same questions, two servers: is one of them worse, and where do their answers part?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

import msgspec

from accuracy.records import Grade, Record
from accuracy.statistics import mcnemar_exact

SIGNIFICANCE = 0.05


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Two answers to one question that are not the same.

    first_token: index of the first token that differs, None where a server tells no tokens; first_character likewise of
    the texts. subject_token, baseline_token: those tokens, None where one had ended. cached_tokens: of the subject's
    prompt, None where it does not tell.
    """

    id: str
    asked: str
    label: int
    subject_text: str
    baseline_text: str
    subject_grade: Grade
    baseline_grade: Grade
    first_character: int
    first_token: int | None
    subject_token: int | None
    baseline_token: int | None
    cached_tokens: int | None
    prompt_tokens: int | None

    @property
    def is_lost(self) -> bool:
        """Whether it is right in the baseline alone."""
        return self.baseline_grade is Grade.RIGHT and self.subject_grade is not Grade.RIGHT


class Pairing(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the subject against the baseline's. p: McNemar's exact test, two-sided, of right against not right.

    hits: pairs whose subject had the prompt, or its beginning, in its prefix cache; of them differing_hits have answers
    that differ and lost_hits are right in the baseline alone.
    """

    run: str
    pairs: int
    both: int
    only_subject: int
    only_baseline: int
    neither: int
    p: float
    differing: int
    hits: int
    differing_hits: int
    lost_hits: int
    differences: list[Difference]


def pair(run: str, subject: Iterable[Record], baseline: Iterable[Record]) -> Pairing:
    """Of the questions that both have answered."""
    known = {record.id: record for record in baseline if record.grade is not Grade.FAILED}
    pairs = [(s, known[s.id]) for s in subject if s.grade is not Grade.FAILED and s.id in known]
    only_subject = sum(s.is_right and not b.is_right for s, b in pairs)
    only_baseline = sum(b.is_right and not s.is_right for s, b in pairs)
    differences = [difference(s, b) for s, b in pairs if _differ(s, b)]
    hits = [(s, b) for s, b in pairs if s.outcome.cached_tokens]
    return Pairing(
        run=run,
        pairs=len(pairs),
        both=sum(s.is_right and b.is_right for s, b in pairs),
        only_subject=only_subject,
        only_baseline=only_baseline,
        neither=sum(not s.is_right and not b.is_right for s, b in pairs),
        p=mcnemar_exact(only_subject, only_baseline),
        differing=len(differences),
        hits=len(hits),
        differing_hits=sum(_differ(s, b) for s, b in hits),
        lost_hits=sum(b.is_right and not s.is_right for s, b in hits),
        differences=differences,
    )


def hit_findings(pairings: Iterable[Pairing]) -> Iterator[str]:
    """A sentence for each run in which questions were lost after prefix hits: the first of them is named."""
    for p in pairings:
        lost = [d for d in p.differences if d.cached_tokens and d.is_lost]
        if lost:
            yield (
                f"run {p.run}: {p.lost_hits} of {p.only_baseline} lost questions came after a prefix hit, first "
                f"{lost[0].id} ({lost[0].cached_tokens} of {lost[0].prompt_tokens} prompt tokens were cached, "
                f"{_place(lost[0])} is the first that differs)"
            )


def _place(found: Difference) -> str:
    return f"character {found.first_character}" if found.first_token is None else f"token {found.first_token}"


def is_loss(pairings: Sequence[Pairing]) -> bool:
    """Whether the subject is worse in some run, at 5 % for all runs together (Bonferroni)."""
    return any(p.only_baseline > p.only_subject and p.p * len(pairings) < SIGNIFICANCE for p in pairings)


def _differ(subject: Record, baseline: Record) -> bool:
    s, b = subject.outcome, baseline.outcome
    return s.text != b.text or bool(s.output_ids and b.output_ids and s.output_ids != b.output_ids)


def difference(subject: Record, baseline: Record) -> Difference:
    s, b = subject.outcome, baseline.outcome
    token = first_difference(s.output_ids, b.output_ids) if s.output_ids and b.output_ids else None
    return Difference(
        id=subject.id,
        asked=subject.asked,
        label=subject.label,
        subject_text=s.text,
        baseline_text=b.text,
        subject_grade=subject.grade,
        baseline_grade=baseline.grade,
        first_character=first_difference(s.text, b.text) or 0,
        first_token=token,
        subject_token=_at(s.output_ids, token),
        baseline_token=_at(b.output_ids, token),
        cached_tokens=s.cached_tokens,
        prompt_tokens=s.prompt_tokens,
    )


def first_difference(one: Sequence[object], other: Sequence[object]) -> int | None:
    """Index of the first place where they are not the same, be it the end of the shorter one; None: they are equal."""
    missing = object()
    pairs = enumerate(zip_longest(one, other, fillvalue=missing))
    return next((i for i, (a, b) in pairs if a != b), None)


def _at(tokens: Sequence[int], index: int | None) -> int | None:
    return tokens[index] if index is not None and index < len(tokens) else None
