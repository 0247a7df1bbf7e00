"""Which worker and which rank the legs of a request go to, seen from the workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from common.config import PolicyName
from router.affinity import Affinity
from router.in_flight import InFlight
from tests.router.mocks import MockWorker, RunningRouter, answer_at_once, config_of, fails, never, run_router

HIT = "a long beginning " * 80


class Fleet:
    """Two prefill and two decode workers behind a router."""

    def __init__(self, prefill: list[MockWorker], decode: list[MockWorker], router: RunningRouter) -> None:
        self.prefill, self.decode, self.router = prefill, decode, router

    async def ask(self, **fields: Any) -> tuple[int, int]:
        """Which prefill and which decode worker it went to."""
        before = [len(worker.bodies) for worker in (*self.prefill, *self.decode)]
        answer = await self.router.generate(**fields)
        assert answer.status_code == 200
        asked = [len(worker.bodies) for worker in (*self.prefill, *self.decode)]
        places = [place for place, (was, now) in enumerate(zip(before, asked, strict=True)) if now > was]
        prefill, decode = places
        return prefill, decode - len(self.prefill)

    async def ask_with_key(self, headers: dict[str, str], **fields: Any) -> Any:
        return await self.router.client.post("/generate", json={"text": "hi"} | fields, headers=headers)


@contextlib.asynccontextmanager
async def fleet(*, num_ranks: tuple[int, int] = (1, 1), **settings: Any) -> AsyncIterator[Fleet]:
    prefill, decode = ([MockWorker(role) for _ in range(2)] for role in ("prefill", "decode"))
    for workers, count in zip((prefill, decode), num_ranks, strict=True):
        for worker in workers:
            worker.num_ranks = count
            await worker.start()
            worker.instance = f"first of {worker.url}"
    try:
        async with run_router(config_of(prefill, decode, **settings)) as router:
            await router.until_alive()
            yield Fleet(prefill, decode, router)
    finally:
        for worker in (*prefill, *decode):
            await worker.stop()


def held(running: Fleet, *, role: str) -> list[int]:
    """How many blocks of `HIT` each worker is thought to have."""
    from router.affinity import Affinity
    from router.policies import PrefixAware

    pairing = running.router.state.workers.pairing
    found = []
    for worker in running.router.state.workers.all:
        if worker.role.value == role:
            policy = pairing._policies[worker.role]
            assert isinstance(policy, PrefixAware)
            found.append(policy.tree.match(Affinity({"text": HIT}).path, worker.targets[0].salt))
    return found


# The default: by prefix


async def test_what_begins_alike_goes_where_it_went() -> None:
    async with fleet() as running:
        first = await running.ask(text=HIT)
        assert [await running.ask(text=HIT + "more " * i) for i in range(4)] == [first] * 4
        assert sorted(held(running, role="prefill")) == sorted(held(running, role="decode")) == [0, 5]


async def test_turns_at_openai_s_endpoints_go_where_they_went() -> None:
    async with fleet() as running:
        for path, bodies in (
            ("/v1/completions", [{"prompt": HIT}, {"prompt": [HIT + "more"]}, {"prompt": HIT + "more, and more"}]),
            ("/v1/chat/completions", [{"messages": [{"role": "user", "content": HIT}] * (i + 1)} for i in range(4)]),
        ):
            before = [len(worker.bodies) for worker in (*running.prefill, *running.decode)]
            for body in bodies:
                answer = await running.router.client.post(path, json=body, headers={"x-routing-key": "k"})
                assert answer.status_code == 200
            after = [len(worker.bodies) for worker in (*running.prefill, *running.decode)]
            added = [now - was for was, now in zip(before, after, strict=True)]
            assert sorted(added[:2]) == sorted(added[2:]) == [0, len(bodies)]


async def test_a_worker_that_starts_again_or_flushes_has_nothing() -> None:
    async with fleet(health_interval_s=0.02) as running:
        prefill, decode = await running.ask(text=HIT)
        targets = running.router.state.workers.decode[decode].targets
        running.decode[decode].instance = "second"
        await running.router.until(lambda: running.router.state.workers.decode[decode].targets != targets)
        assert held(running, role="decode") == [0, 0]
        assert held(running, role="prefill")[prefill] == 5
        assert (await running.router.client.post("/flush_cache")).status_code == 200
        assert held(running, role="prefill") == [0, 0]


async def test_a_worker_that_is_dead_for_a_moment_keeps_what_it_has() -> None:
    async with fleet(health_interval_s=0.02) as running:
        _, decode = await running.ask(text=HIT)
        worker = running.router.state.workers.decode[decode]
        running.decode[decode].healthy = False
        await running.router.until(lambda: not worker.alive)
        running.decode[decode].healthy = True
        await running.router.until_alive()
        assert held(running, role="decode")[decode] == 5


async def test_a_retry_goes_elsewhere_although_the_prefix_is_there() -> None:
    async with fleet() as running:
        prefill, decode = await running.ask(text=HIT)
        failure = b'{"error": {"message": "m", "code": "rank_died", "retryable": true}}'
        running.decode[decode].script = fails(503, failure)
        running.prefill[prefill].script = never
        answer = await running.router.generate(text=HIT)
        assert answer.status_code == 200
        assert len(running.decode[1 - decode].bodies) == len(running.prefill[1 - prefill].bodies) == 1


# By load


async def test_least_load_listens_to_the_workers() -> None:
    async with fleet(policy=PolicyName.LEAST_LOAD, health_interval_s=0.02) as running:
        busy = {"dp_rank": 0, "num_reqs": 3, "num_tokens": 5000}
        running.prefill[0].loads, running.decode[1].loads = [busy], [busy]
        workers = running.router.state.workers
        await running.router.until(
            lambda: workers.prefill[0].targets[0].load.tokens > 5000 < workers.decode[1].targets[0].load.tokens
        )
        assert {await running.ask() for _ in range(10)} == {(1, 0)}
        details = (await running.router.client.get("/server_info")).json()
        assert details["policy"] == "least_load"


async def test_a_burst_spreads_before_any_report() -> None:
    async with fleet(policy=PolicyName.LEAST_LOAD, health_interval_s=60) as running:
        for worker in (*running.prefill, *running.decode):
            worker.script = never
        asked = [asyncio.create_task(running.router.generate(text="x" * 2000)) for _ in range(20)]
        await running.router.until(lambda: sum(len(worker.bodies) for worker in running.decode) == 20)
        assert [len(worker.bodies) for worker in (*running.prefill, *running.decode)] == [10] * 4
        targets = [target for worker in running.router.state.workers.all for target in worker.targets]
        assert all(target.load.num_shares == 10 for target in targets)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await running.router.until(lambda: all(target.load.num_shares == 0 for target in targets))
        assert [target.load.tokens for target in targets] == [0] * 4


BAD_LOADS: list[Any] = [
    None,
    3,
    "x",
    [None],
    [{"dp_rank": "a"}],
    [{"num_tokens": 1.5}],
    {"a": 1},
    [{"dp_rank": 10**30}],
]


@pytest.mark.parametrize("loads", BAD_LOADS)
async def test_loads_of_another_shape_are_no_loads(loads: Any) -> None:
    async with fleet(health_interval_s=0.02) as running:
        for worker in (*running.prefill, *running.decode):
            worker.loads = loads
        checks, targets = running.decode[0].checks, running.router.state.workers.decode[0].targets
        await running.router.until(lambda: running.decode[0].checks > checks + 2)
        assert all(worker.alive for worker in running.router.state.workers.all)
        assert running.router.state.workers.decode[0].targets is targets
        await running.ask()


# Policies of one role


async def test_each_role_has_its_own_policy() -> None:
    settings = {"prefill_policy": PolicyName.STICKY, "decode_policy": PolicyName.ROUND_ROBIN}
    async with fleet(**settings) as running:
        places = [await running.ask(routing_key="k") for _ in range(6)]
        assert len({prefill for prefill, _ in places}) == 1
        assert Counter(decode for _, decode in places) == {0: 3, 1: 3}
        decisions = running.router.state.workers.pairing.decisions
        assert [each.total for each in decisions.values()] == [6, 6]


# By key


@pytest.mark.parametrize("header", ["x-routing-key", "X-SMG-Routing-Key"])
async def test_a_key_in_the_header_is_as_good_as_one_in_the_body(header: str) -> None:
    async with fleet(policy=PolicyName.STICKY) as running:
        homes = {key: await running.ask(routing_key=key) for key in map(str, range(12))}
        assert {decode for _, decode in homes.values()} == {prefill for prefill, _ in homes.values()} == {0, 1}
        for key, (prefill, decode) in homes.items():
            assert (await running.ask_with_key({header: key})).status_code == 200
            assert running.prefill[prefill].bodies[-1]["routing_key"] == key
            assert running.decode[decode].bodies[-1]["routing_key"] == key
        assert (await running.ask_with_key({header: "1"}, routing_key="0")).status_code == 200
        assert running.decode[homes["0"][1]].bodies[-1]["routing_key"] == "0"


@pytest.mark.parametrize("key", [3, "", "x" * 1025, ["a"], {"a": 1}, True])
async def test_what_is_no_key(router: RunningRouter, key: Any) -> None:
    answer = await router.generate(routing_key=key)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "routing_key"
    assert (await router.client.post("/generate", json={"text": "a"}, headers={"x-routing-key": ""})).status_code == 400


# Ranks


async def test_each_leg_is_told_its_own_rank() -> None:
    async with fleet(num_ranks=(2, 3), policy=PolicyName.ROUND_ROBIN) as running:
        for _ in range(24):
            await running.ask()
        for workers, ranks in ((running.prefill, 2), (running.decode, 3)):
            bodies = [body for worker in workers for body in worker.bodies]
            assert Counter(body["routed_dp_rank"] for body in bodies) == dict.fromkeys(range(ranks), 24 // ranks)
        for worker in running.prefill:
            assert all(body["bootstrap_room"] % 2 == body["routed_dp_rank"] for body in worker.bodies)


async def test_the_sequences_of_a_batch_go_to_all_ranks_of_one_worker() -> None:
    async with fleet(num_ranks=(2, 2)) as running:
        prefill, decode = await running.ask(text=["a"] * 40)
        for body in (running.prefill[prefill].bodies[-1], running.decode[decode].bodies[-1]):
            assert body.get("routed_dp_rank") is None
            assert {room % 2 for room in body["bootstrap_room"]} == {0, 1}
        _, decode = await running.ask(text=["a"] * 40, routed_dp_rank=1)
        assert running.decode[decode].bodies[-1]["routed_dp_rank"] == 1


async def test_a_client_may_choose_the_decode_rank() -> None:
    async with fleet(num_ranks=(2, 3)) as running:
        for name in ("routed_dp_rank", "data_parallel_rank"):
            for rank in (0, 1, 2):
                _, decode = await running.ask(**{name: rank})
                body = running.decode[decode].bodies[-1]
                assert body[name] == rank and len(body.keys() & {"routed_dp_rank", "data_parallel_rank"}) == 1
        for body in (body for worker in running.prefill for body in worker.bodies):
            assert body["routed_dp_rank"] == body["bootstrap_room"] % 2
            assert body.get("data_parallel_rank") is None
        targets = [target for worker in running.router.state.workers.decode for target in worker.targets]
        assert all(target.load.num_shares == 0 for target in targets)
        for worker in running.decode:
            worker.script = never
        asked = asyncio.create_task(running.router.generate(routed_dp_rank=2))
        await running.router.until(lambda: any(target.load.num_shares for target in targets))
        assert {target.rank for target in targets if target.load.num_shares} == {2}
        asked.cancel()


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"routed_dp_rank": 3}, "routed_dp_rank", "3 is not allowed; it must be an integer from 0 to 2"),
        ({"routed_dp_rank": -1}, "routed_dp_rank", "an integer from 0 to 2"),
        ({"data_parallel_rank": "x"}, "data_parallel_rank", "an integer from 0 to 2"),
        ({"routed_dp_rank": True}, "routed_dp_rank", "an integer from 0 to 2"),
        ({"routed_dp_rank": 0, "data_parallel_rank": 1}, "data_parallel_rank", "1, but routed_dp_rank is 0"),
    ],
)
async def test_a_rank_that_no_decode_node_has_is_refused_before_any_leg(
    fields: dict[str, Any], param: str, said: str
) -> None:
    async with fleet(num_ranks=(4, 3)) as running:
        answer = await running.router.generate(**fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert said in error["message"]
        assert not any(worker.bodies for worker in (*running.prefill, *running.decode))


async def test_a_prefill_worker_with_one_rank_is_not_told_of_decode_s() -> None:
    async with fleet(num_ranks=(1, 2)) as running:
        prefill, decode = await running.ask(routed_dp_rank=1)
        assert running.prefill[prefill].bodies[0]["routed_dp_rank"] is None
        assert running.decode[decode].bodies[0]["routed_dp_rank"] == 1


@pytest.mark.parametrize("num_ranks", [(1, 1), (1, 2)])
async def test_logs_name_the_rank_of_a_node_that_has_several(num_ranks: tuple[int, int]) -> None:
    async with fleet(num_ranks=num_ranks) as running:
        fields = {"text": "a", "routed_dp_rank": num_ranks[1] - 1}
        pair = running.router.state.workers.pick(Affinity(fields, num_sequences=1))
        rank = "#1" if num_ranks[1] > 1 else ""
        assert pair.where == f"{pair.prefill.url} and {pair.decode.url}{rank}"


async def test_the_record_names_the_ranks_that_served() -> None:
    """The decode rank is the node's word, if it gives one: it chooses another when the one that was meant is dead."""
    from router.request_log import text_line

    async def says_two(worker: MockWorker, request: web.Request, *_: Any) -> web.StreamResponse:
        return web.json_response({"text": "", "output_ids": [1], "meta_info": {"completion_tokens": 1, "dp_rank": 2}})

    async with fleet(num_ranks=(2, 3)) as running:
        prefill, _ = await running.ask(routed_dp_rank=1)
        (record,) = running.router.state.dispatcher.recorder.recent
        asked = running.prefill[prefill].bodies[-1]["routed_dp_rank"]
        assert (record.prefill_rank, record.decode_rank) == (asked, 1)
        assert text_line(record).endswith(f" prefill_rank={asked} decode_rank=1")
        for worker in running.decode:
            worker.script = says_two
        await running.ask(routed_dp_rank=1)
        assert running.router.state.dispatcher.recorder.recent[-1].describe(0.0)["decode_rank"] == 2
        for worker in running.decode:
            worker.script = answer_at_once
        await running.ask(text=["a"] * 4)
        assert running.router.state.dispatcher.recorder.recent[-1].describe(0.0)["decode_rank"] is None


async def test_ranks_have_loads_and_prefixes_of_their_own() -> None:
    async with fleet(num_ranks=(1, 2), health_interval_s=0.02) as running:
        running.decode[0].loads = [{"dp_rank": 1, "num_reqs": 1, "num_tokens": 100}]
        workers = running.router.state.workers
        await running.router.until(lambda: workers.decode[0].targets[1].load.tokens > 0)
        assert workers.decode[0].targets[0].load.tokens == 0
        _, first = await running.ask(text=HIT)
        rank = running.decode[first].bodies[-1]["routed_dp_rank"]
        for _ in range(4):
            assert (await running.ask(text=HIT))[1] == first
            assert running.decode[first].bodies[-1]["routed_dp_rank"] == rank


@pytest.mark.parametrize("num_ranks", [0, -1, 10**9])
async def test_a_number_of_ranks_that_makes_no_sense_is_one(num_ranks: int) -> None:
    async with fleet(num_ranks=(num_ranks, num_ranks)) as running:
        _, decode = await running.ask()
        assert "routed_dp_rank" not in running.decode[decode].bodies[-1]


def test_rooms_of_a_rank() -> None:
    rooms = InFlight().more_rooms(300, (5, 7))
    assert {room % 7 for room in rooms} == {5}
    assert len(set(rooms)) == 300
    assert all(0 <= room < 2**63 for room in rooms)
    for number in range(40):
        (room,) = InFlight(lambda number=number: number).more_rooms(1, (3, 4))  # type: ignore[misc]
        assert room % 4 == 3 and room >= 0 and abs(room - number) < 4


async def test_a_dead_rank_gets_nothing_and_no_batch_is_spread_over_it() -> None:
    async with fleet(num_ranks=(2, 2), policy=PolicyName.ROUND_ROBIN, health_interval_s=0.02) as running:
        for worker in (*running.prefill, *running.decode):
            worker.loads = [{"dp_rank": 0, "alive": True}, {"dp_rank": 1, "alive": False}]
        targets = [target for worker in running.router.state.workers.all for target in worker.targets]
        await running.router.until(lambda: not any(target.alive for target in targets if target.rank == 1))
        for _ in range(6):
            await running.ask()
        prefill, _ = await running.ask(text=["a"] * 8)
        assert {room % 2 for room in running.prefill[prefill].bodies[-1]["bootstrap_room"]} == {0}
        asked = [body for worker in (*running.prefill, *running.decode) for body in worker.bodies]
        assert {body["routed_dp_rank"] for body in asked if body.get("routed_dp_rank") is not None} == {0}
        for worker in (*running.prefill, *running.decode):
            worker.loads = [{"dp_rank": 0}, {"dp_rank": 1}]
        await running.router.until(lambda: all(target.alive for target in targets))
