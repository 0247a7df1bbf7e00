"""What goes into the images, and their probe."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.files import DEPLOY
from tests.support.stack import free_port, running

REPO = DEPLOY.parent
IMPORT_WITHOUT = """
import sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None  # importing it fails
import cli.main, cli.router, cli.router_processes, router.app, common.tracing, common.logs
"""
RUN_WITHOUT = """
import sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None
from cli.main import main
main(sys.argv[2:])
"""


def requirements(*arguments: str) -> list[Requirement]:
    command = [sys.executable, str(DEPLOY / "requirements.py"), str(REPO / "pyproject.toml"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    return [Requirement(line) for line in done.stdout.splitlines()]


def names(*arguments: str) -> set[str]:
    return {canonicalize_name(each.name) for each in requirements(*arguments)}


def pins(*files: Path) -> dict[str, str]:
    lines = [line for file in files for line in file.read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def left_out() -> str:
    """Modules that the router's image does not have, with commas between them."""
    found = names("cpu,otel") - names("otel", "--router")
    assert {"torch", "tokenizers", "numpy"} <= found
    modules = {"pyzmq": "zmq", "mooncake-transfer-engine-non-cuda": "mooncake"}
    return ",".join(sorted(modules.get(each, each) for each in found))


def without(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, left_out(), *arguments]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60)


def test_the_router_needs_nothing_that_its_image_leaves_out() -> None:
    done = without(IMPORT_WITHOUT)
    assert done.returncode == 0, done.stderr


def test_the_routers_doctor_works_in_its_image() -> None:
    workers = ("--prefill", "http://127.0.0.1:1", "8998", "--decode", "http://127.0.0.1:2")
    done = without(RUN_WITHOUT, "doctor", "--role", "router", "--port", "0", "--json", *workers)
    assert (done.returncode, done.stderr) == (1, "")
    checks = {check["name"]: check["status"] for check in json.loads(done.stdout)["checks"]}
    assert {name for name, status in checks.items() if status == "error"} == {
        "worker.prefill.127.0.0.1:1",
        "worker.decode.127.0.0.1:2",
    }
    assert {"python", "memory", "port.http", "api_keys", "tls"} <= set(checks)
    assert without(RUN_WITHOUT, "doctor", "--role", "router", "--port", "0").returncode == 0


@pytest.mark.parametrize(
    "command",
    ["doctor", "up --once", "prefill", "decode", "unified", "chaos", "gate gsm-mini --url http://127.0.0.1:1"],
)
def test_what_is_not_in_the_routers_image_says_so_in_one_line(command: str) -> None:
    done = without(RUN_WITHOUT, *command.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"tandem: error: .* is not installed here.*\n", done.stderr)


@pytest.mark.parametrize(
    ("extras", "file"),
    [("cpu,otel", REPO / "constraints-cpu.txt"), ("cuda13,gpu,otel", DEPLOY / "constraints-gpu.txt")],
)
def test_all_that_an_image_installs_is_pinned_to_what_the_project_allows(extras: str, file: Path) -> None:
    pinned = pins(DEPLOY / "constraints.txt", file)
    for each in requirements(extras):
        assert pinned[canonicalize_name(each.name)] in each.specifier, str(each)


def test_the_pins_of_two_files_agree() -> None:
    shared, *others = (
        pins(DEPLOY / "constraints.txt"),
        pins(REPO / "constraints-cpu.txt"),
        pins(DEPLOY / "constraints-gpu.txt"),
    )
    for other in others:
        assert {name: shared[name] for name in shared.keys() & other.keys()} == {
            name: other[name] for name in shared.keys() & other.keys()
        }


def test_the_build_context_has_every_package() -> None:
    import tomllib

    packages = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    ignored = (REPO / ".dockerignore").read_text().splitlines()
    assert {f"!{each.partition('.')[0]}" for each in packages} <= set(ignored)


def test_every_package_is_in_the_wheel() -> None:
    import tomllib

    packages = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    roots = {each.partition(".")[0] for each in packages}
    folders = {module.parent for root in roots for module in (REPO / root).rglob("*.py")}
    assert {".".join(folder.relative_to(REPO).parts) for folder in folders} == set(packages)


@pytest.mark.parametrize(("status", "expected"), [("200 OK", 0), ("503 Service Unavailable", 1)])
def test_the_probe_says_whether_it_is_healthy(status: str, expected: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with probe(port) as asking:
            connection, _ = server.accept()
            with connection:
                assert connection.recv(1000).startswith(b"GET /health HTTP/1.1\r\n")
                connection.sendall(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n".encode())
            said, _ = asking.communicate(timeout=30)
    assert asking.returncode == expected and status in said


def test_the_probe_of_nobody_fails() -> None:
    with probe(free_port()) as asking:
        said, _ = asking.communicate(timeout=30)
    assert asking.returncode == 1 and "refused" in said


@contextmanager
def answering(status: str, code: str = "", host: str = "127.0.0.1") -> Iterator[int]:
    """The port of a server of one answer."""
    body = json.dumps({"error": {"code": code}}).encode()

    def run() -> None:
        with server.accept()[0] as caller:
            caller.recv(1000)
            caller.sendall(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)

    with socket.create_server((host, 0)) as server:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        thread.join(10)


@pytest.mark.parametrize(
    ("status", "code", "alive"),
    [
        ("200 OK", "", True),
        ("503 Service Unavailable", "draining", True),
        ("503 Service Unavailable", "rank_silent", False),
        ("500 Internal Server Error", "", False),
    ],
)
def test_what_drains_is_alive_and_what_cannot_serve_is_not(status: str, code: str, alive: bool) -> None:
    with answering(status, code) as port, probe(port, "--alive") as asking:
        asking.communicate(timeout=30)
    assert (asking.returncode == 0) == alive


def test_what_loads_is_alive_and_what_hangs_is_not() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        with probe(port, "--alive") as loading:
            loading.communicate(timeout=30)
        server.listen()
        with probe(port, "--alive") as hanging:
            hanging.communicate(timeout=30)
    assert (loading.returncode, hanging.returncode) == (0, 1)


def test_the_probe_goes_to_the_server_s_host() -> None:
    with answering("200 OK", host="127.0.0.2") as port, probe(port, host="127.0.0.2") as asking:
        asking.communicate(timeout=30)
    assert asking.returncode == 0


@pytest.mark.parametrize("host", ["0.0.0.0", ""])
def test_a_server_anywhere_is_asked_here(host: str) -> None:
    with answering("200 OK") as port, probe(port, host=host) as asking:
        asking.communicate(timeout=30)
    assert asking.returncode == 0


def test_an_empty_port_is_the_usual_one() -> None:
    with subprocess.Popen(PROBE, env={"TANDEM_PORT": ""}, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as asking:
        said = asking.communicate(timeout=30)
    assert said[1] == b"", said


def test_the_probe_notices_tls(tmp_path: Path) -> None:
    import trustme

    port, certificate = free_port(), tmp_path / "cert.pem"
    trustme.CA().issue_cert("router").private_key_and_cert_chain_pem.write_to_path(certificate)
    options = ["router", "--port", str(port), "--ssl-certfile", str(certificate), "--ssl-keyfile", str(certificate)]
    with running("router", options, f"https://127.0.0.1:{port}", tmp_path):
        said = ""
        while "HTTP/1.1 503" not in said:  # it has no nodes
            with probe(port) as asking:
                said, _ = asking.communicate(timeout=30)
            assert asking.returncode == 1 and (not said or "refused" in said or "503" in said), said


PROBE = [sys.executable, "-I", "-S", str(DEPLOY / "healthy.py")]


def probe(port: int, *arguments: str, host: str | None = None) -> subprocess.Popen[str]:
    environment = {"TANDEM_PORT": str(port)} | ({} if host is None else {"TANDEM_HOST": host})
    return subprocess.Popen([*PROBE, *arguments], env=environment, stdout=subprocess.PIPE, text=True)


def test_without_a_container_engine_the_test_of_compose_is_skipped_in_words(tmp_path: Path) -> None:
    command = [sys.executable, str(DEPLOY / "test_compose.py")]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and "SKIPPED: no container engine" in done.stdout
