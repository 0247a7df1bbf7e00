"""The rank process: one device, one scheduler thread, one loop.

    front ──ZMQ──► inbox ──► role.submit / abort / query
                              role.poll()   what transfers have finished
                              role.watch()  once a second: is anything owned by nobody?
                              role.step()   one engine step
    front ◄──ZMQ── outbox ◄── role.take_outbox()

`python -m node.rank` runs the unified role; prefill_node.rank and decode_node.rank run theirs through `run_rank`.
The configuration (`NodeConfig` as JSON) is read from stdin.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from common.config import NodeConfig
from common.errors import ServingError
from common.logs import configure_logging
from node.ipc import RankSockets
from node.messages import Abort, FromRank, Ping, Pong, Query, Ready, Shutdown, StartFailed, Submit

log = logging.getLogger(__name__)

IDLE_WAIT_MS = 200
WATCH_INTERVAL_S = 1.0
PR_SET_PDEATHSIG = 1


class Role(Protocol):
    """What a rank does with its messages. All methods are called by the loop's thread alone, and none blocks."""

    def ready(self) -> Ready: ...
    def submit(self, message: Submit) -> None: ...
    def abort(self, message: Abort) -> None: ...
    def query(self, message: Query) -> None: ...
    def poll(self) -> None: ...
    def watch(self, now: float) -> None: ...
    def step(self) -> bool: ...
    def take_outbox(self) -> list[FromRank]: ...
    def close(self) -> None: ...


class Waker:
    """Lets any thread end the loop's idle wait."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __call__(self) -> None:
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return


RoleFactory = Callable[[NodeConfig, int, Waker], Role]


class RankLoop:
    def __init__(self, role: Role, waker: Waker, sockets: RankSockets) -> None:
        self.role = role
        self.waker = waker
        self.sockets = sockets
        self.poller = zmq.Poller()
        self.poller.register(sockets.inbox, zmq.POLLIN)
        self.poller.register(waker.fd, zmq.POLLIN)

    def run(self) -> None:
        busy, watch_s = False, 0.0
        while self._receive(wait_ms=0 if busy else IDLE_WAIT_MS):
            self.role.poll()
            if (now := time.monotonic()) >= watch_s:
                self.role.watch(now)
                watch_s = now + WATCH_INTERVAL_S
            self._send_outbox()  # a first token that has just arrived does not wait for a step
            busy = self.role.step()
            self._send_outbox()

    def _send_outbox(self) -> None:
        for message in self.role.take_outbox():
            self.sockets.send(message)

    def _receive(self, wait_ms: int) -> bool:
        """Hand every message that has come to the role, but answer a `Ping`. False when one of them was `Shutdown`."""
        ready = dict(self.poller.poll(wait_ms))
        if self.waker.fd in ready:
            self.waker.clear()
        while (message := self.sockets.receive()) is not None:
            match message:
                case Submit():
                    self.role.submit(message)
                case Abort():
                    self.role.abort(message)
                case Query():
                    self.role.query(message)
                case Ping(ticket=ticket):
                    self.sockets.send(Pong(ticket=ticket))
                case Shutdown():
                    return False
        return True


def run_rank(make_role: RoleFactory) -> None:
    """Entry point of a rank process. Exits 0 after `Shutdown`, 1 when it cannot start."""
    arguments = _parse_arguments()
    die_with_front(arguments.front)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front decides
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=NodeConfig)
    configure_logging(config.server.log_level, f"{config.role.value}/rank{arguments.rank}")
    sockets = RankSockets(arguments.ipc, arguments.rank)
    waker = Waker()
    try:
        if config.transfer.faults.engine is not None:
            from engine.faults import switch_on

            switch_on(config.transfer.faults.engine)
        role = make_role(config, arguments.rank, waker)
    except ServingError as error:
        sockets.send(StartFailed(pid=os.getpid(), error=error.record()))
        sockets.close(linger_ms=2000)
        sys.exit(1)
    sockets.send(role.ready())
    try:
        RankLoop(role, waker, sockets).run()
    finally:
        role.close()
        sockets.close(linger_ms=0)


def die_with_front(front: int) -> None:
    """Ask the kernel to kill this process when its parent dies, so that no rank outlives its front.

    front: the parent's pid. It may be dead already: importing torch takes seconds.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != front:
        sys.exit(1)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ipc", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--front", type=int, required=True)
    return parser.parse_args()


def main() -> None:
    from node.unified import make_unified_role

    run_rank(make_unified_role)


if __name__ == "__main__":
    main()
