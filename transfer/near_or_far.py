"""For pools on a card, by pair: `cuda_ipc` to a peer of this host whose memory can be opened, Mooncake to any other.

A session is that of `cuda_ipc`, a space, and that of Mooncake.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from common.config import Protocol, TransferConfig
from common.errors import ConfigError, TransferError
from transfer.cuda_ipc import CudaIpcTransport
from transfer.mooncake import MooncakeTransport, check_device_build, open_mooncake
from transfer.transport import Block, DeviceTransport

log = logging.getLogger(__name__)


class NearOrFarTransport:
    on_device = True

    def __init__(self, near: CudaIpcTransport, far: MooncakeTransport) -> None:
        self._near, self._far = near, far
        self.name, self.card, self.writers = f"{near.name} or {far.name}", near.card, far.writers
        self._lock = threading.Lock()
        self._is_near: dict[str, bool] = {}

    def bursts(self, session: str) -> bool:
        return self._goes_near(session.partition(" ")[0])

    @property
    def session(self) -> str:
        return f"{self._near.session} {self._far.session}"

    def device_buffer(self, nbytes: int) -> int:
        address = self._near.device_buffer(nbytes)
        self._far.register(address, nbytes)
        return address

    def host_buffer(self, nbytes: int) -> memoryview:
        raise TransferError(f"{self.name} carries device memory only", code="register_failed")

    def register(self, address: int, nbytes: int) -> None:
        raise TransferError(f"{self.name} carries only what it has allocated", code="register_failed")

    def unregister(self, address: int) -> None:
        raise TransferError(f"{self.name} carries only what it has allocated", code="bad_address")

    def write(self, session: str, blocks: Sequence[Block], nth_room: int = 0) -> None:
        self.begin(session, blocks, nth_room)()

    def begin(self, session: str, blocks: Sequence[Block], nth_room: int = 0) -> Callable[[], None]:
        near, _, far = session.partition(" ")
        if self._goes_near(near):
            return self._near.begin(near, blocks, nth_room)
        return self._far.begin(far, blocks, nth_room)

    def settle(self) -> None:
        self._far.settle()

    def metadata(self, payload: bytes, nth_room: int = 0) -> bytes:
        return payload

    def inbound(self) -> frozenset[str] | None:
        far = self._far.inbound()
        return None if far is None else far | self._near.inbound()

    def outbound(self) -> frozenset[str]:
        return self._near.outbound() | self._far.outbound()

    def reopen(self) -> bool:
        return self._near.reopen() and self._far.reopen()

    def forget(self, session: str) -> None:
        near, _, far = session.partition(" ")
        with self._lock:
            self._is_near.pop(near, None)
        self._near.forget(near)
        self._far.forget(far)

    def close(self) -> None:
        self._near.close()
        self._far.close()

    def _goes_near(self, near: str) -> bool:
        """Decided with the first write to a peer, until it is forgotten."""
        with self._lock:
            if near not in self._is_near:
                self._is_near[near] = self._near.reaches(near)
                log.info("writes to %s go over %s", near[:60], (self._near if self._is_near[near] else self._far).name)
            return self._is_near[near]


def open_near_or_far(near: CudaIpcTransport, config: TransferConfig, device: str) -> DeviceTransport:
    """`near` alone where no Mooncake that carries a card's memory is installed, unless more than TCP is asked of it.
    Raises ConfigError."""
    try:
        check_device_build(config, near.card)
    except ConfigError as error:
        if config.protocol is not Protocol.TCP:
            raise
        log.warning("peers on other hosts cannot be reached: %s", error.message)
        return near
    return NearOrFarTransport(near, open_mooncake(config, device))
