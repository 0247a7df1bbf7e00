"""What one router process owns, put together."""

from __future__ import annotations

import asyncio
from typing import cast

from starlette.requests import Request
from starlette.types import Receive, Scope

from common.config import RouterConfig
from common.http_server import read_body
from common.tracing import open_tracing
from router.client import Network
from router.dispatch import Dispatcher
from router.http_client import HttpNetwork
from router.membership import Membership
from router.node_states import NodeStates
from router.settings import worker_authorization, worker_tls
from router.siblings import Siblings
from router.workers import Workers


class Router:
    """What one router process owns. To be made inside a running event loop."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.network: Network = HttpNetwork(config, worker_tls(config), worker_authorization(config))
        self.workers = Workers(config, self.network)
        self.dispatcher = Dispatcher(config, self.workers, self.network)
        self.node_states = NodeStates(self.network)
        self.dispatcher.recorder.tracing = self.tracing = open_tracing(config.otlp_endpoint, "tandem-router")
        self.workers.on_silence = self.dispatcher.give_up
        self.membership = Membership(config, self.workers)
        self.siblings = Siblings(config.siblings)

    def start(self) -> None:
        self.workers.start()
        self.membership.start()

    async def read_body(self, scope: Scope, receive: Receive) -> bytes:
        """A request's body, within the router's limits of size and time."""
        config = self.config
        return await read_body(scope, receive, max_bytes=config.max_body_bytes, timeout_s=config.upload_timeout_s)

    async def stop(self) -> None:
        await self.siblings.stop()
        await self.membership.stop()
        await self.workers.stop()
        await self.dispatcher.stop()
        await self.node_states.stop()
        await self.network.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)


def router_of(request: Request) -> Router:
    """What answers this request."""
    return cast(Router, request.app.state.router)
