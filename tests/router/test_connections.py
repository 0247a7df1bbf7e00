"""Connections that the router keeps for its next request, and a worker that drops them while they are idle."""

from __future__ import annotations

import asyncio

from common.config import RouterConfig
from router.http_client import HttpNetwork

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


async def test_an_idle_connection_that_the_worker_has_dropped_costs_no_request() -> None:
    connections: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        while await reader.readline():  # a request's head, then its body of two bytes
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(2)
            writer.write(ANSWER)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/generate"
    network = HttpNetwork(RouterConfig())
    try:
        for expected in (1, 1, 2, 3):
            if expected > 1:
                connections[-1].close()
                await connections[-1].wait_closed()
                await asyncio.sleep(0.05)  # the end of it has arrived
            answer = await network.send("POST", url, b"{}")
            assert await answer.read() == b"{}"
            assert len(connections) == expected
    finally:
        await network.close()
        for connection in connections:
            connection.close()
        server.close()
        await server.wait_closed()
