"""From records to a verdict: pass, fail, or invalid when the requests that failed leave it open."""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Sequence

import msgspec

from accuracy.client import Flush
from accuracy.records import Grade, Record
from accuracy.runs import Kind, Run, failures_allowed
from accuracy.statistics import Interval, spread, wilson

_LONG_NUMBER = re.compile(r"\d{6,}")


class Verdict(enum.StrEnum):
    PASS = "pass"
    FAIL = "fail"
    INVALID = "invalid"

    @property
    def exit_code(self) -> int:
        return {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.INVALID: 2}[self]


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A run in figures.

    Of `asked` questions `answered` were graded, `failed` got no answer and `unasked` were given up. cut, no_number: of
    the wrong ones. right_if_cut_counted: what SGLang's script calls right, which takes the last number of a cut answer.
    accuracy: right of answered. interval: Wilson, 95 %, for questions not seen. accuracy_without_leaked: None where all
    are leaked. cached_share: of the prompt tokens, None where the server does not tell. latencies_s: of the answered.
    """

    name: str
    kind: Kind
    side: str
    flush: Flush
    asked: int
    answered: int
    right: int
    wrong: int
    cut: int
    no_number: int
    right_if_cut_counted: int
    failed: int
    timed_out: int
    unasked: int
    accuracy: float
    interval: Interval
    accuracy_without_leaked: float | None
    interval_without_leaked: Interval
    num_leaked: int
    errors: dict[str, int]
    cached_share: float | None
    latencies_s: list[float]
    seconds: float
    completion_tokens: int

    @property
    def missing(self) -> int:
        return self.failed + self.unasked

    @property
    def lowest(self) -> float:
        """The accuracy if every request without an answer had been wrong."""
        return self.right / self.asked

    @property
    def highest(self) -> float:
        return (self.right + self.missing) / self.asked


def summarise(run: Run) -> RunSummary:
    records = run.records
    grades = Counter(record.grade for record in records)
    answered = [record for record in records if record.grade is not Grade.FAILED]
    unleaked = [record for record in answered if not record.leaked]
    right, unleaked_right = grades[Grade.RIGHT], sum(r.is_right for r in unleaked)
    return RunSummary(
        name=run.plan.name,
        kind=run.plan.kind,
        side=run.plan.side,
        flush=run.flush,
        asked=run.asked,
        answered=len(answered),
        right=right,
        wrong=len(answered) - right,
        cut=grades[Grade.CUT],
        no_number=grades[Grade.NO_NUMBER],
        right_if_cut_counted=sum(record.found == record.label for record in answered),
        failed=grades[Grade.FAILED],
        timed_out=sum(record.outcome.timed_out for record in records),
        unasked=run.asked - len(records),
        accuracy=right / len(answered) if answered else 0.0,
        interval=wilson(right, len(answered)),
        accuracy_without_leaked=unleaked_right / len(unleaked) if unleaked else None,
        interval_without_leaked=wilson(unleaked_right, len(unleaked)),
        num_leaked=len(answered) - len(unleaked),
        errors=_errors(records),
        cached_share=_cached_share(answered),
        latencies_s=[round(record.outcome.latency_s, 4) for record in answered],
        seconds=run.seconds,
        completion_tokens=sum(record.outcome.completion_tokens or 0 for record in answered),
    )


def _errors(records: Sequence[Record]) -> dict[str, int]:
    """The commonest, long numbers left out: they name rooms and addresses."""
    told = (_LONG_NUMBER.sub("…", r.outcome.error) for r in records if r.outcome.error is not None)
    return dict(Counter(told).most_common(10))


def _cached_share(answered: Sequence[Record]) -> float | None:
    told = [
        (record.outcome.cached_tokens, record.outcome.prompt_tokens)
        for record in answered
        if record.outcome.cached_tokens is not None and record.outcome.prompt_tokens
    ]
    total = sum(prompt for _, prompt in told)
    return sum(cached for cached, _ in told) / total if total else None


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """worst: the run with the least accuracy, which is the one that counts. spread: standard deviation of the runs."""

    verdict: Verdict
    reasons: list[str]
    worst: RunSummary
    spread: float


def judge(runs: Sequence[RunSummary], *, threshold: float, max_failed: float) -> Judgement:
    """runs: of the subject, at least one."""
    worst = min(runs, key=lambda run: run.accuracy)
    invalid = [reason for run in runs if (reason := why_invalid(run, threshold, max_failed)) is not None]
    low = [run for run in runs if run.highest < threshold]
    if invalid:
        verdict, reasons = Verdict.INVALID, invalid
    elif low:
        verdict, reasons = Verdict.FAIL, [_why_failed(run, threshold) for run in low]
    else:
        verdict, reasons = Verdict.PASS, [f"every run reaches {threshold:g}"]
    return Judgement(verdict=verdict, reasons=reasons, worst=worst, spread=spread([run.accuracy for run in runs]))


def why_invalid(run: RunSummary, threshold: float, max_failed: float) -> str | None:
    """None when the run can be judged."""
    if run.missing > failures_allowed(run.asked, max_failed):
        return f"run {run.name}: {_failures(run)}, more than {max_failed:.1%} of {run.asked}"
    if run.lowest < threshold <= run.highest and run.missing:
        return f"run {run.name}: {_failures(run)}, and they decide whether {threshold:g} is reached"
    return None


def _failures(run: RunSummary) -> str:
    kinds = "; ".join(f"{count} × {message}" for message, count in run.errors.items())
    unasked = f", {run.unasked} not asked or not waited for any more" if run.unasked else ""
    return f"{run.failed} of {run.asked} requests failed{unasked} ({kinds[:300]})"


def _why_failed(run: RunSummary, threshold: float) -> str:
    of_them = f"{run.cut} cut by the length limit, {run.no_number} without a number"
    return f"run {run.name}: accuracy {run.accuracy:.3f} is below {threshold:g} ({run.wrong} wrong, of them {of_them})"
