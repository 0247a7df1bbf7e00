"""The seam between the front and the transfer package: the endpoint that a prefill node's front runs."""

from __future__ import annotations

import socket

import pytest

from common.config import Role
from common.errors import ConfigError
from common.layout import StateLayout
from node.bootstrap import start_bootstrap
from node.front import bind
from node.messages import Ready
from tests.node.conftest import node_config


def ready(rank: int) -> Ready:
    layout = StateLayout(model="m", revision="r", page_size=16, chunk=64, conv_width=4, vocab_size=10, pools=())
    return Ready(
        pid=1,
        fingerprint=layout.fingerprint(),
        transport="fake",
        control_address=("127.0.0.1", 1000 + rank),
        context_length=10,
        max_total_tokens=10,
        vocab_size=10,
        info={},
        layout=layout,
    )


async def test_the_endpoint_listens_on_its_port_until_it_is_closed(model_path: str) -> None:
    config = node_config(model_path, Role.PREFILL)
    endpoint = await start_bootstrap(config, [ready(0), ready(1)])
    address = ("127.0.0.1", config.server.bootstrap_port)
    assert endpoint.port == config.server.bootstrap_port
    socket.create_connection(address, timeout=2).close()
    await endpoint.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=2)


async def test_a_port_that_was_taken_meanwhile_is_named(model_path: str) -> None:
    config = node_config(model_path, Role.PREFILL)
    with bind("127.0.0.1", config.server.bootstrap_port, "bootstrap_port") as taken:
        taken.listen()
        with pytest.raises(ConfigError, match=str(config.server.bootstrap_port)):
            await start_bootstrap(config, [ready(0)])
