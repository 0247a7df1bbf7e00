"""The commands under `tandem gate` and their options. Exit status: 0 pass, 1 fail, 2 invalid or a setting that cannot
work. What they need is imported when they run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from common.errors import ConfigError

if TYPE_CHECKING:
    from accuracy.gate import GateOptions
    from accuracy.tasks import Task

Command = Callable[..., None]

_SHARE = click.FloatRange(0, 1)
_COUNT = click.IntRange(1)

_OPTIONS = (
    click.option("--url", default="http://127.0.0.1:30000", show_default=True, help="Router, node or any other server"),
    click.option("--baseline", metavar="URL", help="Ask this server the same, and compare pair by pair"),
    click.option(
        "--api",
        type=click.Choice(["generate", "completions", "chat"]),
        help="/generate, /v1/completions or /v1/chat/completions; found out by default",
    ),
    click.option("--model", help="Name for the completions; the first one served by default"),
    click.option("--num-questions", type=_COUNT, default=200, show_default=True),
    click.option("--shots", type=click.IntRange(0), default=5, show_default=True, help="Examples before each question"),
    click.option("--shuffle", type=int, metavar="SEED", help="Ask in another order"),
    click.option("--parallel", type=_COUNT, default=128, show_default=True, help="Requests at once"),
    click.option("--max-tokens", type=_COUNT, default=512, show_default=True, help="Of an answer"),
    click.option(
        "--threshold", type=_SHARE, default=0.87, show_default=True, help="Accuracy that every run must reach"
    ),
    click.option("--rounds", type=_COUNT, default=1, show_default=True, help="Each: cold once, then warm"),
    click.option("--warm", type=click.IntRange(0), default=2, show_default=True, help="Warm runs after each cold one"),
    click.option(
        "--max-failed", type=_SHARE, default=0.01, show_default=True, help="Share of requests that may get no answer"
    ),
    click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(0, min_open=True),
        default=300.0,
        show_default=True,
        help="Seconds of a request",
    ),
    click.option(
        "--output",
        type=click.Path(path_type=Path, file_okay=False),
        help="Folder of answers and reports; gate-results/TASK by default",
    ),
    click.option("--resume", is_flag=True, help="Go on where an earlier gate with the same settings was stopped"),
    click.option(
        "--history",
        type=click.Path(path_type=Path, file_okay=False),
        help="Folder of past nights: adds this one, tells of a drift",
    ),
)


@click.group()
def gate() -> None:
    """Accuracy of a server, with a verdict: 0 pass, 1 fail, 2 invalid."""


def _with_options(command: Command) -> Command:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@gate.command()
@click.option(
    "--data",
    type=click.Path(path_type=Path, dir_okay=False),
    help="gsm8k's test.jsonl; fetched once from its public address by default",
)
@_with_options
def gsm8k(data: Path | None, num_questions: int, shots: int, shuffle: int | None, **values: Any) -> None:
    """The questions of gsm8k, asked as SGLang's own test asks them."""
    from accuracy.gsm8k import default_file, fetch
    from accuracy.tasks import gsm8k_task

    path = fetch(default_file()) if data is None else data
    task = gsm8k_task(path, count=num_questions, shots=shots)
    _run(task.shuffled(shuffle), values)


@gate.command("gsm-mini")
@click.option("--seed", type=int, default=0, show_default=True, help="Which questions")
@_with_options
def gsm_mini(seed: int, num_questions: int, shots: int, shuffle: int | None, **values: Any) -> None:
    """Held-out word problems that the bundled tandem-mini can solve."""
    from accuracy.tasks import gsm_mini_task

    task = gsm_mini_task(seed=seed, count=num_questions, shots=shots)
    _run(task.shuffled(shuffle), values)


def _run(task: Task, values: dict[str, Any]) -> None:
    from accuracy.gate import run_gate
    from accuracy.report import write_reports
    from cli.gate.console import Bars, show

    options = gate_options(task.name, values)
    with Bars() as bars:
        report = asyncio.run(run_gate(task, options, bars))
    written = write_reports(report, options.output)
    show(report, [options.output / "answers.jsonl", *written])
    sys.exit(report.exit_code)


def gate_options(task: str, values: dict[str, Any]) -> GateOptions:
    """values: of the command line. Raises ConfigError."""
    from accuracy.client import Api
    from accuracy.gate import GateOptions

    api = None if values["api"] is None else Api(values["api"])
    urls = {name: None if values[name] is None else checked_url(name, values[name]) for name in ("url", "baseline")}
    output = values["output"] or Path("gate-results") / task
    return GateOptions(**(values | urls | {"api": api, "output": output}))


def checked_url(name: str, url: str) -> str:
    """Without a slash at its end. Raises ConfigError for what is no http address."""
    if not url.startswith(("http://", "https://")) or not url.split("://", 1)[1].strip("/"):
        raise ConfigError(f"--{name} {url}: an address like http://127.0.0.1:30000", param=name)
    return url.rstrip("/")
