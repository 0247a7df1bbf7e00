"""Addresses that a node tells others of, and the key that they show each other."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from cli.doctor.checks import Check, error, ok, refused, warning
from cli.doctor.listeners import ANYWHERE, is_far, own_addresses
from common.config import NodeConfig, Role
from common.errors import ConfigError
from common.net import is_loopback
from node.registration import advertised_url
from transfer.handshake import read_key

_SECRETS = Path("/run/secrets")


def spans_hosts(config: NodeConfig, peer_host: str | None) -> bool:
    """Whether the settings speak of more than this machine."""
    server = config.server
    hosts = [server.host, server.bootstrap_host, config.transfer.host, peer_host or ""]
    hosts += [urlsplit(url).hostname or "" for url in (*server.routers, server.advertise_url or "")]
    return any(map(is_far, hosts))


def check_addresses(config: NodeConfig, peer_host: str | None) -> Iterator[Check]:
    """What others are told. A node that only ever talks to this machine may be told of by a loopback address."""
    far = spans_hosts(config, peer_host)
    if not far and config.server.host in ANYWHERE and is_loopback(config.transfer.host):
        yield _check_left_out(config.transfer.host)
    else:
        yield _check_told("address.transfer", config.transfer.host, far, "--transfer-host", must_be_own=True)
    if config.role is Role.PREFILL:
        host = config.server.bootstrap_host
        if host not in ANYWHERE:
            yield _check_told("address.bootstrap", host, far, "--bootstrap-host", must_be_own=True)
    if config.server.routers:
        url = advertised_url(config.server, config.server.port)
        far_router = any(is_far(urlsplit(each).hostname or "") for each in config.server.routers)
        host = urlsplit(url).hostname or ""
        yield _check_told("address.advertised", host, far_router, "--advertise-url or --host", must_be_own=False)
    yield check_cluster_key(config, far)


def _check_left_out(host: str) -> Check:
    """A node that all may reach, and no peer: it starts, and works with peers of this host alone."""
    found = f"{host}: peers on other hosts are told this address, and would look for this node on themselves"
    others = [own for own in own_addresses() if not is_loopback(own)]
    fix = f"--transfer-host: one of {', '.join(others) or '(this machine has none but loopback)'}, unless all are here"
    return warning("address.transfer", found, fix)


def _check_told(name: str, host: str, far: bool, option: str, *, must_be_own: bool) -> Check:
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as reason:
        return error(name, f"{host}: {reason.strerror}", f"{option}: an address of this machine that others can reach")
    shown = host if host == address else f"{host} is {address}"
    reachable = [own for own in own_addresses() if not is_loopback(own)]
    if far and is_loopback(address):
        fix = f"{option}: one of {', '.join(reachable) or '(this machine has none but loopback)'}"
        return error(name, f"{shown}: other hosts would look for this node on themselves", fix)
    if must_be_own and not is_own(address):
        return error(name, f"{shown}: not an address of this machine", f"{option}: one of {', '.join(own_addresses())}")
    return ok(name, f"{shown}{'' if far else ' (peers on this host)' if is_loopback(address) else ''}")


def is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def check_cluster_key(config: NodeConfig, far: bool) -> Check:
    make = "head -c 32 /dev/urandom | base64 > key; chmod 600 key; the same file on every node"
    path = config.transfer.cluster_key_file
    try:
        key = read_key(path)
    except ConfigError as reason:
        return refused("cluster_key", reason, make)
    if key is None and far:
        return error("cluster_key", "none: peers on other hosts are refused", f"--cluster-key-file ({make})")
    if key is None:
        return ok("cluster_key", "none: only peers on this host are taken")
    return _check_secret(path or "")


def _check_secret(path: str) -> Check:
    if anybody_can_read(Path(path)):
        fix = f"chmod 600 {path}, or keep it in a folder that is its owner's alone (chmod 700)"
        return warning("cluster_key", f"{path}: every user of this machine can read it", fix)
    return ok("cluster_key", path)


def anybody_can_read(path: Path) -> bool:
    """Whether users who own nothing of it can. What a container engine mounts as a secret is seen in its container
    alone."""
    real = path.resolve()
    if _SECRETS in (*path.parents, *real.parents):
        return False
    return bool(real.stat().st_mode & 0o004) and all(folder.stat().st_mode & 0o001 for folder in real.parents)
