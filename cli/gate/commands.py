"""The commands under `tandem gate` and their options. Exit status: 0 pass, 1 fail, 2 invalid or a setting that cannot
work. What they need is imported when they run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from cli.numbers import POSITIVE_SECONDS, FiniteRange
from cli.settings import BUNDLED_MODEL
from common.errors import ConfigError, WorkerError

if TYPE_CHECKING:
    from accuracy.gate import GateOptions
    from accuracy.tasks import Task

Command = Callable[..., None]
Decorator = Callable[[Command], Command]

_SHARE = FiniteRange(0, 1)
_COUNT = click.IntRange(1)

_SERVER = (
    click.option("--url", default="http://127.0.0.1:30000", show_default=True, help="Router, node or any other server"),
    click.option("--baseline", metavar="URL", help="Ask this server the same, and compare pair by pair"),
    click.option(
        "--api",
        type=click.Choice(["generate", "completions", "chat"]),
        help="/generate, /v1/completions or /v1/chat/completions; found out by default",
    ),
    click.option("--model", help="Name for the completions; the first one served by default"),
    click.option("--resume", is_flag=True, help="Go on where an earlier gate with the same settings was stopped"),
)

_ASKING = (
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
        type=POSITIVE_SECONDS,
        default=300.0,
        show_default=True,
        help="Seconds of a request",
    ),
    click.option(
        "--output",
        type=click.Path(path_type=Path, file_okay=False),
        help="Folder of answers and reports; gate-results/TASK by default",
    ),
    click.option(
        "--history",
        type=click.Path(path_type=Path, file_okay=False),
        help="Folder of past nights: adds this one, tells of a drift",
    ),
)


_DATA = click.option(
    "--data",
    type=click.Path(path_type=Path, dir_okay=False),
    help="gsm8k's test.jsonl; fetched once from its public address by default",
)


@click.group()
def gate() -> None:
    """Accuracy of a server, with a verdict: 0 pass, 1 fail, 2 invalid."""


def _with(*options: Decorator) -> Decorator:
    """Give a command all of these options."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@gate.command()
@_DATA
@_with(*_SERVER, *_ASKING)
def gsm8k(data: Path | None, num_questions: int, shots: int, shuffle: int | None, **values: Any) -> None:
    """The questions of gsm8k, asked as SGLang's own test asks them."""
    _run(_gsm8k(data, num_questions, shots).shuffled(shuffle), values)


def _gsm8k(data: Path | None, num_questions: int, shots: int) -> Task:
    """Raises ConfigError."""
    from accuracy.gsm8k import default_file, fetch
    from accuracy.tasks import gsm8k_task

    return gsm8k_task(fetch(default_file()) if data is None else data, count=num_questions, shots=shots)


@gate.command("gsm-mini")
@click.option("--seed", type=int, default=0, show_default=True, help="Which questions")
@_with(*_SERVER, *_ASKING)
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


_URL = click.option("--url", default="http://127.0.0.1:30000", show_default=True, help="Router or node to check")
_PROMPTS = click.option(
    "--prompts",
    type=click.Path(path_type=Path, dir_okay=False),
    help="One prompt a line, as text or as JSON with text or input_ids; gsm-mini's by default",
)
_NUM_PROMPTS = click.option("--num-prompts", type=_COUNT, default=16, show_default=True, help="Of the first ones")
_PARALLEL = click.option("--parallel", type=_COUNT, default=16, show_default=True, help="Requests at once")
_JSON = click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the findings here, as JSON"
)


@gate.command()
@_URL
@_PROMPTS
@_NUM_PROMPTS
@click.option("--new-tokens", type=_COUNT, default=128, show_default=True, help="Sampled after each prompt")
@click.option("--bound", type=FiniteRange(0), default=0.002, show_default=True, help="Of the divergence, cold")
@click.option("--warm-bound", type=FiniteRange(0), default=0.01, show_default=True, help="After prefix hits")
@_PARALLEL
@_JSON
def kl(url: str, prompts: Path | None, num_prompts: int, bound: float, warm_bound: float, **values: Any) -> None:
    """Log-probabilities of decoding against those of a prefill of the same tokens."""
    from accuracy.prompts import load_prompts
    from cli.gate import checks

    loaded = load_prompts(prompts, num_prompts)
    _check(checks.kl(checked_url("url", url), loaded, bounds=(bound, warm_bound), **values))


@gate.command()
@_URL
@click.option("--baseline", required=True, metavar="URL", help="The server whose tokens are right")
@_PROMPTS
@_NUM_PROMPTS
@click.option("--new-tokens", type=_COUNT, default=64, show_default=True, help="Compared after each prompt")
@click.option(
    "--tie",
    type=FiniteRange(0),
    default=1e-4,
    show_default=True,
    help="Gap of log-probabilities below which either token will do (bfloat16: 0.12)",
)
@_PARALLEL
@_JSON
def parity(url: str, baseline: str, prompts: Path | None, num_prompts: int, **values: Any) -> None:
    """Greedy tokens against another server's, cold and warm."""
    from accuracy.prompts import load_prompts
    from cli.gate import checks

    loaded, other = load_prompts(prompts, num_prompts), checked_url("baseline", baseline)
    _check(checks.parity(checked_url("url", url), other, loaded, **values))


@gate.command()
@_URL
@click.option("--unified", required=True, metavar="URL", help="A unified node of the same model: the reference")
@click.option("--prompt", help="What to ask")
@click.option(
    "--answers",
    type=click.Path(path_type=Path, dir_okay=False),
    help="answers.jsonl of a gate: ask what was answered wrong there",
)
@click.option("--id", "question", help="This question of --answers, e.g. gsm8k/17")
@click.option("--max-tokens", type=_COUNT, default=256, show_default=True, help="Of the answer")
@click.option("--stop", multiple=True, default=("Question",), show_default=True, help="May be given several times")
@click.option("--tolerance", type=FiniteRange(0), help="Relative distance; by the nodes' dtype by default")
@_JSON
def bisect(
    url: str, unified: str, prompt: str | None, answers: Path | None, question: str | None, **values: Any
) -> None:
    """The first part of the state that is not the unified node's, for one prompt."""
    from cli.gate import checks

    if (prompt is None) == (answers is None):
        raise click.UsageError("give either --prompt or --answers")
    asked = {"text": prompt} if answers is None else checks.failing_prompt(answers, question)
    _check(checks.bisect_prompt(checked_url("url", url), checked_url("unified", unified), asked, **values))


@gate.command()
@click.option("--fault", "faults", multiple=True, help="Only these; may be given several times. All by default")
@click.option("--num-questions", type=_COUNT, default=40, show_default=True, help="Of gsm-mini, asked cold and warm")
@click.option("--parallel", type=_COUNT, default=16, show_default=True, help="Requests at once")
@click.option("--threshold", type=_SHARE, default=0.87, show_default=True, help="Accuracy that every run must reach")
@click.option("--model-path", default=str(BUNDLED_MODEL), show_default="the bundled tandem-mini")
@click.option("--node-option", "node_options", multiple=True, help="One more word of every node's options; repeatable")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("gate-results/mutate"),
    show_default=True,
    help="Folder of the table, the answers and the nodes' logs",
)
def mutate(faults: tuple[str, ...], node_options: tuple[str, ...], output: Path, **values: Any) -> None:
    """Known faults put in on purpose: how far accuracy falls, and what catches each. Starts its own nodes."""
    from cli.gate.mutate import mutate as run
    from cli.gate.mutate import mutate_options, show

    options = mutate_options(faults, node_options, output=output, **values)

    async def trial() -> int:
        found = await run(options, click.echo)
        show(found)
        return 0 if all(one.as_expected for one in found) else 1

    _check(trial())


@gate.command()
@click.option("--task", "name", type=click.Choice(["gsm8k", "gsm-mini"]), default="gsm8k", show_default=True)
@_DATA
@click.option("--model-path", required=True, help="Hugging Face folder of the model")
@click.option("--node-option", "node_options", multiple=True, help="One more word of every node's options; repeatable")
@click.option("--setting", "settings", multiple=True, help="extra_buffer or no_buffer; repeatable. All by default")
@click.option("--unified/--no-unified", default=True, show_default=True, help="Pair with a unified node")
@click.option(
    "--start-timeout",
    "start_timeout_s",
    type=POSITIVE_SECONDS,
    default=1800.0,
    show_default=True,
    help="Of a stack, seconds",
)
@_with(*_ASKING)
def nightly(
    name: str,
    data: Path | None,
    num_questions: int,
    shots: int,
    shuffle: int | None,
    settings: tuple[str, ...],
    model_path: str,
    node_options: tuple[str, ...],
    unified: bool,
    start_timeout_s: float,
    **values: Any,
) -> None:
    """A stack for each setting, gated one after the other: for every night. Starts its own nodes."""
    from accuracy.tasks import gsm_mini_task
    from cli.gate.console import Bars, show_report
    from cli.gate.nightly import NightlyOptions, checked_settings, exit_code
    from cli.gate.nightly import nightly as run

    mini = name == "gsm-mini"
    task = gsm_mini_task(seed=0, count=num_questions, shots=shots) if mini else _gsm8k(data, num_questions, shots)
    served = {"url": "http://127.0.0.1", "baseline": None, "api": "generate", "model": None, "resume": False}
    options = NightlyOptions(
        settings=checked_settings(settings),
        node_options=("--model-path", model_path, *node_options),
        unified=unified,
        start_timeout_s=start_timeout_s,
        gate=gate_options("nightly", values | served),
    )
    with Bars() as bars:
        outcomes = asyncio.run(run(task.shuffled(shuffle), options, bars, click.echo, show_report))
    for outcome in outcomes:
        click.echo(f"{outcome.setting}: {outcome.verdict}{' and drifts' if outcome.drifts else ''}")
    click.echo(f"written: {options.gate.output / 'index.html'}")
    sys.exit(exit_code(outcomes))


def _check(asking: Coroutine[Any, Any, int]) -> NoReturn:
    """End with the status of a check; 2 when it could not be made."""
    try:
        sys.exit(asyncio.run(asking))
    except WorkerError as error:
        click.echo(f"tandem: invalid: {error.message}", err=True)
        sys.exit(2)


def checked_url(name: str, url: str) -> str:
    """Without a slash at its end. Raises ConfigError for what is no http address."""
    if not url.startswith(("http://", "https://")) or not url.split("://", 1)[1].strip("/"):
        raise ConfigError(f"--{name} {url}: an address like http://127.0.0.1:30000", param=name)
    return url.rstrip("/")
