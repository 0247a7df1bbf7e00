"""The loop of a rank process, run in a thread over a role that does nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import cast

import pytest
import zmq

from node.ipc import RankSockets, ipc_directory
from node.messages import FromRank, Ping, Pong, Shutdown, from_rank_decoder, to_rank_encoder
from node.rank import RankLoop, Role, Waker


class IdleRole:
    def poll(self) -> None:
        pass

    def watch(self, now: float) -> None:
        pass

    def step(self) -> bool:
        return False

    def take_outbox(self) -> list[FromRank]:
        return []


def test_the_loop_answers_pings_itself() -> None:
    context = zmq.Context()
    front_in, front_out = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    with ipc_directory() as ipc_dir:
        front_in.bind(f"ipc://{ipc_dir}/from_ranks")
        sockets = RankSockets(ipc_dir, 0)
        front_out.connect(f"ipc://{ipc_dir}/to_rank0")
        loop = threading.Thread(target=RankLoop(cast(Role, IdleRole()), Waker(), sockets).run)
        loop.start()
        for message in (Ping(ticket=7), Ping(ticket=8), Shutdown()):
            front_out.send(to_rank_encoder.encode(message))
        for ticket in (7, 8):
            assert front_in.poll(2000)
            assert from_rank_decoder.decode(front_in.recv()) == Pong(ticket=ticket)
        loop.join(5)
        assert not loop.is_alive()
        sockets.close(linger_ms=0)
    context.destroy(linger=0)


class SlowRole(IdleRole):
    """Has something to say once, and then a step that takes as long as it is let."""

    def __init__(self) -> None:
        self.heard = threading.Event()
        self.said: list[FromRank] = []
        self.polled = self.was_heard = False

    def poll(self) -> None:
        if not self.polled:
            self.polled, self.said = True, [Pong(ticket=3)]

    def step(self) -> bool:
        self.was_heard = self.heard.wait(5)
        return False

    def take_outbox(self) -> list[FromRank]:
        said, self.said = self.said, []
        return said


def test_what_polling_has_found_is_said_before_the_step() -> None:
    context = zmq.Context()
    front_in, front_out = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    with ipc_directory() as ipc_dir:
        front_in.bind(f"ipc://{ipc_dir}/from_ranks")
        sockets, role = RankSockets(ipc_dir, 0), SlowRole()
        front_out.connect(f"ipc://{ipc_dir}/to_rank0")
        loop = threading.Thread(target=RankLoop(cast(Role, role), Waker(), sockets).run)
        loop.start()
        assert from_rank_decoder.decode(front_in.recv()) == Pong(ticket=3)
        role.heard.set()
        front_out.send(to_rank_encoder.encode(Shutdown()))
        loop.join(5)
        assert not loop.is_alive() and role.was_heard
        sockets.close(linger_ms=0)
    context.destroy(linger=0)


@pytest.mark.parametrize(("front", "status"), [(os.getpid(), 0), (1, 1)], ids=["ours", "another"])
def test_a_rank_whose_front_died_while_it_was_loading_ends(front: int, status: int) -> None:
    code = f"from node.rank import die_with_front; die_with_front({front})"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == status
