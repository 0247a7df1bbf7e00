"""Keys by file, option and environment at a real router; the file is read again on SIGHUP."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from cli.children import ChildPlan, Children
from cli.generate import Options, run
from cli.main import main
from common.errors import ServingError
from tests.support.stack import Server, free_port, running

OLD, NEW, USER, ADMIN = (f"{name}-0123456789abcdef" for name in ("old", "new", "user", "admin"))


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """A router takes them over, here in the process of the tests."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"user ann {OLD}\n")
    return path


@pytest.fixture
def router(tmp_path: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Its workers do not exist."""
    monkeypatch.setenv("TANDEM_API_KEY", USER)
    monkeypatch.setenv("TANDEM_ADMIN_API_KEY", ADMIN)
    port = free_port()
    options = ["router", "--port", str(port), "--api-key-file", str(key_file)]
    options += ["--prefill", "http://127.0.0.1:1", "1", "--decode", "http://127.0.0.1:2"]
    with running("router", options, f"http://127.0.0.1:{port}", tmp_path) as server:
        until(lambda: answers(server))
        yield server


def answers(server: Server) -> bool:
    assert server.process.poll() is None, server.text()
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{server.url}/health", timeout=5).status_code == 503
    return False


def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def status(server: Server, key: str) -> int:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.get(f"{server.url}/server_info", headers=headers, timeout=10).status_code


def test_keys_of_a_router(router: Server, key_file: Path) -> None:
    assert [status(router, key) for key in (ADMIN, USER, OLD, NEW)] == [200, 403, 403, 401]
    key_file.write_text("nonsense\n")
    router.process.send_signal(signal.SIGHUP)
    until(lambda: "the keys stay as they were" in router.text())
    assert [status(router, key) for key in (ADMIN, USER, OLD, NEW)] == [200, 403, 403, 401]
    key_file.write_text(f"admin bob {NEW}\n")
    router.process.send_signal(signal.SIGHUP)
    until(lambda: status(router, NEW) == 200)
    assert [status(router, key) for key in (ADMIN, USER, OLD)] == [200, 403, 401]
    with pytest.raises(ServingError, match=r"status 503: no \w+ worker"):
        run(options(router.url, USER))
    with pytest.raises(ServingError, match="status 401"):
        run(options(router.url, None))
    assert not any(key in router.text() for key in (OLD, NEW, USER, ADMIN))


def options(url: str, key: str | None) -> Options:
    return Options(
        text="hi", url=url, max_new_tokens=1, temperature=0, stop=(), question=False, no_stream=False, api_key=key
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--api-key", "short"], "--api-key: a key has 16"),
        (["--admin-api-key", "two words of a key"], "--admin-api-key: a key has 16"),
        (["--api-key", USER, "--admin-api-key", USER], "a name or a key is there twice"),
        (["--ssl-certfile", "/nowhere"], "--ssl-certfile /nowhere: No such file"),
        (["--worker-ca-file", "/nowhere"], "--worker-ca-file /nowhere: No such file"),
        (["--worker-api-key-file", "/nowhere"], "--worker-api-key-file /nowhere: No such file"),
        (["--admin-port", "70000"], "--admin-port 70000: 0 to 65535"),
        (["--requests-per-minute", "5"], "--requests-per-minute 5: it is counted by key"),
        (["--max-concurrent-requests", "0"], "--max-concurrent-requests 0: at least 1"),
    ],
)
def test_settings_that_cannot_be(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    workers = ["--prefill", "http://127.0.0.1:1", "1", "--decode", "http://127.0.0.1:2"]
    with pytest.raises(SystemExit) as end:
        main(["router", "--port", "0", *workers, *given])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_a_taken_admin_port_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit) as end:
        workers = ["--prefill", "http://127.0.0.1:1", "1", "--decode", "http://127.0.0.1:2"]
        main(["router", "--port", "0", *workers, "--admin-port", str(taken.getsockname()[1])])
    assert end.value.code == 2
    assert "--admin-port" in capsys.readouterr().err


def test_what_a_command_starts_takes_no_keys_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_API_KEY", USER)
    monkeypatch.setenv("TANDEM_OTHER", "kept")
    children = Children(lambda line: None, logs=tmp_path)
    shell = 'env | grep "^TANDEM_"; exec sleep 60'
    children.start(ChildPlan("child", ("sh", "-c", shell), "http://127.0.0.1:1"))
    try:
        until(lambda: (tmp_path / "child.log").read_text() != "")
    finally:
        children.stop()
    assert (tmp_path / "child.log").read_text() == "TANDEM_OTHER=kept\n"
    assert os.environ["TANDEM_API_KEY"] == USER
