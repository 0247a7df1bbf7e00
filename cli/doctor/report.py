"""The report: a table in a terminal, lines elsewhere, or JSON."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.doctor.checks import Check, Status

_MARKS = {
    Status.OK: ("ok", "green"),
    Status.WARNING: ("warning", "yellow"),
    Status.ERROR: ("error", "bold red"),
    Status.NOT_APPLICABLE: ("n/a", "dim"),
}

_NAME_WIDTH = 26


def summary(checks: Sequence[Check]) -> str:
    counts = {status: sum(check.status is status for check in checks) for status in Status}
    words = [f"{counts[status]} {_MARKS[status][0]}" for status in Status if counts[status]]
    return ", ".join(words)


def print_report(checks: Sequence[Check], role: str, console: Console) -> None:
    if console.is_terminal:
        console.print(_table(checks))
        console.print(f"tandem {role}: {summary(checks)}", highlight=False)
        return
    for check in checks:
        print(_lines(check))
    print(f"tandem {role}: {summary(checks)}")


def _table(checks: Sequence[Check]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(max_width=_NAME_WIDTH, overflow="fold")
    table.add_column(overflow="fold")
    for check in checks:
        word, style = _MARKS[check.status]
        found = Text(check.found, style="dim" if check.status is Status.NOT_APPLICABLE else "")
        if check.fix is not None:
            found.append(f"\n→ {check.fix}", style=style)
        table.add_row(Text(word, style=style), Text(check.name), found)
    return table


def _lines(check: Check) -> str:
    head = f"{_MARKS[check.status][0]:8} {check.name}: "
    lines = [head + check.found]
    if check.fix is not None:
        lines.append(f"         -> {check.fix}")
    return "\n".join(lines)


def as_json(checks: Sequence[Check], role: str, seconds: float) -> str:
    good = not any(check.status is Status.ERROR for check in checks)
    report = {"role": role, "ok": good, "seconds": round(seconds, 3), "checks": checks}
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()
