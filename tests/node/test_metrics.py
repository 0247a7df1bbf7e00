"""What a node tells about its ranks: /metrics and /debug/state, also when a rank cannot say anything."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.config import Role
from common.errors import WorkerError
from common.sampling import FinishReason
from node.messages import Failure, Query, Reply, Timing, Update
from node.meter import Meter
from node.metrics import COUNTERS, GAUGES, Split, exposition
from tests.node.conftest import FakeNode, fake_node, node_config, wait_for
from tests.support.ranks import Request, disaggregated_ranks, unified_ranks

SLOW = {"frequency_penalty": 1, "max_new_tokens": 100, "ignore_eos": True}
MEASURED = (
    "tandem_time_to_first_token_seconds",
    "tandem_inter_token_seconds",
    "tandem_request_seconds",
    "tandem_phase_seconds",
)
REPO = Path(__file__).resolve().parents[2]
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


@dataclass
class Entry:
    """A sequence that arrived at second 10."""

    rank: int = 0
    arrival_s: float = 10.0
    token_s: float = 0.0


def ended(token_ids: list[int], **timing: Any) -> Update:
    finish = FinishReason(type="length", length=3)
    return Update(
        rid="x", token_ids=token_ids, logprobs=[], num_cached_tokens=0, finish=finish, timing=Timing(**timing)
    )


def meter_of(role: str) -> Meter:
    """Of a front that has seen one answer and one failure."""
    meter = Meter()
    timing = {"decode_s": 0.5} if role == "decode" else {}
    meter.on_update(Entry(), ended([1], transfer_bytes={"kv": 1}, **timing), 11.0)
    meter.on_failure(Entry(), Failure(rid="y", error=WorkerError("it died", code="rank_died").record()))
    meter.http_errors["rank_died"] += 1
    return meter


def documented() -> set[str]:
    """Names in the first column of the table of a node's metrics."""
    rows = re.findall(r"^\| (`tandem_(?!router_).*?) \|", (REPO / "docs/operations.md").read_text(), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def base_name(sample: str) -> str:
    return next((name for name in MEASURED if sample.startswith(name)), sample)


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
            text = exposition(
                Role(name), [state_of(role)], meter=meter_of(name), num_unanswered=1, is_draining=False
            ).decode()
            found[name] = parse(text)
    names = {sample for samples in found.values() for sample, _ in samples}
    gauges, counters = {source.name for source in GAUGES}, {f"{source.name}_total" for source in COUNTERS}
    sometimes_empty = {"tandem_rooms", "tandem_leases"}
    node_wide = {"tandem_rank_up", "tandem_requests_unanswered", "tandem_draining"}
    assert {base_name(name) for name in names} | sometimes_empty == documented(), "docs/operations.md"
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
    text = exposition(Role.DECODE, [state, None], meter=Meter(), num_unanswered=0, is_draining=True).decode()
    samples = {key: value for key, value in parse(text).items() if not key[0].startswith(MEASURED)}
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
        ranks[2].suspend()
        try:
            start = time.monotonic()
            scrape(node)
            assert time.monotonic() - start < 2 + 2, "the time-out, and some for a busy machine"
            wait_for(lambda: not node.get("/get_load").json()[2]["alive"])
            os.kill(ranks[1].pid, signal.SIGKILL)
            wait_for(lambda: scrape(node)["tandem_rank_up", of("decode", 1)] == 0)
            samples = scrape(node)
            assert [samples["tandem_rank_up", of("decode", rank)] for rank in range(3)] == [1, 0, 0]
            assert samples["tandem_sequences", of("decode", 0, phase="running")] == 0
            assert not [labels for name, labels in samples if name == "tandem_sequences" and ("rank", "2") in labels]
            debug = node.get("/debug/state").json()
            assert "limit" in debug["ranks"][0]
            assert [rank["error"]["code"] for rank in debug["ranks"][1:]] == ["rank_died", "rank_silent"]
        finally:
            ranks[2].resume()
        wait_for(lambda: all(scrape(node)["tandem_rank_up", of("decode", rank)] for rank in range(3)))


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


# What the front measures


def test_tokens_are_timed_one_by_one() -> None:
    meter, entry = Meter(), Entry()
    for now in (12.0, 12.25, 12.75):
        token = Update(rid="x", token_ids=[1], logprobs=[], num_cached_tokens=0)
        meter.on_update(entry, token if now < 12.75 else ended([1], decode_s=0.75, prefill_s=2.0), now)
    rank = meter.ranks[0]
    assert (rank.first_token.count, rank.first_token.sum) == (1, 2.0)
    assert (rank.between_tokens.count, rank.between_tokens.sum) == (2, 0.75)
    assert (rank.whole.count, rank.whole.sum) == (1, 2.75)
    assert dict(rank.between_tokens.buckets())["0.25"] == 1, "a bound belongs to its bucket"
    assert {name: phase.sum for name, phase in rank.phases.items()} == {
        "queue": 0.0,
        "prefill": 2.0,
        "transfer": 0.0,
        "decode": 0.75,
    }


@pytest.mark.parametrize(
    ("update", "counted"),
    [
        (ended([1], queue_s=1, prefill_s=1, transfer_s=1, transfer_bytes={"kv": 1}), {"queue", "prefill", "transfer"}),
        (ended([1], queue_s=1, prefill_s=1, transfer_s=1, decode_s=1, transfer_bytes={"kv": 1}), {"decode"}),
        (ended([1], queue_s=1, prefill_s=1, decode_s=1), {"queue", "prefill", "decode"}),
        (ended([]), set()),
    ],
    ids=["prefill", "decode", "alone", "declined"],
)
def test_each_phase_is_counted_at_one_node(update: Update, counted: set[str]) -> None:
    meter = Meter()
    meter.on_update(Entry(), update, 11.0)
    assert {name for name, phase in meter.ranks[0].phases.items() if phase.count} == counted


def test_a_front_counts_tokens_and_errors_of_real_requests(unified: FakeNode) -> None:
    before = scrape(unified)

    def grown(name: str, labels: tuple[tuple[str, str], ...]) -> float:
        return scrape(unified).get((name, labels), 0) - before.get((name, labels), 0)

    body = {"text": "one", "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
    assert httpx.post(f"{unified.url}/generate", json=body, timeout=20).status_code == 200
    assert httpx.post(f"{unified.url}/generate", json={"nonsense": 1}, timeout=20).status_code == 400
    assert grown("tandem_time_to_first_token_seconds_count", of("unified", 0)) == 1
    assert grown("tandem_inter_token_seconds_count", of("unified", 0)) == 4
    assert grown("tandem_request_seconds_count", of("unified", 0)) == 1
    assert grown("tandem_http_errors_total", of("unified", code="unknown_parameter")) == 1
