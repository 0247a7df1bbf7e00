"""The bootstrap endpoint of a prefill node: tells decode ranks which control address each room belongs to.

`BootstrapServer` runs on the event loop of the node's front process. It never sees a room's state or addresses.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

from common.config import Verify
from common.errors import ConfigError, TransferError, WorkerError
from common.layout import StateLayout
from transfer.channel import Channel
from transfer.handshake import expect
from transfer.messages import PROTOCOL_VERSION, Hello, Lookup, Ranks
from transfer.server import FrameServer, dial


class BootstrapServer:
    """rank_addresses: the ranks' control addresses, as peers reach them, in the order of the ranks."""

    def __init__(
        self,
        host: str,
        port: int,
        rank_addresses: Sequence[tuple[str, int]],
        layout: StateLayout,
        key: bytes | None,
        *,
        verify: Verify = Verify.DIGEST,
        timeout_s: float = 30.0,
        node_id: str = "prefill",
    ) -> None:
        for rank_host, _ in rank_addresses:
            if rank_host in ("", "0.0.0.0", "::"):
                raise ConfigError(
                    f"rank address {rank_host or '(empty)'}: peers cannot reach it", param="transfer_host"
                )
        assert rank_addresses, "a prefill node has at least one rank"
        self._ranks = Ranks(addresses=tuple((rank_host, rank_port) for rank_host, rank_port in rank_addresses))
        hello = Hello(
            version=PROTOCOL_VERSION,
            role="prefill",
            node_id=node_id,
            instance=secrets.token_hex(8),
            verify=verify,
            layout=layout,
        )
        self._server = FrameServer(host, port, key, lambda: hello, timeout_s, self._answer)

    @property
    def port(self) -> int:
        return self._server.address[1]

    def move_rank(self, rank: int, address: tuple[str, int]) -> None:
        """Another process is there in the place of this rank. Who knew the old address asks again."""
        addresses = list(self._ranks.addresses)
        addresses[rank] = address
        self._ranks = Ranks(addresses=tuple(addresses))

    async def start(self) -> None:
        """Raises ConfigError when the port is taken."""
        await self._server.start()

    async def close(self) -> None:
        await self._server.close()

    async def _answer(self, channel: Channel, hello: Hello) -> None:
        while True:
            await expect(channel, Lookup)
            channel.send(self._ranks)


async def look_up(host: str, port: int, key: bytes | None, hello: Hello, timeout_s: float) -> Ranks:
    """Ask a bootstrap endpoint for its ranks. Raises WorkerError, ConfigError or TransferError."""
    channel, _ = await dial(host, port, key, hello, timeout_s)
    try:
        channel.send(Lookup())
        async with asyncio.timeout(timeout_s):
            ranks = await expect(channel, Ranks)
    except TimeoutError as error:
        raise WorkerError(f"{host}:{port} did not answer in {timeout_s} s", code="bootstrap_timeout") from error
    finally:
        channel.close()
    if not ranks.addresses:
        raise TransferError(f"the prefill node at {host}:{port} has no ranks", code="protocol_error")
    return ranks
