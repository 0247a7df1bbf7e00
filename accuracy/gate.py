"""The gate: runs of one task, cold and warm, of a server and perhaps of a baseline, and what they say together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import msgspec

from accuracy import history
from accuracy.client import Api, Client
from accuracy.history import Drift, Night
from accuracy.paired import Pairing, hit_findings, is_loss, pair
from accuracy.records import Journal, Record
from accuracy.runs import Asking, Run, RunPlan, ask_all, plan_runs
from accuracy.tasks import Task
from accuracy.verdict import Judgement, RunSummary, Verdict, judge, summarise, why_invalid

SUBJECT, BASELINE = "subject", "baseline"


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOptions:
    """rounds: each one cold run and `warm` warm ones. max_failed: share of a run's requests that may fail.

    timeout_s: of one request. output: folder of the answers and reports. history: folder of past nights, or None.
    """

    url: str
    baseline: str | None
    api: Api | None
    model: str | None
    threshold: float
    rounds: int
    warm: int
    parallel: int
    max_tokens: int
    max_failed: float
    timeout_s: float
    output: Path
    resume: bool
    history: Path | None


class Progress(Protocol):
    """Told of a run that begins and of each of its answers."""

    def begin(self, plan: RunPlan, total: int) -> None: ...
    def record(self, record: Record) -> None: ...


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a gate has found. runs: of both sides. nights: this one is the last. mistakes: of the worst run."""

    task: str
    url: str
    api: str
    baseline_url: str | None
    threshold: float
    max_tokens: int
    parallel: int
    shots: int
    questions: int
    started: str
    seconds: float
    verdict: Verdict
    reasons: list[str]
    judgement: Judgement
    runs: list[RunSummary]
    pairings: list[Pairing]
    nights: list[Night]
    drift: Drift | None
    mistakes: list[Record]

    @property
    def exit_code(self) -> int:
        return self.verdict.exit_code


async def run_gate(task: Task, options: GateOptions, progress: Progress) -> Report:
    """Ask everything, write the answers as they come, judge. Raises ConfigError."""
    started = datetime.now(UTC)
    earlier = [] if options.history is None else history.load(options.history, history_key(task, options))
    with Journal(options.output / "answers.jsonl", _settings(task, options), resume=options.resume) as journal:
        runs, api = await _ask_runs(task, options, journal, progress)
    report = _report(task, options, runs, api, started)
    return report if options.history is None else _with_history(report, earlier, task, options)


async def _ask_runs(task: Task, options: GateOptions, journal: Journal, progress: Progress) -> tuple[list[Run], Api]:
    """All runs, fewer when one of them is hopeless."""
    urls = {SUBJECT: options.url} | ({} if options.baseline is None else {BASELINE: options.baseline})
    asking = Asking(
        max_tokens=options.max_tokens,
        max_failed=options.max_failed,
        parallel=options.parallel,
        on_record=progress.record,
    )
    runs: list[Run] = []
    async with AsyncExitStack() as exits:
        clients = {side: await exits.enter_async_context(_client(url, options)) for side, url in urls.items()}
        for plan in plan_runs(options.rounds, options.warm, tuple(urls)):
            progress.begin(plan, len(task.questions))
            runs.append(await ask_all(clients[plan.side], task, plan, asking, journal))
            if runs[-1].gave_up:
                break
        api = clients[SUBJECT].api
    assert api is not None
    return runs, api


def _client(url: str, options: GateOptions) -> Client:
    return Client(url=url, api=options.api, model=options.model, timeout_s=options.timeout_s, parallel=options.parallel)


def _settings(task: Task, options: GateOptions) -> dict[str, object]:
    """What has to be the same for answers to be of one gate."""
    return {
        "task": task.digest(),
        "url": options.url,
        "baseline": options.baseline,
        "api": options.api,
        "model": options.model,
        "max_tokens": options.max_tokens,
    }


def history_key(task: Task, options: GateOptions) -> str:
    return f"{task.name} {len(task.questions)} questions, {task.shots} shots, {options.max_tokens} tokens"


def _report(task: Task, options: GateOptions, runs: Sequence[Run], api: Api, started: datetime) -> Report:
    summaries = [summarise(run) for run in runs]
    subject, baseline = ([run for run in summaries if run.side == side] for side in (SUBJECT, BASELINE))
    judgement = judge(subject, threshold=options.threshold, max_failed=options.max_failed)
    verdict, reasons, pairings = judgement.verdict, judgement.reasons, _pairings(runs)
    if options.baseline is not None:
        verdict, reasons = conclude(judgement, baseline, pairings, options.max_failed)
    return Report(
        task=task.name,
        url=options.url,
        api=api,
        baseline_url=options.baseline,
        threshold=options.threshold,
        max_tokens=options.max_tokens,
        parallel=options.parallel,
        shots=task.shots,
        questions=len(task.questions),
        started=started.isoformat(timespec="seconds"),
        seconds=(datetime.now(UTC) - started).total_seconds(),
        verdict=verdict,
        reasons=reasons,
        judgement=judgement,
        runs=summaries,
        pairings=pairings,
        nights=[],
        drift=None,
        mistakes=_mistakes(runs, judgement.worst),
    )


def _pairings(runs: Sequence[Run]) -> list[Pairing]:
    baseline = {run.plan.number: run for run in runs if run.plan.side == BASELINE}
    return [
        pair(run.plan.name, run.records, baseline[run.plan.number].records)
        for run in runs
        if run.plan.side == SUBJECT and run.plan.number in baseline
    ]


def _mistakes(runs: Sequence[Run], worst: RunSummary) -> list[Record]:
    """What was not right in the run that counts."""
    run = next(run for run in runs if run.plan.side == SUBJECT and run.plan.name == worst.name)
    return [record for record in run.records if not record.is_right]


def conclude(
    subject: Judgement, baseline: Sequence[RunSummary], pairings: Sequence[Pairing], max_failed: float
) -> tuple[Verdict, list[str]]:
    """The verdict with the baseline taken into account: it tells a weak model from a hand-off that loses.

    The baseline need not reach the threshold, but it has to have answered.
    """
    unusable = [reason for run in baseline if (reason := why_invalid(run, 0.0, max_failed)) is not None]
    if subject.verdict is Verdict.INVALID or unusable or not pairings:
        own = subject.reasons if subject.verdict is Verdict.INVALID else []
        return Verdict.INVALID, own + [f"baseline, {reason}" for reason in unusable]
    counts = "; ".join(f"run {p.run}: {p.only_baseline} against {p.only_subject}, p = {p.p:.3g}" for p in pairings)
    if is_loss(pairings):
        loses = f"loses against the baseline (right there alone against right here alone: {counts})"
        own = subject.reasons if subject.verdict is Verdict.FAIL else []
        return Verdict.FAIL, [*own, loses, *hit_findings(pairings)]
    if subject.verdict is Verdict.FAIL:
        worst = min(run.accuracy for run in baseline)
        weak = f"no loss against the baseline can be shown ({counts}), whose worst run has {worst:.3f}"
        return Verdict.FAIL, [*subject.reasons, f"{weak}: the model is weak, or too few questions were asked"]
    return Verdict.PASS, [*subject.reasons, f"no loss against the baseline ({counts})"]


def _with_history(report: Report, earlier: list[Night], task: Task, options: GateOptions) -> Report:
    assert options.history is not None
    night = Night(
        at=datetime.now(UTC).isoformat(),
        key=history_key(task, options),
        questions=report.questions,
        verdict=report.verdict,
        accuracies=[run.accuracy for run in report.runs if run.side == SUBJECT],
    )
    history.save(options.history, night)
    nights = [*earlier, night]
    return msgspec.structs.replace(report, nights=nights, drift=history.drift(nights))
