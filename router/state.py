"""What one router process owns, put together."""

from __future__ import annotations

from common.config import RouterConfig
from router.client import AiohttpNetwork, Network
from router.dispatch import Dispatcher
from router.workers import Workers


class Router:
    """What one router process owns. To be made inside a running event loop."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.network: Network = AiohttpNetwork(config)
        self.workers = Workers(config, self.network)
        self.dispatcher = Dispatcher(self.workers, self.network)

    def start(self) -> None:
        self.workers.start()

    async def stop(self) -> None:
        await self.workers.stop()
        await self.dispatcher.stop()
        await self.network.close()
