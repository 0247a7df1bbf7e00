"""Same-host transport: a write is a memcpy into the peer's memory. Injects faults on purpose; for tests and trials.

Buffers are memory files, so that another process of the same user can map them through /proc/<pid>/fd/<fd>. A session
is "loopback:<pid>:<start time>:<fd>+<address>+<nbytes>;…"; the start time tells a process from a later one with its
number. fd is -1 for memory that only its own process can reach.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from common.config import LoopbackFaults
from common.errors import TransferError
from transfer.transport import Block

_PACE_BYTES = 1 << 18


class _Range(NamedTuple):
    """`nbytes` from `address` in the owner's address space; `local` is where the same bytes are mapped here.

    memory: a peer's mapping, which stays for as long as somebody holds the range.
    """

    fd: int
    address: int
    nbytes: int
    local: int
    memory: mmap.mmap | None = None


class _FaultSource:
    """Which faults hold now: those given, or while their `file` is there, those in it."""

    def __init__(self, given: LoopbackFaults) -> None:
        self._given = given
        self._read = given
        self._version: tuple[int, int] | None = None

    def now(self) -> LoopbackFaults:
        """Raises TransferError when the file makes no sense."""
        if self._given.file is None:
            return self._given
        path = Path(self._given.file)
        try:
            stat = path.stat()
            if self._version != (stat.st_ino, stat.st_mtime_ns):
                self._read = msgspec.json.decode(path.read_bytes(), type=LoopbackFaults)
                self._version = (stat.st_ino, stat.st_mtime_ns)
        except FileNotFoundError:
            return self._given
        except (OSError, msgspec.MsgspecError) as error:
            raise TransferError(f"--fault-file {path}: {error}", code="bad_faults") from error
        return self._read


class LoopbackTransport:
    """Copies with memmove. Works inside one process and between processes of one user on one host."""

    name = "loopback"
    on_device = False
    writers = 1

    def __init__(self, faults: LoopbackFaults = LoopbackFaults()) -> None:  # noqa: B008 (frozen)
        self._faults = _FaultSource(faults)
        self._lock = threading.Lock()
        self._buffers: list[mmap.mmap] = []
        self._own: list[_Range] = []
        self._peers: dict[str, tuple[_Range, ...]] = {}

    def bursts(self, session: str) -> bool:
        return False

    @property
    def session(self) -> str:
        with self._lock:
            ranges = ";".join(f"{r.fd}+{r.address}+{r.nbytes}" for r in self._own)
        return f"loopback:{os.getpid()}:{_start_time(os.getpid())}:{ranges}"

    def host_buffer(self, nbytes: int) -> memoryview:
        fd = os.memfd_create("tandem-state")
        os.ftruncate(fd, max(nbytes, mmap.PAGESIZE))
        buffer = mmap.mmap(fd, max(nbytes, mmap.PAGESIZE))
        address = _address(buffer)
        with self._lock:
            self._buffers.append(buffer)
            self._own.append(_Range(fd, address, len(buffer), address))
        return memoryview(buffer)

    def register(self, address: int, nbytes: int) -> None:
        with self._lock:
            self._own.append(_Range(-1, address, nbytes, address))

    def unregister(self, address: int) -> None:
        with self._lock:
            self._own = [r for r in self._own if r.address != address]

    def write(self, session: str, blocks: Sequence[Block], nth_room: int = 0) -> None:
        ranges, faults = self._reach(session), self._faults.now()
        if faults.delay_s:
            time.sleep(faults.delay_s)
        hit = nth_room % max(1, faults.every) == 0
        flip, pace = faults.flip if hit else None, _Pace(faults.bandwidth_bytes_s)
        for block in blocks:
            target = _locate(ranges, block)
            if hit and block.part == faults.fail:
                raise TransferError(f"writing {block.part} failed on purpose", code="write_failed")
            if hit and block.part == faults.drop:
                continue
            if hit and block.part == faults.zero:
                ctypes.memset(target, 0, block.nbytes)
                continue
            _copy(target, block, pace)
            if block.part == flip:
                _flip(target + block.nbytes // 2)
                flip = None

    def begin(self, session: str, blocks: Sequence[Block], nth_room: int = 0) -> Callable[[], None]:
        """All of it at once: nothing is left to wait for."""
        self.write(session, blocks, nth_room)
        return lambda: None

    def settle(self) -> None:
        """A copy is in place when it returns."""

    def metadata(self, payload: bytes, nth_room: int = 0) -> bytes | None:
        faults = self._faults.now()
        if nth_room % max(1, faults.every):
            return payload
        if faults.drop == "metadata":
            return None
        if faults.zero == "metadata":
            return bytes(len(payload))
        if faults.flip == "metadata":
            middle = len(payload) // 2
            return payload[:middle] + bytes([payload[middle] ^ 1]) + payload[middle + 1 :]
        return payload

    def inbound(self) -> frozenset[str]:
        """None at all: a writer copies by itself, so nothing of a dead one can still be on its way."""
        return frozenset()

    def outbound(self) -> frozenset[str]:
        return frozenset()

    def reopen(self) -> bool:
        """A write is over when it returns, also one that failed."""
        return True

    def forget(self, session: str) -> None:
        with self._lock:
            self._peers.pop(session, None)

    def close(self) -> None:
        """Let go of the memory files. Views of the buffers stay valid for as long as somebody holds them."""
        with self._lock:
            for owned in self._own:
                if owned.fd >= 0:
                    os.close(owned.fd)
            self._own, self._buffers, self._peers = [], [], {}

    def _reach(self, session: str) -> tuple[_Range, ...]:
        with self._lock:
            if session not in self._peers:
                self._peers = {known: ranges for known, ranges in self._peers.items() if _lives(known)}
                self._peers[session] = self._map(session)
            return self._peers[session]

    def _map(self, session: str) -> tuple[_Range, ...]:
        """Map the peer's buffers here. Raises TransferError when the process is gone or not this user's."""
        try:
            _, pid, start, described = session.split(":")
            ranges = [tuple(map(int, text.split("+"))) for text in described.split(";") if text]
        except ValueError as error:
            raise TransferError(f"not a loopback session: {session[:80]}", code="bad_session") from error
        if int(pid) == os.getpid():
            return tuple(_Range(fd, address, nbytes, address) for fd, address, nbytes in ranges)
        try:
            if _start_time(int(pid)) != start:
                raise ProcessLookupError(f"process {pid} is another one now")
            return tuple(self._map_one(pid, *described_range) for described_range in ranges if described_range[0] >= 0)
        except OSError as error:
            raise TransferError(
                f"cannot reach the memory of process {pid}: {error}", code="peer_unreachable"
            ) from error

    def _map_one(self, pid: str, fd: int, address: int, nbytes: int) -> _Range:
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        try:
            mapped = mmap.mmap(opened, nbytes)
        finally:
            os.close(opened)
        return _Range(fd, address, nbytes, _address(mapped), mapped)


class _Pace:
    """Waits as a link of so many bytes a second would make a write wait, which begins now; 0: not at all."""

    def __init__(self, bytes_s: float) -> None:
        self.bytes_s = bytes_s
        self._due_s = time.monotonic()

    def wait(self, nbytes: int) -> None:
        if self.bytes_s:
            self._due_s += nbytes / self.bytes_s
            time.sleep(max(0.0, self._due_s - time.monotonic()))


def _copy(target: int, block: Block, pace: _Pace) -> None:
    """memmove, in steps at the pace of the link when it has one."""
    step = _PACE_BYTES if pace.bytes_s else block.nbytes
    for offset in range(0, block.nbytes, step):
        nbytes = min(step, block.nbytes - offset)
        pace.wait(nbytes)
        ctypes.memmove(target + offset, block.src + offset, nbytes)


def _locate(ranges: Sequence[_Range], block: Block) -> int:
    """Where the block's destination lies in this process."""
    for known in ranges:
        if known.address <= block.dst and block.dst + block.nbytes <= known.address + known.nbytes:
            return known.local + block.dst - known.address
    raise TransferError(f"the peer has no memory registered at {block.dst:#x}", code="bad_address")


def _address(buffer: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _flip(address: int) -> None:
    byte = ctypes.c_ubyte.from_address(address)
    byte.value ^= 1


def _lives(session: str) -> bool:
    """Whether the process is still there: the memory of a dead one stays in use for as long as it is mapped."""
    _, pid, start, _ = session.split(":")
    try:
        return _start_time(int(pid)) == start
    except OSError:
        return False


def _start_time(pid: int) -> str:
    """Field 22 of /proc/<pid>/stat; what stands before it may hold spaces, but ends with the last ")"."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
