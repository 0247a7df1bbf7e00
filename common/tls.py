"""TLS of router and nodes: what a server shows and asks for, and what a client trusts."""

from __future__ import annotations

import ssl
from pathlib import Path

import msgspec

from common.errors import ConfigError, why_unreadable


class TlsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Files in PEM. certfile: the chain to show; None: plain HTTP. keyfile: its private key, unless it is in certfile.
    ca_certs: only clients with a certificate of one of these authorities are let in."""

    certfile: str | None = None
    keyfile: str | None = None
    ca_certs: str | None = None


def server_context(tls: TlsConfig) -> ssl.SSLContext | None:
    """What a server listens with; None for plain HTTP. Raises ConfigError naming the setting."""
    if tls.certfile is None:
        for option, path in (("--ssl-keyfile", tls.keyfile), ("--ssl-ca-certs", tls.ca_certs)):
            if path is not None:
                raise ConfigError(f"{option} {path}: only with --ssl-certfile", param=_param(option))
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    _show(context, tls.certfile, tls.keyfile)
    if tls.ca_certs is not None:
        _trust(context, tls.ca_certs, "--ssl-ca-certs")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(ca_file: str | None, option: str, shown: TlsConfig | None = None) -> ssl.SSLContext:
    """What a client asks https servers with. ca_file: the authorities to trust, None: those of the system. shown: its
    own certificate, for servers that ask for one. Raises ConfigError naming the option."""
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
    if ca_file is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _trust(context, ca_file, option)
    if shown is not None and shown.certfile is not None:
        _show(context, shown.certfile, shown.keyfile)
    return context


def _show(context: ssl.SSLContext, certfile: str, keyfile: str | None) -> None:
    _check_readable("--ssl-certfile", certfile)
    if keyfile is not None:
        _check_readable("--ssl-keyfile", keyfile)
    try:
        context.load_cert_chain(certfile, keyfile, password=lambda: "")  # without one it would ask at the terminal
    except (OSError, ValueError) as error:
        files = f"--ssl-certfile {certfile}" + (f", --ssl-keyfile {keyfile}" if keyfile is not None else "")
        reason = "no certificate with its private key, unencrypted, in PEM"
        raise ConfigError(f"{files}: {reason}", param="ssl_certfile" if keyfile is None else "ssl_keyfile") from error


def _trust(context: ssl.SSLContext, path: str, option: str) -> None:
    _check_readable(option, path)
    try:
        context.load_verify_locations(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {path}: no certificates in PEM", param=_param(option)) from error


def _check_readable(option: str, path: str) -> None:
    try:
        Path(path).open("rb").close()
    except OSError as error:
        raise ConfigError(f"{option} {path}: {why_unreadable(error)}", param=_param(option)) from error


def _param(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")
