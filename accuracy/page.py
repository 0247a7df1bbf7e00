"""The report as one HTML page that needs nothing else: tables, plots, and answers side by side."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from accuracy.gate import SUBJECT, Report
from accuracy.history import Drift, Night
from accuracy.paired import Difference, Pairing
from accuracy.plots import COLOURS, Point, histogram, intervals, sums
from accuracy.records import Record
from accuracy.runs import Kind
from accuracy.statistics import quantile
from accuracy.verdict import RunSummary

SHOWN = 40

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; background: #fff; margin: 0 auto; padding: 24px 20px 60px;
       max-width: 1080px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 36px 0 10px; }
h3 { font-size: 15px; margin: 14px 0 4px; }
.about { color: #57606a; margin: 0 0 18px; overflow-wrap: anywhere; }
.verdict { border-radius: 8px; padding: 14px 18px; border: 1px solid; }
.verdict b { font-size: 20px; } .verdict ul { margin: 6px 0 0; padding-left: 20px; overflow-wrap: anywhere; }
.pass { background: #eaf7ee; border-color: #4a9d63; } .fail { background: #fdeceb; border-color: #c93c37; }
.invalid, .drift { background: #fff7e0; border-color: #c69026; }
.drift { border: 1px solid #c69026; border-radius: 8px; padding: 8px 14px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 7px; font-size: 14px; border-bottom: 1px solid #e3e6ea; white-space: nowrap; }
th { color: #57606a; font-weight: 600; } th:first-child, td:first-child { text-align: left; }
tr.worst td { font-weight: 600; background: #f6f8fa; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(430px, 100%), 1fr)); gap: 18px; }
figure { margin: 0; border: 1px solid #e3e6ea; border-radius: 8px; padding: 10px; max-width: 720px; }
figcaption { color: #57606a; font-size: 13px; margin-bottom: 4px; } svg { width: 100%; height: auto; display: block; }
svg text { font: 12px system-ui, sans-serif; }
.key span { margin-right: 16px; } .key i { display: inline-block; width: 10px; height: 10px; border-radius: 5px;
       margin-right: 5px; }
details { border: 1px solid #e3e6ea; border-radius: 8px; margin: 8px 0; padding: 6px 12px; }
summary { cursor: pointer; overflow-wrap: anywhere; }
.sides { display: grid; grid-template-columns: 1fr 1fr; gap: 12px; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f8fa; border-radius: 6px; padding: 8px 10px;
      margin: 4px 0 8px; font-size: 13px; }
.same { color: #57606a; } .there { background: #d5e8ff; } .here { background: #ffd9d6; }
@media (max-width: 640px) { .sides { grid-template-columns: 1fr; } }
"""


def page(report: Report) -> str:
    sections = [
        _head(report),
        _runs_section(report),
        _history_section(report.nights, report.drift),
        _latency_section(report),
        _pairing_section(report.pairings),
        _mistakes_section(report.mistakes, report.judgement.worst),
    ]
    title = f"tandem gate {report.task}: {report.verdict}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_e(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f"<body>{''.join(sections)}</body></html>\n"
    )


def _e(text: object) -> str:
    return html.escape(str(text))


def _head(report: Report) -> str:
    against = f", against {report.baseline_url}" if report.baseline_url else ""
    about = (
        f"{report.questions} questions, {report.shots} shots, at most {report.max_tokens} tokens, {report.parallel} at "
        f"once, greedy, {report.url} ({report.api}){against}; {report.started}, {report.seconds:.0f} s"
    )
    reasons = "".join(f"<li>{_e(reason)}</li>" for reason in report.reasons)
    return (
        f'<h1>tandem gate {_e(report.task)}</h1><p class="about">{_e(about)}</p>'
        f'<div class="verdict {report.verdict}"><b>{report.verdict}</b><ul>{reasons}</ul></div>'
    )


# -- runs ----------------------------------------------------------------------------------------------------------

_COLUMNS = (
    "run", "accuracy", "95 %", "w/o leaked", "right", "wrong", "cut", "no number",
    "no answer", "cached", "median s", "99 % s",
)  # fmt: skip


def _runs_section(report: Report) -> str:
    points = [_point(run) for run in report.runs]
    used = {point.colour for point in points}
    keys = (("cold", "after the caches were emptied"), ("warm", "the same questions again"), ("baseline", "baseline"))
    key = "".join(
        f"<span><i style='background:{COLOURS[name]}'></i>{text}</span>" for name, text in keys if name in used
    )
    plot = intervals(points, report.threshold, "accuracy by run")
    spread = (
        f"On the same questions the accuracy varies by {report.judgement.spread:.4f} run to run (standard deviation). "
        f"The intervals are for questions that were not asked (Wilson, 95 %). The lowest run counts."
    )
    rows = "".join(_row(run, report.judgement.worst) for run in report.runs)
    return (
        f'<h2>Accuracy by run</h2><figure><figcaption class="key">{key}</figcaption>{plot}</figure>'
        f'<p>{_e(spread)}</p><div class="scroll"><table><tr>{_cells("th", _COLUMNS)}</tr>{rows}</table></div>'
        f"<p>{_e(_cut_note(report.judgement.worst))}</p>{_errors(report.runs)}"
    )


def _cut_note(worst: RunSummary) -> str:
    return (
        "Answers cut by the length limit are wrong whatever they say; if those of the lowest run that end in the right "
        f"number were counted, as SGLang's script does, it would be {worst.right_if_cut_counted / worst.asked:.4f}."
    )


def _point(run: RunSummary) -> Point:
    colour = run.kind.value if run.side == SUBJECT else run.side
    label = run.name if run.side == SUBJECT else f"{run.name} base"
    return Point(label, run.accuracy, run.interval.low, run.interval.high, colour)


def _row(run: RunSummary, worst: RunSummary) -> str:
    name = run.name if run.side == SUBJECT else f"{run.name}, {run.side}"
    if run.kind is Kind.COLD:
        name += f" ({run.flush or 'resumed'})"
    without = "" if run.accuracy_without_leaked is None else f"{run.accuracy_without_leaked:.4f}"
    cells = (
        name,
        f"{run.accuracy:.4f}",
        f"{run.interval.low:.3f} to {run.interval.high:.3f}",
        without if run.num_leaked else "-",
        run.right,
        run.wrong,
        run.cut,
        run.no_number,
        run.missing,
        "?" if run.cached_share is None else f"{run.cached_share:.0%}",
        f"{quantile(run.latencies_s, 0.5):.2f}",
        f"{quantile(run.latencies_s, 0.99):.2f}",
    )
    return f"<tr{' class=worst' if run == worst else ''}>{_cells('td', cells)}</tr>"


def _cells(tag: str, values: Iterable[object]) -> str:
    return "".join(f"<{tag}>{_e(value)}</{tag}>" for value in values)


def _errors(runs: Sequence[RunSummary]) -> str:
    lines = [f"run {run.name}, {run.side}: {count} × {m}" for run in runs for m, count in run.errors.items()]
    return f"<h3>Why requests failed</h3><pre>{_e(chr(10).join(lines))}</pre>" if lines else ""


# -- history -------------------------------------------------------------------------------------------------------


def _history_section(nights: Sequence[Night], drift: Drift | None) -> str:
    if drift is None or not nights:
        return ""
    points = [
        Point(night.at[5:10], night.mean, min(night.accuracies), max(night.accuracies), "night") for night in nights
    ]
    plot = intervals(points, None, "accuracy by night")
    word = _drift_word(drift)
    labels = [night.at[5:10] for night in nights if night.verdict != "invalid"]
    cusum = sums(drift.sums, labels, drift.limit, "CUSUM by night") if drift.enough else ""
    second = f"<figure><figcaption>CUSUM: how far the nights have fallen, in deviations</figcaption>{cusum}</figure>"
    return (
        f'<h2>History</h2>{word}<div class="plots"><figure><figcaption>Mean of a night\'s runs, from its lowest to its '
        f"highest run</figcaption>{plot}</figure>{second if cusum else ''}</div>"
    )


def _drift_word(drift: Drift) -> str:
    reference = f"the first nights have {drift.level:.4f}, deviation {drift.deviation:.4f}"
    if not drift.enough:
        return f"<p>Too few nights to speak of a drift ({_e(reference)}).</p>"
    if drift.alarm:
        return f'<p class="drift"><b>The accuracy drifts down</b>: {_e(reference)}.</p>'
    return f"<p>No drift: {_e(reference)}.</p>"


# -- latency -------------------------------------------------------------------------------------------------------


def _latency_section(report: Report) -> str:
    longest = max((max(run.latencies_s, default=0.0) for run in report.runs), default=0.0)
    figures = "".join(
        f"<figure><figcaption>{_e(_point(run).label)}: {len(run.latencies_s)} answers, median "
        f"{quantile(run.latencies_s, 0.5):.2f} s</figcaption>"
        f"{histogram(run.latencies_s, longest, _point(run).colour, f'latency of run {run.name}')}</figure>"
        for run in report.runs
        if run.latencies_s
    )
    return f'<h2>Latency of whole answers</h2><div class="plots">{figures}</div>' if figures else ""


# -- answers -------------------------------------------------------------------------------------------------------


def _pairing_section(pairings: Sequence[Pairing]) -> str:
    if not pairings:
        return ""
    columns = (
        "run",
        "pairs",
        "both right",
        "only here",
        "only baseline",
        "neither",
        "McNemar p",
        "answers that differ",
    )
    rows = "".join(f"<tr>{_cells('td', _pairing_cells(p))}</tr>" for p in pairings)
    shown = [(p.run, d) for p in pairings for d in p.differences]
    more = f"<p>{len(shown) - SHOWN} more are in report.json.</p>" if len(shown) > SHOWN else ""
    details = "".join(_difference(run, one) for run, one in shown[:SHOWN])
    return (
        f'<h2>Against the baseline</h2><div class="scroll"><table><tr>{_cells("th", columns)}</tr>{rows}</table></div>'
        f"{details}{more}"
    )


def _pairing_cells(p: Pairing) -> tuple[object, ...]:
    counts = (p.pairs, p.both, p.only_subject, p.only_baseline, p.neither)
    return p.run, *counts, f"{p.p:.4g}", p.differing


def _difference(run: str, found: Difference) -> str:
    at = f"character {found.first_character}" if found.first_token is None else f"token {found.first_token}"
    if found.first_token is not None:
        at += f" ({_token(found.subject_token)} here, {_token(found.baseline_token)} there)"
    cached = (
        "" if found.cached_tokens is None else f", {found.cached_tokens} of {found.prompt_tokens} prompt tokens cached"
    )
    grades = f"{found.subject_grade} here, {found.baseline_grade} there"
    summary = f"run {run}, {found.id}: {grades}; first differs at {at}{cached}"
    sides = "".join(
        f"<div><h3>{name}</h3><pre>{_marked(text, found.first_character, colour)}</pre></div>"
        for name, text, colour in (("here", found.subject_text, "here"), ("baseline", found.baseline_text, "there"))
    )
    return (
        f"<details><summary>{_e(summary)}</summary><pre>{_e(found.asked)}</pre><p>expected: {found.label}</p>"
        f'<div class="sides">{sides}</div></details>'
    )


def _token(token: int | None) -> str:
    return "the end" if token is None else str(token)


def _marked(text: str, begin: int, colour: str) -> str:
    return f'<span class="same">{_e(text[:begin])}</span><span class="{colour}">{_e(text[begin:])}</span>'


def _mistakes_section(mistakes: Sequence[Record], worst: RunSummary) -> str:
    if not mistakes:
        return ""
    details = "".join(
        f"<details><summary>{_e(r.id)}: {_e(r.grade)}, expected {r.label}, found {_e(r.found)}</summary>"
        f"<pre>{_e(r.asked)}</pre><pre>{_e(r.outcome.error or r.outcome.text)}</pre></details>"
        for r in mistakes[:SHOWN]
    )
    more = f"<p>{len(mistakes) - SHOWN} more are in report.json.</p>" if len(mistakes) > SHOWN else ""
    return f"<h2>What was not right in run {_e(worst.name)} ({len(mistakes)})</h2>{details}{more}"
