"""The bootstrap endpoint of a prefill node: where decode ranks ask which prefill rank holds a room.

This is the one place where the front meets the transfer package.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from common.config import NodeConfig
from node.messages import Ready


class Bootstrap(Protocol):
    """A running endpoint. port: the one really bound."""

    @property
    def port(self) -> int: ...

    def move_rank(self, rank: int, address: tuple[str, int]) -> None:
        """Another process is there in the place of this rank."""

    async def close(self) -> None: ...


StartBootstrap = Callable[[NodeConfig, list[Ready]], Awaitable[Bootstrap]]


async def start_bootstrap(config: NodeConfig, readies: list[Ready]) -> Bootstrap:
    """Start the endpoint on `config.server.bootstrap_host:bootstrap_port`.

    readies: of all ranks, by rank: the address of each, and the layout that they share. Raises ConfigError when the
    port is taken.
    """
    from transfer.handshake import read_key
    from transfer.rendezvous import BootstrapServer

    addresses = [ready.control_address for ready in readies if ready.control_address is not None]
    layout = readies[0].layout
    assert len(addresses) == len(readies) and layout is not None, "a prefill rank has an address and a layout"
    endpoint = BootstrapServer(
        config.server.bootstrap_host,
        config.server.bootstrap_port,
        addresses,
        layout,
        read_key(config.transfer.cluster_key_file),
        verify=config.transfer.verify,
        timeout_s=config.transfer.bootstrap_timeout_s,
    )
    await endpoint.start()
    return endpoint
