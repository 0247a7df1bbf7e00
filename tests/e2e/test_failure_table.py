"""The cells of docs/operations.md's failure table that need no other process: a prefill and a decode rank, stepped by
hand, are brought into a state, something happens, and the clients hear what the table says, in time; then all is free.

What needs a process to die or to stop: tests/transfer/test_failures.py, tests/e2e/test_failures.py and test_kill.py.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from common.config import EngineConfig
from common.handoff import RoomAddress
from node.messages import Abort, Submit
from tests.support import failure_table
from tests.support.held import HeldTransport, held_ranks
from tests.support.ranks import Outcome, Ranks, Request
from transfer.lease import LeaseState
from transfer.room import RoomState

HERE = ("client gone", "abort by rid", "transport error", "time-out", "digest mismatch", "out of slots")
ELSEWHERE = {("decode", "running", "time-out"): "tests/node/test_front.py: the front watches its rank"}
CELLS = [cell for cell in failure_table.cells() if cell[2] in HERE and cell not in ELSEWHERE]
AT_ONCE_S = 1.0
BOOTSTRAP_S, TRANSFER_S, FIRST_TOKEN_S = 0.4, 0.5, 1.0
PREFILL_SLOTS, DECODE_PLACES = 4, 8

numbers = itertools.count(1)


@dataclass(slots=True)
class Case:
    """One request and what its clients have heard. number: of its room. prefill, decode: the legs that are here.

    mute: a bootstrap endpoint that says nothing, where the state needs one.
    """

    ranks: Ranks
    number: int = field(default_factory=lambda: next(numbers))
    prefill: Outcome | None = None
    decode: Outcome | None = None
    mute: socket.socket | None = None

    @property
    def rid(self) -> str:
        return f"c{self.number}"

    @property
    def transport(self) -> HeldTransport:
        transport = self.ranks.prefill.transport
        assert isinstance(transport, HeldTransport)
        return transport

    def leg(self, side: str, port: int | None = None, max_new_tokens: int = 2000) -> None:
        role = getattr(self.ranks, side)
        outcomes = self.ranks.outcomes if side == "decode" else self.ranks.legs
        setattr(self, side, outcomes.setdefault(self.rid, Outcome(rid=self.rid)))
        request = Request(prompt=[5 + (self.number * 37 + i * 11) % 900 for i in range(40)])
        port = port or self.ranks.bootstrap_port
        assert port is not None
        role.submit(
            Submit(
                rid=self.rid,
                token_ids=request.prompt,
                sampling=Request(prompt=[], max_new_tokens=max_new_tokens).params(),
                logprobs=request.logprobs,
                room=RoomAddress(host="127.0.0.1", port=port, room=self.number),
                arrival_s=time.monotonic(),
            )
        )

    def until(self, condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
        self.ranks.run_until(lambda: bool(condition()), timeout_s)

    def rooms(self) -> dict[str, int]:
        return self.ranks.prefill.transfer.stats()["rooms"]

    def leases(self) -> dict[str, int]:
        return self.ranks.decode.transfer.stats()["leases"]


SMALL = EngineConfig(max_total_tokens=16384, max_state_slots=PREFILL_SLOTS, max_running_requests=20)
LARGE = EngineConfig(max_total_tokens=32768, max_state_slots=24, max_running_requests=DECODE_PLACES)


@pytest.fixture(scope="module")
def patient() -> Iterator[Ranks]:
    with held_ranks(SMALL, LARGE) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def hasty() -> Iterator[Ranks]:
    limits = {"bootstrap_timeout_s": BOOTSTRAP_S, "transfer_timeout_s": TRANSFER_S}
    with held_ranks(SMALL, LARGE, first_token_timeout_s=FIRST_TOKEN_S, **limits) as ranks:
        yield ranks


@pytest.fixture
def fresh() -> Iterator[Ranks]:
    with held_ranks(SMALL, LARGE, transfer_timeout_s=2.0) as ranks:
        yield ranks


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    """On ranks with short time-outs where one of them is to be reached, on ranks of its own where a write breaks."""
    fault = request.node.callspec.params["fault"]
    kind = {"time-out": "hasty", "transport error": "fresh"}.get(fault, "patient")
    made = Case(request.getfixturevalue(kind))
    yield made
    if made.mute is not None:
        made.mute.close()
    made.transport.land.set()
    made.transport.breaks = made.transport.loses_commit = made.transport.spoils_commit = False
    made.ranks.assert_all_free()


# States


def expected(case: Case) -> None:
    case.leg("prefill")
    assert case.rooms() == {"expected": 1}


def offered(case: Case) -> None:
    case.leg("decode")
    case.until(lambda: case.rooms() == {"offered": 1})


def declined(case: Case) -> None:
    assert case.ranks.bootstrap_port is not None
    address = RoomAddress(host="127.0.0.1", port=case.ranks.bootstrap_port, room=case.number)
    case.ranks.decode.transfer.decline(address, case.rid)
    case.until(lambda: case.rooms() == {"declined": 1})


def both_open(case: Case) -> None:
    """With a write in flight."""
    case.transport.hold()
    case.leg("decode")
    case.leg("prefill")
    case.until(case.transport.reached.is_set)
    assert (case.rooms(), case.leases()) == ({"open": 1}, {"writing": 1})


def confirming(case: Case) -> None:
    case.transport.loses_commit = True
    case.leg("decode")
    case.leg("prefill")
    case.until(lambda: case.rooms() == {"confirming": 1})


def draining(case: Case) -> None:
    both_open(case)
    case.ranks.abort(Outcome(rid=case.rid))
    case.until(lambda: case.prefill.error and case.decode.error)  # type: ignore[union-attr]
    assert (case.rooms(), case.leases()) == ({"draining": 1}, {"draining": 1})


def queued(case: Case) -> None:
    others = [case.ranks.submit(Request(prompt=[7, i], max_new_tokens=3000), alone=True) for i in range(DECODE_PLACES)]
    case.until(lambda: all(other.tokens for other in others))
    case.leg("decode", max_new_tokens=4)
    case.until(lambda: len(case.ranks.decode.reserving) == 1)


def reserved(case: Case) -> None:
    """The bootstrap endpoint takes the connection and says nothing."""
    case.mute = socket.create_server(("127.0.0.1", 0))
    case.leg("decode", port=case.mute.getsockname()[1])
    case.until(lambda: case.leases() == {"reserved": 1})


def running(case: Case) -> None:
    """The prefill leg has its answer."""
    case.leg("decode")
    case.leg("prefill")
    case.until(lambda: len(case.decode.tokens) > 2 and case.prefill.finish)  # type: ignore[union-attr]


STATES: dict[str, Callable[[Case], None]] = {
    "expected": expected,
    "offered": offered,
    "declined": declined,
    "open": both_open,
    "confirming": confirming,
    "queued": queued,
    "reserved": reserved,
    "writing": both_open,
    "draining": draining,
    "running": running,
}


# Faults. Each makes something happen on one side; what both legs hear is looked at afterwards.


def client_gone(case: Case, side: str) -> None:
    """The router closes both legs and aborts both."""
    case.ranks.abort(Outcome(rid=case.rid))


def abort_by_rid(case: Case, side: str) -> None:
    """At one node: that of the row, if its leg is here."""
    side = side if getattr(case, side) is not None else "decode"
    getattr(case.ranks, side).abort(Abort(rid=case.rid))


def transport_error(case: Case, side: str) -> None:
    case.transport.breaks = True
    case.transport.land.set()


def digest_mismatch(case: Case, side: str) -> None:
    case.transport.spoils_commit = True
    case.transport.land.set()


def nothing(case: Case, side: str) -> None:
    """Time passes."""


FAULTS = {
    "client gone": client_gone,
    "abort by rid": abort_by_rid,
    "transport error": transport_error,
    "digest mismatch": digest_mismatch,
    "time-out": nothing,
}


# Looking


def limit_s(within: str) -> float:
    named = {"--bootstrap": BOOTSTRAP_S, "--first-token": FIRST_TOKEN_S, "--transfer": TRANSFER_S}
    return AT_ONCE_S + sum(seconds for name, seconds in named.items() if f"{name}-timeout" in within)


def heard(outcome: Outcome | None, said: failure_table.Outcome) -> bool:
    if outcome is None or outcome.error is None:
        return False
    error = outcome.error
    assert (error.code, error.status, error.retryable) == (said.code, said.status, said.retryable)
    return True


def holds(case: Case, side: str) -> bool:
    """Whether the rank still keeps the room's memory."""
    return bool(getattr(case.ranks, side).rooms)


def legs_that_hear(case: Case, side: str, mark: str) -> list[Outcome]:
    """Both legs, once the ranks know each other; before that the other one is the router's to end."""
    alone = mark in ("not opened", "no memory", "unanswered")
    both = [leg for leg in (case.prefill, case.decode) if leg is not None and leg.finish is None]
    return [getattr(case, side)] if alone else both


@pytest.mark.parametrize(("side", "state", "fault"), [cell for cell in CELLS if cell[2] != "out of slots"])
def test_cell(case: Case, side: str, state: str, fault: str) -> None:
    mark = failure_table.cells()[side, state, fault]
    said = failure_table.outcomes()[mark]
    prepare(case, state, fault, mark)
    before = (case.prefill and case.prefill.error, case.decode and case.decode.error)
    FAULTS[fault](case, side)
    if said.code is None:
        quiet(case, mark, fault)
        assert (case.prefill and case.prefill.error, case.decode and case.decode.error) == before, (
            "nobody is told twice"
        )
        return
    legs = legs_that_hear(case, side, mark)
    step = case.ranks.step if mark != "no token" else lambda: step_decode_alone(case.ranks)
    started = time.monotonic()
    while not all(heard(leg, said) for leg in legs):
        assert time.monotonic() - started < limit_s(said.within), f"{mark}: {case.prefill}, {case.decode}"
        step() or time.sleep(0.001)
    settle(case, side, mark)


def prepare(case: Case, state: str, fault: str, mark: str) -> None:
    """Bring the request there. A mismatch is found when the last write has landed; a first token that is late is one
    that prefill does not compute."""
    if fault == "digest mismatch":
        both_open(case)
    elif mark == "no token":
        case.leg("decode")
        case.leg("prefill")
        deadline = time.monotonic() + 10
        while case.rooms() != {"open": 1}:
            assert time.monotonic() < deadline
            step_decode_alone(case.ranks)
    else:
        STATES[state](case)


def step_decode_alone(ranks: Ranks) -> bool:
    """As `Ranks.step`, but the prefill rank computes nothing."""
    compute, ranks.prefill.step = ranks.prefill.step, lambda: False  # type: ignore[method-assign]
    try:
        return ranks.step()
    finally:
        ranks.prefill.step = compute  # type: ignore[method-assign]


def settle(case: Case, side: str, mark: str) -> None:
    """What is freed when."""
    if not case.transport.land.is_set():
        linger(case, 0.05)
        assert holds(case, "prefill") and holds(case, "decode"), "a write is in flight"
        case.transport.land.set()
    case.until(lambda: not holds(case, "prefill") and not holds(case, "decode"), 2)
    stop_the_others(case)


def quiet(case: Case, mark: str, fault: str) -> None:
    """Cells in which nobody hears anything."""
    if mark == "forgotten":
        assert not holds(case, "prefill") and not holds(case, "decode"), "nothing is lent"
        forgotten_in_time(case) if fault == "time-out" else answered_at_once(case)
        return
    linger(case, max(BOOTSTRAP_S, TRANSFER_S, FIRST_TOKEN_S) + 0.3 if fault == "time-out" else 0.1)
    if fault == "transport error":
        case.until(lambda: not holds(case, "prefill") and not holds(case, "decode"), 1)
        return
    assert holds(case, "prefill") and holds(case, "decode"), "a write is in flight"


def forgotten_in_time(case: Case) -> None:
    case.until(lambda: not case.rooms(), BOOTSTRAP_S + AT_ONCE_S)


def answered_at_once(case: Case) -> None:
    """A leg that comes is told that it is not needed."""
    case.leg("prefill")
    case.until(lambda: case.prefill.ended)  # type: ignore[union-attr]
    assert case.prefill is not None and case.prefill.finish is not None and not case.rooms()


def linger(case: Case, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        case.ranks.step() or time.sleep(0.002)


def stop_the_others(case: Case) -> None:
    """Those that `queued` let run."""
    for rid, outcome in case.ranks.outcomes.items():
        if not outcome.ended:
            case.ranks.decode.abort(Abort(rid=rid))
    case.until(lambda: all(outcome.ended for outcome in case.ranks.outcomes.values()))


@pytest.mark.parametrize(("side", "state", "fault"), [cell for cell in CELLS if cell[2] == "out of slots"])
def test_no_slot_is_no_error(patient: Ranks, side: str, state: str, fault: str) -> None:
    assert failure_table.cells()[side, state, fault] == "waits"
    if state == "queued":
        case = Case(patient)
        queued(case)
        case.leg("prefill")
        linger(case, 0.1)
        assert not case.decode.ended and not case.prefill.ended  # type: ignore[union-attr]
        for rid in [rid for rid in patient.outcomes if rid != case.rid]:
            patient.decode.abort(Abort(rid=rid))
        case.until(lambda: case.decode.ended)  # type: ignore[union-attr]
        assert case.decode is not None and case.decode.finish is not None
    else:
        waiting = [Case(patient) for _ in range(PREFILL_SLOTS + 1)]
        for each in waiting:
            each.transport.hold()
            each.leg("decode", max_new_tokens=2)
            each.leg("prefill")
        waiting[0].until(lambda: waiting[0].rooms() == {"open": len(waiting)})
        linger(waiting[0], 0.2)
        assert patient.prefill.host.scheduler.waiting and not any(each.decode.ended for each in waiting)  # type: ignore[union-attr]
        waiting[0].transport.land.set()
        waiting[0].until(lambda: all(each.decode.ended for each in waiting))  # type: ignore[union-attr]
        assert all(each.decode.finish is not None for each in waiting)  # type: ignore[union-attr]
    patient.assert_all_free()


def test_every_state_of_the_code_is_in_the_table() -> None:
    rows = {side: {state for at, state, _ in failure_table.cells() if at == side} for side in ("prefill", "decode")}
    assert rows["prefill"] == {state.value for state in RoomState} - {"released"}
    passing = {"committed", "released"}  # for no time: `running` follows
    assert rows["decode"] == {state.value for state in LeaseState} - passing | {"queued", "running"}
    assert set(failure_table.cells().values()) == failure_table.outcomes().keys() - {failure_table.NOTHING}
