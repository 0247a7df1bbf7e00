"""Nodes of two ranks each behind a router: it chooses the ranks, and state goes from the one to the other."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.models import FAMILIES, Models
from tests.support.stack import Server, free_port, generate, node, running, wait_healthy

pytestmark = pytest.mark.slow

TWO_RANKS = ("--dp-size", "2", "--transport", "loopback")
PARAMETERS = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


def states(server: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{server.url}/server_info", timeout=20).json()["internal_states"]
    return found


def prompt(place: int) -> list[int]:
    return [(11 * i + place) % 90 + 3 for i in range(200)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_router_chooses_the_ranks_of_both_nodes(family: str, models: Models, tmp_path: Path) -> None:
    of_model = ("--model-path", str(models(family, 16)))
    with ExitStack() as exits:
        bootstrap_port, port = free_port(), free_port()
        prefill = exits.enter_context(node("prefill", tmp_path, (*of_model, *TWO_RANKS), bootstrap_port=bootstrap_port))
        decode = exits.enter_context(node("decode", tmp_path, (*of_model, *TWO_RANKS)))
        unified = exits.enter_context(node("unified", tmp_path, of_model))
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
