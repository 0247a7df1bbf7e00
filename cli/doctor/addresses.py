"""Addresses and ports that this process will listen at and tell others of."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

from cli.doctor.checks import Check, error, ok, refused, warning
from common.config import NodeConfig, Role, RouterConfig
from common.errors import ConfigError
from common.net import is_loopback
from node.registration import advertised_url
from transfer.handshake import read_key

ANYWHERE = ("0.0.0.0", "::", "")


class Listener(NamedTuple):
    """name: of the check. option: what changes the port."""

    name: str
    host: str
    port: int
    option: str


def node_listeners(config: NodeConfig) -> list[Listener]:
    server = config.server
    found = [Listener("port.http", server.host, server.port, "--port")]
    if config.role is Role.PREFILL:
        found.append(
            Listener("port.bootstrap", server.bootstrap_host, server.bootstrap_port, "--disaggregation-bootstrap-port")
        )
    return found


def router_listeners(config: RouterConfig) -> list[Listener]:
    found = [Listener("port.http", config.host, config.port, "--port")]
    if config.admin_port is not None:
        found.append(Listener("port.admin", config.admin_host, config.admin_port, "--admin-port"))
    return found


def check_listeners(listeners: list[Listener]) -> list[Check]:
    """Each is bound for a moment, as it will be, while the others are still held."""
    held: list[socket.socket] = []
    try:
        return [_check_listener(listener, held) for listener in listeners]
    finally:
        for sock in held:
            sock.close()


def _check_listener(listener: Listener, held: list[socket.socket]) -> Check:
    name, where = listener.name, f"{listener.host or '0.0.0.0'}:{listener.port}"
    try:
        family, *_, address = socket.getaddrinfo(
            listener.host or "0.0.0.0", listener.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        held.append(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(1)
    except OSError as reason:
        return error(name, f"{where}: {reason.strerror}", _advice(reason, listener), port=listener.port)
    return ok(name, f"{where} is free" if listener.port else f"{where}: a free one is taken", port=listener.port)


def _advice(reason: OSError, listener: Listener) -> str:
    if isinstance(reason, socket.gaierror):
        return (
            f"the host name does not resolve here: use an address, or add it to DNS or /etc/hosts ({listener.option})"
        )
    match reason.errno:
        case errno.EADDRINUSE:
            return f"end {_who(listener.port)}, or choose another port with {listener.option}"
        case errno.EACCES | errno.EPERM:
            return f"ports below 1024 need a privilege: choose another with {listener.option}"
        case errno.EADDRNOTAVAIL:
            return f"{listener.host} is no address of this machine: {', '.join(own_addresses())} are"
        case _:
            return f"choose another host or port ({listener.option})"


def _who(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f"process {connection.pid} ({psutil.Process(connection.pid).name()}), which listens there"
    except psutil.Error:
        pass
    return "what listens there"


def own_addresses() -> list[str]:
    """IPv4 addresses of this machine's interfaces."""
    interfaces = psutil.net_if_addrs().values()
    return sorted({address.address for each in interfaces for address in each if address.family == socket.AF_INET})


def is_far(host: str) -> bool:
    """Whether another machine may be meant."""
    return host not in ANYWHERE and not is_loopback(host)


def spans_hosts(config: NodeConfig, peer_host: str | None) -> bool:
    """Whether the settings speak of more than this machine."""
    server = config.server
    hosts = [server.host, server.bootstrap_host, config.transfer.host, peer_host or ""]
    hosts += [urlsplit(url).hostname or "" for url in (*server.routers, server.advertise_url or "")]
    return any(map(is_far, hosts))


def check_addresses(config: NodeConfig, peer_host: str | None) -> Iterator[Check]:
    """What others are told. A node that only ever talks to this machine may be told of by a loopback address."""
    far = spans_hosts(config, peer_host)
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
    if Path(path).stat().st_mode & 0o044:
        return warning("cluster_key", f"{path}: every user of this machine can read it", f"chmod 600 {path}")
    return ok("cluster_key", path)
