"""Health, fingerprints, information, orders to all workers, and requests that the router itself refuses."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from common.config import RouterConfig, WorkerAddress
from common.errors import ConfigError
from common.json_body import MAX_DEPTH
from router.app import check_router_config, create_app, serve
from router.request import parse_generate
from tests.router.mocks import (
    MockWorker,
    RunningRouter,
    answer_at_once,
    config_of,
    event,
    never,
    run_router,
    streams,
)


async def test_health_follows_the_workers(router: RunningRouter, prefill: MockWorker, decode: MockWorker) -> None:
    assert (await router.client.get("/health")).status_code == 200
    decode.healthy = False
    await router.until(lambda: not router.state.workers.has_pair())
    answer = await router.client.get("/health")
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "no decode worker is alive")
    assert (await router.generate()).status_code == 503
    decode.healthy = True
    await router.until_alive()
    assert (await router.client.get("/health")).status_code == 200


async def test_a_router_whose_workers_do_not_exist_yet() -> None:
    config = RouterConfig(
        prefill=(WorkerAddress(url="http://127.0.0.1:1", bootstrap_port=1),),
        decode=(WorkerAddress(url="http://127.0.0.1:2"),),
    )
    async with run_router(config) as router:
        answer = await router.client.get("/health")
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "no prefill worker is alive")


async def test_round_robin_over_live_workers(four: list[MockWorker]) -> None:
    async with run_router(config_of(four[:2], four[2:])) as router:
        await router.until_alive()
        for _ in range(6):
            await router.generate()
        assert [len(worker.bodies) for worker in four] == [3, 3, 3, 3]
        four[0].healthy = False
        await router.until(lambda: not router.state.workers.prefill[0].alive)
        for _ in range(4):
            await router.generate()
        assert [len(worker.bodies) for worker in four] == [3, 7, 5, 5]


async def test_only_equal_fingerprints_are_paired(four: list[MockWorker], caplog: pytest.LogCaptureFixture) -> None:
    for worker, fingerprint in zip(four, ("aa", "bb", "bb", "cc"), strict=True):
        worker.fingerprint = fingerprint
    async with run_router(config_of(four[:2], four[2:])) as router:
        await router.until_alive()
        for _ in range(4):
            assert (await router.generate()).status_code == 200
        assert [len(worker.bodies) for worker in four] == [0, 4, 4, 0]
        mismatches = (await router.client.get("/server_info")).json()["mismatches"]
        assert f"{four[0].url} has state layout aa, {four[2].url} has bb" in mismatches
        assert any("state layout aa" in record.getMessage() for record in caplog.records)


async def test_layouts_that_differ_are_told_in_words(four: list[MockWorker]) -> None:
    for worker, (fingerprint, words) in zip(
        four, (("aa", "chunk 8"), ("bb", "chunk 64"), ("bb", None), ("cc", None)), strict=True
    ):
        worker.fingerprint, worker.state_layout = fingerprint, words
    async with run_router(config_of(four[:2], four[2:])) as router:
        await router.until_alive()
        mismatches = (await router.client.get("/server_info")).json()["mismatches"]
        assert f"{four[0].url} has state layout aa (chunk 8), {four[2].url} has bb" in mismatches


async def test_only_nodes_of_one_protocol_are_paired(four: list[MockWorker]) -> None:
    """As while the nodes are replaced by those of a newer version, one after the other."""
    for worker, handoff in zip(four, ("protocol 4", "protocol 5", "protocol 4", "protocol 5"), strict=True):
        worker.handoff = handoff
    async with run_router(config_of(four[:2], four[2:])) as router:
        await router.until_alive()
        for i in range(8):
            await router.generate(rid=f"r{i}")
        old, new = ([[body["rid"] for body in worker.bodies] for worker in four[i::2]] for i in (0, 1))
        assert old[0] == old[1] and new[0] == new[1] and len(old[0]) == len(new[0]) == 4
        mismatches = (await router.client.get("/server_info")).json()["mismatches"]
        assert f"{four[0].url} hands over by protocol 4, {four[3].url} by protocol 5" in mismatches


async def test_fingerprints_without_any_pair(router: RunningRouter, decode: MockWorker) -> None:
    """A worker that comes back as another model is noticed."""
    decode.healthy = False
    await router.until(lambda: not router.state.workers.has_pair())
    decode.fingerprint, decode.healthy = "f1", True
    await router.until_alive()
    for answer in (await router.generate(), await router.client.get("/health")):
        assert answer.status_code == 503
        message = answer.json()["error"]["message"]
        assert "f0" in message
        assert "f1" in message


async def test_server_info(router: RunningRouter, prefill: MockWorker, decode: MockWorker) -> None:
    for path in ("/server_info", "/get_server_info"):
        info = (await router.client.get(path)).json()
        assert info["workers"] == [
            {"role": "prefill", "url": prefill.url, "alive": True, "fingerprint": "f0"},
            {"role": "decode", "url": decode.url, "alive": True, "fingerprint": "f0"},
        ]
        assert info["internal_states"] == [{"rank": 0, "of": "decode"}]
        assert info["prefill"][0]["internal_states"] == [{"rank": 0, "of": "prefill"}]
        assert (info["health_interval_s"], info["mismatches"]) == (0.05, [])


async def test_model_info_comes_from_a_worker(router: RunningRouter) -> None:
    for path in ("/model_info", "/get_model_info"):
        assert (await router.client.get(path)).json() == {"model_path": "mini"}


async def test_health_generate_makes_one_token(router: RunningRouter, decode: MockWorker) -> None:
    assert (await router.client.get("/health_generate")).status_code == 200
    assert decode.bodies[0]["sampling_params"]["max_new_tokens"] == 1
    assert "bootstrap_room" in decode.bodies[0]


async def test_flush_cache_reaches_all_and_fails_with_one(
    router: RunningRouter, prefill: MockWorker, decode: MockWorker
) -> None:
    assert (await router.client.post("/flush_cache?timeout=3")).status_code == 200
    assert (await router.client.get("/flush_cache")).status_code == 200
    assert (prefill.flushes, decode.flushes) == (2, 2)
    decode.flush_status = 400
    answer = await router.client.post("/flush_cache")
    assert answer.status_code == 400
    assert decode.url in answer.json()["error"]["message"]
    assert "busy" in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "invalid_request_error"
    decode.flush_status = 500
    answer = await router.client.post("/flush_cache")
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "worker_error")
    await decode.stop()
    assert (await router.client.post("/flush_cache")).status_code == 503


async def test_abort_request_reaches_both_roles(router: RunningRouter, prefill: MockWorker, decode: MockWorker) -> None:
    for body in ({"rid": "a"}, {"abort_all": True}):
        assert (await router.client.post("/abort_request", json=body)).status_code == 200
    assert prefill.aborts == decode.aborts == [{"rid": "a"}, {"abort_all": True}]
    assert (await router.client.post("/abort_request", json={})).status_code == 400
    assert (await router.client.post("/abort_request", content=b"[")).status_code == 400


REFUSED: list[tuple[bytes, str | None]] = [
    (b"", None),
    (b"{", None),
    (b"[1]", None),
    (b'{"text": NaN}', "text"),
    (b'{"text": "a", "sampling_params": {"top_p": -Infinity}}', "sampling_params.top_p"),
    (b"\xff", None),
    (b"[" * 10000, None),
    (b'{"text": "a", "bootstrap_room": 1}', "bootstrap_room"),
    (b'{"text": "a", "resume": {"output_ids": [1]}}', "resume"),
    (b'{"text": "a", "stream": "yes"}', "stream"),
    (b'{"text": "a", "rid": 3}', "rid"),
    (b'{"text": "a", "rid": ""}', "rid"),
    (b'{"text": "a", "rid": []}', "rid"),
    (b'{"text": ["a", "b"], "rid": ["q", null]}', "rid"),
    (b'{"text": ["a", "b"], "rid": ["x", "x"]}', "rid"),
    (b'{"text": []}', "text"),
    (b'{"text": "a", "sampling_params": {"n": 0}}', "sampling_params.n"),
    (b'{"text": "a", "sampling_params": {"n": true}}', "sampling_params.n"),
    (b'{"text": "a", "sampling_params": {"n": 1e3}}', "sampling_params.n"),
    (b'{"text": "a", "sampling_params": {"n": 99999999999999999999}}', "sampling_params.n"),
    (b'{"text": ["a", "b"], "sampling_params": {"n": %s}}' % (b"9" * 4300), "sampling_params.n"),
    (b'{"text": "a", "sampling_params": {"n": %s}}' % (b"[" * 100 + b"]" * 100), "sampling_params.n"),
    (b'{"text": "a", "stream": %s}' % (b"[" * 100 + b"]" * 100), "stream"),
    (b'{"text": "a", "rid": "%s"}' % (b"r" * 257), "rid"),
    (b'{"text": "a", "rid": ["x", "y"]}', "rid"),
    (
        b'{"input_ids": [%s], "return_logprob": true, "logprob_start_len": 0, "top_logprobs_num": 1024}'
        % b",".join([b"1"] * 1025),
        "top_logprobs_num",
    ),
    (
        b'{"input_ids": [[1], [%s]], "return_logprob": [false, true], "logprob_start_len": [0, 1], '
        b'"top_logprobs_num": [0, 1024], "sampling_params": {"n": 2}}' % b",".join([b"1"] * 514),
        "top_logprobs_num",
    ),
]


async def test_what_the_router_refuses(router: RunningRouter, prefill: MockWorker, decode: MockWorker) -> None:
    for body, param in REFUSED:
        answer = await router.client.post("/generate", content=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["retryable"]) == (400, "invalid_request_error", False), body
        assert error.get("param") == param, body
        assert error["message"]
    assert prefill.bodies == decode.bodies == []


LOGPROBS: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1024}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"input_ids": [1] * 1025, "logprob_start_len": 1},
        {"input_ids": [1] * 2000, "logprob_start_len": -1},
        {"input_ids": [1] * 2000, "return_logprob": False},
        {"input_ids": [[1] * 2000, [1]], "return_logprob": [False, True]},
        {"input_ids": [[1] * 2000, [1]], "top_logprobs_num": [3]},
        {"input_ids": [1] * 2000, "top_logprobs_num": "x"},
    ],
)
def test_log_probabilities_within_reason_are_the_workers_to_judge(fields: dict[str, Any]) -> None:
    assert parse_generate(msgspec.json.encode({"input_ids": [1] * 1024} | LOGPROBS | fields))


async def test_a_field_that_is_nested_too_deep(router: RunningRouter) -> None:
    """Refused at once: whatever walks through a body needs stack for each level."""
    for depth, status in ((MAX_DEPTH - 1, 200), (MAX_DEPTH, 400), (900, 400), (5000, 400)):
        for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
            body = b'{"text": "a", "priority": %s}' % (opening * depth + b"1" + closing * depth)
            answer = await router.client.post("/generate", content=body)
            assert answer.status_code == status, depth
            if status == 400:
                assert answer.json()["error"]["code"] == "invalid_json"
    wide = await router.client.post("/generate", json={"text": "a", "priority": [[[]]] * 1000})
    assert wide.status_code == 200
    await router.until(lambda: not router.state.dispatcher.in_flight.rooms)


async def test_aborts_that_name_nothing_usable(router: RunningRouter, decode: MockWorker) -> None:
    decode.script = never
    running = asyncio.create_task(router.generate(rid="a"))
    await router.until(lambda: len(decode.bodies) == 1)
    unusable: list[Any] = [{"a": 1}, [[1]], [{}], 3, "", [], [""], ["a", None], ["a"] * 4097]
    for rid in unusable:
        answer = await router.client.post("/abort_request", json={"rid": rid})
        assert (answer.status_code, answer.json()["error"].get("param")) == (400, "rid"), str(rid)[:20]
    assert decode.aborts == []
    assert (await router.client.post("/abort_request", json={"rid": ["b"] * 4096})).status_code == 200
    running.cancel()


async def test_a_body_that_is_too_large(router: RunningRouter, decode: MockWorker) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 65536

    for content in (b" " * 2_000_000, parts()):
        answer = await router.client.post("/generate", content=content)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert decode.bodies == []


async def test_a_body_that_does_not_come_times_out(prefill: MockWorker, decode: MockWorker) -> None:
    async with run_router(config_of([prefill], [decode], upload_timeout_s=0.3)) as router:
        for path in (b"/generate", b"/abort_request"):
            answer = await say(router, b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{" % path)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b'"code":"upload_timeout"' in answer


async def test_headers_that_are_too_much(router: RunningRouter) -> None:
    for headers in (b"a: " + b"x" * 70_000, b"a: b\r\n" * 200 + b"\r\n"):
        answer = await say(router, b"GET /health HTTP/1.1\r\nhost: x\r\n" + headers)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b'"code":"headers_too_large"' in answer


async def say(router: RunningRouter, request: bytes) -> bytes:
    """What the router answers to these bytes until it closes the connection."""
    host, port = router.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    async with asyncio.timeout(5):
        answer = await reader.read()
    writer.close()
    return answer


async def test_unknown_paths_and_methods_have_our_error_shape(router: RunningRouter) -> None:
    for method, path, status in (("GET", "/generate", 405), ("POST", "/health", 405), ("GET", "/nothing", 404)):
        answer = await router.client.request(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code", "retryable"}
        assert answer.json()["error"]["code"] == {404: "not_found", 405: "method_not_allowed"}[status]


async def test_a_fault_of_the_router_has_our_error_shape(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router.state.workers, "pick", lambda: 1 / 0)
    answer = await router.generate()
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")


async def test_a_silent_worker_times_out(prefill: MockWorker, decode: MockWorker) -> None:
    decode.script = never
    async with run_router(config_of([prefill], [decode], idle_timeout_s=0.2)) as router:
        await router.until_alive()
        answer = await router.generate()
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "worker_timeout")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("which", ["prefill", "decode"])
async def test_requests_of_a_worker_that_stops_answering_are_given_up(
    prefill: MockWorker, decode: MockWorker, which: str, stream: bool
) -> None:
    bad, other = (prefill, decode) if which == "prefill" else (decode, prefill)
    liveness_s = 0.6
    async with run_router(config_of([prefill], [decode], liveness_timeout_s=liveness_s)) as router:
        await router.until_alive()
        prefill.script = never
        decode.script = streams(event({"text": "a"}), gap_s=30) if stream and which == "decode" else never
        request = asyncio.create_task(router.generate(stream=stream))
        await router.until(lambda: len(decode.bodies) == len(prefill.bodies) == 1)
        begin, bad.stopped = time.monotonic(), True
        text = (await request).text
        assert liveness_s / 2 < time.monotonic() - begin < liveness_s + 1
        assert "worker_silent" in text
        assert f"{which} worker" in text
        await router.until(lambda: other.cut_off == 1 and bool(other.aborts), limit_s=1)
        assert (await router.client.get("/health")).status_code == 503
        bad.stopped, prefill.script, decode.script = False, answer_at_once, answer_at_once
        await router.until_alive()
        assert (await router.generate()).status_code == 200


async def test_a_worker_that_missed_a_check_is_asked_again_at_once(prefill: MockWorker, decode: MockWorker) -> None:
    async with run_router(config_of([prefill], [decode], health_interval_s=60.0, liveness_timeout_s=0.4)) as router:
        await router.until_alive()
        worker = router.state.workers.decode[0]
        decode.stopped = True
        worker.check_now.set()
        await router.until(lambda: not worker.alive)


async def test_one_late_answer_to_a_check_ends_nothing(prefill: MockWorker, decode: MockWorker) -> None:
    async with run_router(config_of([prefill], [decode], liveness_timeout_s=2.0)) as router:
        await router.until_alive()
        worker = router.state.workers.decode[0]
        decode.script = never
        request = asyncio.create_task(router.generate())
        await router.until(lambda: len(decode.bodies) == 1)
        decode.checks_to_miss = 1
        await router.until(lambda: decode.checks_to_miss == 0)
        answered = decode.checks
        await router.until(lambda: decode.checks > answered + 1)
        assert worker.alive
        assert not request.done()
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)


ADDRESS = WorkerAddress(url="http://h:1", bootstrap_port=1)
OTHER_ADDRESS = WorkerAddress(url="http://h:2")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"decode": (ADDRESS,)}, "--decode http://h:1: given more than once"),
        ({"prefill": (WorkerAddress(url="http://h:1"),)}, "bootstrap port"),
        ({"decode": (WorkerAddress(url="h:1"),)}, "--decode h:1"),
        ({"decode": (WorkerAddress(url="http://h:port"),)}, "--decode http://h:port"),
        ({"health_interval_s": 0.0}, "--health-interval 0.0"),
        ({"idle_timeout_s": float("nan")}, "--idle-timeout nan"),
        ({"liveness_timeout_s": -1.0}, "--liveness-timeout -1.0"),
        ({"drain_timeout_s": -1.0}, "--drain-timeout -1.0"),
        ({"drain_timeout_s": float("inf")}, "--drain-timeout inf"),
        ({"max_retries": -1}, "--max-retries -1"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], said: str) -> None:
    good: dict[str, Any] = {"prefill": (ADDRESS,), "decode": (OTHER_ADDRESS,)}
    assert check_router_config(RouterConfig(**good))
    with pytest.raises(ConfigError, match=said.replace("[", ".")):
        create_app(RouterConfig(**good | settings))


async def test_a_port_that_is_taken(decode: MockWorker) -> None:
    with pytest.raises(ConfigError, match=f"--port {decode.port}"):
        serve(RouterConfig(port=decode.port, prefill=(ADDRESS,), decode=(OTHER_ADDRESS,)))


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "::ffff:zz"])
def test_a_host_that_is_not_this_machine(host: str) -> None:
    with pytest.raises(ConfigError, match=f"--host {host}") as caught:
        serve(RouterConfig(host=host, prefill=(ADDRESS,), decode=(OTHER_ADDRESS,)))
    assert caught.value.param == "host"


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_cannot_be(port: int) -> None:
    with pytest.raises(ConfigError, match=f"--port {port}"):
        serve(RouterConfig(port=port, prefill=(ADDRESS,), decode=(OTHER_ADDRESS,)))


def test_the_router_is_small_and_knows_no_torch() -> None:
    code = (
        "import sys, psutil, router.app\n"
        "assert 'torch' not in sys.modules\n"
        "print(psutil.Process().memory_info().rss // 1024)"
    )
    resident_kib = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert resident_kib < 120 * 1024
