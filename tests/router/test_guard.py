"""Who may ask the router what: keys and roles, what a user may end, rates, deadlines, bodies that are not taken."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from starlette.routing import Route

from common.config import RouterConfig, WorkerAddress
from common.errors import ConfigError
from common.keys import KeyRing, KeyRole, admin_key, make_key
from router.app import create_app
from router.guard import Access, access_of
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

ANN, BOB, ROOT = "ann-0123456789abcdef", "bob-0123456789abcdef", "root-0123456789abcdef"
KEYS = f"# who may ask\nuser ann {ANN}\nuser bob {BOB}\n\nadmin root {ROOT}\n"


WORKERS: dict[str, Any] = {
    "prefill": (WorkerAddress(url="http://127.0.0.1:1", bootstrap_port=1),),
    "decode": (WorkerAddress(url="http://127.0.0.1:2"),),
}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text(KEYS)
    return str(path)


@pytest.fixture
async def keyed(prefill: MockWorker, decode: MockWorker, key_file: str) -> AsyncIterator[RunningRouter]:
    async with run_router(config_of([prefill], [decode], api_key_file=key_file)) as running:
        await running.until_alive()
        yield running


async def ask(router: RunningRouter, key: str | None, path: str = "/generate", **headers: str) -> httpx.Response:
    headers |= bearer(key) if key else {}
    if path in ("/generate", "/abort_request"):
        return await router.client.post(path, json={"text": "hi", "rid": "r"}, headers=headers)
    return await router.client.get(path, headers=headers)


def test_what_is_not_listed_is_for_administrators() -> None:
    assert {access_of(path) for path in ("/workers", "/workers/3", "/role", "/flush_cache", "/new")} == {Access.CONTROL}
    assert {access_of(path) for path in ("/generate", "/v1/models", "/v1/chat/completions")} == {Access.USER}
    assert {access_of(path) for path in ("/generate/", "//generate", "/Generate", "/v1")} == {Access.CONTROL}


def test_the_documentation_tells_the_same() -> None:
    """And of every path that the router has."""
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    rows = dict(re.findall(r"^\| (open|use|page|reading|control) \| (.*?) \|", text, re.MULTILINE))
    names = {"open": Access.OPEN, "use": Access.USER, "page": Access.PAGE, "reading": Access.READ}
    documented = {path: access for name, access in names.items() for path in re.findall(r"`(/.*?)`", rows[name])}
    routes = [route.path for route in create_app(RouterConfig(**WORKERS)).routes if isinstance(route, Route)]
    for path in routes:
        shown = next((p for p in ("/v1/…", "/page/…") if path.startswith(p[:-1])), path)
        assert access_of(path) is documented.get(shown, Access.CONTROL), path
    for path in documented:
        assert any(route.startswith(path.removesuffix("…")) for route in routes), path


NO_KEYS = [
    {},
    {"authorization": ROOT},
    {"authorization": f"Basic {ROOT}"},
    {"authorization": "Bearer"},
    {"x-api-key": ROOT},
    bearer(ROOT[:-1]),
    bearer(ROOT + "x"),
    bearer(ROOT.upper()),
]


ASKED = [
    *(("POST", path) for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/tokenize")),
    *(("POST", path) for path in ("/abort_request", "/flush_cache", "/workers", "/nothing")),
    *(("GET", path) for path in ("/v1/models", "/health_generate", "/model_info", "/generate")),
    *(("GET", path) for path in ("/server_info", "/metrics", "/status.json", "/debug/requests", "/workers")),
    ("DELETE", "/workers"),
]


async def test_without_a_right_key_there_is_nothing_but_health(keyed: RunningRouter) -> None:
    for headers in NO_KEYS:
        for method, path in ASKED:
            answer = await keyed.client.request(method, path, headers=headers)
            error = answer.json()["error"]
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), path
            assert error["type"] == "access_error" and error["code"] in ("no_api_key", "invalid_api_key")
            assert ROOT[:8] not in answer.text.lower()
        for path in ("/health", "/", "/page/app.js"):
            assert (await keyed.client.get(path, headers=headers)).status_code == 200


async def test_two_keys_in_one_request_are_no_key(keyed: RunningRouter) -> None:
    both = [("authorization", f"Bearer {ROOT}"), ("authorization", f"Bearer {ANN}")]
    assert (await keyed.client.get("/server_info", headers=both)).status_code == 401


async def test_a_user_key_serves_and_does_not_administer(keyed: RunningRouter, decode: MockWorker) -> None:
    assert (await ask(keyed, ANN)).status_code == 200
    assert (await ask(keyed, ANN, "/model_info")).status_code == 200
    assert (await keyed.client.get("/model_info", headers={"authorization": f"bEaReR  {ANN}"})).status_code == 200
    for path in ("/server_info", "/flush_cache", "/workers", "/metrics", "/debug/requests"):
        answer = await ask(keyed, ANN, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden"), path
        assert "www-authenticate" not in answer.headers
    assert decode.flushes == 0
    assert (await ask(keyed, ROOT, "/flush_cache")).status_code == 200
    assert decode.flushes == 1


async def test_no_key_is_shown_or_passed_on(keyed: RunningRouter, prefill: MockWorker, decode: MockWorker) -> None:
    seen: list[dict[str, str]] = []

    async def script(worker: MockWorker, request: Any, body: dict[str, Any]) -> Any:
        seen.append({name.lower(): value for name, value in request.headers.items()})
        return await answer_at_once(worker, request, body)

    prefill.script = decode.script = script
    assert (await ask(keyed, ANN)).status_code == 200
    assert len(seen) == 2 and not any("authorization" in headers for headers in seen)
    info = (await ask(keyed, ROOT, "/server_info")).text
    assert "api_key_file" in info and not any(key in info for key in (ANN, BOB, ROOT))


async def test_a_refused_body_is_not_read(keyed: RunningRouter) -> None:
    """The answer comes although the body never does."""
    host, port = keyed.client.base_url.host, keyed.client.base_url.port
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n{")
    async with asyncio.timeout(5):
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
    writer.close()
    await writer.wait_closed()


# What a user may end


@pytest.mark.parametrize(("key", "status", "ends"), [(ANN, 200, True), (BOB, 200, False), (ROOT, 200, True)])
async def test_a_user_ends_only_its_own_requests(
    keyed: RunningRouter, decode: MockWorker, key: str, status: int, ends: bool
) -> None:
    decode.script = never
    asked = asyncio.create_task(ask(keyed, ANN))
    await keyed.until(lambda: len(decode.bodies) == 1)
    assert (await ask(keyed, key, "/abort_request")).status_code == status
    assert [abort["rid"] for abort in decode.aborts] == ([["r"] if key == ANN else "r"] if ends else [])
    asked.cancel()


async def test_a_user_cannot_end_everything(keyed: RunningRouter, decode: MockWorker) -> None:
    for body in ({"abort_all": True}, {"abort_all": True, "rid": "r"}):
        answer = await keyed.client.post("/abort_request", json=body, headers=bearer(ANN))
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
    assert decode.aborts == []
    answer = await keyed.client.post("/abort_request", json={"abort_all": True}, headers=bearer(ROOT))
    assert (answer.status_code, decode.aborts) == (200, [{"abort_all": True}])


# Without keys


async def test_without_keys_others_may_not_administer(
    prefill: MockWorker, decode: MockWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_router(config_of([prefill], [decode], host="0.0.0.0")) as router:
        await router.until_alive()
        assert (await ask(router, None, "/flush_cache")).status_code == 200  # from this machine
        monkeypatch.setattr("router.guard.is_loopback", lambda host: False)
        answer = await ask(router, None, "/flush_cache")
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
        answer = await router.client.post("/abort_request", json={"abort_all": True})
        assert answer.status_code == 403
        assert (await ask(router, None)).status_code == 200
        assert (await ask(router, None, "/server_info")).status_code == 200
        assert decode.flushes == 1


@pytest.mark.parametrize("header", [{"origin": "http://a.example"}, {"sec-fetch-site": "cross-site"}])
async def test_a_web_page_does_not_administer(
    router: RunningRouter, decode: MockWorker, header: dict[str, str]
) -> None:
    """Of somebody who has it open on this machine: it could add a worker of its own, which gets the prompts."""
    for method, path in (("GET", "/flush_cache"), ("POST", "/flush_cache"), ("POST", "/workers")):
        answer = await router.client.request(method, path, headers=header)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
    answer = await router.client.post("/abort_request", json={"abort_all": True}, headers=header)
    assert answer.status_code == 403 and decode.aborts == [] and decode.flushes == 0
    assert (await router.client.get("/flush_cache", headers={"sec-fetch-site": "none"})).status_code == 200


async def test_a_proxy_on_this_machine_does_not_make_others_local(prefill: MockWorker, decode: MockWorker) -> None:
    async with run_router(config_of([prefill], [decode], host="0.0.0.0")) as router:
        await router.until_alive()
        answer = await router.client.get("/flush_cache", headers={"x-forwarded-for": "203.0.113.7"})
        assert answer.status_code == 403


# Rates


async def test_a_key_that_asks_too_often_is_told_when_to_come_back(
    prefill: MockWorker, decode: MockWorker, key_file: str
) -> None:
    config = config_of([prefill], [decode], api_key_file=key_file, requests_per_minute=2)
    async with run_router(config) as router:
        await router.until_alive()
        assert [(await ask(router, ANN)).status_code for _ in range(3)] == [200, 200, 429]
        refused = await ask(router, ANN)
        assert refused.json()["error"]["code"] == "rate_limited" and refused.json()["error"]["retryable"]
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert (await ask(router, ANN, "/abort_request")).status_code == 200
        assert (await ask(router, BOB)).status_code == 200
        assert [(await ask(router, ROOT)).status_code for _ in range(4)] == [200] * 4
        assert router.state.dispatcher.admission.rejected == {"rate_limited": 2}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_key_pays_for_its_tokens_afterwards(
    prefill: MockWorker, decode: MockWorker, key_file: str, *, stream: bool
) -> None:
    timing = {"queue_s": 0, "prefill_s": 0, "transfer_s": 0, "decode_s": 0}
    said = answer_object("x", prompt_tokens=90, completion_tokens=20, timing=timing)
    whole = event(said) + b"data: [DONE]\n\n"

    async def answer(worker: MockWorker, request: Any, body: dict[str, Any]) -> Any:
        return web.json_response(said)

    prefill.script = answer
    decode.script = streams(whole) if stream else answer
    config = config_of([prefill], [decode], api_key_file=key_file, tokens_per_minute=100)
    async with run_router(config) as router:
        await router.until_alive()
        body = {"text": "hi", "stream": stream}
        asked = [await router.client.post("/generate", json=body, headers=bearer(ANN)) for _ in range(2)]
        assert [answer.status_code for answer in asked] == [200, 429]
        assert asked[1].json()["error"]["message"] == "too many tokens a minute with this key"
        assert 5 <= int(asked[1].headers["retry-after"]) <= 7  # 10 are owed and one is needed, at 100 a minute
        assert (await router.client.post("/generate", json=body, headers=bearer(BOB))).status_code == 200


# Deadlines


async def test_a_request_that_is_late_ends_everywhere(
    router: RunningRouter, prefill: MockWorker, decode: MockWorker
) -> None:
    prefill.script = decode.script = never
    begin = time.monotonic()
    answer = await ask(router, None, "/generate", **{"x-request-timeout-s": "0.2"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert not answer.json()["error"]["retryable"]
    assert 0.2 <= time.monotonic() - begin < 3
    await router.until(lambda: len(prefill.aborts) == len(decode.aborts) == 1)
    await router.until(lambda: prefill.cut_off == decode.cut_off == 1)
    await router.until(lambda: router.state.dispatcher.num_running == 0)


async def test_a_stream_that_is_late_ends_with_an_error_event(router: RunningRouter, decode: MockWorker) -> None:
    async def script(worker: MockWorker, request: Any, body: dict[str, Any]) -> Any:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(event({"text": "a", "meta_info": {"id": "r", "finish_reason": None}}))
        return await never()

    decode.script = script
    headers = {"x-request-timeout-s": "0.3"}
    answer = await router.client.post("/generate", json={"text": "hi", "stream": True}, headers=headers)
    events = answer.text.split("\n\n")
    assert answer.status_code == 200 and len(events) == 4
    assert '"a"' in events[0] and '"deadline_exceeded"' in events[1] and events[2] == "data: [DONE]"
    await router.until(lambda: len(decode.aborts) == 1)


NO_TIMES = ["0", "-1", "1e3", "nan", "inf", "soon", "", "1" * 40]


async def test_a_time_that_is_none_is_refused(router: RunningRouter) -> None:
    for value in NO_TIMES:
        answer = await ask(router, None, "/generate", **{"x-request-timeout-s": value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-timeout-s")


async def test_a_client_may_ask_for_less_time_not_for_more(prefill: MockWorker, decode: MockWorker) -> None:
    decode.script = never
    async with run_router(config_of([prefill], [decode], request_timeout_s=0.2)) as router:
        await router.until_alive()
        for asked in ({}, {"x-request-timeout-s": "60"}):
            async with asyncio.timeout(3):
                assert (await ask(router, None, "/generate", **asked)).status_code == 504


async def test_a_worker_that_has_no_room_is_quoted(router: RunningRouter, decode: MockWorker) -> None:
    body = b'{"error": {"message": "queue is full", "code": "queue_full"}}'
    decode.script = fails(429, body)
    answer = await ask(router, None)
    assert (answer.status_code, answer.content) == (429, body)


# Bodies


ENCODINGS = ["gzip", "br", "deflate", "x-gzip, identity", "zstd"]


async def test_a_compressed_body_is_refused(router: RunningRouter) -> None:
    for encoding in ENCODINGS:
        for path in ("/generate", "/abort_request"):
            answer = await router.client.post(path, content=b"\x1f\x8b", headers={"content-encoding": encoding})
            assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_encoding")
        answer = await router.client.post("/generate", json={"text": "x"}, headers={"content-encoding": "identity"})
        assert answer.status_code == 200


async def raw(router: RunningRouter, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(router.client.base_url.host, router.client.base_url.port)
    writer.write(request)
    async with asyncio.timeout(5):
        answer = await reader.read()
    writer.close()
    return answer


CONTRADICTIONS = [
    b"content-length: 4\r\ntransfer-encoding: chunked\r\n",
    b"transfer-encoding: chunked\r\ncontent-length: 4\r\n",
    b"content-length: 4\r\ncontent-length: 5\r\n",
    b"content-length: -4\r\n",
    b"content-length: 4x\r\n",
    b"content-length: 99999999999999999999999\r\n",
]


async def test_lengths_that_contradict_are_no_request(router: RunningRouter, decode: MockWorker) -> None:
    for head in CONTRADICTIONS:
        answer = await raw(router, b"POST /generate HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n{}\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400 ") and decode.bodies == []


async def test_chunks_are_counted(router: RunningRouter, decode: MockWorker) -> None:
    """1 MiB is allowed here (conftest)."""
    chunk = b"40000\r\n" + b"x" * (1 << 18) + b"\r\n"
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    reader, writer = await asyncio.open_connection(router.client.base_url.host, router.client.base_url.port)
    writer.write(head + chunk * 5)
    async with asyncio.timeout(5):
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
    writer.close()
    assert decode.bodies == []


# Key files


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no key in it"),
        ("# nothing\n", "no key in it"),
        (f"user {ANN}\n", "line 1: 2 words"),
        (f"user ann {ANN} more\n", "line 1: 4 words"),
        (f"\nroot ann {ANN}\n", "line 2: the role must be user or admin"),
        (f"user a/b {ANN}\n", "line 1: a name"),
        ("user ann secret\n", "line 1: a key has 16"),
        (f"user ann {ANN}\nuser ann {BOB}\n", "twice"),
        (f"user ann {ANN}\nadmin bob {ANN}\n", "twice"),
        (f"user ann {ANN}é\n", "more than ASCII"),
    ],
)
def test_key_files_that_cannot_be_used(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--api-key-file") as error:
        KeyRing(str(path))
    assert words in error.value.message and "0123456789" not in error.value.message
    assert error.value.param == "api_key_file"


def test_keys_given_by_themselves() -> None:
    ring = KeyRing(None, [make_key(KeyRole.ADMIN, ROOT, "--admin-api-key")])
    assert ring.caller([(b"authorization", f"Bearer {ROOT}".encode())]).role is KeyRole.ADMIN
    with pytest.raises(ConfigError, match="--api-key: a key has 16"):
        make_key(KeyRole.USER, "short", "--api-key")
    assert ROOT not in repr(make_key(KeyRole.ADMIN, ROOT, "--admin-api-key"))


def test_keys_are_read_again(key_file: str, caplog: pytest.LogCaptureFixture) -> None:
    ring = KeyRing(key_file)
    new = "new-0123456789abcdef"
    Path(key_file).write_text(f"user new {new}\n")
    ring.reload()
    assert ring.caller([(b"authorization", f"Bearer {new}".encode())]).name == "new"
    Path(key_file).write_text("nonsense\n")
    ring.reload()
    assert ring.caller([(b"authorization", f"Bearer {new}".encode())]).name == "new"
    assert "the keys stay as they were" in caplog.text and new not in caplog.text


def test_a_key_for_the_workers_must_be_an_admins(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"user ann {ANN}\n")
    with pytest.raises(ConfigError, match=r"--worker-api-key-file .*: no admin key in it"):
        admin_key(str(path), "--worker-api-key-file")


async def test_the_router_shows_its_workers_a_key(prefill: MockWorker, decode: MockWorker, key_file: str) -> None:
    seen: set[str | None] = set()

    async def script(worker: MockWorker, request: Any, body: dict[str, Any]) -> Any:
        seen.add(request.headers.get("authorization"))
        return await answer_at_once(worker, request, body)

    prefill.script = decode.script = script
    async with run_router(config_of([prefill], [decode], worker_api_key_file=key_file)) as router:
        await router.until_alive()
        answer = await ask(router, None, "/generate", authorization="Bearer of-the-client-himself")
        assert answer.status_code == 200
    assert seen == {f"Bearer {ROOT}"}


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"requests_per_minute": 3}, "requests_per_minute"),
        ({"tokens_per_minute": 3}, "tokens_per_minute"),
        ({"max_concurrent_requests": 0}, "max_concurrent_requests"),
        ({"queue_size": -1}, "queue_size"),
        ({"queue_timeout_s": 0}, "queue_timeout_s"),
        ({"request_timeout_s": float("inf")}, "request_timeout_s"),
        ({"admin_port": 70000}, "admin_port"),
        ({"admin_port": 30000}, "admin_port"),
        ({"api_key_file": "/nowhere"}, "api_key_file"),
        ({"worker_api_key_file": "/nowhere"}, "worker_api_key_file"),
        ({"worker_ca_file": "/nowhere"}, "worker_ca_file"),
        ({"ssl_certfile": "/nowhere"}, "ssl_certfile"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as error:
        create_app(RouterConfig(**WORKERS, **settings))
    assert error.value.param == param


# What never comes, and who never reads


async def test_a_request_that_does_not_come_is_not_waited_for(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.http_server.HEAD_TIMEOUT_S", 0.2)
    whole = b"GET /model_info HTTP/1.1\r\nhost: x\r\n\r\n"
    for begin in (b"", b"GET /health", whole + b"GET /health HTTP/1.1\r\nhost"):
        reader, writer = await asyncio.open_connection(router.client.base_url.host, router.client.base_url.port)
        writer.write(begin)
        async with asyncio.timeout(5):
            answer = await reader.read()
        assert answer.count(b"HTTP/1.1 200") == begin.count(whole)
        writer.close()
    reader, writer = await asyncio.open_connection(router.client.base_url.host, router.client.base_url.port)
    for _ in range(3):  # a client that has asked may be idle for longer
        writer.write(whole)
        async with asyncio.timeout(5):
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(0.3)
    writer.close()


async def test_a_next_request_that_does_not_come_does_not_end_the_answer_before_it(
    router: RunningRouter, decode: MockWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.http_server.HEAD_TIMEOUT_S", 0.1)

    async def slow(worker: MockWorker, request: Any, body: dict[str, Any]) -> Any:
        await asyncio.sleep(0.5)
        return await answer_at_once(worker, request, body)

    decode.script = slow
    reader, writer = await asyncio.open_connection(router.client.base_url.host, router.client.base_url.port)
    body = b'{"text": "x"}'
    writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%sGET /he" % (len(body), body))
    async with asyncio.timeout(5):
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200") and b"from decode" in answer
    writer.close()


async def test_a_client_that_does_not_read_holds_no_place_beyond_its_deadline(
    prefill: MockWorker, decode: MockWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.dispatch._TELL_S", 0.2)
    decode.script = streams(*[event({"text": "x" * 200_000})] * 200, gap_s=0)
    config = config_of([prefill], [decode], max_concurrent_requests=1, request_timeout_s=0.5)
    async with run_router(config) as router:
        await router.until_alive()
        _, writer = await asyncio.open_connection(router.client.base_url.host, router.client.base_url.port, limit=1)
        body = b'{"text": "x", "stream": true}'
        writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        admission = router.state.dispatcher.admission
        await router.until(lambda: admission.num_running == 1)
        await router.until(lambda: admission.num_running == 0, limit_s=10)
        decode.script = answer_at_once
        assert (await router.generate()).status_code == 200
        writer.transport.abort()
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("fails_first", [False, True])
async def test_a_client_that_never_reads_does_not_hold_its_place_for_ever(
    prefill: MockWorker, decode: MockWorker, monkeypatch: pytest.MonkeyPatch, fails_first: bool
) -> None:
    """fails_first: what waits for the client is the error event."""
    monkeypatch.setattr("router.dispatch._TELL_S", 0.2)
    error = {"error": {"message": "m", "type": "capacity_error", "code": "full"}}
    big = [event({"text": "x" * 30_000_000}), event(error)] if fails_first else [event({"text": "x" * 200_000})] * 200
    decode.script = streams(*big, gap_s=0)
    records: list[Any] = []
    monkeypatch.setattr("router.dispatch.request_log", lambda _: records.append)
    async with run_router(config_of([prefill], [decode], max_concurrent_requests=1, idle_timeout_s=0.5)) as router:
        await router.until_alive()
        _, writer = await asyncio.open_connection(router.client.base_url.host, router.client.base_url.port, limit=1)
        body = b'{"text": "x", "stream": true}'
        writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        admission = router.state.dispatcher.admission
        await router.until(lambda: admission.num_running == 1)
        await router.until(lambda: admission.num_running == 0, limit_s=10)
        assert records[0].code == ("full" if fails_first else "client_stalled")
        assert router.state.workers.decode[0].breaker.describe()["failures_in_a_row"] == 0
        decode.script = answer_at_once
        assert (await router.generate()).status_code == 200
        writer.transport.abort()


async def test_a_client_that_reads_slowly_gets_its_answer(prefill: MockWorker, decode: MockWorker) -> None:
    """The whole takes longer than the time for one write."""
    decode.script = streams(*[event(answer_object("x" * 400_000))] * 40, event(b"[DONE]"), gap_s=0)
    async with run_router(config_of([prefill], [decode], idle_timeout_s=1.0)) as router:
        await router.until_alive()
        begin, size = time.monotonic(), 0
        async with router.client.stream("POST", "/generate", json={"text": "x", "stream": True}) as answer:
            async for chunk in answer.aiter_raw(1 << 20):
                size += len(chunk)
                await asyncio.sleep(0.1)
        assert size > 16_000_000 and time.monotonic() - begin > 1.0


async def test_the_deadline_holds_between_two_tries(prefill: MockWorker, decode: MockWorker) -> None:
    """Whose wait for the end of the first one, at a worker that does not confirm the abort, is the longest there is."""
    spare = MockWorker("decode")
    await spare.start()
    try:
        prefill.script, prefill.abort_delay_s = never, 1.5
        decode.script = spare.script = fails(503, b'{"error": {"message": "m", "code": "draining", "retryable": true}}')
        async with run_router(config_of([prefill], [decode, spare])) as router:
            await router.until_alive()
            begin = time.monotonic()
            answer = await ask(router, None, "/generate", **{"x-request-timeout-s": "0.3"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
            assert time.monotonic() - begin < 1.2
    finally:
        await spare.stop()


WRONG_PATHS = [
    "/v1/models/../abort_request",
    "/v1/models/%2e%2e/flush_cache",
    "/v1/models/a/./b",
    "/v1/models/a%0d%0ax:%201",
    "/v1/models/..%2f..",
]


async def test_no_path_leads_the_routers_key_elsewhere(router: RunningRouter) -> None:
    """What is passed on goes with the router's own key."""
    for path in WRONG_PATHS:
        answer = await raw(router, b"GET %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % path.encode())
        assert answer.startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 403 "))


NAMES = ["%E2%82%AC", "a%20b", "a%3Fb%23c", "%00", "a%25b"]


async def test_a_name_is_passed_on_as_one(router: RunningRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    real = router.state.network.send

    async def send(method: str, url: str, *arguments: Any, **named: Any) -> Any:
        if "/v1/" in url:
            sent.append(url)
        return await real(method, url, *arguments, **named)

    monkeypatch.setattr(router.state.network, "send", send)
    head = b"GET /v1/models/%s HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    for name in NAMES:
        assert (await raw(router, head % name.encode())).startswith(b"HTTP/1.1 40")
    assert [url.rpartition("/")[2].lower() for url in sent] == [name.lower() for name in NAMES]
