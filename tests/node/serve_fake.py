"""A node's front process over fake ranks: `serve_fake.py MODE NUM_RANKS < NodeConfig as JSON`. Exit 2 on errors."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from common.config import NodeConfig
from common.errors import ServingError
from node import front
from node.messages import Ready


class FakeBootstrap:
    def __init__(self, port: int) -> None:
        self.port = port

    def move_rank(self, rank: int, address: tuple[str, int]) -> None:
        print(f"rank {rank} moved to {address[0]}:{address[1]}", file=sys.stderr, flush=True)

    async def close(self) -> None:
        print("bootstrap closed", file=sys.stderr)


async def start_bootstrap(config: NodeConfig, readies: list[Ready]) -> FakeBootstrap:
    assert all(ready.control_address == ("127.0.0.1", 1) for ready in readies)
    return FakeBootstrap(config.server.bootstrap_port)


def main() -> None:
    mode, num_ranks = sys.argv[1], int(sys.argv[2])
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=NodeConfig)
    config = msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, dp_size=num_ranks))
    if mode == "dies-when-ready":
        front.RESTART_WAIT_S = 0.2
    command = [sys.executable, str(Path(__file__).with_name("fake_rank.py")), "--mode", mode]
    try:
        return_s = 1.0 if mode == "loads-again" else front.RETURN_S
        front.serve(config, command=command, bootstrap=start_bootstrap, rank_stop_s=0.7, rank_return_s=return_s)
    except ServingError as error:
        print(f"{error.record().type} {error.code}: {error.message}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
