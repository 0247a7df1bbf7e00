"""Which TCP sockets this process has open, as the kernel lists them."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ESTABLISHED, _SYN_RECEIVED, _CLOSE_WAIT, _LISTEN = "01", "03", "08", "0A"


class Socket(NamedTuple):
    """local, remote: "address:port". inode "0": no process holds it (not accepted yet, or let go of)."""

    local: str
    remote: str
    state: str
    inode: str

    @property
    def listening(self) -> bool:
        return self.state == _LISTEN

    @property
    def readable(self) -> bool:
        """Whether this process may still get bytes from it: held open, or waiting to be accepted."""
        return self.inode != "0" or self.state in (_ESTABLISHED, _SYN_RECEIVED, _CLOSE_WAIT)

    @property
    def local_port(self) -> int:
        return int(self.local.rpartition(":")[2])


def all_sockets() -> Iterator[Socket]:
    """Every TCP socket of this network namespace, both address families."""
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/self/net/{table}")
        if not path.exists():
            continue
        for line in path.read_text().splitlines()[1:]:
            fields = line.split()
            yield Socket(_endpoint(fields[1]), _endpoint(fields[2]), fields[3], fields[9])


def own_sockets() -> list[Socket]:
    """The TCP sockets that this process holds open."""
    inodes = {target[8:-1] for target in open_files() if target.startswith("socket:[")}
    return [socket for socket in all_sockets() if socket.inode in inodes]


def open_files() -> Iterator[str]:
    """What each descriptor of this process points to."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            yield str(entry.readlink())
        except FileNotFoundError:
            continue


def connected_to(port: int) -> frozenset[str]:
    """The far ends of all connections to local `port`, also those that are being closed but may hold unread bytes."""
    return frozenset(
        socket.remote
        for socket in all_sockets()
        if socket.local_port == port and not socket.listening and socket.readable
    )


def _endpoint(text: str) -> str:
    """ "0100007F:1F90" (words in host byte order) as "127.0.0.1:8080"; IPv4 inside IPv6 is shown as IPv4."""
    address, _, port = text.partition(":")
    words = bytes.fromhex(address)
    packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
    parsed = ipaddress.ip_address(packed)
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped:
        parsed = parsed.ipv4_mapped
    return f"{parsed}:{int(port, 16)}"
