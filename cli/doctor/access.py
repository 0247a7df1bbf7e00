"""Who is let in, and over what: files of keys and certificates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cli.doctor.checks import Check, not_applicable, ok, refused, warning
from cli.doctor.listeners import ANYWHERE, is_far
from common.config import RouterConfig, ServerConfig
from common.errors import ConfigError
from common.keys import Key, KeyRing
from common.tls import TlsConfig, server_context


def check_access(config: ServerConfig | RouterConfig, more_keys: Sequence[Key] = ()) -> Iterator[Check]:
    """more_keys: those that came without a file."""
    tls = TlsConfig(certfile=config.ssl_certfile, keyfile=config.ssl_keyfile, ca_certs=config.ssl_ca_certs)
    is_open_to_others = is_far(config.host) or config.host in ANYWHERE
    try:
        keys = KeyRing(config.api_key_file, more_keys)
    except ConfigError as reason:
        yield refused("api_keys", reason, "correct the file that is named: a line for each key, role name key")
    else:
        yield _check_keys(keys.is_open, is_open_to_others)
    try:
        context = server_context(tls)
    except ConfigError as reason:
        yield refused("tls", reason, "give files in PEM, the key that belongs to the certificate, and read permission")
    else:
        yield not_applicable("tls", "plain HTTP") if context is None else ok("tls", f"{tls.certfile} can be used")


def _check_keys(is_open: bool, is_open_to_others: bool) -> Check:
    if not is_open:
        return ok("api_keys", "clients need a key")
    if not is_open_to_others:
        return ok("api_keys", "none: everybody on this host is let in")
    fix = "--api-key-file, or keep its port on a network that only the cluster and its clients share"
    return warning("api_keys", "none: everybody who reaches the port is let in", fix)
