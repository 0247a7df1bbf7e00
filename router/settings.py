"""What a router's settings must be, and what of them has to work before it listens: keys, certificates, ports."""

from __future__ import annotations

import ssl

from common.config import Role, RouterConfig
from common.errors import ConfigError
from common.keys import KeyRing, admin_key
from common.tls import TlsConfig, client_context, server_context
from common.tracing import check_endpoint
from router.state_file import StateFile
from router.worker import make_worker

_TIMES = (
    "health_interval_s",
    "connect_timeout_s",
    "idle_timeout_s",
    "liveness_timeout_s",
    "upload_timeout_s",
    "heartbeat_timeout_s",
    "breaker_window_s",
    "breaker_open_s",
    "outlier_window_s",
    "outlier_ejection_s",
    "queue_timeout_s",
    "request_timeout_s",
)
_AT_LEAST = {
    "max_retries": 0,
    "breaker_failures": 0,
    "max_body_bytes": 1,
    "max_concurrent_requests": 1,
    "queue_size": 0,
    "requests_per_minute": 1,
    "tokens_per_minute": 1,
}


def check_router_config(config: RouterConfig) -> RouterConfig:
    """Raises ConfigError naming the setting."""
    _check_workers(config)
    for name in _TIMES:
        value = getattr(config, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{_option(name)} {value}: a positive number of seconds", param=name)
    if not 0 <= config.drain_timeout_s < float("inf"):
        raise ConfigError(
            f"--drain-timeout {config.drain_timeout_s}: a finite number of seconds, 0 or more", param="drain_timeout_s"
        )
    _check_health(config)
    check_endpoint(config.otlp_endpoint)
    for name in ("port", "admin_port"):
        port = getattr(config, name)
        if port is not None and not 0 <= port <= 65535:
            raise ConfigError(f"{_option(name)} {port}: 0 to 65535", param=name)
    if config.admin_port == config.port != 0:
        raise ConfigError(f"--admin-port {config.admin_port}: --port is the same", param="admin_port")
    for name, least in _AT_LEAST.items():
        value = getattr(config, name)
        if value is not None and value < least:
            raise ConfigError(f"{_option(name)} {value}: {_words(least)}", param=name)
    return config


def _check_workers(config: RouterConfig) -> None:
    named = [(Role.PREFILL, address) for address in config.prefill] + [(Role.DECODE, a) for a in config.decode]
    seen: set[str] = set()
    for role, address in named:
        url = make_worker(role, address).url
        if url in seen:
            raise ConfigError(f"--{role.value} {url}: given more than once", param=role.value)
        seen.add(url)
    for address in config.prefill:
        if address.bootstrap_port is None:
            raise ConfigError(f"--prefill {address.url}: give its bootstrap port too", param="prefill")
    if config.state_file is not None:
        StateFile(config.state_file).read()


def _check_health(config: RouterConfig) -> None:
    if not 0 <= config.idle_probe_interval_s < float("inf"):
        raise ConfigError(
            f"--idle-probe-interval {config.idle_probe_interval_s}: a finite number of seconds, 0 or more",
            param="idle_probe_interval_s",
        )
    if not 0 < config.breaker_failure_rate <= 1:
        raise ConfigError(
            f"--breaker-failure-rate {config.breaker_failure_rate}: above 0, up to 1", param="breaker_failure_rate"
        )
    if config.outlier_factor != 0 and not 1 < config.outlier_factor < float("inf"):
        raise ConfigError(f"--outlier-factor {config.outlier_factor}: 0, or above 1", param="outlier_factor")


def _words(least: int) -> str:
    return "0 or more" if least == 0 else f"at least {least}"


def _option(name: str) -> str:
    return "--" + name.removesuffix("_s").replace("_", "-")


def check_files(config: RouterConfig, keys: KeyRing) -> None:
    """Raises ConfigError for what makes no sense without keys, and for files that cannot be used."""
    listener_tls(config)
    worker_tls(config)
    worker_authorization(config)
    for name in ("requests_per_minute", "tokens_per_minute"):
        value = getattr(config, name)
        if value is not None and keys.is_open:
            raise ConfigError(f"{_option(name)} {value}: it is counted by key (--api-key-file)", param=name)


# Files, read again wherever they are used: what is secret stays out of the config


def tls_config(config: RouterConfig) -> TlsConfig:
    return TlsConfig(certfile=config.ssl_certfile, keyfile=config.ssl_keyfile, ca_certs=config.ssl_ca_certs)


def listener_tls(config: RouterConfig) -> ssl.SSLContext | None:
    """Raises ConfigError."""
    return server_context(tls_config(config))


def worker_tls(config: RouterConfig) -> ssl.SSLContext:
    """For workers with https URLs. The router shows them its own certificate if they ask. Raises ConfigError."""
    return client_context(config.worker_ca_file, "--worker-ca-file", tls_config(config))


def worker_authorization(config: RouterConfig) -> str | None:
    """What the router shows its workers. Raises ConfigError."""
    path = config.worker_api_key_file
    return None if path is None else admin_key(path, "--worker-api-key-file").header
