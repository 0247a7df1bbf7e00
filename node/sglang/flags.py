"""A node's settings as the command line and the environment of `python -m sglang.launch_server`.

Only what the user has set is translated: SGLang's own defaults suit its models and cards better than ours. A setting
that SGLang has no word for is refused, and so is a passed-on argument that would contradict us.
"""

from __future__ import annotations

import enum
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import Protocol, Role, TransportName
from common.errors import ConfigError
from node.sglang.config import SglangConfig
from node.sglang.versions import Version
from transfer.mooncake import DEVICE_SETTINGS

log = logging.getLogger(__name__)

PLAIN = {
    "model.served_name": "--served-model-name",
    "model.chat_template": "--chat-template",
    "model.dtype": "--dtype",
    "model.ssm_dtype": "--mamba-ssm-dtype",
    "model.load_format": "--load-format",
    "server.log_level": "--log-level",
    "server.ssl_certfile": "--ssl-certfile",
    "server.ssl_keyfile": "--ssl-keyfile",
    "engine.page_size": "--page-size",
    "engine.max_total_tokens": "--max-total-tokens",
    "engine.max_state_slots": "--max-mamba-cache-size",
    "engine.max_running_requests": "--max-running-requests",
    "engine.chunked_prefill_size": "--chunked-prefill-size",
    "engine.context_length": "--context-length",
    "engine.dp_size": "--dp-size",
    "engine.mamba_track_interval": "--mamba-track-interval",
    "engine.disable_radix_cache": "--disable-radix-cache",
    "engine.disable_overlap_schedule": "--disable-overlap-schedule",
    "engine.enable_mixed_chunk": "--enable-mixed-chunk",
}
"""Settings that are one flag of SGLang's, in every version."""
OTHER_FLAGS = (
    "--model-path",
    "--host",
    "--port",
    "--tp-size",
    "--base-gpu-id",
    "--device",
    "--prefill-max-requests",
    "--disaggregation-mode",
    "--disaggregation-transfer-backend",
    "--disaggregation-bootstrap-port",
    "--disaggregation-ib-device",
)
"""The others that `launch` makes, besides `Version.strategy_flag`."""

_ELSEWHERE = {
    "model.path",
    "model.device",
    "engine.mamba_scheduler_strategy",
    "server.host",
    "server.port",
    "server.bootstrap_host",
    "server.bootstrap_port",
    "server.routers",
    "server.advertise_url",
    "server.heartbeat_interval_s",
    "server.router_api_key_file",
    "server.router_ca_file",
    "server.drain_timeout_s",
    "transfer.transport",
    "transfer.protocol",
    "transfer.device",
    "transfer.host",
    "transfer.bootstrap_timeout_s",
    "transfer.transfer_timeout_s",
}
_OURS = {
    "--model-path": "--model-path",
    "--host": "--host",
    "--port": "--port",
    "--tp-size": "--tp-size",
    "--tensor-parallel-size": "--tp-size",
    "--disaggregation-mode": "the command's name",
    "--disaggregation-transfer-backend": "--transport, --transfer-protocol",
    "--disaggregation-bootstrap-port": "--bootstrap-port",
    "--mamba-scheduler-strategy": "--mamba-scheduler-strategy",
    "--mamba-radix-cache-strategy": "--mamba-scheduler-strategy",
    "--config": "options",
    "--api-key": "a private network: the supervisor and routers ask without a key",
    "--admin-api-key": "a private network: the supervisor and routers ask without a key",
    "--ssl-ca-certs": "a private network: the supervisor asks without a certificate",
}
"""Flags that may not be passed on, and what says the same."""

_WHOLE = ("engine.chunked_prefill_size", -1)
ONE_AT_A_TIME = "--prefill-max-requests"
_HYBRID_WORDS = ("mamba", "ssm", "linear", "hybrid", "recurrent")
_FORCED = ("MC_FORCE_TCP", "MC_FORCE_HCA", "MC_FORCE_MNNVL", "MC_INTRANODE_NVLINK", "SGLANG_MOONCAKE_CUSTOM_MEM_POOL")
_DEFAULTS = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
"""/health is to say that the server lives, at once: with `true` it makes a token, takes a second at least, and waits
behind long prompts, so a router would take a busy server for a dead one."""


@dataclass(frozen=True, slots=True)
class Launch:
    """arguments: of `python -m sglang.launch_server`. defaults: environment where it is not set; forced: and where it
    is; removed: what may not be set."""

    arguments: tuple[str, ...]
    defaults: Mapping[str, str]
    forced: Mapping[str, str]
    removed: tuple[str, ...]

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        kept = {name: value for name, value in inherited.items() if name not in self.removed}
        return {**self.defaults, **kept, **self.forced}


def launch(config: SglangConfig, version: Version) -> Launch:
    """Raises ConfigError for what SGLang cannot do, or not rightly."""
    _check_given(config)
    _check_passed_on(config.arguments)
    server = config.server
    arguments = ["--model-path", config.node.model.path, "--host", server.host, "--port", str(server.port)]
    for setting, flag in PLAIN.items():
        if setting in config.given:
            arguments += _flag(flag, _value(config, setting))
    arguments += _device(config) + _strategy(config, version) + _one_at_a_time(config, version)
    if config.tp_size > 1:
        arguments += ["--tp-size", str(config.tp_size)]
    if config.role is not Role.UNIFIED:
        arguments += _disaggregation(config, version)
    forced = _forced(config)
    removed = tuple(name for name in _FORCED if config.role is not Role.UNIFIED and name not in forced)
    return Launch((*arguments, *config.arguments), _DEFAULTS | _tuning(config), forced, removed)


def _value(config: SglangConfig, setting: str) -> Any:
    section, _, field = setting.partition(".")
    return getattr(getattr(config.node, section), field)


def _flag(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag] if value else []
    if value is None:
        return []
    return [flag, str(value.value if isinstance(value, enum.Enum) else value)]


# What is refused


def _check_given(config: SglangConfig) -> None:
    for setting, option in config.given.items():
        if setting in ("server.api_key_file", "server.ssl_ca_certs"):
            raise ConfigError(
                f"{option}: not with --engine sglang, whose port belongs on a private network behind the router",
                param=_param(option),
            )
        if setting not in PLAIN and setting not in _ELSEWHERE:
            raise ConfigError(
                f"{option}: SGLang has no such setting; what it has goes through --sglang-arg", param=_param(option)
            )
        value = _value(config, setting)
        if setting in PLAIN and type(value) is int and value < 1 and (setting, value) != _WHOLE:
            raise ConfigError(f"{option} {value}: at least 1", param=_param(option))
    server = config.server
    if "server.bootstrap_host" in config.given and server.bootstrap_host != server.host:
        raise ConfigError(
            f"--bootstrap-host {server.bootstrap_host}: SGLang opens rooms at --host {server.host}",
            param="bootstrap_host",
        )


def _check_passed_on(arguments: tuple[str, ...]) -> None:
    """A name that argparse would complete to one of ours is ours."""
    for argument in arguments:
        name = argument.partition("=")[0]
        if not name.startswith("--"):
            continue
        ours = next((flag for flag in _OURS if flag.startswith(name)), None)
        if ours is not None and len(name) > 2:
            raise ConfigError(f"--sglang-arg {argument}: use {_OURS[ours]}", param="sglang_arg")


def _param(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


# What several settings make together


def _device(config: SglangConfig) -> list[str]:
    if "model.device" not in config.given:
        return []
    device = config.node.model.device
    kind, _, card = device.partition(":")
    if kind != "cuda" or (card and not card.isdigit()):
        raise ConfigError(
            f"--device {device}: with --engine sglang cuda, or the first card to take (cuda:2)", param="device"
        )
    return ["--device", "cuda", *(["--base-gpu-id", card] if card else [])]


def _strategy(config: SglangConfig, version: Version) -> list[str]:
    engine = config.node.engine
    if "engine.mamba_scheduler_strategy" not in config.given:
        return []
    strategy = engine.mamba_scheduler_strategy
    if strategy == "extra_buffer":
        return [version.strategy_flag, strategy]
    if "engine.page_size" in config.given and engine.page_size != 1:
        raise ConfigError(f"--page-size {engine.page_size}: SGLang's no_buffer has pages of 1 token", param="page_size")
    if engine.disable_overlap_schedule is False:
        raise ConfigError(
            "--enable-overlap-schedule: SGLang's no_buffer needs --disable-overlap-schedule",
            param="disable_overlap_schedule",
        )
    already = "engine.disable_overlap_schedule" in config.given
    return [version.strategy_flag, strategy, *([] if already else ["--disable-overlap-schedule"])]


def _one_at_a_time(config: SglangConfig, version: Version) -> list[str]:
    """Where batches of several prompts would cache wrong states, prompts are computed one at a time.

    Raises ConfigError when the user asks for more than that.
    """
    engine = config.node.engine
    saves_states = (
        config.role is not Role.DECODE
        and not engine.disable_radix_cache
        and "--disable-radix-cache" not in config.arguments
        and not ("engine.mamba_scheduler_strategy" in config.given and engine.mamba_scheduler_strategy == "no_buffer")
    )
    if not version.mixes_states or not saves_states or not _may_be_hybrid(config.node.model.path):
        return []
    why = f"sglang {version.name} saves wrong states with extra_buffer when it computes several prompts together"
    way_out = "--mamba-scheduler-strategy no_buffer and --disable-radix-cache avoid it, 0.5.20 and later have it fixed"
    asked = _passed_on(config.arguments, ONE_AT_A_TIME)
    mixes = any(each.startswith("--enable-mix") for each in config.arguments)
    if engine.enable_mixed_chunk or mixes:
        raise ConfigError(f"--enable-mixed-chunk: {why}; {way_out}", param="enable_mixed_chunk")
    if asked not in (None, "1"):
        raise ConfigError(f"--sglang-arg {ONE_AT_A_TIME} {asked}: {why}; {way_out}", param="sglang_arg")
    if asked is None:
        log.warning("%s, so it gets %s 1; %s", why, ONE_AT_A_TIME, way_out)
    return [] if asked else [ONE_AT_A_TIME, "1"]


def _passed_on(arguments: tuple[str, ...], flag: str) -> str | None:
    """The value that counts: the last one."""
    value = None
    for place, argument in enumerate(arguments):
        name, equals, given = argument.partition("=")
        if name.startswith("--prefill-max") and flag.startswith(name):
            value = given if equals else next(iter(arguments[place + 1 : place + 2]), "")
    return value


def _may_be_hybrid(path: str) -> bool:
    """Whether the model may have recurrent layers; so when nothing can be read of it."""
    try:
        config = json.loads((Path(path) / "config.json").read_bytes())
    except (OSError, ValueError):
        return True
    return any(word in json.dumps(config).lower() for word in _HYBRID_WORDS)


def _disaggregation(config: SglangConfig, version: Version) -> list[str]:
    transfer = config.node.transfer
    if transfer.transport is TransportName.LOOPBACK:
        raise ConfigError(
            "--transport loopback: with --engine sglang mooncake or cuda_ipc (or auto)", param="transport"
        )
    if transfer.device and transfer.protocol is not Protocol.RDMA:
        raise ConfigError(
            f"--transfer-device {transfer.device}: only with --transfer-protocol rdma", param="transfer_device"
        )
    over_tcp = transfer.protocol is Protocol.TCP and transfer.transport is not TransportName.CUDA_IPC
    backend = version.tcp_backend if over_tcp else "mooncake"
    arguments = ["--disaggregation-mode", config.role.value, "--disaggregation-transfer-backend", backend]
    if config.role is Role.PREFILL:
        arguments += ["--disaggregation-bootstrap-port", str(config.server.bootstrap_port)]
    return arguments + (["--disaggregation-ib-device", transfer.device] if transfer.device else [])


def _forced(config: SglangConfig) -> dict[str, str]:
    """What makes Mooncake use the protocol that was asked for, or fail."""
    transfer = config.node.transfer
    if config.role is Role.UNIFIED:
        return {}
    if transfer.transport is TransportName.CUDA_IPC:
        return {"MC_INTRANODE_NVLINK": "1", "SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "INTRA_NODE_NVLINK"}
    match transfer.protocol:
        case Protocol.TCP:
            return {"MC_FORCE_TCP": "1"}
        case Protocol.RDMA:
            return {"MC_FORCE_HCA": "1", "MOONCAKE_PROTOCOL": "rdma"}
        case Protocol.NVLINK:
            return {"MC_FORCE_MNNVL": "1", "SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "NVLINK"}


def _tuning(config: SglangConfig) -> dict[str, str]:
    transfer = config.node.transfer
    if config.role is Role.UNIFIED:
        return {}
    found = {"MC_TCP_BIND_ADDRESS": transfer.host, **DEVICE_SETTINGS}
    if "transfer.host" in config.given:
        found["SGLANG_HOST_IP"] = transfer.host
    for setting, variable in (
        ("transfer.bootstrap_timeout_s", "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"),
        ("transfer.transfer_timeout_s", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT"),
    ):
        if setting in config.given:
            found[variable] = str(max(1, round(_value(config, setting))))
    return found
