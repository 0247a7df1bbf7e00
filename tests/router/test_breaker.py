"""A worker that fails is left, tried again, and taken back. Who fails without its own fault is not."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from common.config import Role, WorkerAddress
from router.breaker import Breaker, BreakerLimits, BreakerState, Verdict, guilty_leg
from router.leg_outcome import LegEnd, LegOutcome
from router.targets import make_targets
from router.worker import Worker, make_worker
from tests.router.mocks import (
    MockWorker,
    RunningRouter,
    answer_at_once,
    answer_object,
    config_of,
    event,
    fails,
    never,
    run_router,
    streams,
)

CLOSED, OPEN, HALF_OPEN = BreakerState
GOOD, BAD, NONE = Verdict


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeLeg:
    worker: Worker = field(default_factory=lambda: make_worker(Role.DECODE, WorkerAddress(url="http://d:1")))
    partner: Any = None


def breaker_of(clock: Clock, **limits: Any) -> Breaker:
    return Breaker(BreakerLimits(**limits), clock)


def ask(breaker: Breaker, verdict: Verdict) -> None:
    leg: Any = FakeLeg()
    breaker.on_begin(leg)
    breaker.on_verdict(leg, verdict, "why")


def test_it_opens_after_failures_in_a_row_and_closes_when_the_one_that_tries_succeeds() -> None:
    clock = Clock()
    breaker = breaker_of(clock, failures=3, open_s=5.0)
    for verdict in (BAD, BAD, GOOD, BAD, NONE, BAD):
        ask(breaker, verdict)
    assert breaker.state is CLOSED and breaker.allows
    ask(breaker, BAD)
    assert breaker.state is OPEN and not breaker.allows
    assert breaker.describe() == {"state": "open", "failures_in_a_row": 0, "reason": "why", "open_for_s": 5.0}
    clock.now += 5.0
    assert breaker.state is HALF_OPEN and breaker.allows
    probe: Any = FakeLeg()
    breaker.on_begin(probe)
    assert not breaker.allows, "one at a time"
    breaker.on_verdict(probe, GOOD)
    assert breaker.state is CLOSED and breaker.allows


def test_each_try_that_fails_doubles_the_time() -> None:
    clock = Clock()
    breaker = breaker_of(clock, failures=1, open_s=1.0)
    found = []
    for _ in range(6):
        ask(breaker, BAD)
        found.append(breaker.describe()["open_for_s"])
        clock.now += found[-1]
    assert found == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    ask(breaker, GOOD)
    ask(breaker, BAD)
    assert breaker.describe()["open_for_s"] == 1.0, "a success makes it forget"


def test_a_try_without_a_verdict_is_followed_by_another() -> None:
    clock = Clock()
    breaker = breaker_of(clock, failures=1, open_s=1.0)
    ask(breaker, BAD)
    clock.now += 1.0
    ask(breaker, NONE)
    assert breaker.state is HALF_OPEN and breaker.allows


def test_what_began_before_it_opened_has_no_say() -> None:
    clock = Clock()
    breaker = breaker_of(clock, failures=1, open_s=1.0)
    old: Any = FakeLeg()
    breaker.on_begin(old)
    ask(breaker, BAD)
    breaker.on_verdict(old, GOOD)
    assert breaker.state is OPEN
    clock.now += 1.0
    breaker.on_verdict(old, BAD)
    assert breaker.state is HALF_OPEN and breaker.allows
    probe: Any = FakeLeg()
    breaker.on_begin(probe)
    breaker.on_verdict(old, GOOD)
    assert breaker.state is HALF_OPEN and not breaker.allows


def test_the_first_byte_lets_others_follow_but_one_failure_opens_it_again() -> None:
    clock = Clock()
    breaker = breaker_of(clock, failures=3, open_s=1.0)
    for _ in range(3):
        ask(breaker, BAD)
    clock.now += 1.0
    probe: Any = FakeLeg()
    breaker.on_begin(probe)
    breaker.on_first_byte(probe)
    assert breaker.state is CLOSED
    breaker.on_verdict(probe, BAD)
    assert breaker.state is OPEN
    assert breaker.describe()["open_for_s"] == 2.0


def test_failures_that_are_many_but_never_in_a_row() -> None:
    clock = Clock()
    breaker = breaker_of(clock, failures=3, failure_rate=0.5, window_s=10.0)
    for _ in range(9):
        ask(breaker, GOOD)
        ask(breaker, BAD)
    assert breaker.state is CLOSED, "fewer than 20 say nothing"
    clock.now += 11.0
    for _ in range(9):
        ask(breaker, GOOD)
        ask(breaker, BAD)
    assert breaker.state is CLOSED, "the others were long ago"
    ask(breaker, GOOD)
    ask(breaker, BAD)
    assert breaker.state is OPEN


def test_zero_failures_never_open_it() -> None:
    breaker = breaker_of(Clock(), failures=0)
    for _ in range(100):
        ask(breaker, BAD)
    assert breaker.state is CLOSED


# Whose fault it was


def outcome(end: LegEnd, code: str | None, kind: str = "worker_error") -> LegOutcome:
    return LegOutcome(end=end, code=code, kind=kind, seconds=1.0, first_byte_s=None, gap_s=None)


@pytest.mark.parametrize(
    ("end", "code", "guilty"),
    [
        (LegEnd.OK, None, None),
        (LegEnd.CLIENT_ERROR, "invalid_request", None),
        (LegEnd.ABORTED, "aborted", None),
        (LegEnd.WORKER_ERROR, "draining", None),
        (LegEnd.WORKER_ERROR, "shutting_down", None),
        (LegEnd.LOST, "worker_unavailable", None),
        (LegEnd.WORKER_ERROR, "rank_died", "self"),
        (LegEnd.WORKER_ERROR, "rank_silent", "self"),
        (LegEnd.WORKER_ERROR, "internal", "self"),
        (LegEnd.WORKER_ERROR, "first_token_timeout", "self"),
        (LegEnd.WORKER_ERROR, None, "self"),
        (LegEnd.LOST, "worker_lost", "self"),
        (LegEnd.LOST, "worker_silent", "self"),
        (LegEnd.WORKER_ERROR, "peer_lost", "partner"),
        (LegEnd.WORKER_ERROR, "peer_silent", "partner"),
        (LegEnd.WORKER_ERROR, "peer_unreachable", "partner"),
    ],
)
def test_who_is_to_blame(end: LegEnd, code: str | None, guilty: str | None) -> None:
    leg: Any = FakeLeg()
    leg.partner = FakeLeg(partner=leg)
    named = {"self": leg, "partner": leg.partner, None: None}
    assert guilty_leg(leg, outcome(end, code)) is named[guilty]


def test_a_long_silence_counts_where_health_checks_are_not_answered_either() -> None:
    leg: Any = FakeLeg()
    assert guilty_leg(leg, outcome(LegEnd.LOST, "worker_timeout")) is None
    leg.worker.unanswered = 1
    assert guilty_leg(leg, outcome(LegEnd.LOST, "worker_timeout")) is leg


@pytest.mark.parametrize("code", ["rank_died", "rank_silent"])
def test_one_of_several_ranks_is_not_the_worker(code: str) -> None:
    leg: Any = FakeLeg()
    assert guilty_leg(leg, outcome(LegEnd.WORKER_ERROR, code)) is leg
    leg.worker.targets = make_targets(leg.worker, 2)
    assert guilty_leg(leg, outcome(LegEnd.WORKER_ERROR, code)) is None


@pytest.mark.parametrize("code", ["peer_lost", "peer_silent"])
def test_the_peer_of_one_of_several_ranks_accuses_nobody(code: str) -> None:
    """Also before anybody else knows that the rank is gone."""
    leg: Any = FakeLeg()
    leg.partner = FakeLeg(partner=leg)
    leg.worker.targets = make_targets(leg.worker, 2)
    assert guilty_leg(leg, outcome(LegEnd.WORKER_ERROR, code)) is leg.partner
    leg.partner.worker.targets = make_targets(leg.partner.worker, 2)
    assert guilty_leg(leg, outcome(LegEnd.WORKER_ERROR, code)) is None


def test_a_node_of_which_no_rank_can_be_reached_is_accused_but_not_for_a_dead_one() -> None:
    leg: Any = FakeLeg()
    leg.partner = FakeLeg(partner=leg)
    leg.partner.worker.targets = make_targets(leg.partner.worker, 2)
    assert guilty_leg(leg, outcome(LegEnd.WORKER_ERROR, "peer_unreachable")) is leg.partner
    leg.partner.worker.targets[1].alive = False
    assert guilty_leg(leg, outcome(LegEnd.WORKER_ERROR, "peer_unreachable")) is None


@pytest.mark.parametrize("code", ["no_capacity", "first_token_timeout"])
def test_who_is_full_has_not_failed(code: str) -> None:
    leg: Any = FakeLeg()
    assert guilty_leg(leg, outcome(LegEnd.WORKER_ERROR, code, "capacity_error")) is None


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("write_failed", "transfer_error"),
        ("digest_mismatch", "transfer_error"),
        ("layout_mismatch", "config_error"),
        ("bootstrap_timeout", "worker_error"),
    ],
)
def test_of_a_failed_handoff_the_one_that_has_gone_longer_without_success(code: str, kind: str) -> None:
    leg: Any = FakeLeg()
    leg.partner = FakeLeg(partner=leg)
    failed = outcome(LegEnd.WORKER_ERROR, code, kind)
    leg.worker.breaker.good_s, leg.partner.worker.breaker.good_s = 2.0, 1.0
    assert guilty_leg(leg, failed) is leg.partner
    leg.partner.worker.breaker.good_s = 3.0
    assert guilty_leg(leg, failed) is leg
    leg.worker.breaker.good_s = None
    assert guilty_leg(leg, failed) is leg


# In the router


def state_of(router: RunningRouter, worker: MockWorker) -> str:
    return str(next(w.state for w in router.state.workers.all if w.url == worker.url))


def config(four: list[MockWorker], **settings: Any) -> Any:
    by_turns = {"breaker_open_s": 0.3, "policy": "round_robin"}
    return config_of(four[:2], four[2:], **by_turns | settings)


@pytest.mark.parametrize("broken", [0, 2])
async def test_a_worker_that_fails_is_left_within_three_requests_and_taken_back(
    four: list[MockWorker], broken: int
) -> None:
    """Its errors are not tried elsewhere."""
    bad, partners = four[broken], four[2:] if broken == 0 else four[:2]
    bad.script = fails(500, b'{"error": {"message": "m", "code": "internal", "retryable": false}}')
    async with run_router(config(four, breaker_open_s=1.0)) as router:
        await router.until_alive()
        statuses = []
        while state_of(router, bad) != "open":
            statuses.append((await router.generate()).status_code)
        assert set(statuses) <= {200, 500} and len(bad.bodies) == 3
        asked = sum(len(worker.bodies) for worker in partners)
        for _ in range(10):
            assert (await router.generate()).status_code == 200
        assert len(bad.bodies) == 3, "open: no leg is dispatched there"
        assert sum(len(worker.bodies) for worker in partners) == asked + 10, "one for each request, none for the bad"
        bad.script = answer_at_once
        await router.until(lambda: state_of(router, bad) == "half_open")
        while len(bad.bodies) == 3:
            assert (await router.generate()).status_code == 200
        await router.until(lambda: state_of(router, bad) == "alive")
        for _ in range(4):
            assert (await router.generate()).status_code == 200
        assert len(bad.bodies) >= 5


async def test_of_a_half_open_worker_one_request_tries(four: list[MockWorker]) -> None:
    bad = four[2]
    bad.script = fails(500, b"{}")
    async with run_router(config(four, breaker_failures=1)) as router:
        await router.until_alive()
        while state_of(router, bad) != "open":
            await router.generate()
        bad.script = never
        await router.until(lambda: state_of(router, bad) == "half_open")
        asked = len(bad.bodies)
        stuck = []
        while len(bad.bodies) == asked:
            stuck.append(asyncio.create_task(router.generate()))
            await asyncio.wait(stuck[-1:], timeout=0.05)
        for _ in range(6):
            assert (await router.generate()).status_code == 200
        assert len(bad.bodies) == asked + 1
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        await router.until(lambda: next(w for w in router.state.workers.decode if w.url == bad.url).num_legs == 0)
        bad.script = streams(event(answer_object()), event(b"[DONE]"))
        while len(bad.bodies) == asked + 1:
            await router.generate(stream=True)
        assert state_of(router, bad) == "alive"


async def test_a_long_stream_that_tries_holds_nobody_back(router: RunningRouter, decode: MockWorker) -> None:
    router.state.workers.decode[0].breaker = Breaker(BreakerLimits(failures=1, open_s=0.1))
    decode.script = fails(500, b"{}")
    assert (await router.generate()).status_code == 500
    await router.until(lambda: state_of(router, decode) == "half_open")
    decode.script = streams(event(answer_object()), gap_s=60.0)
    async with router.client.stream("POST", "/generate", json={"text": "a", "stream": True}) as first:
        await anext(first.aiter_bytes())
        assert state_of(router, decode) == "alive"
        decode.script = answer_at_once
        assert (await router.generate()).status_code == 200


async def test_a_pair_alone_whose_breaker_is_open(router: RunningRouter, decode: MockWorker) -> None:
    decode.script = fails(500, b"{}")
    for _ in range(3):
        assert (await router.generate()).status_code == 500
    answer = await router.generate()
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "no decode worker takes requests: open")
    assert answer.json()["error"]["retryable"] is True
    assert (await router.client.get("/health")).status_code == 503
    assert len(decode.bodies) == 3


CLIENT_ERRORS = [400, 413, 429, 499]


@pytest.mark.parametrize("status", CLIENT_ERRORS)
async def test_errors_of_clients_open_nothing(router: RunningRouter, decode: MockWorker, status: int) -> None:
    decode.script = fails(status, b'{"error": {"message": "m", "code": "c"}}')
    for _ in range(5):
        assert (await router.generate()).status_code == status
    assert state_of(router, decode) == "alive"


async def test_a_prefill_worker_whose_decode_peer_has_died_is_not_to_blame(four: list[MockWorker]) -> None:
    """Both answer the truth: the decode node that its rank died, prefill that its peer is lost."""
    body = b'{"error": {"message": "m", "code": "%s", "retryable": false}}'
    four[1].healthy = False
    four[0].script = fails(503, body % b"peer_lost")
    four[2].script = four[3].script = never
    async with run_router(config(four)) as router:
        await router.until(lambda: [w.alive for w in router.state.workers.all] == [True, False, True, True])
        for _ in range(6):
            assert (await router.generate()).status_code == 503
        assert [state_of(router, worker) for worker in (four[0], *four[2:])] == ["alive", "open", "open"]


async def test_a_worker_that_comes_back_as_another_process_begins_anew(four: list[MockWorker]) -> None:
    bad = four[2]
    bad.instance, bad.script = "one", fails(500, b"{}")
    async with run_router(config(four, breaker_failures=1, breaker_open_s=60.0)) as router:
        await router.until_alive()
        while state_of(router, bad) != "open":
            await router.generate()
        bad.instance = "two"
        await router.until(lambda: state_of(router, bad) == "alive")


# Idle workers


async def test_an_idle_worker_is_asked_for_a_token(four: list[MockWorker]) -> None:
    bad = four[3]
    bad.probe_status = 503
    async with run_router(config(four, idle_probe_interval_s=0.1, breaker_open_s=0.2)) as router:
        await router.until(lambda: state_of(router, bad) == "open")
        assert bad.probes == 3 and four[2].probes >= 1
        assert not bad.bodies
        bad.probe_status = 200
        await router.until(lambda: state_of(router, bad) == "alive")


async def test_a_busy_worker_is_not_asked_for_a_token(four: list[MockWorker]) -> None:
    for worker in four:
        worker.script = never
    async with run_router(config(four, idle_probe_interval_s=0.1, policy="round_robin")) as router:
        await router.until_alive()
        running = [asyncio.create_task(router.generate()) for _ in range(2)]
        await router.until(lambda: all(worker.bodies for worker in four))
        probes, checks = [worker.probes for worker in four], four[0].checks
        await router.until(lambda: four[0].checks > checks + 6)
        assert [worker.probes for worker in four] == probes
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
