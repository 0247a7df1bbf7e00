"""The unified role: one rank that prefills and decodes. It is what every disaggregated result is compared with."""

from __future__ import annotations

from common.config import NodeConfig
from common.errors import AbortedError
from node.accounting import NO_ROOMS
from node.engine_host import EngineHost, finish_local
from node.messages import Abort, FromRank, Query, Ready, Submit
from node.rank import Waker


class UnifiedRole:
    def __init__(self, config: NodeConfig, rank: int) -> None:
        self.rank = rank
        self.host = EngineHost(config, allocate=None, hold_after_prefill=False)

    def ready(self) -> Ready:
        return self.host.ready(rank=self.rank, transport="none", control_address=None)

    def submit(self, message: Submit) -> None:
        self.host.scheduler.add(self.host.new_sequence(message))

    def abort(self, message: Abort) -> None:
        for sequence in self.host.select(message.rid):
            self.host.scheduler.remove(sequence)
            self.host.scheduler.release(sequence)
            self.host.fail(sequence, AbortedError(message.message))

    def query(self, message: Query) -> None:
        self.host.answer_query(message, idle=not self.host.sequences, rooms=NO_ROOMS, extra_state={})

    def watch(self, now: float) -> None:
        self.host.watch(NO_ROOMS, now)

    def poll(self) -> None:
        """Nothing comes to a unified rank but messages."""

    def step(self) -> bool:
        report = self.host.scheduler.step()
        if report is not None:
            finish_local(self.host, report)
        return self.host.scheduler.has_work()

    def take_outbox(self) -> list[FromRank]:
        return self.host.take_outbox()

    def close(self) -> None:
        """No transfer, nothing to close."""


def make_unified_role(config: NodeConfig, rank: int, waker: Waker) -> UnifiedRole:
    return UnifiedRole(config, rank)
