"""Workers that do not take the router's key: they get nothing, and no client hears of a key that is not its own."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.router.mocks import MockWorker, RunningRouter, config_of, never, run_router

KEY = "worker-0123456789abcdef"
WHY = "/server_info answered 401: --worker-api-key-file is missing or its key is unknown there"


async def test_a_worker_that_wants_a_key_is_not_alive(
    prefill: MockWorker, decode: MockWorker, caplog: pytest.LogCaptureFixture
) -> None:
    prefill.key = decode.key = KEY
    with caplog.at_level(logging.INFO, "tandem.router"):
        async with run_router(config_of([prefill], [decode])) as router:
            workers = router.state.workers.all
            await router.until(lambda: all(worker.reason == WHY for worker in workers))
            checks = decode.checks
            await router.until(lambda: decode.checks > checks + 3)
            assert [worker.state for worker in workers] == ["dead", "dead"]
            assert (await router.client.get("/health")).status_code == 503
            for path in ("/generate", "/v1/completions", "/tokenize"):
                answer = await router.client.post(path, json={"text": "hi"})
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_unavailable")
    told = [record for record in caplog.records if WHY in record.message]
    assert len(told) == 2 and {record.levelname for record in told} == {"WARNING"}, "said once of each"


async def test_a_key_that_is_not_an_administrators_is_told_apart(prefill: MockWorker, decode: MockWorker) -> None:
    decode.key, decode.key_status = KEY, 403
    async with run_router(config_of([prefill], [decode])) as router:
        worker = router.state.workers.decode[0]
        why = "/server_info answered 403: the key of --worker-api-key-file may not ask this there"
        await router.until(lambda: worker.reason == why and worker.state == "dead")


async def test_with_its_key_it_serves(prefill: MockWorker, decode: MockWorker, tmp_path: Path) -> None:
    prefill.key = decode.key = KEY
    key_file = tmp_path / "key"
    key_file.write_text(f"admin router {KEY}\n")
    async with run_router(config_of([prefill], [decode], worker_api_key_file=str(key_file))) as router:
        await router.until_alive()
        assert (await router.generate()).status_code == 200


async def test_a_leg_that_is_refused_goes_elsewhere(prefill: MockWorker, decode: MockWorker) -> None:
    second = MockWorker("decode")
    await second.start()
    try:
        async with run_router(config_of([prefill], [decode, second], policy="round_robin")) as router:
            await router.until_alive()
            decode.key = KEY
            answers = [await router.generate() for _ in range(3)]
            assert [answer.status_code for answer in answers] == [200, 200, 200]
            strict = next(worker for worker in router.state.workers.decode if worker.url == decode.url)
            await router.until(lambda: strict.state == "dead" and strict.reason == WHY)
            assert strict.breaker.describe() == {"state": "closed", "failures_in_a_row": 0}
            decode.key = None
            await router.until(lambda: strict.state == "alive")
    finally:
        await second.stop()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_refused_key_is_no_401_for_the_client(
    router: RunningRouter, prefill: MockWorker, decode: MockWorker, role: str
) -> None:
    (prefill if role == "prefill" else decode).key = KEY
    decode.script = never
    answer = await router.generate()
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "worker_refused_key")
    assert "www-authenticate" not in answer.headers
    assert (await router.generate()).status_code == 503


async def test_an_order_that_is_refused_is_no_401_either(router: RunningRouter, decode: MockWorker) -> None:
    decode.key = KEY
    answer = await router.client.post("/flush_cache")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_unavailable")
    assert "--worker-api-key-file" in answer.json()["error"]["message"]
