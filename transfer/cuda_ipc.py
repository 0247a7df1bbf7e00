"""Writes from device memory into the device memory of another process of this host: copies on the card.

A session is "cuda_ipc:<host's boot id>:<pid>:<start time>:<device uuid>:<door>:<address>+<nbytes>+<handle>;…". The
writer opens the handles with its first write and closes them when it has lost the peer (`forget`).

Who can write here holds a connection to this process' door, an abstract socket, while it has the handles open. A
writer that lets go says so, when its copies are over. One that dies says nothing; its copies may go on until the driver
has taken its channels away, as part of the process' exit. So it counts until the process has exited (is a zombie or
gone), not just until its sockets are closed. That is as much as can be seen from outside: that the driver is then done
is its own promise.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from common.errors import ConfigError, TransferError
from transfer.cuda_driver import HANDLE_BYTES, CudaDriver
from transfer.device_copy import copy_stream, queue_copies, wait_for
from transfer.transport import Block

log = logging.getLogger(__name__)

_BYE = b"."
_BACKLOG = 128


class Opened(NamedTuple):
    """`nbytes` from `address` in the owner's address space; `local` is where they lie here."""

    address: int
    nbytes: int
    local: int


@dataclass(frozen=True, slots=True)
class _Peer:
    """Another process' memory. door: held open to it; None: this process' own memory."""

    ranges: tuple[Opened, ...]
    stream: torch.cuda.Stream
    door: socket.socket | None


class CudaIpcTransport:
    """Between processes of one host (and inside one, for tests). Pools lie in `device_buffer`s."""

    name = "cuda_ipc"
    on_device = True
    writers = 1

    def __init__(self, device: torch.device) -> None:
        """Raises ConfigError when there is no such device."""
        self.card = device.index or 0
        self.device = torch.device("cuda", self.card)
        self._driver = CudaDriver(self.card)
        self._lock = threading.Lock()
        self._own: dict[int, tuple[int, bytes]] = {}
        self._peers: dict[str, _Peer] = {}
        self._door = Door(os.urandom(8).hex())

    def bursts(self, session: str) -> bool:
        """Links between cards that are awake take power from the multiprocessors: a prompt then takes 2 % longer.
        Within a card there is no link, and what leaves early does not keep the first token waiting."""
        return not is_of_card(session, self._driver.uuid)

    @property
    def session(self) -> str:
        with self._lock:
            ranges = ";".join(f"{address}+{size}+{handle.hex()}" for address, (size, handle) in self._own.items())
        return f"cuda_ipc:{_boot_id()}:{own_label()}:{self._driver.uuid}:{self._door.name}:{ranges}"

    def device_buffer(self, nbytes: int) -> int:
        """The address of zeroed device memory that peers can write to; it lives as long as the process."""
        address = self._driver.allocate(nbytes)
        handle = self._driver.export(address)
        with self._lock:
            self._own[address] = (nbytes, handle)
        return address

    def host_buffer(self, nbytes: int) -> memoryview:
        raise TransferError("cuda_ipc carries device memory only", code="register_failed")

    def register(self, address: int, nbytes: int) -> None:
        raise TransferError("cuda_ipc carries only what it has allocated", code="register_failed")

    def unregister(self, address: int) -> None:
        raise TransferError("cuda_ipc carries only what it has allocated", code="bad_address")

    def write(self, session: str, blocks: Sequence[Block], nth_room: int = 0) -> None:
        self.begin(session, blocks, nth_room)()

    def begin(self, session: str, blocks: Sequence[Block], nth_room: int = 0) -> Callable[[], None]:
        """The copies are queued on a stream of this peer's, see `queue_copies`."""
        with self._lock:
            peer = self._reach(session)
            placed = [block._replace(dst=locate(peer.ranges, block)) for block in blocks]
            written = queue_copies(placed, self._driver.copy, peer.stream)
        return partial(wait_for, written)

    def settle(self) -> None:
        """A write has ended when its event was seen."""

    def metadata(self, payload: bytes, nth_room: int = 0) -> bytes:
        return payload

    def inbound(self) -> frozenset[str]:
        """ "pid:start time" of the processes that may write here."""
        return self._door.visitors()

    def outbound(self) -> frozenset[str]:
        return frozenset({own_label()})

    def reopen(self) -> bool:
        """Nothing to close: a write that has failed is over when its stream is empty."""
        with self._lock:
            for peer in self._peers.values():
                wait_for(peer.stream)
        return True

    def reaches(self, session: str) -> bool:
        """Whether this process can write there; from then on it holds the memory open. The reason of a no is logged."""
        try:
            with self._lock:
                self._reach(session)
        except TransferError as error:
            log.info("no way to %s over cuda_ipc: %s", session[:60], error.message)
            return False
        return True

    def forget(self, session: str) -> None:
        with self._lock:
            peer = self._peers.pop(session, None)
            if peer is not None:
                self._let_go(peer)

    def close(self) -> None:
        """Let go of the peers' memory. One's own stays for as long as the process: peers may still have it open."""
        with self._lock:
            while self._peers:
                self._let_go(self._peers.popitem()[1])
        self._door.close()

    def _reach(self, session: str) -> _Peer:
        if session not in self._peers:
            self._peers[session] = self._open(session)
        return self._peers[session]

    def _open(self, session: str) -> _Peer:
        """Raises TransferError when the peer cannot be reached in this way."""
        try:
            kind, boot, pid, start, _, door, described = session.split(":")
            ranges = [_parse(text) for text in described.split(";") if text]
        except ValueError as error:
            raise TransferError(f"not a cuda_ipc session: {session[:80]}", code="bad_session") from error
        if (kind, boot) != ("cuda_ipc", _boot_id()):
            raise TransferError(f"cuda_ipc: {session[:60]} is of another host", code="bad_session")
        if f"{pid}:{start}" == own_label():
            own = tuple(Opened(address, nbytes, address) for address, nbytes, _ in ranges)
            return _Peer(own, copy_stream(self.device), None)
        visit = _enter(door, pid)
        opened: list[Opened] = []
        try:
            for address, nbytes, handle in ranges:
                opened.append(Opened(address, nbytes, self._driver.open(handle)))
            return _Peer(tuple(opened), copy_stream(self.device), visit)
        except TransferError:
            for memory in opened:
                self._driver.close(memory.local)
            _leave(visit)
            raise

    def _let_go(self, peer: _Peer) -> None:
        wait_for(peer.stream)
        if peer.door is not None:
            for memory in peer.ranges:
                self._driver.close(memory.local)
            _leave(peer.door)


class Door:
    """Knows which processes may write here: those that have connected and neither said good-bye nor exited."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0tandem-{name}")
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._visitors: dict[socket.socket, str] = {}

    def visitors(self) -> frozenset[str]:
        """ "pid:start time" of each."""
        with self._lock:
            self._admit()
            for visitor in [visitor for visitor, label in self._visitors.items() if _has_left(visitor, label)]:
                visitor.close()
                del self._visitors[visitor]
            return frozenset(self._visitors.values())

    def close(self) -> None:
        with self._lock:
            for connection in (self._listener, *self._visitors):
                connection.close()
            self._visitors.clear()

    def _admit(self) -> None:
        while True:
            try:
                visitor, _ = self._listener.accept()
            except (BlockingIOError, OSError):  # nobody waits, or the door is closed
                return
            visitor.setblocking(False)
            packed = visitor.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid = struct.unpack("3i", packed)[0]
            self._visitors[visitor] = f"{pid}:{_start_time(pid)}"


def _enter(door: str, pid: str) -> socket.socket:
    visit = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        visit.connect(f"\0tandem-{door}")
    except OSError as error:
        visit.close()
        raise TransferError(f"cuda_ipc: process {pid} is not there: {error}", code="peer_unreachable") from error
    return visit


def _leave(visit: socket.socket) -> None:
    """Say that no copy is under way any more. The other end may be gone, and need not hear it then."""
    with visit:
        try:
            visit.send(_BYE, socket.MSG_NOSIGNAL)
        except OSError:
            return


def _has_left(visitor: socket.socket, label: str) -> bool:
    try:
        return visitor.recv(1) == _BYE or not _runs(label)
    except BlockingIOError:
        return False
    except OSError:  # reset
        return not _runs(label)


def _runs(label: str) -> bool:
    """Whether the process is there and has not exited."""
    pid, _, start = label.partition(":")
    try:
        fields = _stat(int(pid))
    except OSError:
        return False
    return fields[0] not in "ZX" and fields[19] == start


def locate(ranges: Sequence[Opened], block: Block) -> int:
    """Where the block's destination lies in this process. Raises TransferError."""
    for known in ranges:
        if known.address <= block.dst and block.dst + block.nbytes <= known.address + known.nbytes:
            return known.local + block.dst - known.address
    raise TransferError(f"the peer has no memory registered at {block.dst:#x}", code="bad_address")


def is_of_card(session: str, uuid: str) -> bool:
    """Whether the session is of a process on this card."""
    return session.split(":")[4:5] == [uuid]


def open_cuda_ipc(device: str) -> CudaIpcTransport:
    """Raises ConfigError."""
    found = torch.device(device)
    if found.type != "cuda":
        raise ConfigError(
            f"--transport cuda_ipc: it carries the memory of a card (--device cuda), not of {device}", param="transport"
        )
    transport = CudaIpcTransport(found)
    log.info("transport installed: %s on %s", transport.name, transport.device)
    return transport


def own_label() -> str:
    """ "pid:start time" of this process."""
    return f"{os.getpid()}:{_start_time(os.getpid())}"


def _parse(text: str) -> tuple[int, int, bytes]:
    address, nbytes, handle = text.split("+")
    found = bytes.fromhex(handle)
    if len(found) != HANDLE_BYTES:
        raise ValueError(f"a handle of {len(found)} bytes")
    return int(address), int(nbytes), found


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _start_time(pid: int) -> str:
    """Empty when the process is gone."""
    try:
        return _stat(pid)[19]
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    """/proc/<pid>/stat from the state on; what stands before it may hold spaces, but ends with the last ")"."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
