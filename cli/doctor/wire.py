"""A real write through the configured transport, between two processes, and its digest at the other end."""

from __future__ import annotations

import contextlib
import logging
import platform
import socket
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import msgspec
import numpy as np
import xxhash

from cli.doctor.checks import shown
from cli.doctor.fit import Settings, differences
from cli.doctor.talk import Talk, address, number, text, welcome
from common.config import TransferConfig
from common.errors import ConfigError, ServingError, TransferError
from transfer.messages import PROTOCOL_VERSION
from transfer.transport import Block, Transport, open_transport

log = logging.getLogger(__name__)

NBYTES = 64 << 20
_BLOCK_BYTES = 1 << 20
_CLOCK_TRIES = 9
_MAX_WRITE_S = 8.0
_MAX_STRANGERS = 16
_ACCEPT_AGAIN_S = 0.1


class Site:
    """An open transport with memory: its first half is written from, its second half is written into."""

    def __init__(
        self, config: TransferConfig, device: str, nbytes: int = NBYTES, settings: Settings | None = None
    ) -> None:
        """settings: of the node, told to the other end. Raises ConfigError, TransferError."""
        self._settings = settings or {}
        patience_s = min(config.transfer_timeout_s, _MAX_WRITE_S)
        self.config = msgspec.structs.replace(config, transfer_timeout_s=patience_s)
        self.nbytes = nbytes
        self.transport = open_transport(self.config, device)
        self._memory = (
            _on_card(self.transport, nbytes) if self.transport.on_device else _on_host(self.transport, nbytes)
        )
        self.fill()

    def fill(self) -> None:
        """New random bytes to write."""
        self._memory.fill(np.random.default_rng().integers(0, 256, self.nbytes, np.uint8))

    def hello(self) -> dict[str, Any]:
        """What the other end needs to write here, and to compare."""
        return {
            "host": platform.node(),
            "tandem": version("tandem-serve"),
            "protocol": PROTOCOL_VERSION,
            "transport": self.transport.name,
            "session": self.transport.session,
            "address": self._memory.address + self.nbytes,
            "nbytes": self.nbytes,
            "settings": self._settings,
        }

    def write(self, session: str, address: int) -> float:
        """Seconds for all bytes, without the first one, which opens connections. Raises TransferError."""
        base = self._memory.address
        sizes = range(0, self.nbytes, _BLOCK_BYTES)
        blocks = [Block(base + offset, address + offset, _BLOCK_BYTES, "kv") for offset in sizes]
        self.transport.write(session, blocks[:1])
        started_s = time.monotonic()
        self.transport.write(session, blocks)
        return time.monotonic() - started_s

    def source_digest(self) -> str:
        return _digest(self._memory.read(0))

    def target_digest(self) -> str:
        self.transport.settle()
        return _digest(self._memory.read(self.nbytes))


def _digest(array: np.ndarray[Any, Any]) -> str:
    return str(xxhash.xxh3_64(array.data).hexdigest())


class _Memory:
    """address: of its first byte. fill: copy an array to the beginning. read(offset): the half from there."""

    def __init__(
        self,
        address: int,
        fill: Callable[[np.ndarray[Any, Any]], None],
        read: Callable[[int], np.ndarray[Any, Any]],
    ) -> None:
        self.address, self.fill, self.read = address, fill, read


def _on_host(transport: Transport, nbytes: int) -> _Memory:
    array = np.frombuffer(transport.host_buffer(2 * nbytes), np.uint8)

    def fill(values: np.ndarray[Any, Any]) -> None:
        array[:nbytes] = values

    return _Memory(array.ctypes.data, fill, lambda offset: array[offset : offset + nbytes])


def _on_card(transport: Transport, nbytes: int) -> _Memory:
    import torch

    from node.transport_memory import pool_allocator

    tensor = pool_allocator(transport)(2 * nbytes)

    def fill(values: np.ndarray[Any, Any]) -> None:
        tensor[:nbytes].copy_(torch.from_numpy(values))
        torch.cuda.synchronize(tensor.device)

    return _Memory(tensor.data_ptr(), fill, lambda offset: tensor[offset : offset + nbytes].cpu().numpy())


# The listener


def listen(host: str, port: int) -> socket.socket:
    """Raises ConfigError."""
    try:
        return socket.create_server((host, port), backlog=8)
    except (OSError, OverflowError) as reason:
        raise ConfigError(f"--serve {port}: {host}: {reason}", param="serve") from reason


class _Callers:
    """Who has called, each in a thread of its own: greeted at once, then served one after the other, because they write
    to the same memory. Of strangers there are a few at most; a new one takes the place of the one that came first."""

    def __init__(self, site: Site, key: bytes | None) -> None:
        self._site, self._key = site, key
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._strangers: list[socket.socket] = []

    def take(self, sock: socket.socket) -> None:
        with self._lock:
            self._strangers.append(sock)
            if len(self._strangers) > _MAX_STRANGERS:
                _hang_up(self._strangers.pop(0))
        threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        """One that fails is logged."""
        try:
            with sock, Talk(sock) as talk:
                try:
                    welcome(talk, self._key)
                finally:
                    self._is_no_stranger(sock)
                log.info("%s has come", talk.peer)
                with self._turn:
                    _converse(talk, self._site)
        except ServingError as error:
            if error.code != "peer_lost":
                log.warning("%s", error.message)
        except OSError as error:
            log.warning("a caller was lost: %s", error)

    def _is_no_stranger(self, sock: socket.socket) -> None:
        with self._lock:
            self._strangers = [each for each in self._strangers if each is not sock]


def _hang_up(sock: socket.socket) -> None:
    """Its thread finds that out, and closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def serve(listener: socket.socket, site: Site, key: bytes | None) -> None:
    """For ever."""
    callers = _Callers(site, key)
    while True:
        try:
            sock, _ = listener.accept()
            callers.take(sock)
        except (OSError, RuntimeError) as error:  # no descriptors, or threads, left
            log.warning("a caller was lost: %s", error)
            time.sleep(_ACCEPT_AGAIN_S)


def _converse(talk: Talk, site: Site) -> None:
    """Until the caller leaves, which is a WorkerError."""
    while True:
        words = talk.receive()
        try:
            answer = _answer(words, site)
        except ServingError as error:
            talk.refuse(error)
        else:
            talk.send(**answer)


def _answer(words: dict[str, Any], site: Site) -> dict[str, Any]:
    match words:
        case {"ask": "clock"}:
            return {"time_s": time.time()}
        case {"ask": "hello"}:
            return site.hello()
        case {"ask": "digest"}:
            return {"digest": site.target_digest()}
        case {"ask": "write", "session": str(session)}:
            return {"seconds": site.write(session, address(words, "address")), "digest": site.source_digest()}
        case _:
            raise TransferError("this question is not known here", code="protocol_error")


# The caller


def compare(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Raises ConfigError naming both values of all that differs."""
    for what in ("protocol", "transport"):
        if mine[what] != theirs.get(what):
            there = shown(theirs.get(what))
            raise ConfigError(f"{what}: {mine[what]} here, {there} there", code="layout_mismatch")
    if differing := differences(mine["settings"], theirs.get("settings")):
        raise ConfigError("; ".join(differing), code="layout_mismatch")


def clock(talk: Talk) -> tuple[float, float]:
    """How far the other clock is ahead, and how wrong that may be: of the quickest answer. Seconds."""
    found = []
    for _ in range(_CLOCK_TRIES):
        before_s, started_s = time.time(), time.monotonic()
        theirs_s = number(talk.ask("clock"), "time_s")
        half_s = (time.monotonic() - started_s) / 2
        found.append((half_s, theirs_s - before_s - half_s))
    half_s, skew_s = min(found)
    return skew_s, half_s


def write_there(talk: Talk, site: Site, theirs: dict[str, Any]) -> float:
    """Seconds. Raises TransferError, also when other bytes have arrived."""
    seconds = site.write(text(theirs, "session"), address(theirs, "address"))
    _check_digest(site.source_digest(), text(talk.ask("digest"), "digest"), "there")
    return seconds


def write_here(talk: Talk, site: Site) -> float:
    """The other end writes. Seconds."""
    hello = site.hello()
    answer = talk.ask("write", session=hello["session"], address=hello["address"])
    _check_digest(text(answer, "digest"), site.target_digest(), "here")
    return number(answer, "seconds")


def _check_digest(sent: str, arrived: str, where: str) -> None:
    if sent != arrived:
        raise TransferError(f"other bytes arrived {where}: digest {arrived} in place of {sent}", code="digest_mismatch")
