"""What a gate shows while it asks and when it has a verdict."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from accuracy.client import Flush
from accuracy.gate import SUBJECT, Report
from accuracy.records import Grade, Record
from accuracy.runs import RunPlan
from accuracy.verdict import RunSummary

_WIDTH = 120
_STYLES = {"pass": "bold green", "fail": "bold red", "invalid": "bold yellow"}


class Bars:
    """A bar for each run, on stderr, only where that is a terminal. A context manager."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task: TaskID | None = None
        self._name, self._right, self._failed = "", 0, 0

    def begin(self, plan: RunPlan, total: int) -> None:
        self._name, self._right, self._failed = f"{plan.name} {plan.side}", 0, 0
        self._task = self._progress.add_task(self._name, total=total)

    def record(self, record: Record) -> None:
        assert self._task is not None
        self._right += record.is_right
        self._failed += record.grade is Grade.FAILED
        words = f"{self._name}: {self._right} right, {self._failed} failed"
        self._progress.update(self._task, advance=1, description=words)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


def show(report: Report, written: list[Path]) -> None:
    """The table, the verdict and where more is to be read, on stdout."""
    show_report(report)
    line = f"written: {', '.join(map(str, written))}"
    Console().print(line, markup=False, highlight=False, soft_wrap=True)


def show_report(report: Report) -> None:
    """The table and the verdict, on stdout."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print(_runs(report))
    for line in _findings(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"verdict: {report.verdict}", style=_STYLES[report.verdict])
    for reason in report.reasons:
        console.print(f"  {reason}", markup=False, highlight=False, soft_wrap=True)


def _findings(report: Report) -> Iterator[str]:
    for p in report.pairings:
        alone = f"right here alone {p.only_subject}, there alone {p.only_baseline}, p = {p.p:.3g} (McNemar)"
        yield f"run {p.run} against the baseline: {alone}; {p.differing} of {p.pairs} answers differ"
        if p.hits and p.differing:
            yield f"run {p.run}: {p.differing_hits} of {p.hits} answers after a prefix hit differ"
    yield f"spread of the runs on these questions: {report.judgement.spread:.4f}"
    if report.drift is not None and report.drift.alarm:
        yield "the accuracy drifts down over the last nights (CUSUM)"


def _runs(report: Report) -> Table:
    title = f"{report.task}: {report.questions} questions, {report.url} ({report.api})"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name in ("run", "accuracy", "95 %", "unleaked", "wrong", "cut", "no num", "failed", "cached"):
        table.add_column(name, justify="left" if name == "run" else "right")
    for run in report.runs:
        table.add_row(*_cells(run), style="bold" if run == report.judgement.worst else None)
    return table


def _cells(run: RunSummary) -> tuple[str, ...]:
    without = run.accuracy_without_leaked
    not_cold = " (not flushed)" if run.flush in (Flush.UNSUPPORTED, Flush.REFUSED) else ""
    return (
        (run.name if run.side == SUBJECT else f"{run.name} {run.side}") + not_cold,
        f"{run.accuracy:.3f}",
        f"{run.interval.low:.3f}-{run.interval.high:.3f}",
        "-" if without is None or not run.num_leaked else f"{without:.3f}",
        str(run.wrong),
        str(run.cut),
        str(run.no_number),
        str(run.missing),
        "?" if run.cached_share is None else f"{run.cached_share:.0%}",
    )
