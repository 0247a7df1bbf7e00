"""`tandem compare`: several stacks side by side, as table, JSON and page."""

from __future__ import annotations

import asyncio
import html
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from accuracy.client import Client
from accuracy.compare import Stack, compare
from accuracy.plots import histogram
from accuracy.prompts import Prompt
from cli.gate.checks import write_json
from common.errors import ConfigError

_STYLE = """
body { font: 15px system-ui; margin: 2em auto; max-width: 52em; }
td { text-align: right; padding: 4px 9px; }
svg text { font: 12px system-ui; }
"""
_ROWS: tuple[tuple[str, Callable[[Stack], str]], ...] = (
    ("API", lambda s: s.api),
    ("caches", lambda s: s.flushed),
    ("equal answers", lambda s: "" if s.likeness is None else f"{s.likeness.equal} of {s.likeness.prompts}"),
    ("first difference", lambda s: _first(s)),
    ("KL", lambda s: "" if s.likeness is None else _number(s.likeness.kl, ".1e")),
    ("largest difference", lambda s: "" if s.likeness is None else _number(s.likeness.largest, ".1e")),
    ("TTFT p50, ms", lambda s: _number(s.speed.ttft_p50_ms)),
    ("TTFT p99, ms", lambda s: _number(s.speed.ttft_p99_ms)),
    ("ITL p50, ms", lambda s: _number(s.speed.itl_p50_ms, ".2f")),
    ("ITL p99, ms", lambda s: _number(s.speed.itl_p99_ms, ".2f")),
    ("output tokens", lambda s: str(s.speed.output_tokens)),
    ("tokens/s", lambda s: _number(s.speed.tokens_s)),
)


def run(
    clients: Sequence[tuple[str, Client]],
    prompts: Sequence[Prompt],
    *,
    new_tokens: int,
    output: Path | None,
    plot: Path | None,
) -> None:
    """Ask, print, write. Raises ServingError."""
    found = asyncio.run(compare(clients, prompts, new_tokens=new_tokens))
    click.echo(table(found))
    write_json(output, found)
    if plot is not None:
        _write(plot, page(found))


def table(stacks: Sequence[Stack]) -> str:
    rows = _rows(stacks)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


def page(stacks: Sequence[Stack]) -> str:
    """Needs nothing else. The stacks' plots have one scale."""
    rows = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in _rows(stacks))
    plots = []
    for title, values in (("Time to first token", [s.ttft_s for s in stacks]), ("Gaps", [s.gaps_s for s in stacks])):
        longest = max((value for each in values for value in each), default=1.0)
        for stack, own in zip(stacks, values, strict=True):
            label = f"{title}: {stack.name}"
            plots.append(f"<h3>{html.escape(label)}</h3>{histogram(own, longest, 'cold', label)}")
    return (
        f"<!doctype html><meta charset=utf-8><title>tandem compare</title><style>{_STYLE}</style>"
        f"<h1>tandem compare</h1><table>{rows}</table>{''.join(plots)}\n"
    )


def _rows(stacks: Sequence[Stack]) -> list[list[str]]:
    return [["", *(stack.name for stack in stacks)], *([name, *map(shown, stacks)] for name, shown in _ROWS)]


def _first(stack: Stack) -> str:
    """Of the prompt that differs earliest."""
    if stack.likeness is None or not stack.likeness.differences:
        return ""
    prompt, place = min(stack.likeness.differences.items(), key=lambda found: found[1])
    return f"{stack.likeness.unit[:-1]} {place} of prompt {prompt}"


def _number(value: float | None, how: str = ".1f") -> str:
    return "-" if value is None else format(value, how)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror or error}", param="plot") from error
