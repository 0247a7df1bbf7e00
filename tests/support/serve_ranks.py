"""A node of several ranks, for which there is no option yet: `serve_ranks.py NUM_RANKS < NodeConfig as JSON`."""

from __future__ import annotations

import sys

import msgspec

from common.config import NodeConfig
from node.front import serve

if __name__ == "__main__":
    serve(msgspec.json.decode(sys.stdin.buffer.read(), type=NodeConfig), num_ranks=int(sys.argv[1]))
