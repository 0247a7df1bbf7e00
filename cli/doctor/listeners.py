"""Ports that this process will listen at, each bound for a moment. Needs nothing that a router's image leaves out."""

from __future__ import annotations

import errno
import socket
from typing import NamedTuple

import psutil

from cli.doctor.checks import Check, error, ok
from common.config import NodeConfig, Role, RouterConfig
from common.net import is_loopback

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
    taken: dict[int, Listener] = {}
    checks = []
    try:
        for listener in listeners:
            same = taken.get(listener.port)
            checks.append(_check_listener(listener, held) if same is None else _is_the_same(listener, same))
            if listener.port:
                taken[listener.port] = listener
        return checks
    finally:
        for sock in held:
            sock.close()


def _is_the_same(listener: Listener, other: Listener) -> Check:
    """As the process itself would refuse it."""
    found = f"{listener.option} {listener.port}: {other.option} is the same"
    return error(listener.name, found, f"give each a port of its own ({other.option}, {listener.option})")


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
