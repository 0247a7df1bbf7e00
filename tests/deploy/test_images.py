"""What goes into the images, and their probe."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.files import DEPLOY
from tests.support.stack import free_port

REPO = DEPLOY.parent
IMPORT_WITHOUT = """
import sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None  # importing it fails
import cli.main, cli.router, cli.router_processes, router.app, common.tracing, common.logs
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


def test_the_router_needs_nothing_that_its_image_leaves_out() -> None:
    left_out = names("cpu,otel") - names("otel", "--router")
    assert {"torch", "tokenizers", "numpy"} <= left_out
    modules = [{"pyzmq": "zmq", "mooncake-transfer-engine-non-cuda": "mooncake"}.get(each, each) for each in left_out]
    command = [sys.executable, "-c", IMPORT_WITHOUT, ",".join(modules)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


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
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with probe(port) as running:
            connection, _ = server.accept()
            with connection:
                assert connection.recv(1000).startswith(b"GET /health HTTP/1.1\r\n")
                connection.sendall(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n".encode())
            said, _ = running.communicate(timeout=30)
    assert running.returncode == expected and status in said


def test_the_probe_of_nobody_fails() -> None:
    with probe(free_port()) as running:
        said, _ = running.communicate(timeout=30)
    assert running.returncode == 1 and "refused" in said


def probe(port: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-S", str(DEPLOY / "healthy.py")]
    return subprocess.Popen(command, env={"TANDEM_PORT": str(port)}, stdout=subprocess.PIPE, text=True)


def test_without_a_container_engine_the_test_of_compose_is_skipped_in_words(tmp_path: Path) -> None:
    command = [sys.executable, str(DEPLOY / "test_compose.py")]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and "SKIPPED: no container engine" in done.stdout
