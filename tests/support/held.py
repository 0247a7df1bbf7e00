"""A loopback transport whose writes a test holds back, breaks or spoils, and ranks with it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from common.config import EngineConfig, Role
from common.errors import TransferError
from decode_node.rank import DecodeRole
from node.rank import Waker
from prefill_node.rank import PrefillRole
from tests.support.ranks import Ranks, bootstrap, node_config
from transfer.loopback import LoopbackTransport
from transfer.transport import Block, open_transport


class HeldTransport(LoopbackTransport):
    """Writes wait until they may `land`, and then fail if the link `breaks`. The commit is lost or spoiled on request.

    reached: a write waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.land, self.reached = threading.Event(), threading.Event()
        self.land.set()
        self.breaks = self.loses_commit = self.spoils_commit = False

    def hold(self) -> None:
        self.land.clear()
        self.reached.clear()

    def write(self, session: str, blocks: Sequence[Block], nth_room: int = 0) -> None:
        if blocks[0].part != "greeting":
            self.reached.set()
            assert self.land.wait(30)
            if self.breaks:
                raise TransferError("the link broke", code="write_failed")
        super().write(session, blocks, nth_room)

    def metadata(self, payload: bytes, nth_room: int = 0) -> bytes | None:
        if self.spoils_commit:
            return payload[:-1] + bytes([payload[-1] ^ 1])
        return None if self.loses_commit else payload


@contextmanager
def held_ranks(prefill_engine: EngineConfig, decode_engine: EngineConfig, **transfer: float) -> Iterator[Ranks]:
    """As `disaggregated_ranks`, with a `HeldTransport` on the prefill rank."""
    prefill = PrefillRole(node_config(Role.PREFILL, engine=prefill_engine, **transfer), 0, HeldTransport(), Waker())
    try:
        config = node_config(Role.DECODE, engine=decode_engine, **transfer)
        decode = DecodeRole(config, 0, open_transport(config.transfer), Waker())
        try:
            with bootstrap(prefill) as port:
                yield Ranks([prefill, decode], port)
        finally:
            decode.close()
    finally:
        prefill.close()
