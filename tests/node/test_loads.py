"""What a node tells of its load, and a router that chooses a rank of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from common.config import PolicyName, RouterConfig, WorkerAddress
from tests.node.conftest import FakeNode, wait_for
from tests.node.test_serving import SILENT, SLOW, in_background, prompt_length, room
from tests.router.mocks import run_router


def loads(node: FakeNode) -> list[dict[str, int]]:
    return list(node.get("/get_load").json())


def idle(rank: int) -> dict[str, int]:
    names = ("num_reqs", "num_waiting_reqs", "num_tokens", "num_pending_tokens")
    return {"dp_rank": rank, "alive": True} | dict.fromkeys(names, 0)


def abort(node: FakeNode, rid: str) -> None:
    node.post({"rid": rid}, "/abort_request")


def test_loads_are_the_sequences_and_tokens_in_flight_of_each_rank(decode: FakeNode) -> None:
    assert loads(decode) == decode.get("/health").json()["loads"] == [idle(0), idle(1)]
    length = prompt_length(decode)
    bodies: list[dict[str, Any]] = [
        {"sampling_params": SILENT, "rid": "silent", "routed_dp_rank": 0},
        {"sampling_params": SLOW, "rid": "slow", "routed_dp_rank": 1},
    ]
    threads = [
        in_background(lambda body=body: decode.post({"text": "Tom has 12 €5 😀 apples."} | body))[0] for body in bodies
    ]
    try:
        wait_for(lambda: loads(decode)[1]["num_tokens"] > length + 3)
        waiting, running = loads(decode)
        assert waiting == idle(0) | {
            "num_reqs": 1,
            "num_waiting_reqs": 1,
            "num_tokens": length,
            "num_pending_tokens": length,
        }
        assert (running["num_reqs"], running["num_waiting_reqs"], running["num_pending_tokens"]) == (1, 0, 0)
    finally:
        abort(decode, "silent")
        abort(decode, "slow")
        for thread in threads:
            thread.join(10)
    assert loads(decode) == [idle(0), idle(1)]


async def test_a_router_chooses_the_rank(prefill: FakeNode, decode: FakeNode) -> None:
    """Both ranks in turn, whatever the room; the load that the node reports arrives."""
    config = RouterConfig(
        prefill=(WorkerAddress(url=prefill.url, bootstrap_port=8998),),
        decode=(WorkerAddress(url=decode.url),),
        policy=PolicyName.LEAST_LOAD,
        health_interval_s=0.05,
    )
    assert decode.post({"text": "a", "sampling_params": {"max_new_tokens": 1}, **room(3)}).status_code == 200
    async with run_router(config) as router:
        await router.until_alive()
        (worker,) = router.state.workers.decode
        assert [target.rank for target in worker.targets] == [0, 1]
        thread, _ = in_background(
            lambda: decode.post({"text": "b" * 50, "sampling_params": SLOW, "rid": "other", "routed_dp_rank": 1})
        )
        try:
            await router.until(lambda: worker.targets[1].load.tokens > 0)
            answers = [await router.generate(sampling_params={"max_new_tokens": 3}) for _ in range(6)]
            assert [answer.status_code for answer in answers] == [200] * 6
        finally:
            abort(decode, "other")
            thread.join(10)
        decisions = router.state.workers.pairing.decisions
        assert Counter(each.total for each in decisions.values()) == {6: 2}
