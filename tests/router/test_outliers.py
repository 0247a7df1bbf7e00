"""A worker that is much slower than its peers gets no requests for a while; never more than half of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.config import Role, WorkerAddress
from router.leg_outcome import LegEnd, LegOutcome
from router.outliers import OutlierLimits, Outliers
from router.worker import Worker, make_worker
from tests.router.mocks import MockWorker, answer_object, config_of, event, run_router, streams


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Role4:
    """Four workers of a role and what is found of them."""

    def __init__(self, role: Role = Role.DECODE, **limits: Any) -> None:
        self.clock = Clock()
        self.workers = [make_worker(role, WorkerAddress(url=f"http://w{i}:1")) for i in range(4)]
        for worker in self.workers:
            worker.alive = True
        given = {"factor": 3.0, "window_s": 30.0, "ejection_s": 10.0}
        self.outliers = Outliers(OutlierLimits(**given | limits), self.clock)

    def serve(self, times: int = 20, **seconds: float) -> list[str]:
        """So many legs at each worker. seconds: w0 … w3: gap of that worker; 0.01 unless given."""
        found = []
        for _ in range(times):
            for i, worker in enumerate(self.workers):
                gap_s = seconds.get(f"w{i}", 0.01)
                outcome = LegOutcome(end=LegEnd.OK, code=None, seconds=1.0, first_byte_s=0.1, gap_s=gap_s)
                found.append(self.outliers.note(worker, outcome, self.workers))
        return [reason for reason in found if reason]

    def ejected(self) -> list[int]:
        return [i for i, worker in enumerate(self.workers) if worker.ejected_until_s > self.clock.now]


def test_a_slow_worker_is_ejected_and_its_reason_has_both_values() -> None:
    four = Role4()
    assert four.serve(19, w2=0.2) == []
    assert four.serve(1, w2=0.2) == ["median gap 200 ms, of its peers 10 ms"]
    assert four.ejected() == [2]
    four.clock.now += 10.0
    assert four.ejected() == []


def test_the_time_grows_while_it_stays_slow_and_is_forgotten_later() -> None:
    four, lasted = Role4(), []
    for _ in range(5):
        four.serve(20, w2=0.2)
        lasted.append(four.workers[2].ejected_until_s - four.clock.now)
        four.clock.now = four.workers[2].ejected_until_s
    assert lasted == [10.0, 20.0, 40.0, 80.0, 80.0]
    four.clock.now += 81.0
    four.serve(20, w2=0.2)
    assert four.workers[2].ejected_until_s - four.clock.now == 10.0


def test_never_more_than_half_of_a_role() -> None:
    four = Role4()
    four.serve(20, w0=0.5)
    four.serve(20, w0=0.5, w1=0.5)
    four.serve(40, w0=0.5, w1=0.5, w2=0.5)
    assert four.ejected() == [0, 1]


def test_of_two_the_slower_one_but_not_both() -> None:
    four = Role4()
    del four.workers[2:]
    four.serve(21, w0=0.5)
    assert four.ejected() == [0]
    four.serve(40, w1=5.0)
    assert four.ejected() == [0]


def test_one_alone_has_no_peers() -> None:
    four = Role4()
    del four.workers[1:]
    four.serve(40, w0=9.0)
    assert four.ejected() == []


def test_dead_peers_are_no_measure() -> None:
    four = Role4()
    four.serve(20)
    for worker in four.workers[1:]:
        worker.alive = False
    four.serve(20, w0=0.5)
    assert four.ejected() == []


@pytest.mark.parametrize("seconds", [{"w2": 0.025}, {"w2": 0.02}, {}])
def test_what_is_not_much_slower_stays(seconds: dict[str, float]) -> None:
    four = Role4()
    assert four.serve(40, **seconds) == [] and four.ejected() == []


def test_times_that_are_old_do_not_count() -> None:
    four = Role4()
    four.serve(19, w2=0.2)
    four.clock.now += 31.0
    four.serve(19, w2=0.2)
    assert four.ejected() == []


def test_zero_turns_it_off() -> None:
    four = Role4(factor=0.0)
    four.serve(40, w2=9.0)
    assert four.ejected() == []


def test_of_answers_that_are_not_streamed_only_prefill_is_measured() -> None:
    for role, ejected in ((Role.DECODE, []), (Role.PREFILL, [1])):
        four = Role4(role)
        for _ in range(20):
            for i, worker in enumerate(four.workers):
                first_byte_s = 5.0 if i == 1 else 0.1
                outcome = LegOutcome(end=LegEnd.OK, code=None, seconds=5.0, first_byte_s=first_byte_s, gap_s=None)
                four.outliers.note(worker, outcome, four.workers)
        assert four.ejected() == ejected


@pytest.fixture
async def slow() -> AsyncIterator[MockWorker]:
    worker = MockWorker("decode")
    await worker.start()
    yield worker
    await worker.stop()


async def test_in_the_router_the_slow_one_gets_nothing_until_its_time_is_over(
    prefill: MockWorker, decode: MockWorker, slow: MockWorker
) -> None:
    events = [event(answer_object())] * 3 + [event(b"[DONE]")]
    decode.script, slow.script = streams(*events, gap_s=0.0), streams(*events, gap_s=0.03)
    settings = {"outlier_factor": 3.0, "outlier_ejection_s": 0.5, "policy": "round_robin"}
    async with run_router(config_of([prefill], [decode, slow], **settings)) as router:
        await router.until_alive()
        found: Worker = next(w for w in router.state.workers.decode if w.url == slow.url)
        for _ in range(60):
            assert (await router.generate(stream=True)).status_code == 200
            if found.state == "ejected":
                break
        asked = len(slow.bodies)
        assert asked >= 20
        for _ in range(5):
            assert (await router.generate(stream=True)).status_code == 200
        assert len(slow.bodies) == asked
        await router.until(lambda: found.state == "alive")
        for _ in range(4):
            assert (await router.generate(stream=True)).status_code == 200
        assert len(slow.bodies) > asked
