"""The options of a node, as a table: which field of which part of `NodeConfig` each one fills."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec

from common.config import (
    DType,
    EngineConfig,
    LoadFormat,
    LoopbackFaults,
    ModelConfig,
    NodeConfig,
    Protocol,
    Role,
    ServerConfig,
    TransferConfig,
    TransportName,
    Verify,
)
from common.errors import ConfigError
from common.reasoning import ReasoningParser

BUNDLED_MODEL = Path(__file__).resolve().parents[1] / "models" / "tandem-mini"
LOG_LEVELS = ("debug", "info", "warning", "error")

_DEFAULTS: dict[str, msgspec.Struct] = {
    "model": ModelConfig(path=str(BUNDLED_MODEL)),
    "engine": EngineConfig(),
    "transfer": TransferConfig(),
    "server": ServerConfig(),
    "faults": LoopbackFaults(),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """section, field: what it fills. flags: its names, the first one is shown in errors. kind: int, float, str, an
    enum, a tuple of words, or list: of strings, the option may be given several times. roles: the nodes whose help
    shows it; the others take it too, so that one set of options can be given to all."""

    section: str
    field: str
    flags: tuple[str, ...]
    kind: Any
    help: str
    roles: tuple[Role, ...] = tuple(Role)

    @property
    def name(self) -> str:
        return f"{self.section}__{self.field}"

    def option(self, role: Role) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        default = _default(self)
        return click.option(
            *self.flags,
            self.name,
            type=_click_type(self.kind),
            multiple=self.kind is list,
            default=default,
            show_default=default not in (None, "", ()),
            hidden=role not in self.roles,
            help=self.help,
            is_flag=self.kind is bool,
        )


def _default(setting: Setting) -> Any:
    default = getattr(_DEFAULTS[setting.section], setting.field)
    return default.value if isinstance(default, enum.Enum) else default


def _click_type(kind: Any) -> Any:
    if isinstance(kind, tuple):
        return click.Choice(kind)
    if kind is list:
        return str
    if isinstance(kind, type) and issubclass(kind, enum.StrEnum):
        return click.Choice([member.value for member in kind])
    return kind


_PREFILL, _DECODES, _PAIR = (Role.PREFILL,), (Role.DECODE, Role.UNIFIED), (Role.PREFILL, Role.DECODE)
_PARTS = ("kv", "conv", "ssm", "track", "metadata")

NODE_SETTINGS = (
    Setting("model", "path", ("--model-path", "--model"), str, "Hugging Face folder of the model"),
    Setting("model", "chat_template", ("--chat-template",), str, "File with a chat template; the model's by default"),
    Setting("model", "reasoning_parser", ("--reasoning-parser",), ReasoningParser, "Tells thoughts from content"),
    Setting("model", "served_name", ("--served-model-name",), str, "Name that clients use; the folder's by default"),
    Setting("model", "dtype", ("--dtype",), DType, "Of weights, KV and conv state"),
    Setting("model", "ssm_dtype", ("--mamba-ssm-dtype",), DType, "Of the SSM state"),
    Setting(
        "model", "device", ("--device",), str, "torch device; of several ranks cpu, cuda, or one each: cuda:0,cuda:1"
    ),
    Setting("model", "load_format", ("--load-format",), LoadFormat, "dummy: random weights, to measure speed"),
    Setting("server", "host", ("--host",), str, "Address to listen on"),
    Setting("server", "port", ("--port",), int, "Port to listen on"),
    Setting("server", "bootstrap_host", ("--bootstrap-host",), str, "Address where it opens rooms", _PREFILL),
    Setting(
        "server",
        "bootstrap_port",
        ("--disaggregation-bootstrap-port", "--bootstrap-port"),
        int,
        "Port where it opens rooms",
        _PREFILL,
    ),
    Setting("server", "max_body_bytes", ("--max-body-bytes",), int, "Largest request body"),
    Setting("server", "upload_timeout_s", ("--upload-timeout",), float, "Seconds for the whole body of a request"),
    Setting("server", "drain_timeout_s", ("--drain-timeout",), float, "Seconds for what runs to end after SIGTERM"),
    Setting(
        "server", "routers", ("--router",), list, "Router to register at, by URL; may be given several times", _PAIR
    ),
    Setting(
        "server", "advertise_url", ("--advertise-url",), str, "Where routers reach it; host and port by default", _PAIR
    ),
    Setting("server", "heartbeat_interval_s", ("--heartbeat-interval",), float, "Seconds between registrations", _PAIR),
    Setting(
        "server",
        "router_api_key_file",
        ("--router-api-key-file",),
        str,
        "Its first admin key is shown to routers",
        _PAIR,
    ),
    Setting("server", "router_ca_file", ("--router-ca-file",), str, "PEM: whom to trust for https routers", _PAIR),
    Setting("server", "api_key_file", ("--api-key-file",), str, "Keys of clients, one a line: role name key"),
    Setting("server", "ssl_certfile", ("--ssl-certfile",), str, "PEM: certificate chain; HTTPS in place of HTTP"),
    Setting("server", "ssl_keyfile", ("--ssl-keyfile",), str, "PEM: its private key"),
    Setting("server", "ssl_ca_certs", ("--ssl-ca-certs",), str, "PEM: whose clients' certificates are asked for"),
    Setting("server", "log_level", ("--log-level",), LOG_LEVELS, "Least severe level that is logged"),
    Setting("server", "otlp_endpoint", ("--otlp-endpoint",), str, "Where OpenTelemetry traces go (OTLP over HTTP)"),
    Setting("engine", "page_size", ("--page-size",), int, "Tokens in a KV page"),
    Setting("engine", "max_total_tokens", ("--max-total-tokens",), int, "Tokens that all KV pages hold"),
    Setting("engine", "max_state_slots", ("--max-mamba-cache-size",), int, "State slots; slot 0 is reserved"),
    Setting(
        "engine", "max_running_requests", ("--max-running-requests",), int, "Sequences computed at once; others wait"
    ),
    Setting(
        "engine",
        "chunked_prefill_size",
        ("--chunked-prefill-size",),
        int,
        "Prompt tokens computed in one step; -1: all",
    ),
    Setting(
        "engine",
        "mamba_scheduler_strategy",
        ("--mamba-scheduler-strategy", "--mamba-radix-cache-strategy"),
        ("no_buffer", "extra_buffer"),
        "Which states are saved for prefix caching",
    ),
    Setting(
        "engine",
        "mamba_track_interval",
        ("--mamba-track-interval",),
        int,
        "Tokens between states decode saves",
        _DECODES,
    ),
    Setting("engine", "disable_radix_cache", ("--disable-radix-cache",), bool, "Keep no prefixes"),
    Setting(
        "engine",
        "disable_overlap_schedule",
        ("--disable-overlap-schedule/--enable-overlap-schedule",),
        bool,
        "Plan a step only when the last has ended; the default on the CPU",
    ),
    Setting(
        "engine", "enable_mixed_chunk", ("--enable-mixed-chunk",), bool, "Prefill and decode rows in one step", _DECODES
    ),
    Setting(
        "engine",
        "local_prefill_max_tokens",
        ("--local-prefill-max-tokens",),
        int,
        "Prompt tokens a decode node computes itself when it holds the rest",
        (Role.DECODE,),
    ),
    Setting("engine", "context_length", ("--context-length",), int, "Longest sequence; the model's own by default"),
    Setting("engine", "dp_size", ("--dp-size", "--data-parallel-size"), int, "Ranks: processes with a model each"),
    Setting("engine", "threads", ("--threads",), int, "torch threads of each rank"),
    Setting(
        "transfer",
        "transport",
        ("--transport",),
        TransportName,
        "What carries the state; auto: cuda_ipc or mooncake",
        _PAIR,
    ),
    Setting("transfer", "protocol", ("--transfer-protocol",), Protocol, "What Mooncake uses", _PAIR),
    Setting(
        "transfer",
        "device",
        ("--transfer-device", "--disaggregation-ib-device"),
        str,
        "RDMA devices, comma separated; with --transfer-protocol rdma",
        _PAIR,
    ),
    Setting("transfer", "host", ("--transfer-host",), str, "Address that peers reach this node's memory at", _PAIR),
    Setting("transfer", "verify", ("--verify",), Verify, "How decode checks what arrived", _PAIR),
    Setting(
        "transfer",
        "ssm_wire_dtype",
        ("--ssm-wire-dtype",),
        DType,
        "What SSM states cross as; what they are by default. bfloat16 halves them and loses bits",
        _PAIR,
    ),
    Setting(
        "transfer",
        "disable_layerwise_transfer",
        ("--disable-layerwise-transfer",),
        bool,
        "Send what a step computes when all of it is done, not layer by layer",
        _PREFILL,
    ),
    Setting(
        "transfer",
        "disable_early_prefill",
        ("--disable-early-prefill",),
        bool,
        "Compute no prompt before decode has opened its room, also when there is nothing else to do",
        _PREFILL,
    ),
    Setting(
        "transfer", "cluster_key_file", ("--cluster-key-file",), str, "Shared secret; none: loopback peers only", _PAIR
    ),
    Setting(
        "transfer", "bootstrap_timeout_s", ("--bootstrap-timeout",), float, "Seconds until both legs have met", _PAIR
    ),
    Setting("transfer", "transfer_timeout_s", ("--transfer-timeout",), float, "Seconds for a hand-off's writes", _PAIR),
    Setting("transfer", "first_token_timeout_s", ("--first-token-timeout",), float, "Seconds until the first token"),
    Setting(
        "transfer", "liveness_timeout_s", ("--liveness-timeout",), float, "Seconds of silence of a dead rank or peer"
    ),
    Setting("faults", "flip", ("--fault-flip",), _PARTS, "Tests: flip a byte of this part", roles=()),
    Setting("faults", "zero", ("--fault-zero",), _PARTS, "Tests: write zeros in place of this part", roles=()),
    Setting("faults", "drop", ("--fault-drop",), _PARTS, "Tests: do not write this part", roles=()),
    Setting("faults", "fail", ("--fault-fail",), _PARTS[:-1], "Tests: writing this part fails", roles=()),
    Setting("faults", "every", ("--fault-every",), int, "Tests: only in every n-th room", roles=()),
    Setting("faults", "delay_s", ("--fault-delay",), float, "Tests: seconds before each write", roles=()),
    Setting("faults", "bandwidth_bytes_s", ("--fault-bandwidth",), float, "Tests: bytes a second", roles=()),
    Setting("faults", "engine", ("--fault-engine",), str, "Tests: a fault of the engine, by name", roles=()),
    Setting("faults", "file", ("--fault-file",), str, "Tests: JSON of these, in force while it is there", roles=()),
)


def node_options(role: Role) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command every option of a node; it gets them as keywords for `node_config`."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for setting in reversed(NODE_SETTINGS):
            command = setting.option(role)(command)
        return command

    return add


def node_config(role: Role, values: dict[str, Any]) -> NodeConfig:
    """values: by `Setting.name`. Raises ConfigError when faults are asked of a transport that injects none."""
    for setting in NODE_SETTINGS:
        asked = setting.section == "faults" and values[setting.name] != _default(setting)
        if asked and values["transfer__transport"] != TransportName.LOOPBACK.value:
            raise ConfigError(f"{setting.flags[0]}: only with --transport loopback", param=setting.flags[0][2:])
    parts: dict[str, dict[str, Any]] = {section: {} for section in _DEFAULTS}
    for setting in NODE_SETTINGS:
        parts[setting.section][setting.field] = values[setting.name]
    parts["transfer"]["faults"] = parts.pop("faults")
    return msgspec.convert({"role": role, **parts}, NodeConfig)
