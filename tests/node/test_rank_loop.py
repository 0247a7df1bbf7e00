"""The loop of a rank process, run in a thread over a role that does nothing."""

from __future__ import annotations

import threading
from typing import cast

import zmq

from node.messages import FromRank, Ping, Pong, Shutdown, from_rank_decoder, to_rank_encoder
from node.rank import RankLoop, Role, Waker


class IdleRole:
    def poll(self) -> None:
        pass

    def step(self) -> bool:
        return False

    def take_outbox(self) -> list[FromRank]:
        return []


def test_the_loop_answers_pings_itself() -> None:
    context = zmq.Context()
    ours_in, ours_out, inbox, outbox = (context.socket(kind) for kind in (zmq.PULL, zmq.PUSH, zmq.PULL, zmq.PUSH))
    inbox.bind("inproc://to_rank")
    ours_out.connect("inproc://to_rank")
    ours_in.bind("inproc://from_rank")
    outbox.connect("inproc://from_rank")
    loop = threading.Thread(target=RankLoop(cast(Role, IdleRole()), Waker(), inbox, outbox).run)
    loop.start()
    for message in (Ping(ticket=7), Ping(ticket=8), Shutdown()):
        ours_out.send(to_rank_encoder.encode(message))
    for ticket in (7, 8):
        assert ours_in.poll(2000)
        assert from_rank_decoder.decode(ours_in.recv()) == Pong(ticket=ticket)
    loop.join(5)
    assert not loop.is_alive()
    context.destroy(linger=0)
