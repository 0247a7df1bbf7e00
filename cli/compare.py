"""`tandem compare`, as far as its options go."""

from __future__ import annotations

from pathlib import Path

import click

from cli.gate.commands import checked_url
from common.errors import ConfigError


@click.command("compare")
@click.argument("stacks", nargs=-1, required=True, metavar="[NAME=]URL [NAME=]URL…")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, dir_okay=False),
    help="One prompt a line, as text or as JSON with text or input_ids; gsm-mini's by default",
)
@click.option("--num-prompts", type=click.IntRange(1), default=16, show_default=True, help="Of the first ones")
@click.option("--new-tokens", type=click.IntRange(1), default=64, show_default=True, help="Of each answer at most")
@click.option("--parallel", type=click.IntRange(1), default=4, show_default=True, help="Requests at once")
@click.option(
    "--api", type=click.Choice(["generate", "completions", "chat"]), help="Of all of them; found out by default"
)
@click.option("--timeout", "timeout_s", type=click.FloatRange(0, min_open=True), default=600.0, show_default=True)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the figures here, as JSON")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Write table and plots here, as HTML")
def compare(
    stacks: tuple[str, ...],
    prompts: Path | None,
    num_prompts: int,
    new_tokens: int,
    parallel: int,
    api: str | None,
    timeout_s: float,
    output: Path | None,
    plot: Path | None,
) -> None:
    """The same prompts through several servers (routers, nodes, SGLang, vLLM), one after the other.

    Tokens and log-probabilities are compared with the first one's."""
    named = [_named(stack) for stack in stacks]
    if len(named) < 2:
        raise click.UsageError("give two servers at least")
    if len({name for name, _ in named}) < len(named):
        raise ConfigError("STACKS: give each a name of its own (NAME=URL)", param="stacks")
    from accuracy.client import Api, Client
    from accuracy.prompts import load_prompts
    from cli.comparison import run

    chosen = None if api is None else Api(api)
    clients = [(name, Client(url=url, api=chosen, timeout_s=timeout_s, parallel=parallel)) for name, url in named]
    run(clients, load_prompts(prompts, num_prompts), new_tokens=new_tokens, output=output, plot=plot)


def _named(stack: str) -> tuple[str, str]:
    name, equals, url = stack.partition("=")
    is_named = bool(equals) and "/" not in name
    return (name, checked_url("stacks", url)) if is_named else (stack, checked_url("stacks", stack))
