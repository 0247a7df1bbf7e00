"""Which of two transports a peer is written to over; rooms that are written side by side where the way allows it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch

from common.config import Protocol, TransferConfig, TransportName
from common.errors import ConfigError, TransferError
from transfer import Committed
from transfer.cuda_ipc import CudaIpcTransport
from transfer.loopback import LoopbackTransport
from transfer.mooncake import DEVICE_SETTINGS, MooncakeTransport
from transfer.near_or_far import NearOrFarTransport, open_near_or_far
from transfer.transport import Block, open_transport

BLOCKS = [Block(0, 0, 4, "kv")]


class FakeTransport:
    """Notes what is asked of it. near: the sessions that it reaches."""

    card, writers = 1, 4

    def __init__(self, name: str, near: Sequence[str] = ()) -> None:
        self.name, self.session = name, f"{name}:here"
        self.near, self.asked = set(near), list[tuple[str, ...]]()

    def reaches(self, session: str) -> bool:
        self.asked.append(("reaches", session))
        return session in self.near

    def begin(self, session: str, blocks: Sequence[Block], nth_room: int = 0) -> Callable[[], None]:
        self.asked.append(("begin", session))
        return lambda: self.asked.append(("wait", session))

    def device_buffer(self, nbytes: int) -> int:
        return 4096

    def register(self, address: int, nbytes: int) -> None:
        self.asked.append(("register", str(address), str(nbytes)))

    def forget(self, session: str) -> None:
        self.asked.append(("forget", session))

    def inbound(self) -> frozenset[str] | None:
        return None if self.name == "rdma" else frozenset({f"{self.name} in"})

    def outbound(self) -> frozenset[str]:
        return frozenset({f"{self.name} out"})

    def reopen(self) -> bool:
        return self.name != "rdma"


def pair(near: FakeTransport, far: FakeTransport) -> NearOrFarTransport:
    return NearOrFarTransport(cast(CudaIpcTransport, near), cast(MooncakeTransport, far))


def test_a_peer_that_can_be_reached_nearby_is() -> None:
    near, far = FakeTransport("ipc", ["ipc:a"]), FakeTransport("tcp")
    both = pair(near, far)
    assert both.session == "ipc:here tcp:here" and both.name == "ipc or tcp" and both.card == 1
    both.write("ipc:a tcp:a", BLOCKS)
    both.write("ipc:b tcp:b", BLOCKS)
    both.write("ipc:b tcp:b", BLOCKS)
    assert near.asked == [("reaches", "ipc:a"), ("begin", "ipc:a"), ("wait", "ipc:a"), ("reaches", "ipc:b")]
    assert far.asked == 2 * [("begin", "tcp:b"), ("wait", "tcp:b")]


def test_a_forgotten_peer_is_looked_at_again() -> None:
    near, far = FakeTransport("ipc"), FakeTransport("tcp")
    both = pair(near, far)
    both.write("ipc:a tcp:a", BLOCKS)
    both.forget("ipc:a tcp:a")
    near.near.add("ipc:a")
    both.write("ipc:a tcp:a", BLOCKS)
    assert ("forget", "ipc:a") in near.asked and ("forget", "tcp:a") in far.asked
    assert near.asked[-2:] == [("begin", "ipc:a"), ("wait", "ipc:a")]


def test_memory_is_known_to_both_and_so_are_connections() -> None:
    near, far = FakeTransport("ipc"), FakeTransport("tcp")
    both = pair(near, far)
    assert both.device_buffer(64) == 4096 and far.asked == [("register", "4096", "64")]
    assert both.inbound() == {"ipc in", "tcp in"} and both.outbound() == {"ipc out", "tcp out"}
    assert both.reopen()
    unseen = pair(near, FakeTransport("rdma"))
    assert unseen.inbound() is None and not unseen.reopen()
    for refused in (lambda: both.host_buffer(1), lambda: both.register(1, 1), lambda: both.unregister(1)):
        with pytest.raises(TransferError):
            refused()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card, so perhaps a Mooncake for it")
def test_a_mooncake_for_the_host_alone_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is installed here."""
    for name, value in DEVICE_SETTINGS.items():
        monkeypatch.setenv(name, value)  # so that it is as before afterwards
    near = cast(CudaIpcTransport, FakeTransport("ipc"))
    assert open_near_or_far(near, TransferConfig(), "cuda:1") is near
    with pytest.raises(ConfigError, match="this build does not carry the memory of --device cuda:1") as caught:
        open_near_or_far(near, TransferConfig(protocol=Protocol.RDMA), "cuda:1")
    assert caught.value.param == "transport"
    with pytest.raises(ConfigError, match=r"--device cuda:0; run: pip install --force-reinstall .*cuda"):
        open_transport(TransferConfig(transport=TransportName.MOONCAKE), "cuda")


class SideBySide(LoopbackTransport):
    """The first room's state lands when the test says so."""

    writers = 2

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.land = threading.Event(), threading.Event()

    def begin(self, session: str, blocks: Sequence[Block], nth_room: int = 0) -> Callable[[], None]:
        def wait() -> None:
            if nth_room == 0:
                self.begun.set()
                assert self.land.wait(10)
            self.write(session, blocks, nth_room)

        return wait


def test_a_room_does_not_wait_for_another_one(config: Any, prefill: Any, decode: Any) -> None:
    p, d = prefill(config(), transport=SideBySide()), decode(config())
    for room, pages, slot in ((1, [4, 5], 1), (2, [6, 7], 2)):
        p.transfer.expect(room, "r", 5)
        d.transfer.open(p.address(room), "r", pages, slot)
    p.send(1, [1, 2], 1, tracked_position=-1)
    assert p.transport.begun.wait(10)
    p.send(2, [3, 8], 2, tracked_position=-1)
    d.wait_for(Committed, 2)
    assert not d.of(Committed, 1)
    p.transport.land.set()
    d.wait_for(Committed, 1)
    for room, here, there in ((1, [1, 2], [4, 5]), (2, [3, 8], [6, 7])):
        assert p.pools.state(here, room) == d.pools.state(there, room)
