"""A fleet of a benchmark: what it starts ends with it, also when the benchmark is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from bench.fleet import fleet
from tests.support.stack import REPO

KILLED = """
import sys
from pathlib import Path
from bench.fleet import fleet
with fleet(Path(sys.argv[1])) as servers:
    servers.router("router", [], [], {})
    print(servers.pid("router"), flush=True)
    sys.stdin.read()
"""


def test_a_server_ends_with_the_block_and_is_named(tmp_path: Path) -> None:
    with fleet(tmp_path) as servers:
        servers.router("router", [], [], {})
        process = psutil.Process(servers.pid("router"))
        assert servers.names() == ["router"] and servers.url("router").startswith("http://127.0.0.1:")
    assert not process.is_running()
    assert servers.names() == []


def test_a_server_ends_when_the_benchmark_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    bench = subprocess.Popen(command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert bench.stdout is not None
    process = psutil.Process(int(bench.stdout.readline()))
    bench.kill()
    bench.communicate()
    process.wait(30)
