"""The `tandem router` command."""

from __future__ import annotations

import logging
import signal
import sys
from typing import Any

import click

from cli.guard_options import protection_options
from cli.lifeline import die_with_parent, parent_pid_option
from cli.policy_options import policy_options
from cli.router_processes import MAX_PROCESSES, RouterProcesses
from cli.settings import LOG_LEVELS
from common.config import RouterConfig, WorkerAddress
from common.errors import ConfigError
from common.keys import Key, KeyRole, make_key

_TIMES = ("health_interval", "connect_timeout", "idle_timeout", "liveness_timeout", "upload_timeout")
PREFILL_USAGE = "--prefill takes a URL and the node's bootstrap port (1 to 65535)"


def _bootstrap_port(value: str) -> int:
    """The second value of the router's --prefill. Raises ConfigError."""
    if value.isdecimal() and 0 < int(value) < 65536:
        return int(value)
    raise ConfigError(f"{PREFILL_USAGE}, not {value}", param="prefill")


@click.command()
@click.option("--host", default=RouterConfig().host, show_default=True, help="Address to listen on")
@click.option("--port", type=int, default=RouterConfig().port, show_default=True, help="Port to listen on")
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
@click.option("--health-interval", type=float, default=1.0, show_default=True, help="Seconds between two checks")
@click.option("--connect-timeout", type=float, default=2.0, show_default=True, help="Seconds to open a connection")
@click.option("--idle-timeout", type=float, default=300.0, show_default=True, help="Seconds between two bytes")
@click.option("--liveness-timeout", type=float, default=5.0, show_default=True, help="Seconds of a worker's silence")
@click.option("--upload-timeout", type=float, default=60.0, show_default=True, help="Seconds for the body of a request")
@click.option(
    "--max-retries",
    type=int,
    default=RouterConfig().max_retries,
    show_default=True,
    help="How often a request may move to another pair of workers",
)
@click.option(
    "--resume-on-decode-failure/--no-resume-on-decode-failure",
    default=RouterConfig().resume_on_decode_failure,
    show_default=True,
    help="Let it move in mid-answer too: the stream goes on at another decode worker",
)
@click.option(
    "--drain-timeout",
    "drain_timeout_s",
    type=float,
    default=RouterConfig().drain_timeout_s,
    show_default=True,
    help="Seconds that what runs may take to end after SIGTERM",
)
@policy_options
@click.option(
    "--state-file",
    metavar="FILE",
    help="Keep workers that come at run time here, for the next start and for other routers",
)
@click.option("--require-fingerprint", metavar="FINGERPRINT", help="Take only workers of this state layout")
@click.option(
    "--heartbeat-timeout",
    "heartbeat_timeout_s",
    type=float,
    default=RouterConfig().heartbeat_timeout_s,
    show_default=True,
    help="Seconds until a worker that registered itself, and does not live, is forgotten",
)
@click.option(
    "--idle-probe-interval",
    "idle_probe_interval_s",
    type=float,
    default=RouterConfig().idle_probe_interval_s,
    show_default=True,
    help="Seconds until an idle worker is asked for a token; 0: never",
)
@click.option(
    "--breaker-failures",
    type=int,
    default=RouterConfig().breaker_failures,
    show_default=True,
    help="Failures of a worker in a row after which it gets no requests for a while; 0: it always does",
)
@click.option(
    "--breaker-failure-rate",
    type=float,
    default=RouterConfig().breaker_failure_rate,
    show_default=True,
    help="Part of its requests that may not fail either, of 20 and more within the window",
)
@click.option(
    "--breaker-window",
    "breaker_window_s",
    type=float,
    default=RouterConfig().breaker_window_s,
    show_default=True,
    help="Seconds over which the rate is taken",
)
@click.option(
    "--breaker-open",
    "breaker_open_s",
    type=float,
    default=RouterConfig().breaker_open_s,
    show_default=True,
    help="Seconds without requests until it is tried again; each failure doubles them, up to eight times",
)
@click.option(
    "--outlier-factor",
    type=float,
    default=RouterConfig().outlier_factor,
    show_default=True,
    help="How many times slower than its peers a worker may be before it gets no requests for a while; 0: any",
)
@click.option(
    "--outlier-window",
    "outlier_window_s",
    type=float,
    default=RouterConfig().outlier_window_s,
    show_default=True,
    help="Seconds over which its times are compared",
)
@click.option(
    "--outlier-ejection",
    "outlier_ejection_s",
    type=float,
    default=RouterConfig().outlier_ejection_s,
    show_default=True,
    help="Seconds without requests, the first time",
)
@click.option("--max-body-bytes", type=int, default=RouterConfig().max_body_bytes, show_default=True)
@click.option("--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True)
@click.option(
    "--request-log",
    type=click.Choice(["text", "json", "off"]),
    default=RouterConfig().request_log,
    show_default=True,
    help="A line on stderr for each request: never a prompt, an answer or a key",
)
@click.option("--otlp-endpoint", metavar="URL", help="Where OpenTelemetry traces go (OTLP over HTTP); none by default")
@protection_options
@click.option("--pd-disaggregation", is_flag=True, hidden=True, help="Always so; accepted for SGLang's command lines")
@parent_pid_option
def router(
    log_level: str,
    num_processes: int,
    api_key: str | None,
    admin_api_key: str | None,
    parent_pid: int | None,
    **values: Any,
) -> None:
    """The front door: spreads requests over pairs of prefill and decode workers."""
    from common.logs import configure_logging
    from router.app import listen, serve

    config = router_config(values | {"log_level": log_level})
    configure_logging(log_level, "router")
    die_with_parent(parent_pid)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit_quietly)
    keys = _given_keys(api_key, admin_api_key)
    if num_processes == 1:
        serve(config, keys)
    else:
        RouterProcesses(config, listen(config, keys), keys, num_processes).run()


def router_config(values: dict[str, Any]) -> RouterConfig:
    """values: the router's options by name, also such as are no setting of a `RouterConfig`."""
    settings = {name: value for name, value in values.items() if name in RouterConfig.__struct_fields__}
    times = {f"{name}_s": values[name] for name in _TIMES}
    workers = {
        "prefill": tuple(WorkerAddress(url=url, bootstrap_port=port) for url, port in values["prefill"]),
        "decode": tuple(WorkerAddress(url=url) for url in values["decode"]),
    }
    return RouterConfig(**settings | times | workers)


def _given_keys(user: str | None, admin: str | None) -> list[Key]:
    """Those that came without a file. Raises ConfigError."""
    given = ((KeyRole.USER, user, "--api-key"), (KeyRole.ADMIN, admin, "--admin-api-key"))
    return [make_key(role, secret, option) for role, secret, option in given if secret is not None]


def _exit_quietly(*_: object) -> None:
    """Before it listens and after it has ended; in between the router handles its signals."""
    logging.shutdown()
    sys.exit(0)
