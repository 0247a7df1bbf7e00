"""`tandem gate nightly`: a stack for each setting that matters, gated one after the other, and one page for all.

settings ──► stack up ──► gate (cold, warm) ──► report ──► stack down ──► … ──► index.html, summary.json, exit status
"""

from __future__ import annotations

import contextlib
import html
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from accuracy.gate import GateOptions, Progress, Report, run_gate
from accuracy.report import write_reports
from accuracy.tasks import Task
from accuracy.verdict import Verdict
from cli.gate.stack import disaggregated, unified_node
from common.errors import ConfigError, WorkerError

SETTINGS: dict[str, tuple[str, ...]] = {
    "extra_buffer": ("--mamba-scheduler-strategy", "extra_buffer"),
    "no_buffer": ("--mamba-scheduler-strategy", "no_buffer", "--page-size", "1", "--disable-overlap-schedule"),
}
"""Options of the nodes, by the name of the setting."""

_LOG_BYTES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class NightlyOptions:
    """settings: names of SETTINGS. node_options: of every node. unified: pair with a unified node of the same options.

    gate: of every gate; url, baseline, output and history are set for each setting: `output` and `history` are the
    folders that get one folder a setting.
    """

    settings: tuple[str, ...]
    node_options: tuple[str, ...]
    unified: bool
    start_timeout_s: float
    gate: GateOptions


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Of one setting. accuracy: of the worst run, None when there was none. drifts: the history says so."""

    setting: str
    verdict: Verdict
    reasons: list[str]
    accuracy: float | None
    drifts: bool


def checked_settings(names: Sequence[str]) -> tuple[str, ...]:
    """All of them when none is named. Raises ConfigError."""
    for name in names:
        if name not in SETTINGS:
            raise ConfigError(f"--setting {name}: one of {', '.join(SETTINGS)}", param="setting")
    return tuple(names) or tuple(SETTINGS)


async def nightly(
    task: Task, options: NightlyOptions, progress: Progress, say: Callable[[str], None], show: Callable[[Report], None]
) -> list[Outcome]:
    """Gate every setting; one whose stack does not start is invalid, and the next one has its turn."""
    outcomes = []
    for setting in options.settings:
        say(f"setting {setting}: starting")
        try:
            report = await _gate_setting(task, options, setting, progress)
        except WorkerError as error:
            outcomes.append(_not_started(setting, error, options.gate.output / setting / "logs"))
            say(f"setting {setting}: {'; '.join(outcomes[-1].reasons)}")
            continue
        show(report)
        outcomes.append(_outcome(setting, report))
    _write_summary(task, options, outcomes)
    return outcomes


async def _gate_setting(task: Task, options: NightlyOptions, setting: str, progress: Progress) -> Report:
    output = options.gate.output / setting
    with _stack(options, setting, output / "logs") as (url, baseline):
        history = options.gate.history and options.gate.history / setting
        gate = replace(options.gate, url=url, baseline=baseline, output=output, history=history)
        report = await run_gate(task, gate, progress)
    write_reports(report, output)
    return report


@contextlib.contextmanager
def _stack(options: NightlyOptions, setting: str, logs: Path) -> Iterator[tuple[str, str | None]]:
    """Addresses of the router and of the unified node, if there is to be one."""
    node = (*options.node_options, *SETTINGS[setting])
    with contextlib.ExitStack() as exits:
        baseline = None
        if options.unified:
            baseline = exits.enter_context(unified_node(node, logs, options.start_timeout_s))
        yield exits.enter_context(disaggregated(node, logs, options.start_timeout_s)), baseline


def _not_started(setting: str, error: WorkerError, logs: Path) -> Outcome:
    said = [f"{path.name}: {path.read_bytes()[-_LOG_BYTES:].decode(errors='replace')}" for path in logs.glob("*.log")]
    return Outcome(
        setting=setting,
        verdict=Verdict.INVALID,
        reasons=[f"the stack did not start: {error.message}", *said],
        accuracy=None,
        drifts=False,
    )


def _outcome(setting: str, report: Report) -> Outcome:
    return Outcome(
        setting=setting,
        verdict=report.verdict,
        reasons=report.reasons,
        accuracy=report.judgement.worst.accuracy,
        drifts=report.drift is not None and report.drift.alarm,
    )


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """1 when one failed, otherwise 2 when one was invalid, otherwise 0."""
    verdicts = {outcome.verdict for outcome in outcomes}
    worst = next((v for v in (Verdict.FAIL, Verdict.INVALID) if v in verdicts), Verdict.PASS)
    return worst.exit_code


def _write_summary(task: Task, options: NightlyOptions, outcomes: Sequence[Outcome]) -> None:
    folder = options.gate.output
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(outcomes), indent=1) + b"\n")
    (folder / "index.html").write_text(_index(task, outcomes))


def _index(task: Task, outcomes: Sequence[Outcome]) -> str:
    """Links to the reports of the settings."""
    rows = "".join(map(_row, outcomes))
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:0 auto;padding:24px 20px}"
        "table{border-collapse:collapse;width:100%}th,td{text-align:left;vertical-align:top;padding:6px 9px;"
        "border-bottom:1px solid #e3e6ea;overflow-wrap:anywhere}th,td:nth-child(-n+3){white-space:nowrap}"
        ".pass{color:#1a7f37}.fail{color:#c93c37}.invalid{color:#9a6700}"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>nightly {html.escape(task.name)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head><body>'
        f"<h1>Nightly {html.escape(task.name)}, {len(task.questions)} questions</h1><table><tr><th>setting</th>"
        f"<th>verdict</th><th>accuracy</th><th>why</th></tr>{rows}</table></body></html>\n"
    )


def _row(o: Outcome) -> str:
    verdict = f'<td class="{o.verdict}">{o.verdict}{", drifts" if o.drifts else ""}</td>'
    link = html.escape(o.setting)
    if o.accuracy is not None:
        link = f'<a href="{link}/report.html">{link}</a>'
    accuracy = "" if o.accuracy is None else f"{o.accuracy:.4f}"
    reasons = "<br>".join(map(html.escape, o.reasons))
    return f"<tr><td>{link}</td>{verdict}<td>{accuracy}</td><td>{reasons}</td></tr>"
