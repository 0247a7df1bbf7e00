"""Dead and silent processes with a room in every state, as docs/operations.md's failure table has it; late writes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transfer_rig import Decode, Prefill, wide_layout

from common.config import LoopbackFaults, TransferConfig, TransportName
from common.errors import AbortedError, ServingError
from common.handoff import RoomAddress
from common.layout import StateKind
from tests.support import failure_table
from tests.support.held import HeldTransport
from tests.support.stack import free_port
from transfer import Committed, Released, RoomFailed, RoomOpened, Sent

Make = Callable[..., Any]
Config = Callable[..., TransferConfig]

HERE, THERE = [7, 8, 9, 2], [3, 4, 11, 20]
TRANSPORTS = [TransportName.MOONCAKE, TransportName.LOOPBACK]
LIVENESS_S, BOOTSTRAP_S, AT_ONCE_S = 0.5, 1.0, 1.0
OFFERED, OPEN, CONFIRMING, DECLINED, DRAINING, RESERVED = range(1, 7)
SIGNALS = {"dead": signal.SIGKILL, "silent": signal.SIGSTOP}


@pytest.fixture
def hasty(config: Config) -> TransferConfig:
    return config(liveness_timeout_s=LIVENESS_S, bootstrap_timeout_s=BOOTSTRAP_S)


def mark_of(side: str, state: str, fate: str) -> failure_table.Outcome:
    other = "decode" if side == "prefill" else "prefill"
    fault = f"{other} dead" if fate == "dead" else "other side silent"
    return failure_table.outcomes()[failure_table.cells()[side, state, fault]]


def assert_told(side: Prefill | Decode, room: int, said: failure_table.Outcome) -> None:
    """In the time that the table names, by the error that it names."""
    named = {"--liveness-timeout": LIVENESS_S, "--bootstrap-timeout": BOOTSTRAP_S}
    limit_s = AT_ONCE_S + sum(seconds for name, seconds in named.items() if name in said.within)
    error: ServingError = side.wait_for(RoomFailed, room, limit_s).error
    assert (error.code, error.http_status, error.retryable) == (said.code, said.status, said.retryable)


def address(process: Any, room: int) -> dict[str, Any]:
    return {"host": "127.0.0.1", "port": process.port, "room": room}


# Decode dies or stops


@pytest.mark.parametrize("fate", SIGNALS)
def test_a_room_in_every_state_on_the_prefill_rank(
    hasty: TransferConfig, process: Make, prefill: Make, fate: str
) -> None:
    p, d = prefill(hasty, transport=HeldTransport()), process("decode", hasty)
    states: Callable[[], dict[str, int]] = lambda: p.transfer.stats()["rooms"]  # noqa: E731
    here = {"host": "127.0.0.1", "port": p.bootstrap.port}
    p.transport.loses_commit = True
    for room, slot in ((CONFIRMING, 1), (OPEN, 2)):
        p.transfer.expect(room, "r", 5)
        d.say("open", {**here, "room": room}, "r", [2 * slot, 2 * slot + 1], slot)
        p.wait_for(RoomOpened, room)
        if room == CONFIRMING:
            p.send(room, HERE[:2], 1)
            p.until(lambda: states() == {"confirming": 1})
    d.say("open", {**here, "room": OFFERED}, "r", [20, 21], 3)
    d.say("decline", {**here, "room": DECLINED}, "r")
    p.transport.hold()
    p.send(OPEN, HERE[:2], 2)
    p.until(lambda: states() == {"confirming": 1, "open": 1, "offered": 1, "declined": 1})
    assert p.transport.reached.wait(5)
    d.signal(SIGNALS[fate])
    for room, state in ((OPEN, "open"), (CONFIRMING, "confirming")):
        assert_told(p, room, mark_of("prefill", state, fate))
    p.until(lambda: "offered" not in states(), AT_ONCE_S + LIVENESS_S)  # nobody is here to be told
    p.wait_for(Released, CONFIRMING, AT_ONCE_S)
    assert not p.of(Released, OPEN), "a write is in flight"
    p.transport.land.set()
    p.wait_for(Released, OPEN, 5)
    p.until(lambda: not states(), AT_ONCE_S + BOOTSTRAP_S)  # the note of the declined one goes by itself
    assert mark_of("prefill", "declined", fate).mark == "forgotten" and mark_of("prefill", "offered", fate).code


@pytest.mark.parametrize("fate", SIGNALS)
def test_a_draining_room_on_the_prefill_rank(hasty: TransferConfig, process: Make, prefill: Make, fate: str) -> None:
    p, d = prefill(hasty, transport=HeldTransport()), process("decode", hasty)
    p.transfer.expect(DRAINING, "r", 5)
    d.say("open", {"host": "127.0.0.1", "port": p.bootstrap.port, "room": DRAINING}, "r", THERE, 2)
    p.wait_for(RoomOpened, DRAINING)
    p.transport.hold()
    p.send(DRAINING, HERE, 1)
    assert p.transport.reached.wait(5)
    p.transfer.abort(DRAINING, AbortedError("no more"))
    d.wait_for("RoomFailed", DRAINING)
    p.pump()
    d.signal(SIGNALS[fate])
    said = mark_of("prefill", "draining", fate)
    assert said.mark == "told" and not p.quiet(2 * LIVENESS_S), "a write is in flight"
    p.transport.land.set()
    p.wait_for(Released, DRAINING, 5)
    assert len(p.of(RoomFailed, DRAINING)) == 1


# Prefill dies or stops


@pytest.fixture
def lent(hasty: TransferConfig, config: Config, process: Make, decode: Make) -> Iterator[tuple[Any, Decode]]:
    """A prefill process in the middle of a slow write to a room that was given up; another room is open."""
    layout = wide_layout(4 << 20)
    slow = config(LoopbackFaults(bandwidth_bytes_s=4e6), liveness_timeout_s=LIVENESS_S)
    p, d = process("prefill", slow, layout), decode(hasty, layout)
    target = d.pools.item(2, 1)
    untouched = target.copy()
    for room, slot in ((DRAINING, 1), (OPEN, 2)):
        p.say("expect", room, "r", 5)
        d.transfer.open(RoomAddress(**address(p, room)), "r", [2 * slot, 2 * slot + 1], slot)
        p.wait_for("RoomOpened", room)
    p.say("send_state", DRAINING, 1, None)
    d.until(lambda: (target != untouched).any())
    d.transfer.abort(DRAINING, AbortedError("no more"))
    d.wait_for(RoomFailed, DRAINING, AT_ONCE_S)
    assert d.transfer.stats()["leases"] == {"draining": 1, "writing": 1}
    yield p, d


def test_a_request_in_every_state_on_the_decode_rank_when_prefill_dies(lent: tuple[Any, Decode]) -> None:
    p, d = lent
    p.signal(signal.SIGKILL)
    assert_told(d, OPEN, mark_of("decode", "writing", "dead"))
    for room in (OPEN, DRAINING):
        d.wait_for(Released, room, 3)
    landed = d.pools.bytes.copy()
    d.transfer.open(RoomAddress(**address(p, RESERVED)), "r", [20], 3)
    assert_told(d, RESERVED, mark_of("decode", "reserved", "dead"))
    d.wait_for(Released, RESERVED, AT_ONCE_S)
    assert (mark_of("decode", "draining", "dead").mark, len(d.of(RoomFailed, DRAINING))) == ("told, fence", 1)
    assert not d.quiet(0.1) and (d.pools.bytes == landed).all(), "what was released is written no more"


def test_a_request_in_every_state_on_the_decode_rank_when_prefill_stops(lent: tuple[Any, Decode]) -> None:
    p, d = lent
    p.signal(signal.SIGSTOP)
    assert_told(d, OPEN, mark_of("decode", "writing", "silent"))
    d.transfer.open(RoomAddress(**address(p, RESERVED)), "r", [20], 3)
    assert_told(d, RESERVED, mark_of("decode", "reserved", "silent"))
    d.wait_for(Released, RESERVED, AT_ONCE_S)
    assert mark_of("decode", "draining", "silent").mark == "held"
    assert not d.quiet(LIVENESS_S), "it may wake up and write"
    assert d.transfer.stats()["leases"] == {"draining": 2}
    p.signal(signal.SIGCONT)
    for room in (OPEN, DRAINING):
        d.wait_for(Released, room, 5)


def test_prefill_dies_before_it_has_answered_the_handshake(hasty: TransferConfig, process: Make, decode: Make) -> None:
    p, d = process("prefill", hasty), decode(hasty)
    p.signal(signal.SIGSTOP)
    d.transfer.open(RoomAddress(**address(p, RESERVED)), "r", THERE, 2)
    assert not d.quiet(0.1)
    p.signal(signal.SIGKILL)
    error = d.wait_for(RoomFailed, RESERVED, AT_ONCE_S).error
    assert (error.code, error.http_status, error.retryable) == ("peer_lost", 503, True)
    d.wait_for(Released, RESERVED, AT_ONCE_S)


@pytest.mark.parametrize("after", ["one of two chunks", "the last layer", "everything but the metadata"])
def test_prefill_is_killed_on_the_way(config: Config, process: Make, decode: Make, prefill: Make, after: str) -> None:
    """Half of a state is never taken for a whole one, and its memory is of use to the next."""
    settings = config(transport=TransportName.MOONCAKE)
    p, d = process("prefill", settings), decode(settings)
    p.say("state", HERE, 1)
    whole = p.wait_for("state")[1]
    p.say("expect", 1, "r", 5)
    d.transfer.open(RoomAddress(**address(p, 1)), "r", THERE, 2)
    p.wait_for("RoomOpened", 1)
    last_page, last_state = d.pools.item(0, THERE[1]), d.pools.item(d.pools.of(StateKind.SSM)[-1], 2)
    last_page[:] = last_state[:] = 0
    p.say("send_pages", 1, 0, HERE[:2])
    if after != "one of two chunks":
        p.say("send_pages", 1, 2, HERE[2:])
        p.say("send_state", 1, 1, None)
    d.until(last_page.any if after == "one of two chunks" else last_state.any)
    if after == "everything but the metadata":
        d.until(lambda: d.pools.state(THERE, 2).hex() == whole)
    p.signal(signal.SIGKILL)
    assert d.wait_for(RoomFailed, 1, AT_ONCE_S).error.code == "peer_lost"
    d.wait_for(Released, 1, 3)
    assert not d.of(Committed, 1)
    hand_off(prefill(settings), d, 2)


def hand_off(p: Prefill, d: Decode, room: int) -> None:
    p.transfer.expect(room, "r", 5)
    d.transfer.open(p.address(room), "r", THERE, 2)
    p.wait_for(RoomOpened, room)
    p.send(room, HERE, 1)
    d.wait_for(Committed, room)
    assert d.pools.state(THERE, 2) == p.pools.state(HERE, 1)


# Late writes


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("ended_by", ["abort", "kill"])
def test_memory_that_is_lent_again_gets_no_late_write(
    config: Config, process: Make, decode: Make, transport: TransportName, ended_by: str
) -> None:
    """In the middle of a long write the request ends; what is released is poisoned, and the poison stays."""
    slow = transport is TransportName.LOOPBACK
    layout = wide_layout((2 if slow else 12) << 20)
    p = process("prefill", config(LoopbackFaults(bandwidth_bytes_s=4e6 * slow), transport=transport), layout)
    d = decode(config(transport=transport), layout)
    p.say("expect", 1, "r", 5)
    d.transfer.open(RoomAddress(**address(p, 1)), "r", THERE, 2)
    p.wait_for("RoomOpened", 1)
    target = d.pools.item(2, 2)
    target[:] = 0
    p.say("send_state", 1, 1, None)
    d.until(target[: 1 << 16].any)
    if ended_by == "kill":
        p.signal(signal.SIGKILL)
    else:
        d.transfer.abort(1, AbortedError("no more"))
    d.wait_for(RoomFailed, 1, AT_ONCE_S)
    d.wait_for(Released, 1, 5)
    target[:] = 0xA5
    time.sleep(0.3)
    assert (target == 0xA5).all()


# Coming back


@pytest.mark.parametrize(
    ("transport", "same_session"),
    [(TransportName.MOONCAKE, True), (TransportName.MOONCAKE, False), (TransportName.LOOPBACK, False)],
)
def test_decode_comes_back(
    config: Config,
    process: Make,
    prefill: Make,
    monkeypatch: pytest.MonkeyPatch,
    transport: TransportName,
    same_session: bool,
) -> None:
    """Also where Mooncake gives it the port, and so the name, that the dead one had."""
    settings = config(transport=transport)
    p = prefill(settings)
    if same_session:
        port = str(free_port())
        monkeypatch.setenv("MC_MIN_RPC_PORT", port)
        monkeypatch.setenv("MC_MAX_RPC_PORT", port)
    for life in range(2):
        d = process("decode", settings)
        for room in (2 * life, 2 * life + 1):
            p.transfer.expect(room, "r", 5)
            d.say("open", {"host": "127.0.0.1", "port": p.bootstrap.port, "room": room}, "r", THERE, 2)
            p.wait_for(RoomOpened, room)
            p.send(room, HERE, 1)
            p.wait_for(Sent, room)
            d.events.clear()
            d.say("state", THERE, 2)
            assert d.wait_for("state")[1] == p.pools.state(HERE, 1).hex()
        d.signal(signal.SIGKILL)
        p.until(lambda: not p.transfer.stats()["peers"])


@pytest.mark.parametrize("by", ["prefill", "decode"])
def test_an_idle_connection_that_is_dropped_is_made_again(config: Config, prefill: Make, decode: Make, by: str) -> None:
    p, d = prefill(config()), decode(config())
    for room in range(3):
        hand_off(p, d, room)
        p.wait_for(Released, room)
        links = [peer.link for peer in p.transfer._peers] if by == "prefill" else list(d.transfer._links.values())
        for link in links:
            link.channel.shut()
        d.until(lambda: not d.transfer.stats()["peers"] and not p.transfer.stats()["peers"])
    assert not any(isinstance(event, RoomFailed) for event in (*p.events, *d.events))


def test_a_write_that_timed_out_is_ended_for_certain(config: Config, process: Make) -> None:
    """Mooncake goes on with it when the stopped receiver does. The sender closes its connections instead."""
    layout = wide_layout(1 << 20)
    settings = config(transport=TransportName.MOONCAKE, liveness_timeout_s=LIVENESS_S, transfer_timeout_s=1.0)
    p, d = process("prefill", settings, layout), process("decode", settings, layout)
    for room in (1, 2):
        p.say("expect", room, "r", 5)
        d.say("open", address(p, room), "r", [room], room)
        p.wait_for("RoomOpened", room)
    d.signal(signal.SIGSTOP)
    p.say("send_state", 1, 1, None)
    for room in (1, 2):
        p.wait_for("RoomFailed", room, 5)
    p.wait_for("Released", 1, 40)  # the write has timed out
    d.signal(signal.SIGCONT)
    for room in (1, 2):
        d.wait_for("Released", room, 10)
    landed = digest(d)
    time.sleep(0.3)
    assert digest(d) == landed, "released, and written nevertheless"
    p.say("expect", 3, "r", 5)
    d.say("open", address(p, 3), "r", THERE, 2)
    p.wait_for("RoomOpened", 3)
    for command in (("send_pages", 3, 0, HERE), ("send_state", 3, 1, None), ("metadata", 3)):
        p.say(*command)
    d.wait_for("Committed", 3)


def digest(process: Any) -> str:
    """Of slot 1."""
    process.say("digest", [], 1)
    found: str = process.wait_for("digest")[1]
    process.events.clear()
    return found
