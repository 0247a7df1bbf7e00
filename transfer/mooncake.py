"""Mooncake Transfer Engine: RDMA, TCP or NVLink writes. Return codes become typed errors here and nowhere else.

Mooncake falls back to TCP in silence when it finds no RDMA device, so what was installed is read from the process
itself: an open verbs device means RDMA, a listening data port means TCP. Its two ports listen on every interface and
know no key: whoever reaches them can write to registered memory, so they belong on a trusted network.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import math
import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from common.config import Protocol, TransferConfig
from common.errors import ConfigError, TransferError
from transfer.cuda_driver import CudaDriver, card_of
from transfer.pinned import Slots
from transfer.sockets import connected_to, open_files, own_sockets
from transfer.transport import Block

HOST_PACKAGE, DEVICE_PACKAGE = "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-cuda13"
HOST_SETTINGS = {"MC_LOG_LEVEL": "ERROR"}
# A card's memory goes through the host in slices, which the default makes small.
DEVICE_SETTINGS = HOST_SETTINGS | {
    "MC_NUM_TCP_IO_THREADS": "8",
    "MC_TCP_LANES_PER_PEER": "8",
    "MC_TCP_SLICE_SIZE": str(4 << 20),
}
SLOT_BYTES = 32 << 20  # as the largest write
NUM_SLOTS = 8  # two for each writer of one peer
PACE_BYTES = 1 << 20
PACE_SHARE = 0.7
SHORTEST_SLEEP_S = 1e-4

log = logging.getLogger(__name__)

_WRITE_CODES = {-1: "the peer could not be reached or refused the write", -202: "the memory could not be locked"}


class MooncakeTransport:
    """One initialised engine. `data_port` is where peers' TCP writes come in (None for RDMA and NVLink)."""

    on_device = False
    writers = 1

    def __init__(self, config: TransferConfig, settings: dict[str, str] = HOST_SETTINGS) -> None:
        """settings: Mooncake's, by environment variable; a user's own win. Raises ConfigError as `open_mooncake`."""
        self.name = f"mooncake-{config.protocol.value}"
        self._config = config
        _set_environment(config, settings)
        self._engine, self._data_port = _start_engine(config)
        self._lock = threading.Lock()
        self._buffers: list[mmap.mmap] = []
        self._registered: dict[int, int] = {}
        self._slots: Slots | None = None
        self._pace = Pace()

    def bursts(self, session: str) -> bool:
        return False

    @property
    def session(self) -> str:
        return f"{self._config.host}:{self._engine.get_rpc_port()}"

    def host_buffer(self, nbytes: int) -> memoryview:
        buffer = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE))
        self.register(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), len(buffer))
        with self._lock:
            self._buffers.append(buffer)
        return memoryview(buffer)

    def register(self, address: int, nbytes: int) -> None:
        with self._lock:
            self._register(self._engine, address, nbytes)
            self._registered[address] = nbytes

    def _register(self, engine: Any, address: int, nbytes: int) -> None:
        code = engine.register_memory(address, nbytes)
        if code:
            raise TransferError(
                f"{self.name} could not register {nbytes} bytes: {_meaning(code)} (ulimit -l)", code="register_failed"
            )

    def unregister(self, address: int) -> None:
        with self._lock:
            code = self._engine.unregister_memory(address)
            self._registered.pop(address, None)
        if code:
            raise TransferError(f"{self.name} could not unregister {address:#x}: {_meaning(code)}", code="bad_address")

    def write(self, session: str, blocks: Sequence[Block], nth_room: int = 0) -> None:
        """Waits without the interpreter lock, so that other threads keep running."""
        self.begin(session, blocks, nth_room)()

    def begin(self, session: str, blocks: Sequence[Block], nth_room: int = 0) -> Callable[[], None]:
        """Mooncake's own threads write."""
        if not blocks:
            return lambda: None
        slots = self._slots
        slot = slots.take(blocks) if slots is not None else None
        if slots is None or slot is None:
            return self._begin(session, blocks)
        return self._begin_from(slots, slot, session, blocks)

    def _begin_from(self, slots: Slots, slot: int, session: str, blocks: Sequence[Block]) -> Callable[[], None]:
        """By way of page-locked memory."""
        try:
            wait = self._begin(session, slots.fill(slot, blocks))
        except BaseException:
            slots.give_back(slot)
            raise

        def landed() -> None:
            try:
                wait()
            finally:  # a failed write that goes on writes to memory that decode still holds back
                slots.give_back(slot)

        return landed

    def _begin(self, session: str, blocks: Sequence[Block]) -> Callable[[], None]:
        sources, targets, sizes, _ = (list(column) for column in zip(*blocks, strict=True))
        started_s = time.monotonic()
        batch = self._engine.batch_transfer_async_write(session, sources, targets, sizes)
        if not batch:
            raise self._write_failed(session, -1)
        return lambda: self._wait(session, batch, sum(sizes), started_s)

    def _wait(self, session: str, batch: int, nbytes: int, started_s: float) -> None:
        """Until all of a batch is in place: over TCP, until the peer has acknowledged each block.

        Mooncake waits in a busy loop, which takes a core from the threads that write and from compute; so this sleeps
        first, for as long as the batch cannot be done.
        """
        pause_s = started_s + self._pace.at_least_s(nbytes) - time.monotonic()
        if pause_s > SHORTEST_SLEEP_S:
            time.sleep(pause_s)
        code = self._engine.get_batch_transfer_status([batch])
        if code:
            raise self._write_failed(session, code)
        self._pace.note(nbytes, time.monotonic() - started_s)

    def _write_failed(self, session: str, code: int) -> TransferError:
        return TransferError(f"{self.name} write to {session} failed: {_meaning(code)}", code="write_failed")

    def settle(self) -> None:
        """A write to the host's memory is in place when it is acknowledged."""

    def metadata(self, payload: bytes, nth_room: int = 0) -> bytes:
        return payload

    def inbound(self) -> frozenset[str] | None:
        return None if self._data_port is None else connected_to(self._data_port)

    def outbound(self) -> frozenset[str]:
        return frozenset(socket.local for socket in own_sockets() if not socket.listening)

    def reopen(self) -> bool:
        """A new engine in place of the old one, whose destructor closes its connections: Mooncake goes on with a write
        that it has reported as failed, for as long as the connection lives."""
        if self._data_port is None:
            return False
        engine, data_port = _start_engine(self._config)
        with self._lock:
            for address, nbytes in self._registered.items():
                self._register(engine, address, nbytes)
            self._engine, self._data_port = engine, data_port
        log.info("%s began anew, session %s", self.name, self.session)
        return True

    def forget(self, session: str) -> None:
        """Mooncake keeps no memory of a peer's."""

    def close(self) -> None:
        """End the engine (its destructor closes every connection); buffers live on while somebody holds a view."""
        self._engine = None


class DeviceMooncakeTransport(MooncakeTransport):
    """The same for the memory of a card: over TCP it goes through the host, at the sender by way of page-locked memory,
    over RDMA the adapter reads and writes it. One write leaves most of the way idle, so several rooms are written at a
    time."""

    on_device = True
    writers = 4

    def __init__(self, config: TransferConfig, card: int) -> None:
        """Raises ConfigError, also for a Mooncake that knows no CUDA."""
        check_device_build(config, card)
        super().__init__(config, DEVICE_SETTINGS)
        self.card = card
        self._driver = CudaDriver(card)
        if config.protocol is Protocol.TCP:
            from transfer.device_copy import HostCopies

            self._slots = Slots(SLOT_BYTES, NUM_SLOTS, self._pinned_buffer, HostCopies(self._driver, card))

    def _pinned_buffer(self, nbytes: int) -> int:
        address = self._driver.allocate_pinned(nbytes)
        self.register(address, nbytes)
        return address

    def device_buffer(self, nbytes: int) -> int:
        address = self._driver.allocate(nbytes)
        self.register(address, nbytes)
        return address

    def host_buffer(self, nbytes: int) -> memoryview:
        raise TransferError(f"{self.name} carries device memory here", code="register_failed")

    def settle(self) -> None:
        """What was acknowledged may still be on its way from the host to the card."""
        self._driver.settle()


class Pace:
    """How quick writes can be: the quickest so far, of those that are large enough to tell."""

    def __init__(self) -> None:
        self._best_bytes_s = 0.0

    def note(self, nbytes: int, seconds: float) -> None:
        if nbytes >= PACE_BYTES:
            self._best_bytes_s = max(self._best_bytes_s, nbytes / seconds)

    def at_least_s(self, nbytes: int) -> float:
        """A write of so many bytes takes longer than this; 0 while nothing is known."""
        return PACE_SHARE * nbytes / self._best_bytes_s if self._best_bytes_s else 0.0


def open_mooncake(config: TransferConfig, device: str = "cpu") -> MooncakeTransport:
    """A transport that speaks exactly the protocol asked for. device: where pools lie. Raises ConfigError, with
    Mooncake's own words at hand."""
    if device.startswith("cuda"):
        transport: MooncakeTransport = DeviceMooncakeTransport(config, card_of(device))
    else:
        transport = MooncakeTransport(config)
    log.info("transport installed: %s, session %s", transport.name, transport.session)
    return transport


def _start_engine(config: TransferConfig) -> tuple[Any, int | None]:
    """An engine and its TCP data port. Raises ConfigError."""
    module = _load()
    if config.protocol is Protocol.NVLINK and not (module.SUPPORT_MNNVL or module.SUPPORT_INTRA_NVLINK):
        raise ConfigError(
            "--transfer-protocol nvlink: this Mooncake wheel is built without it", param="transfer_protocol"
        )
    before = {socket.inode for socket in own_sockets()}
    engine = module.TransferEngine()
    with _captured_stderr() as words:
        code = engine.initialize(config.host, "P2PHANDSHAKE", config.protocol.value, config.device)
    log.debug("mooncake said: %s", words())
    if code:
        asked = f"--transfer-protocol {config.protocol.value}"
        if config.device:
            asked += f", --transfer-device {config.device}"
        raise ConfigError(
            f"{asked}: Mooncake did not start on {config.host} (code {code}): {_last_error(words())}",
            param="transfer_device" if config.device else "transfer_protocol",
        )
    rpc_port = engine.get_rpc_port()
    listening = [s.local_port for s in own_sockets() if s.listening and s.inode not in before]
    data_ports = [port for port in listening if port != rpc_port]
    _check_installed(config.protocol, data_ports)
    _check_devices(config.device)
    return engine, data_ports[0] if data_ports else None


def _check_installed(wanted: Protocol, data_ports: Sequence[int]) -> None:
    """Refuse to go on with another transport than `wanted`. Raises ConfigError."""
    verbs = bool(_verbs_open())
    match wanted:
        case Protocol.TCP:
            right = len(data_ports) == 1 and not verbs
        case Protocol.RDMA:
            right = verbs and not data_ports
        case Protocol.NVLINK:
            right = not verbs and not data_ports
    if not right:
        raise ConfigError(
            f"--transfer-protocol {wanted.value}: Mooncake installed another transport"
            f" (RDMA device open: {verbs}, TCP data ports: {list(data_ports)})",
            param="transfer_protocol",
        )


def _check_devices(wanted: str) -> None:
    """Refuse to go on without a device of the list: Mooncake leaves out those that are not there or not up."""
    names = {name.strip() for name in wanted.split(",")} - {""}
    found = {Path(f"/sys/class/infiniband_verbs/{verbs}/ibdev").read_text().strip() for verbs in _verbs_open()}
    if not names <= found:
        raise ConfigError(
            f"--transfer-device {wanted}: Mooncake did not open {', '.join(sorted(names - found))}"
            " (no such device, or its port is down)",
            param="transfer_device",
        )


def _verbs_open() -> set[str]:
    """The RDMA devices that this process has open, by the names of their device files (uverbs0)."""
    return {Path(target).name for target in open_files() if "/infiniband/uverbs" in target}


def _set_environment(config: TransferConfig, settings: dict[str, str]) -> None:
    """Mooncake reads its settings from the environment, when it is loaded and when it starts; a user's own win."""
    timeout = {"MC_TRANSFER_TIMEOUT": str(max(1, math.ceil(config.transfer_timeout_s)))}
    for name, value in (settings | timeout).items():
        os.environ.setdefault(name, value)
    forced = {Protocol.TCP: "MC_FORCE_TCP", Protocol.RDMA: "MC_FORCE_HCA", Protocol.NVLINK: "MC_FORCE_MNNVL"}
    for protocol, variable in forced.items():
        if protocol is config.protocol:
            os.environ[variable] = "1"
        else:
            os.environ.pop(variable, None)


def _load(package: str = HOST_PACKAGE) -> Any:
    """package: what to install where there is none."""
    try:
        return importlib.import_module("mooncake.engine")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--transport mooncake: not installed; run: pip install {package}", param="transport"
        ) from error
    except ImportError as error:
        if "libibverbs" in str(error):
            raise ConfigError(
                "--transport mooncake: needs libibverbs; run: apt-get install -y libibverbs1", param="transport"
            ) from error
        raise ConfigError(f"--transport mooncake: cannot be loaded: {error}", param="transport") from error


def check_device_build(config: TransferConfig, card: int) -> None:
    """Raises ConfigError where there is no Mooncake, or one for the host alone, which would take a card's addresses for
    its own."""
    _set_environment(config, DEVICE_SETTINGS)
    if b"libcudart.so" not in Path(_load(DEVICE_PACKAGE).__file__).read_bytes():
        raise ConfigError(
            f"--transport mooncake: this build does not carry the memory of --device cuda:{card}; run: pip install "
            f"--force-reinstall {DEVICE_PACKAGE}",
            param="transport",
        )


@contextlib.contextmanager
def _captured_stderr() -> Iterator[Any]:
    """Keep what C++ code prints to descriptor 2; yields a function that returns it, also after the block."""
    kept: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed below)
    saved = os.dup(2)
    sys.stderr.flush()
    os.dup2(kept.fileno(), 2)
    text: list[str] = []
    try:
        yield lambda: "".join(text)
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        kept.seek(0)
        text.append(kept.read().decode(errors="replace"))
        kept.close()


def _last_error(words: str) -> str:
    lines = [line for line in words.splitlines() if line.startswith(("E", "F"))]
    return lines[-1] if lines else "no reason given"


def _meaning(code: int) -> str:
    return f"{_WRITE_CODES.get(code, 'unknown reason')} (code {code})"
