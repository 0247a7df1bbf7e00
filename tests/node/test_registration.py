"""A node at its routers: registered when it is ready, again and again, and gone before it refuses anything."""

from __future__ import annotations

import asyncio
import json
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest

from common.config import ModelConfig, NodeConfig, Role, ServerConfig, TransferConfig
from common.errors import ConfigError, RequestError
from node.registration import Registrar, Registration, advertised_url, check_registration, peer_name
from node.role import check_role, command_as, read_role
from tests.node.conftest import FakeNode, fake_node, node_config, wait_for
from tests.support.stack import free_port

KEY = "a-key-of-24-characters--"


class FakeRouter:
    """Remembers (method, what was said, headers) and answers `status`."""

    def __init__(self) -> None:
        self.said: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.status, self.answer = 201, {"mismatches": []}
        self.on_ask: Callable[[], None] = lambda: None

    def methods(self) -> list[str]:
        return [method for method, _, _ in self.said]


@contextmanager
def fake_router(port: int = 0) -> Iterator[tuple[FakeRouter, str]]:
    router = FakeRouter()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self._answer("POST", body)

        def do_DELETE(self) -> None:
            query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
            self._answer("DELETE", query)

        def _answer(self, method: str, what: dict[str, Any]) -> None:
            assert urlsplit(self.path).path == "/workers"
            router.on_ask()
            router.said.append((method, what, dict(self.headers)))
            data = json.dumps(router.answer).encode()
            self.send_response(router.status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield router, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def registering(config: NodeConfig, *routers: str, **settings: Any) -> NodeConfig:
    given = {"routers": routers, "heartbeat_interval_s": 0.1} | settings
    return msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, **given))


def test_a_node_registers_and_leaves(model_path: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"user somebody {KEY}1\nadmin node {KEY}2\n")
    config = node_config(model_path, Role.PREFILL)
    with fake_router() as (router, url), fake_router() as (other, other_url):
        config = registering(config, url, other_url + "/", router_api_key_file=str(keys))
        with fake_node(config, tmp_path / "log") as node:
            wait_for(lambda: len(router.said) >= 3 and len(other.said) >= 3)
            instance = node.get("/health").json()["instance"]
            method, said, headers = router.said[0]
            assert (method, headers["authorization"]) == ("POST", f"Bearer {KEY}2")
            assert said == {
                "url": node.url,
                "role": "prefill",
                "bootstrap_port": config.server.bootstrap_port,
                "instance": instance,
            }
            assert router.said[2][1] == said, "a heartbeat says the same"
            node.process.send_signal(signal.SIGTERM)
            assert node.process.wait(10) == 0
        for one in (router, other):
            assert one.methods()[-1] == "DELETE" and one.methods().count("DELETE") == 1
            assert one.said[-1][1] == {"url": node.url, "instance": instance}
        assert (tmp_path / "log").read_text().count("registering at") == 2, "news only"
        assert KEY not in (tmp_path / "log").read_text()


def test_it_serves_until_its_routers_have_heard_that_it_leaves(model_path: str, tmp_path: Path) -> None:
    """What a router still sends in this moment is not refused."""
    statuses: list[int] = []
    with fake_router() as (router, url):
        config = registering(node_config(model_path, Role.DECODE), url, heartbeat_interval_s=60.0)
        with fake_node(config, tmp_path / "log") as node:
            wait_for(lambda: len(router.said) == 1)

            def ask() -> None:
                body = {"text": "Tom", "sampling_params": {"max_new_tokens": 1}}
                statuses.append(node.post(body).status_code)

            router.on_ask = ask
            node.process.send_signal(signal.SIGTERM)
            assert node.process.wait(10) == 0
    assert router.methods() == ["POST", "DELETE"] and statuses == [200]


def test_a_router_that_comes_later_and_one_that_never_answers(model_path: str, tmp_path: Path) -> None:
    port = free_port()
    config = registering(node_config(model_path, Role.DECODE), f"http://127.0.0.1:{port}")
    with fake_node(config, tmp_path / "log") as node:
        wait_for(lambda: "cannot be reached" in (tmp_path / "log").read_text())
        with fake_router(port) as (router, _):
            wait_for(lambda: "POST" in router.methods())
            release = threading.Event()
            router.on_ask = lambda: (release.wait(20), None)[1]
            began = time.monotonic()
            node.process.send_signal(signal.SIGTERM)
            assert node.process.wait(10) == 0
            assert time.monotonic() - began < 5, "it does not wait for a router for long"
            release.set()


def test_a_refusal_is_told_once_with_its_reason(model_path: str, tmp_path: Path) -> None:
    with fake_router() as (router, url):
        router.status, router.answer = 409, {"error": {"message": "was removed by an administrator"}}
        config = registering(node_config(model_path, Role.DECODE), url)
        with fake_node(config, tmp_path / "log"):
            wait_for(lambda: len(router.said) >= 3)
        log = (tmp_path / "log").read_text()
    assert log.count("WARNING node.registration: registering at") == 1
    assert "409: was removed by an administrator" in log


def test_a_mismatch_is_told(model_path: str, tmp_path: Path) -> None:
    with fake_router() as (router, url):
        mismatch = "http://a has state layout f0, http://b has f1"
        router.answer = {"state": "dead", "reason": "no connection", "mismatches": [mismatch]}
        config = registering(node_config(model_path, Role.DECODE), url)
        with fake_node(config, tmp_path / "log"):
            wait_for(lambda: len(router.said) >= 2)
        said = f"it has taken that; but there it is dead: no connection; {mismatch}"
        assert said in (tmp_path / "log").read_text()


@pytest.mark.parametrize("answer", [b"", b"[]", b"{", b"\xff", b'{"error": []}', b'{"mismatches": 5}'])
async def test_answers_that_make_no_sense(answer: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """They end neither the loop nor the node."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(b"HTTP/1.1 500 x\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (len(answer), answer))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    found = check_registration(Role.DECODE, ServerConfig(routers=(url,), heartbeat_interval_s=0.05))
    assert found is not None
    told = Registration(url="http://n:1", role="decode", bootstrap_port=None, instance="i")
    registrar = Registrar(routers=found, registration=told)
    registrar.start()
    async with asyncio.timeout(10):
        while "500: no reason given" not in caplog.text:  # noqa: ASYNC110 - a log has no event
            await asyncio.sleep(0.02)
    assert not any(loop.done() for loop in registrar._loops)
    server.close()
    await registrar.leave()
    await registrar.leave()


# Settings


def test_what_is_advertised() -> None:
    server = ServerConfig(host="10.0.0.1", port=0)
    assert advertised_url(server, 5) == "http://10.0.0.1:5"
    assert advertised_url(msgspec.structs.replace(server, host="::1"), 5) == "http://[::1]:5"
    assert advertised_url(msgspec.structs.replace(server, ssl_certfile="c"), 5) == "https://10.0.0.1:5"
    assert advertised_url(msgspec.structs.replace(server, advertise_url="http://n:9"), 5) == "http://n:9"


@pytest.mark.parametrize(
    ("role", "settings", "param"),
    [
        (Role.DECODE, {"routers": ("ftp://a",)}, "router"),
        (Role.DECODE, {"routers": ("http://a:1", "http://user@a:1")}, "router"),
        (Role.UNIFIED, {"routers": ("http://a:1",)}, "router"),
        (Role.DECODE, {"routers": ("http://a:1",), "host": "0.0.0.0"}, "advertise_url"),
        (Role.DECODE, {"routers": ("http://a:1",), "host": "::"}, "advertise_url"),
        (Role.DECODE, {"advertise_url": "http://0.0.0.0:1"}, "advertise_url"),
        (Role.DECODE, {"advertise_url": "http://[::]:1"}, "advertise_url"),
        (Role.DECODE, {"advertise_url": "n:1"}, "advertise_url"),
        (Role.DECODE, {"heartbeat_interval_s": 0.0}, "heartbeat_interval"),
        (Role.DECODE, {"heartbeat_interval_s": float("nan")}, "heartbeat_interval"),
        (Role.DECODE, {"routers": ("http://a:1",), "router_api_key_file": "/nowhere"}, "router_api_key_file"),
        (Role.DECODE, {"routers": ("https://a:1",), "router_ca_file": "/nowhere"}, "router_ca_file"),
    ],
)
def test_settings_that_cannot_work(role: Role, settings: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_registration(role, ServerConfig(**settings))
    assert caught.value.param == param and f"--{param.replace('_', '-')}" in caught.value.message


def test_a_host_that_is_everywhere_with_an_advertised_url() -> None:
    server = ServerConfig(routers=("http://a:1", "http://a:1/"), host="0.0.0.0", advertise_url="http://n:1")
    found = check_registration(Role.PREFILL, server)
    assert found is not None and found.urls == ("http://a:1",)
    assert check_registration(Role.UNIFIED, ServerConfig()) is None


# Roles


@pytest.mark.parametrize(
    ("command", "arguments", "expected"),
    [
        (["p", "-m", "cli.main", "prefill", "--port", "1"], ["prefill", "--port", "1"], ["p", "-m", "cli.main"]),
        (["p", "/bin/tandem", "prefill"], ["prefill"], ["p", "/bin/tandem"]),
        (
            ["p", "t", "prefill", "--served-model-name", "prefill"],
            ["prefill", "--served-model-name", "prefill"],
            ["p", "t"],
        ),
    ],
)
def test_the_command_line_with_another_role(command: list[str], arguments: list[str], expected: list[str]) -> None:
    assert command_as(Role.DECODE, Role.PREFILL, command, arguments) == [*expected, "decode", *arguments[1:]]


@pytest.mark.parametrize(
    ("command", "arguments"), [(["p", "x.py", "ok"], ["ok"]), (["p"], []), (["p", "decode"], ["decode"])]
)
def test_a_node_that_the_command_line_did_not_start(command: list[str], arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="not started as `tandem prefill`"):
        command_as(Role.DECODE, Role.PREFILL, command, arguments)


@pytest.mark.parametrize(
    "body", [{}, {"role": None}, {"role": "unified"}, {"role": 5}, {"role": ["decode"]}, {"role": {}}]
)
def test_roles_that_are_none(body: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        read_role(body)
    assert caught.value.param == "role"


def test_settings_that_do_not_work_in_the_other_role(model_path: str) -> None:
    config = node_config(model_path, Role.UNIFIED)
    config = msgspec.structs.replace(config, transfer=msgspec.structs.replace(config.transfer, host="0.0.0.0"))
    with pytest.raises(RequestError) as caught:
        check_role(config, Role.DECODE)
    assert (caught.value.http_status, caught.value.param) == (409, "transfer_host")


def test_a_role_that_cannot_be_taken_changes_nothing(decode: FakeNode) -> None:
    """Nobody can start this node again, which is no child of the command line; and its bootstrap port is taken."""
    answer = decode.post({"role": "prefill"}, "/role")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (409, "role_refused", "role")
    assert "not started as `tandem decode`" in error["message"]
    assert decode.post({"role": "decode"}, "/role").json() == {"role": "decode", "changing": False}
    assert decode.get("/health").status_code == 200


def test_a_bootstrap_port_that_is_taken(model_path: str, tmp_path: Path) -> None:
    config = node_config(model_path, Role.DECODE)
    with fake_router(config.server.bootstrap_port), fake_node(config, tmp_path / "log") as node:
        answer = node.post({"role": "prefill"}, "/role")
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (409, "bootstrap_port")
        assert f"--bootstrap-port {config.server.bootstrap_port}: already in use" in error["message"]
        assert node.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("host", "transfer_host", "advertised", "name"),
    [
        ("127.0.0.1", "127.0.0.1", None, "127.0.0.1:30001/1"),
        ("10.0.0.2", "10.0.1.2", None, "10.0.0.2:30001/1"),
        ("0.0.0.0", "decode-2", None, "decode-2:30001/1"),
        ("127.0.0.1", "decode-2", None, "decode-2:30001/1"),
        ("::", "fd00::2", None, "[fd00::2]:30001/1"),
        ("0.0.0.0", "127.0.0.1", None, f"{platform.node()}:30001/1"),
        ("0.0.0.0", "decode-2", "http://10.0.0.7:31000", "10.0.0.7:31000/1"),
    ],
)
def test_a_rank_is_called_by_where_it_is(host: str, transfer_host: str, advertised: str | None, name: str) -> None:
    config = NodeConfig(
        role=Role.DECODE,
        model=ModelConfig(path="m"),
        server=ServerConfig(host=host, port=30001, advertise_url=advertised),
        transfer=TransferConfig(host=transfer_host),
    )
    assert peer_name(config, 1) == name
