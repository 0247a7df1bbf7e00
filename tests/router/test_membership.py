"""Workers come and go while the router serves: by its administrator, by themselves, and by the state file."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from common.config import Role, RouterConfig, WorkerAddress
from common.errors import ConfigError
from router.app import create_app
from router.state_file import Entry, StateFile
from tests.router.mocks import (
    BOOTSTRAP_PORT,
    MockWorker,
    RunningRouter,
    answer_object,
    config_of,
    event,
    never,
    run_router,
    streams,
)


def body_of(worker: MockWorker, **more: Any) -> dict[str, Any]:
    port = {"bootstrap_port": BOOTSTRAP_PORT} if worker.role == "prefill" else {}
    return {"url": worker.url, "role": worker.role, **port, **more}


async def add(router: RunningRouter, worker: MockWorker, **more: Any) -> Any:
    return await router.client.post("/workers", json=body_of(worker, **more))


async def listed(router: RunningRouter) -> dict[str, dict[str, Any]]:
    found = (await router.client.get("/workers")).json()["workers"]
    return {worker["url"]: worker for worker in found}


def empty(**settings: Any) -> RouterConfig:
    return config_of([], [], **settings)


async def test_a_router_begins_with_no_workers_and_serves_those_that_are_added(
    prefill: MockWorker, decode: MockWorker
) -> None:
    async with run_router(empty()) as router:
        answer = await router.generate()
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "no prefill worker is alive")
        for worker in (prefill, decode):
            assert (await add(router, worker)).status_code == 201
        await router.until_alive()
        assert (await router.generate()).status_code == 200
        assert prefill.bodies[0]["bootstrap_port"] == BOOTSTRAP_PORT
        again = await add(router, decode)
        assert again.status_code == 200 and len(await listed(router)) == 2
        assert (await router.client.get("/list_workers")).json() == {"urls": [prefill.url, decode.url]}


async def test_what_is_said_of_a_worker(router: RunningRouter, decode: MockWorker) -> None:
    decode.instance, decode.num_ranks = "i1", 2
    decode.healthy = False
    await router.until(lambda: not router.state.workers.has_pair())
    decode.healthy = True
    await router.until_alive()
    found = (await listed(router))[decode.url]
    said = {name: found.pop(name) for name in ("id", "since", "loads")}
    assert len(said["id"]) == 12 and said["since"] > 1.6e9 and len(said["loads"]) == 2
    assert found == {
        "role": "decode",
        "url": decode.url,
        "alive": True,
        "fingerprint": "f0",
        "state": "alive",
        "source": "flag",
        "bootstrap_port": None,
        "ranks": 2,
        "ranks_alive": 2,
        "requests": 0,
        "handoff": None,
        "state_layout": None,
        "instance": "i1",
        "breaker": {"state": "closed", "failures_in_a_row": 0},
    }


async def test_ranks_that_take_no_requests_are_told(prefill: MockWorker, decode: MockWorker) -> None:
    decode.num_ranks = 2
    decode.loads = [{"dp_rank": 0, "alive": True, "num_tokens": 0}, {"dp_rank": 1, "alive": False, "num_tokens": 0}]
    async with run_router(config_of([prefill], [decode])) as router:
        await router.until_alive()
        await router.until(lambda: router.state.workers.decode[0].num_ranks_alive == 1)
        found = (await listed(router))[decode.url]
        assert (found["state"], found["ranks"], found["ranks_alive"]) == ("alive", 2, 1)
        shown = (await router.client.get("/status.json")).json()["workers"]
        assert [worker["ranks_alive"] for worker in shown] == [1, 1]
        decode.healthy = False
        await router.until(lambda: router.state.workers.decode[0].num_ranks_alive == 0)


async def test_role_and_bootstrap_port_are_asked_of_the_worker(prefill: MockWorker, decode: MockWorker) -> None:
    prefill.info = {"role": "prefill", "bootstrap_port": 4321}
    decode.info = {"disaggregation_mode": "decode"}  # as SGLang's servers say
    async with run_router(empty()) as router:
        for worker in (prefill, decode):
            answer = await router.client.post("/add_worker", params={"url": worker.url})
            assert answer.status_code == 201
        await router.until_alive()
        assert (await router.generate()).status_code == 200
        assert prefill.bodies[0]["bootstrap_port"] == 4321


@pytest.mark.parametrize(
    ("body", "status", "param", "said"),
    [
        ({}, 400, None, "url"),
        ({"url": 5}, 400, "url", "url: Expected `str`, got `int`"),
        ({"url": "ftp://a"}, 400, "url", "is no URL"),
        ({"url": "http://user:secret@a:1"}, 400, "url", "is no URL"),
        ({"url": "http://a:1/?x=1"}, 400, "url", "is no URL"),
        ({"url": "http://a:99999"}, 400, "url", "is no URL"),
        ({"url": "http://a:1\r\nx: y"}, 400, "url", "is no URL"),
        ({"url": "http://a..b:1"}, 400, "url", "is no URL"),
        ({"url": f"http://{'a' * 64}.com:1"}, 400, "url", "is no URL"),
        ({"url": "http://127.0.0.1:1", "fingerprint": "f" * 257}, 400, "fingerprint", "fingerprint: "),
        ({"url": "http://127.0.0.1:1", "role": "unified"}, 400, "role", "serves alone"),
        ({"url": "http://127.0.0.1:1", "role": "queen"}, 400, "role", 'role: "queen" is not allowed; it must be'),
        ({"url": "http://127.0.0.1:1", "role": "prefill", "bootstrap_port": 0}, 400, "bootstrap_port", "1 to 65535"),
        ({"url": "http://127.0.0.1:1", "role": ["decode"]}, 400, "role", "it must be prefill or decode"),
        ({"url": "http://127.0.0.1:1", "speed": 9}, 400, "speed", "speed: unknown parameter"),
        ({"url": "http://127.0.0.1:1", "rolle": "decode"}, 400, "rolle", "did you mean role?"),
        ({"url": "http://127.0.0.1:1"}, 503, "url", "cannot be asked for what was left out, role or bootstrap_port"),
        ({"url": "http://127.0.0.1:1", "role": "prefill"}, 503, "url", "cannot be asked"),
        ([], 400, None, "must be a JSON object"),
    ],
)
async def test_registrations_that_make_no_sense(
    router: RunningRouter, body: Any, status: int, param: str | None, said: str
) -> None:
    answer = await router.client.post("/workers", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error.get("param")) == (status, param)
    assert said in error["message"]
    assert len(await listed(router)) == 2


async def test_a_worker_that_says_otherwise(router: RunningRouter, four: list[MockWorker]) -> None:
    four[0].info = {"role": "decode"}
    four[1].info = {"role": "unified"}
    answers = [await add(router, four[0]), await router.client.post("/workers", json={"url": four[1].url})]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert "says that it is decode, not prefill" in answers[0].json()["error"]["message"]
    assert "says that it is unified, not prefill or decode" in answers[1].json()["error"]["message"]
    four[2].info = {}
    answer = await router.client.post("/workers", json={"url": four[2].url})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "role")
    four[3].info = {"role": "prefill"}
    answer = await router.client.post("/workers", json={"url": four[3].url})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "bootstrap_port")


async def test_a_worker_that_is_not_there_yet_joins_when_it_comes(router: RunningRouter, decode: MockWorker) -> None:
    late = MockWorker("decode")
    await late.start()
    await late.stop()
    assert (await add(router, late)).status_code == 201
    assert (await listed(router))[late.url]["state"] == "dead"
    await late.start()
    await router.until_alive()
    await late.stop()


async def test_a_router_is_no_worker(router: RunningRouter) -> None:
    answer = await router.client.post("/workers", json={"url": router.url, "role": "decode"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "role")
    assert "says that it is router, not decode" in answer.json()["error"]["message"]


async def test_one_process_under_two_urls_is_one_worker(router: RunningRouter, decode: MockWorker) -> None:
    """As when a flag says localhost and the node registers with its address."""
    decode.instance = "one"
    other_url = decode.url.replace("127.0.0.1", "localhost")
    await router.client.post("/workers", json={"url": other_url, "role": "decode", "instance": "one"})
    await router.until(lambda: sum(w.alive for w in router.state.workers.decode) == 1)
    await router.until(lambda: any("the same process as" in w.reason for w in router.state.workers.decode))
    assert (await router.generate()).status_code == 200
    twin = next(w for w in router.state.workers.decode if w.alive)
    await router.client.delete("/workers", params={"url": twin.url})
    await router.until(lambda: [w.alive for w in router.state.workers.decode] == [True])


# Layouts


async def test_another_layout_may_join_and_is_told_both_values(router: RunningRouter, four: list[MockWorker]) -> None:
    """Two versions side by side while one replaces the other: only equal ones are paired."""
    for worker in (four[0], four[2]):
        worker.fingerprint = "f1"
    answer = await add(router, four[0])
    assert answer.status_code == 201
    told = answer.json()["mismatches"]
    assert len(told) == 1 and f"{four[0].url} has state layout f1" in told[0] and "has f0" in told[0]
    await add(router, four[2])
    await router.until_alive()
    for _ in range(8):
        assert (await router.generate()).status_code == 200
    assert len(four[0].bodies) == len(four[2].bodies)
    assert told[0] in (await router.client.get("/workers")).json()["mismatches"]


async def test_only_the_required_layout(four: list[MockWorker]) -> None:
    async with run_router(empty(require_fingerprint="f0")) as router:
        assert (await add(router, four[0])).status_code == 201
        four[2].fingerprint = "f1"
        answer = await add(router, four[2])
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (409, "fingerprint_mismatch")
        assert "f1" in error["message"] and "--require-fingerprint is f0" in error["message"]
        assert list(await listed(router)) == [four[0].url]


async def test_a_worker_that_comes_back_with_another_layout_than_the_required(
    prefill: MockWorker, decode: MockWorker
) -> None:
    async with run_router(config_of([prefill], [decode], require_fingerprint="f0")) as router:
        await router.until_alive()
        decode.fingerprint, decode.instance = "f1", "new"
        await router.until(lambda: not router.state.workers.has_pair())
        reason = (await listed(router))[decode.url]["reason"]
        assert reason == "it has state layout f1, --require-fingerprint is f0"


# Going


@pytest.mark.parametrize("by_id", [False, True])
async def test_a_worker_drains_before_it_goes(router: RunningRouter, four: list[MockWorker], by_id: bool) -> None:
    leaving = four[2]
    await add(router, leaving)
    await router.until_alive()
    leaving.script = never
    running = []
    while not leaving.bodies:
        running.append(asyncio.create_task(router.generate()))
        await asyncio.wait(running[-1:], timeout=0.05)
    wid = (await listed(router))[leaving.url]["id"]
    path, params = (f"/workers/{wid}", {}) if by_id else ("/workers", {"url": leaving.url + "/"})
    answer = await router.client.delete(path, params=params)
    assert (answer.status_code, answer.json()["state"], answer.json()["requests"]) == (202, "draining", 1)
    for _ in range(6):
        assert (await router.generate()).status_code == 200
    assert len(leaving.bodies) == 1, "nothing new"
    assert not running[-1].done()
    running[-1].cancel()
    await router.until(lambda: all(w.url != leaving.url for w in router.state.workers.all))
    checks = leaving.checks
    await asyncio.sleep(0.2)
    assert leaving.checks == checks, "nobody looks after it any more"


async def test_a_worker_is_removed_by_force_and_what_it_runs_goes_on_elsewhere(
    router: RunningRouter, four: list[MockWorker]
) -> None:
    leaving = four[2]
    await add(router, leaving)
    await router.until_alive()
    leaving.script = never
    running: list[asyncio.Task[Any]] = []
    while not leaving.bodies:
        running.append(asyncio.create_task(router.generate()))
        await asyncio.wait(running[-1:], timeout=0.05)
    answer = await router.client.post("/remove_worker", params={"url": leaving.url, "force": "true"})
    assert answer.status_code == 200
    assert [(await task).status_code for task in running] == [200] * len(running)
    assert leaving.url not in await listed(router)


async def test_what_cannot_be_removed(router: RunningRouter) -> None:
    for path, status in (("/workers?url=http://a:1", 404), ("/workers/abc", 404), ("/workers", 400)):
        assert (await router.client.delete(path)).status_code == status
    url = router.state.workers.all[0].url
    answer = await router.client.delete("/workers", params={"url": url, "force": "maybe"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "force")
    assert len(await listed(router)) == 2


async def test_the_last_one_goes_and_comes_again(router: RunningRouter, decode: MockWorker) -> None:
    gone = await router.client.delete("/workers", params={"url": decode.url})
    assert (gone.status_code, gone.json()["state"], gone.json()["alive"]) == (200, "gone", False)
    answer = await router.generate()
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "no decode worker is alive")
    assert (await add(router, decode)).status_code == 201
    await router.until_alive()
    assert (await router.generate()).status_code == 200


async def test_workers_come_and_go_under_load(
    router: RunningRouter, prefill: MockWorker, decode: MockWorker, four: list[MockWorker]
) -> None:
    """No request fails while workers are added, drained and removed."""
    for worker in (decode, *four[2:]):
        worker.script = streams(*[event(answer_object())] * 4, event(b"[DONE]"), gap_s=0.01)
    statuses: list[int] = []
    stop = asyncio.Event()

    async def ask() -> None:
        while not stop.is_set():
            answer = await router.generate(stream=True)
            statuses.append(answer.status_code if b"[DONE]" in answer.content else 0)

    clients = [asyncio.create_task(ask()) for _ in range(8)]
    for _ in range(3):
        for worker in four:
            assert (await add(router, worker)).status_code == 201
        await router.until_alive()
        served = [len(worker.bodies) for worker in four]
        await router.until(lambda before=served: all(len(w.bodies) > n for w, n in zip(four, before, strict=True)), 10)
        for worker in four:
            await router.client.delete("/workers", params={"url": worker.url})
        await router.until(lambda: len(router.state.workers.all) == 2)
    stop.set()
    await asyncio.gather(*clients)
    assert set(statuses) == {200} and len(statuses) > 20


# Workers that register themselves


async def test_a_heartbeat_keeps_and_silence_alone_does_not_remove(four: list[MockWorker]) -> None:
    decode = four[2]
    decode.instance = "one"
    async with run_router(empty(heartbeat_timeout_s=0.3)) as router:
        assert (await add(router, decode, instance="one")).json()["source"] == "self"
        await router.until_alive()
        worker = router.state.workers.all[0]
        heard_s = worker.heard_s
        assert (await add(router, decode, instance="one")).status_code == 200
        assert worker.heard_s > heard_s
        checks = decode.checks
        await asyncio.sleep(0.5)
        await router.until(lambda: decode.checks > checks)
        assert decode.url in await listed(router), "it lives: that it does not register any more does not matter"
        await decode.stop()
        await router.until(lambda: not router.state.workers.all)


async def test_a_dead_worker_that_was_added_or_named_stays(router: RunningRouter, decode: MockWorker) -> None:
    async with run_router(empty(heartbeat_timeout_s=0.1)) as router:
        await add(router, decode)
        await router.until_alive()
        await decode.stop()
        await router.until(lambda: not router.state.workers.all[0].alive)
        await asyncio.sleep(0.4)
        assert decode.url in await listed(router)


async def test_a_worker_says_that_it_leaves_and_comes_back(four: list[MockWorker]) -> None:
    decode = four[2]
    decode.instance = "one"
    async with run_router(empty()) as router:
        await add(router, decode, instance="one")
        await router.until_alive()
        answer = await router.client.delete("/workers", params={"url": decode.url, "instance": "zero"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "other_instance")
        answer = await router.client.delete("/workers", params={"url": decode.url, "instance": "one"})
        assert answer.status_code == 200 and not await listed(router)
        assert (await add(router, decode, instance="one")).status_code == 201


async def test_who_was_removed_does_not_come_back_by_itself(four: list[MockWorker]) -> None:
    decode = four[2]
    decode.instance = "one"
    async with run_router(empty()) as router:
        await add(router, decode, instance="one")
        await router.until_alive()
        await router.client.delete("/workers", params={"url": decode.url})
        answer = await add(router, decode, instance="one")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "worker_removed")
        assert not await listed(router)
        decode.instance = "two"
        assert (await add(router, decode, instance="two")).status_code == 201, "another process"
        await router.until_alive()
        await router.client.delete("/workers", params={"url": decode.url})
        assert (await add(router, decode)).status_code == 201, "an administrator may"
        assert (await add(router, decode, instance="two")).status_code == 200


async def test_a_worker_takes_another_role(router: RunningRouter, four: list[MockWorker]) -> None:
    """As the router sees it: the node is gone for a moment and comes back as another process with another role."""
    turned = four[1]
    turned.info, turned.instance = {"role": "prefill"}, "one"
    await add(router, turned)
    await router.until_alive()
    turned.info, turned.instance = {"role": "decode"}, "two"
    await router.until(lambda: any(w.url == turned.url and w.alive for w in router.state.workers.decode))
    assert all(w.url != turned.url for w in router.state.workers.prefill)
    while not any(body.get("bootstrap_room") is not None for body in turned.bodies):
        assert (await router.generate()).status_code == 200
    turned.info, turned.instance = {"role": "prefill", "bootstrap_port": 7777}, "three"
    await router.until(lambda: any(w.url == turned.url and w.alive for w in router.state.workers.prefill))
    assert (await listed(router))[turned.url]["bootstrap_port"] == 7777


async def test_a_worker_that_is_unified_now_gets_no_requests(router: RunningRouter, decode: MockWorker) -> None:
    decode.info, decode.instance = {"role": "unified"}, "two"
    await router.until(lambda: not router.state.workers.has_pair())
    assert (await listed(router))[decode.url]["reason"] == "it says that it is unified, not decode"


# The state file


async def test_workers_survive_a_restart_of_the_router(tmp_path: Path, four: list[MockWorker]) -> None:
    config = empty(state_file=str(tmp_path / "workers.json"))
    async with run_router(config) as router:
        for worker in four:
            await add(router, worker, **({"instance": "i"} if worker is four[3] else {}))
        await router.client.delete("/workers", params={"url": four[1].url})
        before = await listed(router)
    async with run_router(config) as router:
        await router.until_alive()
        after = await listed(router)
        assert list(after) == [four[0].url, four[2].url, four[3].url]
        for url, worker in after.items():
            for name in ("role", "source", "bootstrap_port", "since"):
                assert worker[name] == before[url][name]
        assert (await router.generate()).status_code == 200
        four[1].instance = None
        assert (await add(router, four[1], instance="i")).status_code == 409, "still removed"


async def test_a_flag_does_not_bring_back_who_was_removed(
    tmp_path: Path, prefill: MockWorker, decode: MockWorker
) -> None:
    config = config_of([prefill], [decode], state_file=str(tmp_path / "workers.json"))
    async with run_router(config) as router:
        await router.client.delete("/workers", params={"url": decode.url})
    async with run_router(config) as router:
        assert list(await listed(router)) == [prefill.url]
        assert (await add(router, decode)).status_code == 201
    async with run_router(config) as router:
        await router.until_alive()
        assert list(await listed(router)) == [prefill.url, decode.url]


async def test_routers_that_share_the_file_share_the_workers(tmp_path: Path, four: list[MockWorker]) -> None:
    config = empty(state_file=str(tmp_path / "workers.json"))
    async with run_router(config) as one, run_router(config) as other:
        async with asyncio.TaskGroup() as adding:
            for router, worker in zip((one, other, one, other), four, strict=True):
                adding.create_task(add(router, worker))
        for router in (one, other):
            await router.until(lambda r=router: len(r.state.workers.all) == 4)
            await router.until_alive()
        four[2].script = never
        running = []
        while not four[2].bodies:
            running.append(asyncio.create_task(other.generate()))
            await asyncio.wait(running[-1:], timeout=0.05)
        await one.client.delete("/workers", params={"url": four[2].url})
        await other.until(lambda: any(w.is_leaving for w in other.state.workers.all))
        assert not running[-1].done(), "it drains there too"
        running[-1].cancel()
        await other.until(lambda: len(other.state.workers.all) == 3)
        await other.client.post("/workers", json=body_of(four[2]))
        await one.until(lambda: len(one.state.workers.all) == 4)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "it does not hold workers"),
        ("[]", "it does not hold workers"),
        ("\x00\xff", "it does not hold workers"),
        ('{"version": 7}', "version 7"),
        ('{"workers": {"http://a:1": {"role": "queen"}}}', "it does not hold workers"),
        ('{"workers": {"ftp://a": {"role": "decode"}}}', "ftp://a in it"),
        ('{"workers": {"http://a:1": {"role": "prefill"}}}', "http://a:1 in it"),
        ('{"workers": {"http://a:1": {"role": "unified"}}}', "http://a:1 in it"),
        ('{"workers": {"http://a..b:1": {"role": "decode"}}}', "http://a..b:1 in it"),
        ('{"workers": {"http://a:1": {"role": "prefill", "bootstrap_port": -5}}}', "http://a:1 in it"),
        ('{"workers": {"http://a:1": {"role": "prefill", "bootstrap_port": 65536}}}', "http://a:1 in it"),
        ('{"version":1,"workers":' + '{"a":' * 20_000 + "1" + "}" * 20_000 + "}", "it does not hold workers"),
        (json.dumps({"workers": {f"http://a:{n + 1}": {"role": "decode"} for n in range(1025)}}), "holds 1025 workers"),
    ],
    ids=range(13),
)
def test_a_broken_state_file_is_refused_at_start(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "workers.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=said) as caught:
        create_app(RouterConfig(state_file=str(path)))
    assert caught.value.param == "state_file" and f"--state-file {path}" in caught.value.message


async def test_an_empty_state_file_and_one_behind_a_link(tmp_path: Path, decode: MockWorker) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.touch()
    link.symlink_to(real)
    async with run_router(empty(state_file=str(link))) as router:
        await add(router, decode)
        kept = json.loads(real.read_bytes())
    assert link.is_symlink() and list(kept["workers"]) == [decode.url]


def test_a_state_file_that_cannot_be(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "folder"):
        with pytest.raises(ConfigError) as caught:
            create_app(RouterConfig(state_file=str(path)))
        assert caught.value.param == "state_file"


@pytest.mark.parametrize("address", [("http://a..b:1", None), ("http://a:1", 0), ("http://a:1", 70_000)])
def test_a_worker_of_a_flag_that_cannot_be(address: tuple[str, int | None]) -> None:
    url, port = address
    with pytest.raises(ConfigError) as caught:
        create_app(RouterConfig(prefill=(WorkerAddress(url=url, bootstrap_port=port or 0),)))
    assert caught.value.param == "prefill" and url in caught.value.message


DEEP = b'{"other":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
NONSENSE: dict[str, bytes] = {
    "deep": DEEP,
    "a long fingerprint": json.dumps({"fingerprint": "f" * 257}).encode(),
    "no ranks": b'{"fingerprint": "f0", "dp_size": 0}',
    "too many ranks": b'{"fingerprint": "f0", "dp_size": 4097}',
    "no port": b'{"fingerprint": "f0", "disaggregation_bootstrap_port": 70000}',
}


@pytest.mark.parametrize("name", NONSENSE)
async def test_a_worker_that_says_nonsense_of_itself_says_nothing(
    router: RunningRouter, decode: MockWorker, name: str
) -> None:
    worker = router.state.workers.decode[0]
    decode.info_body, decode.instance = NONSENSE[name], "another"
    await router.until(lambda: worker.alive and worker.instance == "another")
    assert (worker.fingerprint, worker.num_ranks) == (None, 1)
    decode.info_body, decode.instance = None, "a third"
    await router.until(lambda: worker.alive and worker.fingerprint == "f0")


@pytest.mark.parametrize("loads", [[{"num_tokens": 2**60}], [{"num_reqs": 10**300}], [{"num_tokens": "x"}]])
async def test_loads_that_make_no_sense_are_no_loads(router: RunningRouter, decode: MockWorker, loads: Any) -> None:
    decode.loads = loads
    seen = decode.checks
    await router.until(lambda: decode.checks > seen + 2)
    assert (await router.generate()).status_code == 200
    assert router.state.workers.decode[0].targets[0].load.tokens == 0


async def test_deep_answers_to_health_checks(router: RunningRouter, decode: MockWorker) -> None:
    worker = router.state.workers.decode[0]

    async def health(_: Any) -> Any:
        decode.checks += 1
        return web.Response(body=DEEP)

    decode.health = health
    seen = decode.checks
    await router.until(lambda: decode.checks > seen + 2)
    assert worker.alive and (await router.generate()).status_code == 200


async def test_a_fault_in_a_health_check_does_not_end_the_checks(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = router.state.workers.decode[0]
    with monkeypatch.context() as patch:
        patch.setattr("router.health._health", lambda _: 1 // 0)
        await router.until(lambda: not worker.alive)
        assert worker.describe()["reason"] == "its health check failed: ZeroDivisionError"
    assert "Traceback" in caplog.text and "ZeroDivisionError" in caplog.text
    await router.until(lambda: worker.alive)
    assert (await router.generate()).status_code == 200


async def test_a_fault_over_the_state_file_does_not_end_its_reading(
    tmp_path: Path, decode: MockWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "workers.json"
    async with run_router(empty(state_file=str(path))) as router:
        with monkeypatch.context() as patch:
            patch.setattr("router.membership.Membership._restore", lambda *_: 1 // 0)
            path.write_text(json.dumps({"workers": {decode.url: {"role": "decode"}}}))
            await router.until(lambda: "the state file was not taken over" in caplog.text)
        path.write_text(json.dumps({"workers": {decode.url: {"role": "decode"}}}, indent=1))
        await router.until(lambda: len(router.state.workers.all) == 1)


async def test_a_state_file_that_breaks_at_run_time_changes_nothing(
    tmp_path: Path, decode: MockWorker, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "workers.json"
    async with run_router(empty(state_file=str(path))) as router:
        await add(router, decode)
        path.write_text("{")
        await router.until(lambda: "the workers stay as they were" in caplog.text)
        assert list(await listed(router)) == [decode.url]
    assert len(caplog.messages) < 20, "said once"


def test_the_file_is_never_half_written(tmp_path: Path) -> None:
    """A reader that reads all the time sees whole files only; nothing is left beside it but the lock."""
    path = tmp_path / "workers.json"
    file, stop, seen = StateFile(str(path)), threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            if path.exists():
                seen.append(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(100):
        workers = {f"http://a:{n + 1}": Entry(role=Role.DECODE) for n in range(i % 7)}
        file.change(lambda held, workers=workers: msgspec.structs.replace(held, workers=workers))
    stop.set()
    reader.join()
    assert len(seen) > 10 and all(json.loads(data)["version"] == 1 for data in seen)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".workers.json.lock", "workers.json"]


async def test_a_file_that_cannot_be_written_any_more_stops_nobody(
    tmp_path: Path, decode: MockWorker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_router(empty(state_file=str(tmp_path / "workers.json"))) as router:

        def fail(_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", fail)
        assert (await add(router, decode)).status_code == 201
        await router.until_alive()
        assert "workers that come or go are not kept" in caplog.text and "No space left" in caplog.text
        monkeypatch.undo()
        await router.client.delete("/workers", params={"url": decode.url})
        assert not await listed(router)


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"heartbeat_timeout_s": 0.0}, "heartbeat_timeout_s"),
        ({"idle_probe_interval_s": -1.0}, "idle_probe_interval_s"),
        ({"breaker_failures": -1}, "breaker_failures"),
        ({"breaker_failure_rate": 0.0}, "breaker_failure_rate"),
        ({"breaker_failure_rate": float("nan")}, "breaker_failure_rate"),
        ({"breaker_window_s": 0.0}, "breaker_window_s"),
        ({"breaker_open_s": float("inf")}, "breaker_open_s"),
        ({"outlier_factor": 0.5}, "outlier_factor"),
        ({"outlier_window_s": -1.0}, "outlier_window_s"),
        ({"outlier_ejection_s": 0.0}, "outlier_ejection_s"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        create_app(RouterConfig(**settings))
    assert caught.value.param == param
