"""What the status page gets: of requests, of workers, and of nodes that tell little, nonsense or nothing."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from aiohttp import web

from router.node_states import summary
from tests.router.mocks import MockWorker, RunningRouter


async def status(router: RunningRouter, query: str = "") -> dict[str, Any]:
    answer = await router.client.get(f"/status.json{query}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def worker_of(found: dict[str, Any], worker: MockWorker) -> dict[str, Any]:
    (entry,) = [entry for entry in found["workers"] if entry["url"] == worker.url]
    return dict(entry)


def test_a_nodes_numbers_are_sums_over_its_ranks() -> None:
    rank = {"slots_free": 3, "num_running": 1, "cache": {"hits": 2, "misses": 1}, "transfer": {"quarantined": 1}}
    found = summary({"served_model_name": "m" * 500, "internal_states": [rank, rank, {"error": {"code": "rank_died"}}]})
    assert (found["slots_free"], found["num_running"], found["quarantined"], found["ranks"]) == (6, 2, 2, 2)
    assert found["cache"]["hits"] == 4 and found["cache"]["hit_tokens"] is None
    assert found["pages_free"] is None and len(found["model"]) == 100


@pytest.mark.parametrize(
    "info",
    [{}, {"internal_states": 5}, {"internal_states": [1, None, {"slots_free": "many", "cache": [], "transfer": 1}]}],
)
def test_a_foreign_node_tells_nothing_of_use(info: dict[str, Any]) -> None:
    found = summary(info)
    assert found["slots_free"] is None and found["cache"] is None and found["model"] is None


@pytest.mark.parametrize("body", [b"{", b"[]", b"5", b"[" * 100_000, b"\xff", b'{"internal_states": 5}'])
async def test_nonsense_of_a_node_is_shown_as_nothing(router: RunningRouter, decode: MockWorker, body: bytes) -> None:
    decode.info_body = body
    entry = worker_of(await status(router), decode)
    assert entry["state"] == "alive" and (entry["node"] is None or entry["node"]["slots_free"] is None)


async def test_many_who_look_are_one_who_asks(router: RunningRouter, decode: MockWorker) -> None:
    before = decode.infos
    found = await asyncio.gather(*(status(router) for _ in range(20)))
    assert decode.infos == before + 1
    assert all(worker_of(each, decode)["node"] is not None for each in found)


async def test_a_node_that_is_silent_holds_up_nobody(
    router: RunningRouter, prefill: MockWorker, decode: MockWorker
) -> None:
    await status(router)
    decode.info_delay_s = 30
    await asyncio.sleep(1)
    start = time.monotonic()
    found = await status(router)
    assert time.monotonic() - start < 1.5
    assert worker_of(found, decode)["node_age_s"] >= 1 > worker_of(found, prefill)["node_age_s"]


@pytest.mark.parametrize(("shown", "expected"), [("all", {"good", "bad"}), ("failed", {"bad"}), ("running", set())])
async def test_which_requests_are_shown(
    router: RunningRouter, prefill: MockWorker, decode: MockWorker, shown: str, expected: set[str]
) -> None:
    await router.generate(rid="good")

    async def refuses(_: MockWorker, __: web.Request, ___: dict[str, Any]) -> web.Response:
        return web.json_response({"error": {"code": "too_many_tokens"}}, status=400)

    decode.script = prefill.script = refuses
    await router.generate(rid="bad", text="SECRET")
    found = await status(router, f"?requests={shown}")
    assert {entry["id"] for entry in found["requests"]} == expected
    assert found["totals"]["ended"] == {"ok": 1, "too_many_tokens": 1} and "SECRET" not in str(found)


async def test_another_choice_of_requests_is_refused_by_name(router: RunningRouter) -> None:
    answer = await router.client.get("/status.json?requests=mine")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "requests"


async def test_the_page_may_load_nothing_from_elsewhere(router: RunningRouter) -> None:
    page = await router.client.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    rules = dict(rule.split(" ", 1) for rule in page.headers["content-security-policy"].split("; "))
    assert rules["default-src"] == "'none'" and set(rules.values()) == {"'none'", "'self'"}
    assert page.headers["x-content-type-options"] == "nosniff" and "set-cookie" not in page.headers
    for path in ("app.js", "waterfall.js", "style.css", "icon.svg"):
        assert f"page/{path}" in page.text or path == "waterfall.js"
        found = await router.client.get(f"/page/{path}")
        assert found.status_code == 200 and "http:" not in found.text.replace("http://www.w3.org/", "")
    assert (await router.client.get("/page/../app.py")).status_code == 404


async def test_a_health_check_is_no_request_to_generate(router: RunningRouter) -> None:
    assert (await router.client.get("/health_generate")).status_code == 200
    (entry,) = (await status(router))["requests"]
    assert entry["endpoint"] == "/health_generate"
