"""The `tandem` command. A setting that cannot work prints one line and exits 2; anything else that fails exits 1.

Ctrl-C exits 130, but for what serves until then: nodes, router and `up` exit 0.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from cli.compare import compare
from cli.doctor.command import doctor
from cli.gate.commands import gate
from cli.installed import NODE_INSTALL, is_installed, require_nodes
from cli.lifeline import die_with_parent, parent_pid_option
from cli.numbers import POSITIVE_SECONDS
from cli.router import PREFILL_USAGE, router
from cli.settings import BUNDLED_MODEL, LOG_LEVELS, node_config, node_options
from cli.sglang import engine_options, refuse_sglang_options, serve_sglang
from common.config import Role, TransportName, check_node_config
from common.errors import ConfigError, ServingError

_INTERRUPTED = 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the `tandem` command."""
    try:
        tandem.main(args=arguments, prog_name="tandem", standalone_mode=False)
    except ServingError as error:
        _fail(error.message, 2 if isinstance(error, ConfigError) else 1)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
    except click.BadOptionUsage as error:
        _fail(PREFILL_USAGE if error.option_name == "--prefill" else error.format_message(), error.exit_code)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(_INTERRUPTED)
    except ModuleNotFoundError as error:
        if is_installed(error.name or ""):
            raise
        _fail(f"{error.name} is not installed here, and this needs it: {NODE_INSTALL}", 2)
    sys.exit(0)


def _fail(message: str, status: int) -> NoReturn:
    click.echo(f"tandem: error: {message}", err=True)
    sys.exit(status)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="tandem-serve", prog_name="tandem")
def tandem() -> None:
    """Prefill and decode of hybrid models in separate processes."""


def _node_command(role: Role, about: str) -> None:
    @tandem.command(role.value, help=about)
    @node_options(role)
    @engine_options
    @parent_pid_option
    def command(parent_pid: int | None, engine: str, **values: Any) -> None:
        if engine == "sglang":
            die_with_parent(parent_pid)
            serve_sglang(role, values)
            return
        refuse_sglang_options()
        require_nodes(role.value)
        config = check_node_config(node_config(role, values))
        die_with_parent(parent_pid)
        from node.front import serve

        serve(config)


_node_command(Role.PREFILL, "A prefill node: computes prompts and writes their state into decode nodes.")
_node_command(Role.DECODE, "A decode node: takes the state of prompts and makes the answers.")
_node_command(Role.UNIFIED, "A node that does both: the reference for everything else.")
tandem.add_command(router)
tandem.add_command(gate)
tandem.add_command(compare)
tandem.add_command(doctor)


@tandem.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the router")
@click.option("--port", type=int, default=30000, show_default=True, help="Port of the router; 0: a free one")
@click.option("--model-path", default=str(BUNDLED_MODEL), show_default="the bundled tandem-mini")
@click.option("--device", default="cpu", show_default=True, help="Of both nodes; two (cuda:0,cuda:1): of each its own")
@click.option(
    "--transport", type=click.Choice([each.value for each in TransportName]), default="auto", show_default=True
)
@click.option("--dp-size", type=int, default=1, show_default=True, help="Ranks of the decode node")
@click.option("--threads", type=int, default=None, help="torch threads of each rank; its share of the cores by default")
@click.option(
    "--start-timeout", type=POSITIVE_SECONDS, default=300.0, show_default=True, help="Seconds until all must be ready"
)
@click.option("--log-level", type=click.Choice(LOG_LEVELS), default="warning", show_default=True)
@click.option("--once", is_flag=True, help="Ask the question, then stop")
def up(**values: Any) -> None:
    """Router, prefill node and decode node on this machine, and a first question."""
    from cli import up as implementation

    sys.exit(implementation.up(implementation.Options(**values)))


@tandem.command()
@click.argument("text", required=False)
@click.option("--url", default="http://127.0.0.1:30000", show_default=True, help="Router or node")
@click.option("--max-new-tokens", type=int, default=200, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--stop", multiple=True, help="Stop string; may be given several times")
@click.option(
    "--question",
    is_flag=True,
    help="TEXT is a word problem, put it as tandem-mini was taught (`python -m accuracy.gsm_mini` prints some)",
)
@click.option("--example", is_flag=True, help="In place of TEXT: a word problem, another one each time")
@click.option("--no-stream", is_flag=True, help="Print the answer when it is complete")
@click.option("--api-key", envvar="TANDEM_API_KEY", show_envvar=True, help="For a server that asks for one")
def generate(example: bool, **values: Any) -> None:
    """Continue TEXT, printing tokens as they come."""
    from cli.generate import Options, run

    if (values["text"] is None) != example:
        raise click.UsageError("give either TEXT or --example")
    run(Options(**values))


@tandem.command()
@click.option("--seconds", type=float, default=120.0, show_default=True, help="How long faults are injected")
@click.option("--seed", type=int, default=0, show_default=True, help="Of plan and load; the same one, the same plan")
@click.option("--transport", type=click.Choice(["mooncake", "loopback"]), default="loopback", show_default=True)
@click.option("--verify", type=click.Choice(["off", "digest", "full"]), default="digest", show_default=True)
@click.option(
    "--fault",
    "kinds",
    multiple=True,
    metavar="KIND",
    help="Only these faults; may be given several times. All that the transport can do by default",
)
@click.option("--dp-size", type=click.IntRange(1, 8), default=1, show_default=True, help="Ranks of each node")
@click.option("--concurrency", type=int, default=6, show_default=True, help="Clients")
@click.option("--rate", type=float, default=10.0, show_default=True, help="Requests begun a second at most")
@click.option("--liveness-timeout", "liveness_s", type=float, default=3.0, show_default=True, help="Of all processes")
@click.option(
    "--margin", "margin_s", type=float, default=10.0, show_default=True, help="Silence allowed beyond that, seconds"
)
@click.option(
    "--settle-timeout", "settle_s", type=float, default=30.0, show_default=True, help="Seconds until all is free again"
)
@click.option("--model-path", default=str(BUNDLED_MODEL), show_default="the bundled tandem-mini")
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), help="Write the findings here, as JSON")
@click.option("--logs", type=click.Path(path_type=Path, file_okay=False), help="Folder for the processes' logs")
def chaos(**values: Any) -> None:
    """Two prefill and two decode nodes under load, with faults on purpose; exits 1 when anything goes wrong."""
    from cli.chaos.options import chaos_options
    from cli.chaos.run import chaos as run

    sys.exit(run(chaos_options(values)))


@tandem.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("name", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--all", "run_all", is_flag=True, help="Run every benchmark, with ARGUMENTS")
def bench(name: str | None, arguments: tuple[str, ...], run_all: bool) -> None:
    """List the benchmarks, or run the one called NAME with ARGUMENTS (--help: its own)."""
    from cli.bench import list_scripts, run_scripts

    if name is None and not run_all:
        list_scripts()
    elif run_all and name is not None:
        sys.exit(run_scripts(None, (name, *arguments)))
    else:
        sys.exit(run_scripts(name, arguments))


if __name__ == "__main__":
    main()
