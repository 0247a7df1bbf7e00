"""The `tandem doctor` command: its own options, and those of the role that it checks."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click
import msgspec

from cli.router import given_keys, router, router_config
from cli.settings import BUNDLED_MODEL, NODE_SETTINGS, node_config, node_options
from cli.sglang import engine_options
from common.config import NodeConfig, Role, RouterConfig, check_node_config
from common.errors import ConfigError
from common.net import is_loopback

if TYPE_CHECKING:
    from cli.doctor.checks import Check

_ROUTER = "router"
_ROLES = [*(role.value for role in Role), _ROUTER]
_DEFAULT_ROLE = Role.PREFILL.value
_NODE_NAMES = {setting.name for setting in NODE_SETTINGS}
_ROLE_KEY = "cli.doctor.role"


class _DoctorCommand(click.Command):
    """Takes the options of the role that is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] in _ROLES:
            raise click.UsageError(f"{args[0]}: say --role {args[0]}", ctx)
        ctx.meta[_ROLE_KEY] = _asked_role(args)
        return super().parse_args(ctx, args)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        help_option = self.get_help_option(ctx)
        mine = [*self.params, *_role_params(ctx.meta.get(_ROLE_KEY, _DEFAULT_ROLE))]
        return mine if help_option is None else [*mine, help_option]


def _asked_role(args: Sequence[str]) -> str:
    """The last --role; a wrong one is refused later, by its own option."""
    found = _DEFAULT_ROLE
    for index, word in enumerate(args):
        if word == "--role" and index + 1 < len(args):
            found = args[index + 1]
        elif word.startswith("--role="):
            found = word.removeprefix("--role=")
    return found if found in _ROLES else _DEFAULT_ROLE


def _role_params(role: str) -> list[click.Parameter]:
    if role == _ROUTER:
        return [param for param in router.params if param.name != "parent_pid"]
    node = click.command(engine_options(node_options(Role(role))(lambda **_: None)))
    return [param for param in node.params if param.name == "engine" or param.name in _NODE_NAMES]


class _Peer(click.ParamType[tuple[str, int]]):
    name = "HOST:PORT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        if isinstance(value, tuple):
            return value
        host, _, port = str(value).rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            self.fail(f"{value} is not HOST:PORT", param, ctx)
        return host.strip("[]"), int(port)


@click.command(cls=_DoctorCommand)
@click.option("--role", type=click.Choice(_ROLES), default=_DEFAULT_ROLE, show_default=True, help="What will run here")
@click.option("--json", "as_json", is_flag=True, help="Print JSON")
@click.option("--quick", is_flag=True, help="Leave out the write of 64 MiB between two processes")
@click.option("--peer", type=_Peer(), help="Write to this `tandem doctor --serve`, and have it write here")
@click.option(
    "--serve",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Check nothing; answer the --peer of others at --transfer-host, until Ctrl-C. 0: a free port",
)
def doctor(
    role: str, as_json: bool, quick: bool, peer: tuple[str, int] | None, serve: int | None, **values: Any
) -> None:
    """Check whether a node or router with these options would work here, before it is started.

    Takes the options of --role too. Exits 1 when a line is an error, 2 when an option is wrong.
    """
    if peer is not None and serve is not None:
        raise click.UsageError("--peer, --serve: one of them; --serve answers the --peer of another host")
    if role == _ROUTER or role == Role.UNIFIED.value:
        for name, given in (("--peer", peer), ("--serve", serve)):
            if given is not None:
                raise click.UsageError(f"{name}: only with --role prefill or decode")
    if role == _ROUTER:
        from cli.doctor import run_router

        _report(
            role,
            as_json,
            run_router.router_checks(_router_settings(values), given_keys(values["api_key"], values["admin_api_key"])),
        )
    if values["engine"] != "native":
        raise ConfigError(
            f"--engine {values['engine']}: the doctor knows nodes of the native engine only", param="engine"
        )
    config = checked_options(node_config(Role(role), values))
    if serve is not None:
        _serve(config, serve)
    from cli.doctor import run

    _report(role, as_json, run.node_checks(config, quick=quick, peer=peer))


def _router_settings(values: dict[str, Any]) -> RouterConfig:
    """Raises ConfigError."""
    from router.settings import check_router_config

    return check_router_config(router_config(values))


def checked_options(config: NodeConfig) -> NodeConfig:
    """The same config. Raises ConfigError for options that cannot work anywhere; what depends on files is looked at by
    the checks."""
    from node.registration import check_registration

    replace = msgspec.structs.replace
    server = replace(config.server, router_api_key_file=None, router_ca_file=None)
    transfer = replace(config.transfer, cluster_key_file=None)
    for path in (config.model.path, str(BUNDLED_MODEL)):
        try:
            model = replace(config.model, path=path)
            check_node_config(replace(config, model=model, transfer=transfer, server=server))
            break
        except ConfigError as error:
            if error.param != "model_path":
                raise
    check_registration(config.role, server)
    return config


def _report(role: str, as_json: bool, checks: Iterable[Check]) -> NoReturn:
    from rich.console import Console

    from cli.doctor import report
    from cli.doctor.checks import Status

    started_s = time.monotonic()
    console = Console()
    if as_json:
        found = list(checks)
        click.echo(report.as_json(found, role, time.monotonic() - started_s))
    else:
        with console.status("checking") if console.is_terminal else contextlib.nullcontext():
            found = list(checks)
        report.print_report(found, role, console)
    sys.exit(int(any(check.status is Status.ERROR for check in found)))


def _serve(config: NodeConfig, port: int) -> NoReturn:
    """Until SIGINT or SIGTERM, which are its proper end."""
    from cli.doctor import wire
    from cli.doctor.fit import settings_of
    from cli.doctor.model import own_fingerprint
    from common.config import rank_devices
    from transfer.handshake import read_key

    logging.basicConfig(format="%(message)s", level=logging.INFO)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    key = read_key(config.transfer.cluster_key_file)
    with wire.listen(config.transfer.host, port) as listener:
        site = wire.Site(
            config.transfer, rank_devices(config)[0], settings=settings_of(config, own_fingerprint(config))
        )
        host, bound = listener.getsockname()[:2]
        where = "on this host (--transfer-host: an address that others reach)" if is_loopback(host) else "on another"
        click.echo(f"{site.transport.name} at {host}:{bound}; {where}: tandem doctor --peer {host}:{bound} ...")
        sys.stdout.flush()
        wire.serve(listener, site, key)
    raise AssertionError("it serves for ever")
