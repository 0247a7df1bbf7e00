"""Options of the router that protect it, named as their fields of `RouterConfig`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from common.config import RouterConfig

KEY_VARIABLES = ("TANDEM_API_KEY", "TANDEM_ADMIN_API_KEY")

_DEFAULTS = RouterConfig()

_OPTIONS = (
    click.option(
        "--max-concurrent-requests",
        type=int,
        help="How many requests run at once; the others wait. Not bounded by default",
    ),
    click.option(
        "--queue-size",
        type=int,
        default=_DEFAULTS.queue_size,
        show_default=True,
        help="How many may wait; beyond it: 429",
    ),
    click.option(
        "--queue-timeout",
        "queue_timeout_s",
        type=float,
        default=_DEFAULTS.queue_timeout_s,
        show_default=True,
        help="Seconds that a request may wait",
    ),
    click.option(
        "--request-timeout",
        "request_timeout_s",
        type=float,
        help="Seconds from a request's head to its answer's end; the header x-request-timeout-s asks for less",
    ),
    click.option("--requests-per-minute", type=int, help="Of one user key; not bounded by default"),
    click.option(
        "--tokens-per-minute", type=int, help="Of one user key, of prompts and answers; not bounded by default"
    ),
    click.option("--api-key-file", help="Keys of clients, one a line: role name key. role: user or admin"),
    click.option("--api-key", envvar=KEY_VARIABLES[0], show_envvar=True, help="One user key (others can see it in ps)"),
    click.option("--admin-api-key", envvar=KEY_VARIABLES[1], show_envvar=True, help="One admin key"),
    click.option("--admin-port", type=int, help="Port of the administration, which --port then does not have"),
    click.option("--admin-host", default=_DEFAULTS.admin_host, show_default=True, help="Its address"),
    click.option("--worker-api-key-file", help="The first admin key in it is shown to the workers"),
    click.option("--worker-ca-file", help="PEM: whom to trust for https workers; the system's authorities by default"),
    click.option("--ssl-certfile", help="PEM: certificate chain; HTTPS in place of HTTP"),
    click.option("--ssl-keyfile", help="PEM: its private key"),
    click.option("--ssl-ca-certs", help="PEM: only clients with a certificate of one of these authorities are let in"),
)


def protection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
