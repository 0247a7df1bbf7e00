"""Nodes of two ranks each behind a router: it chooses the ranks, and state goes from the one to the other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from common.config import ModelConfig, NodeConfig, Role, ServerConfig, TransferConfig, TransportName
from tests.support.stack import MODEL, REPO, Server, free_port, generate, node, running, stop, wait_healthy

pytestmark = pytest.mark.slow

PARAMETERS = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


@contextmanager
def two_ranks(role: Role, folder: Path, bootstrap_port: int) -> Iterator[Server]:
    port, log = free_port(), folder / f"{role.value}.log"
    config = NodeConfig(
        role=role,
        model=ModelConfig(path=str(MODEL)),
        transfer=TransferConfig(transport=TransportName.LOOPBACK),
        server=ServerConfig(port=port, bootstrap_port=bootstrap_port),
    )
    command = [sys.executable, "-m", "tests.support.serve_ranks", "2"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=REPO, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(config))
        process.stdin.close()
        yield Server(name=role.value, process=process, url=f"http://127.0.0.1:{port}", log=log)
    finally:
        stop(process)


def states(server: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{server.url}/server_info", timeout=20).json()["internal_states"]
    return found


def prompt(place: int) -> list[int]:
    return [(11 * i + place) % 400 + 100 for i in range(200)]


def test_a_router_chooses_the_ranks_of_both_nodes(tmp_path: Path) -> None:
    with ExitStack() as exits:
        bootstrap_port, port = free_port(), free_port()
        prefill = exits.enter_context(two_ranks(Role.PREFILL, tmp_path, bootstrap_port))
        decode = exits.enter_context(two_ranks(Role.DECODE, tmp_path, free_port()))
        unified = exits.enter_context(node("unified", tmp_path))
        arguments = ["router", "--port", str(port), "--prefill", prefill.url, str(bootstrap_port)]
        arguments += ["--decode", decode.url]
        router = exits.enter_context(running("router", arguments, f"http://127.0.0.1:{port}", tmp_path))
        for server in (prefill, decode, unified, router):
            wait_healthy(server)
        for place in range(12):
            body: dict[str, object] = {"input_ids": prompt(place), "sampling_params": PARAMETERS}
            answers = [generate(url, body).json() for url in (router.url, unified.url)]
            assert answers[0]["output_ids"] == answers[1]["output_ids"]
        for server in (prefill, decode):
            assert all(state["requests_finished"] >= 3 for state in states(server)), states(server)
        again = generate(router.url, {"input_ids": prompt(3), "sampling_params": PARAMETERS}).json()
        assert again["meta_info"]["cached_tokens"] >= 128
        batch = {"input_ids": [prompt(place) for place in range(20, 28)], "sampling_params": PARAMETERS}
        assert len(generate(router.url, batch).json()) == 8
        named = generate(router.url, {"input_ids": prompt(40), "sampling_params": PARAMETERS, "routed_dp_rank": 5})
        assert (named.status_code, named.json()["error"]["param"]) == (400, "routed_dp_rank")
