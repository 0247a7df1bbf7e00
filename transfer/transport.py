"""The seam between the hand-off and whatever moves the bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple
from typing import Protocol as ProtocolType

from common.config import TransferConfig, TransportName, chosen_transport
from common.errors import ConfigError

if TYPE_CHECKING:
    from transfer.cuda_ipc import CudaIpcTransport


class Block(NamedTuple):
    """Copy `nbytes` from address `src` here to address `dst` at the peer.

    part: kv, conv, ssm or track; "greeting" for bytes that nobody reads.
    """

    src: int
    dst: int
    nbytes: int
    part: str


class Transport(ProtocolType):
    """One-sided writes into a peer's registered memory. Every method but `close` may be called from any thread."""

    @property
    def name(self) -> str:
        """What was really installed, e.g. "mooncake-tcp"."""
        ...

    @property
    def on_device(self) -> bool:
        """Whether it carries the memory of a card, which the host cannot read, or the host's: see `DeviceTransport`."""
        ...

    @property
    def writers(self) -> int:
        """How many rooms are to be written to one peer at a time: several where one leaves the way idle."""
        ...

    def bursts(self, session: str) -> bool:
        """Whether a request's state crosses to this peer in the time of a few layers, and is to leave in one burst: see
        `CudaIpcTransport`."""
        ...

    @property
    def session(self) -> str:
        """What a peer passes to `write` to reach this process; read it after all memory is registered."""
        ...

    def host_buffer(self, nbytes: int) -> memoryview:
        """Zeroed, page-aligned, registered host memory, at least `nbytes` long; it lives as long as the transport."""
        ...

    def register(self, address: int, nbytes: int) -> None:
        """Let peers write to memory that the caller owns and keeps alive. Raises TransferError."""
        ...

    def unregister(self, address: int) -> None: ...

    def write(self, session: str, blocks: Sequence[Block], nth_room: int = 0) -> None:
        """Write all blocks; returns when every byte is in place. Raises TransferError.

        nth_room: which room of the sender this is, counted from 0; only injected faults look at it. After an error
        some of the blocks may still land.
        """
        ...

    def begin(self, session: str, blocks: Sequence[Block], nth_room: int = 0) -> Callable[[], None]:
        """The first half of `write`; the second is what it returns, to be called once, by the same thread.

        In between the caller may read the blocks, not change them. Both halves raise TransferError.
        """
        ...

    def settle(self) -> None:
        """At the receiver, before it reads what a peer says is in place: wait for what is left of its way into memory.
        Raises TransferError."""
        ...

    def metadata(self, payload: bytes, nth_room: int = 0) -> bytes | None:
        """The metadata as it leaves: unchanged, unless a fault is injected (None: lost on the way)."""
        ...

    def inbound(self) -> frozenset[str] | None:
        """The far ends ("address:port") of the connections over which peers can write here; None: cannot be known."""
        ...

    def outbound(self) -> frozenset[str]:
        """The near ends ("address:port") of this process' own connections."""
        ...

    def reopen(self) -> bool:
        """Make sure that writes which have failed do not go on: close every connection, and begin anew with the same
        memory. Nobody may write meanwhile. False where it would not help: nothing tells what is still on its way.
        Raises ServingError when it did not work; then everything is as before.
        """
        ...

    def forget(self, session: str) -> None:
        """Let go of what is held of a peer that is lost, once its writes are over. A later write reaches it anew."""
        ...

    def close(self) -> None: ...


class DeviceTransport(Transport, ProtocolType):
    """One that is `on_device`. card: the number of the device."""

    @property
    def card(self) -> int: ...

    def device_buffer(self, nbytes: int) -> int:
        """The address of zeroed device memory that peers can write to; it lives as long as the process. Raises
        TransferError."""
        ...


def open_transport(config: TransferConfig, device: str = "cpu") -> Transport:
    """The transport that the configuration asks for, ready to write. device: where pools lie. Raises ConfigError."""
    if config.host in ("", "0.0.0.0", "::"):
        raise ConfigError(
            f"--transfer-host {config.host or '(empty)'}: peers cannot reach it; give this machine's address",
            param="transfer_host",
        )
    match chosen_transport(config.transport, device):
        case TransportName.CUDA_IPC:
            return _open_cuda_ipc(device)
        case TransportName.LOOPBACK:
            from transfer.loopback import LoopbackTransport

            return LoopbackTransport(config.faults)
        case TransportName.MOONCAKE:
            from transfer.mooncake import open_mooncake

            return open_mooncake(config, device)
        case TransportName.AUTO:
            near = _open_cuda_ipc(device)
            from transfer.near_or_far import open_near_or_far

            return open_near_or_far(near, config, device)


def _open_cuda_ipc(device: str) -> CudaIpcTransport:
    try:
        from transfer.cuda_ipc import open_cuda_ipc
    except ImportError as error:
        raise ConfigError(f"--transport cuda_ipc: {error}; install the extra gpu", param="transport") from error
    return open_cuda_ipc(device)
