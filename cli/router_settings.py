"""The options of the router, as a table: which field of `RouterConfig` each one fills."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import click

from cli.settings import LOG_LEVELS
from common.config import PolicyName, RouterConfig

MAX_PROCESSES = 64
KEY_VARIABLES = ("TANDEM_API_KEY", "TANDEM_ADMIN_API_KEY")

_DEFAULTS = RouterConfig()
_ALIASES = ("cache_aware", "manual")
"""SGLang's names for prefix_aware and sticky."""


class _Policy(click.Choice[str]):
    def __init__(self) -> None:
        super().__init__([*(name.value for name in PolicyName), *_ALIASES])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return PolicyName(super().convert(value, param, ctx))

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return f"[{'|'.join(PolicyName)}]"


class RouterSetting(NamedTuple):
    """field: of `RouterConfig`; the option is called like it, without the `_s` of seconds. kind: int, float, str, bool
    (a pair of flags), a click type or a tuple of words."""

    field: str
    kind: Any
    help: str
    metavar: str | None = None

    @property
    def flag(self) -> str:
        return f"--{self.field.removesuffix('_s').replace('_', '-')}"

    def option(self) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        default = getattr(_DEFAULTS, self.field)
        flags = f"{self.flag}/--no{self.flag[1:]}" if self.kind is bool else self.flag
        return click.option(
            flags,
            self.field,
            type=click.Choice(self.kind) if isinstance(self.kind, tuple) else self.kind,
            default=default.value if isinstance(default, enum.Enum) else default,
            show_default=True,
            metavar=self.metavar,
            help=self.help,
        )


ROUTER_SETTINGS = (
    RouterSetting("host", str, "Address to listen on"),
    RouterSetting("port", int, "Port to listen on"),
    RouterSetting("policy", _Policy(), "How workers are chosen"),
    RouterSetting("prefill_policy", _Policy(), "How prefill workers are chosen, if not by --policy"),
    RouterSetting("decode_policy", _Policy(), "How decode workers are chosen, if not by --policy"),
    RouterSetting("max_retries", int, "How often a request may move to another pair of workers"),
    RouterSetting(
        "resume_on_decode_failure", bool, "Let it move in mid-answer too: the stream goes on at another decode worker"
    ),
    RouterSetting("health_interval_s", float, "Seconds between two checks"),
    RouterSetting("liveness_timeout_s", float, "Seconds of a worker's silence"),
    RouterSetting("connect_timeout_s", float, "Seconds to open a connection"),
    RouterSetting("idle_timeout_s", float, "Seconds between two bytes"),
    RouterSetting("upload_timeout_s", float, "Seconds for the body of a request"),
    RouterSetting("max_body_bytes", int, "Largest request body"),
    RouterSetting("drain_timeout_s", float, "Seconds that what runs may take to end after SIGTERM"),
    # Membership
    RouterSetting(
        "state_file", str, "Keep workers that come at run time here, for the next start and for other routers", "FILE"
    ),
    RouterSetting("require_fingerprint", str, "Take only workers of this state layout", "FINGERPRINT"),
    RouterSetting(
        "heartbeat_timeout_s", float, "Seconds until a worker that registered itself, and does not live, is forgotten"
    ),
    RouterSetting("idle_probe_interval_s", float, "Seconds until an idle worker is asked for a token; 0: never"),
    # Workers that fail
    RouterSetting(
        "breaker_failures",
        int,
        "Failures of a worker in a row after which it gets no requests for a while; 0: it always does",
    ),
    RouterSetting(
        "breaker_failure_rate", float, "Part of its requests that may not fail either, of 20 and more within the window"
    ),
    RouterSetting("breaker_window_s", float, "Seconds over which the rate is taken"),
    RouterSetting(
        "breaker_open_s",
        float,
        "Seconds without requests until it is tried again; each failure doubles them, up to eight times",
    ),
    RouterSetting(
        "outlier_factor",
        float,
        "How many times slower than its peers a worker may be before it gets no requests for a while; 0: any",
    ),
    RouterSetting("outlier_window_s", float, "Seconds over which its times are compared"),
    RouterSetting("outlier_ejection_s", float, "Seconds without requests, the first time"),
    # Protection
    RouterSetting(
        "max_concurrent_requests", int, "How many requests run at once; the others wait. Not bounded by default"
    ),
    RouterSetting("queue_size", int, "How many may wait; beyond it: 429"),
    RouterSetting("queue_timeout_s", float, "Seconds that a request may wait"),
    RouterSetting(
        "request_timeout_s",
        float,
        "Seconds from a request's head to its answer's end; the header x-request-timeout-s asks for less",
    ),
    RouterSetting("requests_per_minute", int, "Of one user key; not bounded by default"),
    RouterSetting("tokens_per_minute", int, "Of one user key, of prompts and answers; not bounded by default"),
    RouterSetting("api_key_file", str, "Keys of clients, one a line: role name key. role: user or admin"),
    RouterSetting("admin_port", int, "Port of the administration, which --port then does not have"),
    RouterSetting("admin_host", str, "Its address"),
    RouterSetting("worker_api_key_file", str, "The first admin key in it is shown to the workers"),
    RouterSetting("worker_ca_file", str, "PEM: whom to trust for https workers; the system's authorities by default"),
    RouterSetting("ssl_certfile", str, "PEM: certificate chain; HTTPS in place of HTTP"),
    RouterSetting("ssl_keyfile", str, "PEM: its private key"),
    RouterSetting("ssl_ca_certs", str, "PEM: only clients with a certificate of one of these authorities are let in"),
    # What it tells
    RouterSetting("log_level", LOG_LEVELS, "Least severe level that is logged"),
    RouterSetting(
        "request_log", ("text", "json", "off"), "A line on stderr for each request: never a prompt, an answer or a key"
    ),
    RouterSetting("otlp_endpoint", str, "Where OpenTelemetry traces go (OTLP over HTTP); none by default", "URL"),
)


def router_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The table's options, each named as its field."""
    for setting in reversed(ROUTER_SETTINGS):
        command = setting.option()(command)
    return command
