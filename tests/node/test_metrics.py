"""What a node tells about its ranks: /metrics and /debug/state, also when a rank cannot say anything."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.config import Role
from node.messages import Query, Reply
from node.metrics import COUNTERS, GAUGES, Split, exposition
from tests.node.conftest import FakeNode, fake_node, node_config, wait_for
from tests.support.ranks import Request, disaggregated_ranks, unified_ranks

SLOW = {"frequency_penalty": 1, "max_new_tokens": 100, "ignore_eos": True}
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parse(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(node: FakeNode) -> Samples:
    response = node.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    return parse(response.text)


def of(role: str, rank: int | None = None, **labels: str) -> tuple[tuple[str, str], ...]:
    own = {"role": role, **labels} | ({} if rank is None else {"rank": str(rank)})
    return tuple(sorted(own.items()))


def state_of(role: object) -> dict[str, object]:
    role.query(Query(ticket=1, what="state"))  # type: ignore[attr-defined]
    reply = role.take_outbox()[-1]  # type: ignore[attr-defined]
    assert isinstance(reply, Reply)
    return reply.payload


def test_every_number_is_in_the_state_of_a_real_rank_of_some_role() -> None:
    """And none is lost on the way; names have their units, counters end with _total."""
    with disaggregated_ranks() as pair, unified_ranks() as alone:
        pair.run([Request(prompt=list(range(5, 200)), max_new_tokens=3)])
        alone.run([Request(prompt=list(range(5, 200)), max_new_tokens=3)])
        found: dict[str, Samples] = {}
        for name, role in (("prefill", pair.prefill), ("decode", pair.decode), ("unified", alone.roles[0])):
            text = exposition(name, [state_of(role)], num_unanswered=1, is_draining=False).decode()
            found[name] = parse(text)
    names = {sample for samples in found.values() for sample, _ in samples}
    gauges, counters = {source.name for source in GAUGES}, {f"{source.name}_total" for source in COUNTERS}
    sometimes_empty = {"tandem_rooms", "tandem_leases"}
    node_wide = {"tandem_rank_up", "tandem_requests_unanswered", "tandem_draining"}
    assert names >= (gauges | counters | node_wide) - sometimes_empty
    assert all(re.fullmatch("tandem_[a-z_]+", name) for name in names)
    decode = found["decode"]
    for source in GAUGES:
        if isinstance(source, Split) and isinstance(source.values, dict):
            present = {dict(labels)[source.label] for name, labels in decode if name == source.name}
            assert present == set(source.values), source.name
    assert decode["tandem_requests_total", of("decode", 0, outcome="finished")] == 1
    assert decode["tandem_handoffs_total", of("decode", 0, outcome="committed")] == 1
    assert decode["tandem_handoffs_total", of("decode", 0, outcome="failed")] == 0, "growth can be seen"
    assert decode["tandem_digest_mismatches_total", of("decode", 0, part="metadata")] == 0
    assert decode["tandem_transfer_bytes_total", of("decode", 0, part="ssm")] == 655_360
    for name in ("pages", "slots"):
        for role_name, total in (("prefill", 16384 // 16 - 1), ("decode", 16384 // 16 - 1)):
            values = [v for (sample, _), v in found[role_name].items() if sample == f"tandem_{name}"]
            assert sum(values) == (total if name == "pages" else 23)


def test_states_of_rooms_and_mismatches_are_labels() -> None:
    state = {"transfer": {"leases": {"writing": 2, "draining": 1}, "digest_mismatches": {"ssm": 3}}}
    samples = parse(exposition("decode", [state, None], num_unanswered=0, is_draining=True).decode())
    assert samples == {
        ("tandem_rank_up", of("decode", 0)): 1,
        ("tandem_rank_up", of("decode", 1)): 0,
        ("tandem_requests_unanswered", of("decode")): 0,
        ("tandem_draining", of("decode")): 1,
        ("tandem_leases", of("decode", 0, state="writing")): 2,
        ("tandem_leases", of("decode", 0, state="draining")): 1,
        ("tandem_digest_mismatches_total", of("decode", 0, part="ssm")): 3,
        **{
            ("tandem_digest_mismatches_total", of("decode", 0, part=part)): 0
            for part in ("kv", "conv", "track", "metadata")
        },
    }


def test_a_dead_and_a_silent_rank_do_not_hold_up_the_scrape(model_path: str, tmp_path: Path) -> None:
    """liveness_timeout_s is 2 here."""
    with fake_node(node_config(model_path, Role.DECODE), tmp_path / "log", num_ranks=3) as node:
        ranks = sorted(node.ranks(), key=lambda rank: rank.cmdline()[-1])
        assert [scrape(node)["tandem_rank_up", of("decode", rank)] for rank in range(3)] == [1, 1, 1]
        os.kill(ranks[1].pid, signal.SIGKILL)
        wait_for(lambda: scrape(node)["tandem_rank_up", of("decode", 1)] == 0)
        ranks[2].suspend()
        try:
            start = time.monotonic()
            samples = scrape(node)
            assert time.monotonic() - start < 2 + 2, "the time-out, and some for a busy machine"
            assert [samples["tandem_rank_up", of("decode", rank)] for rank in range(3)] == [1, 0, 0]
            assert samples["tandem_sequences", of("decode", 0, phase="running")] == 0
            assert not [labels for name, labels in samples if name == "tandem_sequences" and ("rank", "2") in labels]
            debug = node.get("/debug/state").json()
            assert "limit" in debug["ranks"][0]
            assert [rank["error"]["code"] for rank in debug["ranks"][1:]] == ["rank_died", "rank_silent"]
        finally:
            ranks[2].resume()
        wait_for(lambda: scrape(node)["tandem_rank_up", of("decode", 2)] == 1)


def test_debug_state_lists_what_the_front_waits_for(model_path: str, tmp_path: Path) -> None:
    with fake_node(node_config(model_path, Role.UNIFIED), tmp_path / "log") as node:
        body = {"text": ["one", "two"], "rid": "mine", "sampling_params": SLOW, "stream": True}
        with httpx.stream("POST", f"{node.url}/generate", json=body, timeout=20) as response:
            lines = response.iter_lines()  # kept: when it goes, so does the connection
            assert response.status_code == 200 and next(lines)
            assert scrape(node)["tandem_requests_unanswered", of("unified")] == 2
            found = node.get("/debug/state?limit=1").json()
            assert (found["role"], found["draining"], found["omitted"]) == ("unified", False, {"requests": 1})
            (entry,) = found["requests"]
            assert entry["rid"] == "mine_0" and entry["group"] == "mine" and entry["rank"] == 0
            assert 0 <= entry["heard_s"] <= entry["age_s"] < 20 and not entry["ending"] and not entry["told"]
            assert found["ranks"][0]["limit"] == 1
            assert node.get("/debug/state").json()["ranks"][0]["limit"] == 1000


@pytest.mark.parametrize("limit", ["0", "-1", "x", "1.5", "", "9" * 5000, "100001", "٣"])
def test_a_limit_that_is_none_is_refused_by_name(unified: FakeNode, limit: str) -> None:
    response = unified.get(f"/debug/state?limit={limit}")
    assert response.status_code == 400 and response.json()["error"]["param"] == "limit"
