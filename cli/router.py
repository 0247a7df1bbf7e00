"""The `tandem router` command."""

from __future__ import annotations

import logging
import signal
import sys
from typing import Any

import click

from cli.lifeline import die_with_parent, parent_pid_option
from cli.router_settings import KEY_VARIABLES, MAX_PROCESSES, ROUTER_SETTINGS, router_options
from common.config import RouterConfig, WorkerAddress
from common.errors import ConfigError
from common.keys import Key, KeyRole, make_key

PREFILL_USAGE = "--prefill takes a URL and the node's bootstrap port (1 to 65535)"


def _bootstrap_port(value: str) -> int:
    """The second value of the router's --prefill. Raises ConfigError."""
    if value.isdecimal() and 0 < int(value) < 65536:
        return int(value)
    raise ConfigError(f"{PREFILL_USAGE}, not {value}", param="prefill")


@click.command()
@click.option(
    "--prefill",
    type=(str, _bootstrap_port),
    multiple=True,
    metavar="URL BOOTSTRAP_PORT",
    help="A prefill worker; may be given several times",
)
@click.option("--decode", multiple=True, metavar="URL", help="A decode worker; may be given several times")
@click.option(
    "--workers",
    "num_processes",
    type=click.IntRange(1, MAX_PROCESSES),
    default=1,
    show_default=True,
    help="Processes that share port, bounds and the list of workers",
)
@router_options
@click.option("--api-key", envvar=KEY_VARIABLES[0], show_envvar=True, help="One user key (others can see it in ps)")
@click.option("--admin-api-key", envvar=KEY_VARIABLES[1], show_envvar=True, help="One admin key")
@click.option("--pd-disaggregation", is_flag=True, hidden=True, help="Always so; accepted for SGLang's command lines")
@parent_pid_option
def router(
    num_processes: int,
    api_key: str | None,
    admin_api_key: str | None,
    parent_pid: int | None,
    **values: Any,
) -> None:
    """The front door: spreads requests over pairs of prefill and decode workers."""
    from cli.router_processes import RouterProcesses
    from common.logs import configure_logging
    from router.app import serve

    config = router_config(values)
    configure_logging(config.log_level, "router")
    die_with_parent(parent_pid)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit_quietly)
    keys = given_keys(api_key, admin_api_key)
    if num_processes == 1:
        serve(config, keys)
    else:
        RouterProcesses(config, keys, num_processes).run()


def router_config(values: dict[str, Any]) -> RouterConfig:
    """values: the router's options by name, also such as are no setting of a `RouterConfig`."""
    settings = {setting.field: values[setting.field] for setting in ROUTER_SETTINGS}
    workers = {
        "prefill": tuple(WorkerAddress(url=url, bootstrap_port=port) for url, port in values["prefill"]),
        "decode": tuple(WorkerAddress(url=url) for url in values["decode"]),
    }
    return RouterConfig(**settings | workers)


def given_keys(user: str | None, admin: str | None) -> list[Key]:
    """Those that came without a file. Raises ConfigError."""
    given = ((KeyRole.USER, user, "--api-key"), (KeyRole.ADMIN, admin, "--admin-api-key"))
    return [make_key(role, secret, option) for role, secret, option in given if secret is not None]


def _exit_quietly(*_: object) -> None:
    """Before it listens and after it has ended; in between the router handles its signals."""
    logging.shutdown()
    sys.exit(0)
