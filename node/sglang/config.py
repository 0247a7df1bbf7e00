"""The settings of a node whose engine is SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.config import NodeConfig, Role, ServerConfig
from common.errors import ConfigError
from common.tls import TlsConfig, server_context


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangConfig:
    """given: what the user has set, "section.field" of `node` to the option's name; only that is translated, the rest
    is SGLang's own default. python: the interpreter that has sglang. arguments: passed on as they are. start_timeout_s:
    until it must be ready; health_timeout_s: without an answer until it is started again."""

    node: NodeConfig
    given: Mapping[str, str]
    python: str
    arguments: tuple[str, ...] = ()
    tp_size: int = 1
    start_timeout_s: float = 1800.0
    health_timeout_s: float = 60.0

    @property
    def role(self) -> Role:
        return self.node.role

    @property
    def server(self) -> ServerConfig:
        return self.node.server


def check_sglang_config(config: SglangConfig) -> None:
    """What concerns the supervisor itself. Raises ConfigError."""
    server = config.server
    server_context(TlsConfig(certfile=server.ssl_certfile, keyfile=server.ssl_keyfile))
    ports = [("port", server.port)]
    if config.role is Role.PREFILL:
        ports.append(("bootstrap_port", server.bootstrap_port))
    for name, port in ports:
        if not 1 <= port <= 65535:
            raise ConfigError(f"--{name.replace('_', '-')} {port}: 1 to 65535", param=name)
    if len({port for _, port in ports}) < len(ports):
        raise ConfigError(f"--bootstrap-port {server.bootstrap_port}: --port is the same", param="bootstrap_port")
    for option, value in (
        ("--sglang-start-timeout", config.start_timeout_s),
        ("--sglang-health-timeout", config.health_timeout_s),
    ):
        if not 0 < value < float("inf"):
            raise ConfigError(f"{option} {value}: a positive number of seconds", param=option[2:].replace("-", "_"))
    if not 0 <= server.drain_timeout_s < float("inf"):
        raise ConfigError(f"--drain-timeout {server.drain_timeout_s}: 0 or more seconds", param="drain_timeout")
    if config.tp_size < 1:
        raise ConfigError(f"--tp-size {config.tp_size}: at least 1", param="tp_size")
