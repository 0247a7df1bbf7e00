"""What Mooncake TCP does with a write in flight when memory is taken back, or either side is killed or stopped.

Two processes. This one lends memory to the other, which writes all of it at once. As soon as the first bytes are here,
something happens; from then on it is counted what still lands, and how much is overwritten of a pattern in the target's
second half. Then the other way round: what a writer hears of a receiver that is killed, or stopped for longer than the
time-out, and what lands when it goes on. The hand-off's fence (docs/architecture.md) rests on these answers.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from results import write_result

from common.config import TransferConfig
from common.errors import TransferError
from transfer.transport import Block, Transport, open_transport

PATTERN, DATA = 0xA5, 0x3C
QUIET_S = 1.0
LIMIT_S = 60.0
WRITE_TIMEOUT_S = 5


class Other:
    """The other process. It answers each line with one line."""

    def __init__(self, nbytes: int, mode: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--nbytes", str(nbytes), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.greeting = self.answer()

    def tell(self, *what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def lend(nbytes: int) -> None:
    """Says where it can be written to, then for each line how much is here."""
    transport = open_transport(TransferConfig())
    target = np.frombuffer(transport.host_buffer(nbytes), np.uint8)[:nbytes]
    target[:] = 0
    print(json.dumps([transport.session, target.ctypes.data]), flush=True)
    for _ in sys.stdin:
        print(landed(target), flush=True)


def write_to(nbytes: int, number: signal.Signals) -> dict[str, Any]:
    """One write to a receiver that gets a signal in the middle of it, and goes on when the write has failed."""
    transport = open_transport(TransferConfig())
    source = transport.host_buffer(nbytes)
    source[:] = bytes([DATA]) * len(source)
    receiver = Other(nbytes, "--lend")
    session, address = receiver.greeting
    try:
        wait = transport.begin(session, [Block(address_of(source), address, nbytes, "ssm")])
        wait_until(lambda: ask(receiver) > 0)
        started, reason = time.monotonic(), None
        receiver.process.send_signal(number)
        try:
            wait()
        except TransferError as error:
            reason = error.message
        result: dict[str, Any] = {"error": reason, "after_s": round(time.monotonic() - started, 2)}
        if number is signal.SIGSTOP:
            receiver.process.send_signal(signal.SIGCONT)
            before = ask(receiver)
            time.sleep(QUIET_S)
            result |= {"landed_bytes": before, "landed_a_second_later_bytes": ask(receiver)}
        return result
    finally:
        receiver.kill()
        transport.close()


def ask(receiver: Other) -> int:
    receiver.tell()
    return int(receiver.answer())


def write_when_told(nbytes: int) -> None:
    transport = open_transport(TransferConfig())
    source = transport.host_buffer(nbytes)
    source[:] = bytes([DATA]) * len(source)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        session, address = json.loads(line)
        started, reason = time.monotonic(), None
        try:
            transport.write(session, [Block(address_of(source), address, nbytes, "ssm")])
        except TransferError as error:
            reason = error.message
        print(json.dumps({"error": reason, "seconds": round(time.monotonic() - started, 3)}), flush=True)


def observe(nbytes: int, happens: Callable[[Transport, Other, np.ndarray], None]) -> dict[str, Any]:
    """One write and what `happens` in the middle of it."""
    transport = open_transport(TransferConfig())
    target = np.frombuffer(transport.host_buffer(nbytes), np.uint8)[:nbytes]
    sender = Other(nbytes, "--write")
    try:
        target[:] = 0  # page faults would slow the pattern down
        sender.tell(transport.session, target.ctypes.data)
        wait_until(lambda: target[0] == DATA)
        started = time.monotonic()
        happens(transport, sender, target)
        happened_s = time.monotonic() - started
        before = landed(target)
        half = target[nbytes // 2 :]
        half[:] = PATTERN
        last_change_s = settle(target)
        result = {
            "it_took_ms": round(1000 * happened_s, 1),
            "landed_after_bytes": landed(target) - before,
            "pattern_lost_bytes": int(np.count_nonzero(half != PATTERN)),
            "last_byte_after_ms": round(1000 * last_change_s),
            "connections_left": len(transport.inbound() or ()),
        }
        if sender.process.poll() is None:
            result["write"] = sender.answer()
        return result
    finally:
        sender.kill()
        transport.close()


def landed(target: np.ndarray) -> int:
    """How many bytes are here, to one page."""
    return int(np.count_nonzero(target[:: mmap.PAGESIZE] == DATA)) * mmap.PAGESIZE


def settle(target: np.ndarray) -> float:
    """Wait until nothing has changed for a while; seconds from the call to the last change."""
    started = changed = time.monotonic()
    before = -1
    while time.monotonic() - changed < QUIET_S:
        now = landed(target)
        if now != before:
            before, changed = now, time.monotonic()
        time.sleep(0.002)
    return changed - started


def reuse(transport: Transport, sender: Other, target: np.ndarray) -> None:
    """The receiver takes its pages back without a word."""


def unregister(transport: Transport, sender: Other, target: np.ndarray) -> None:
    transport.unregister(target.ctypes.data)


def signal_only(transport: Transport, sender: Other, target: np.ndarray) -> None:
    sender.process.kill()


def kill_and_wait(transport: Transport, sender: Other, target: np.ndarray) -> None:
    """As the fence does."""
    sender.kill()
    wait_until(lambda: not transport.inbound())


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("nothing happened")
        time.sleep(0.0005)


def address_of(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nbytes", type=int, default=256 << 20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--lend", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ["MC_TRANSFER_TIMEOUT"] = str(WRITE_TIMEOUT_S)
    if arguments.write or arguments.lend:
        (write_when_told if arguments.write else lend)(arguments.nbytes)
        return
    cases = {
        "reused": reuse,
        "unregistered": unregister,
        "kill_sent": signal_only,
        "dead_and_connections_gone": kill_and_wait,
    }
    found = {
        name: [observe(arguments.nbytes, happens) for _ in range(arguments.rounds)] for name, happens in cases.items()
    }
    for name, number in (("receiver_killed", signal.SIGKILL), ("receiver_stopped", signal.SIGSTOP)):
        found[name] = [write_to(arguments.nbytes, number) for _ in range(arguments.rounds)]
    for name, rounds in found.items():
        for each in rounds:
            print(name, each)
    figures = {"nbytes": arguments.nbytes, "write_timeout_s": WRITE_TIMEOUT_S, "cases": found}
    write_result("mooncake_in_flight", figures)


if __name__ == "__main__":
    main()
