"""Who owns what in a rank: leaks made on purpose are counted and named, and what is owned for long is no leak."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from common.config import LoopbackFaults
from node.accounting import LEAK_AFTER_S
from node.messages import Abort, Query, Reply
from tests.support.ranks import Outcome, Ranks, Request, assert_all_owned, disaggregated_ranks, unified_ranks

PROMPT = [5 + i % 900 for i in range(300)]
LONG = Request(prompt=PROMPT, max_new_tokens=400)


@pytest.fixture
def unified() -> Iterator[Ranks]:
    with unified_ranks() as ranks:
        yield ranks


@pytest.fixture
def pair() -> Iterator[Ranks]:
    with disaggregated_ranks() as ranks:
        yield ranks


def ask(role: Any, what: str, limit: int = 1000) -> dict[str, Any]:
    role.query(Query(ticket=1, what=what, limit=limit))
    reply = role.take_outbox()[-1]
    assert isinstance(reply, Reply) and reply.error is None
    return reply.payload


def leaks_after(role: Any, seconds: float) -> int:
    """`leaks_total` when the rank has looked now and so many seconds later."""
    now = time.monotonic()
    role.watch(now)
    role.watch(now + seconds)
    return int(ask(role, "state")["leaks_total"])


def run_to(ranks: Ranks, num_tokens: int, request: Request = LONG) -> Outcome:
    outcome = ranks.submit(request)
    ranks.run_until(lambda: len(outcome.tokens) >= num_tokens)
    return outcome


# Integrity


def integrity_failures(role: Any) -> int:
    role.watch(time.monotonic())
    return int(ask(role, "state")["integrity_failures"])


def test_books_that_do_not_balance_are_noticed_when_the_rank_is_idle(unified: Ranks) -> None:
    run_to(unified, 3)
    host = unified.roles[0].host  # type: ignore[attr-defined]
    memory = host.scheduler.memory
    memory.slots._free.append(memory.slots._free[0])
    assert integrity_failures(unified.roles[0]) == 0, "it is not idle"
    unified.run_until(lambda: not host.sequences)

    assert integrity_failures(unified.roles[0]) == 1
    assert integrity_failures(unified.roles[0]) == 1, "looked at once after each request"
    memory.slots._free.pop()


# Leaks


def forget_sequence(role: Any) -> set[str]:
    """Its slot, its pages and its lock stay behind."""
    (sequence,) = role.host.scheduler.running
    role.host.scheduler.running.clear()
    del role.host.sequences[sequence.rid]
    return {"page", "slot", "lock"}


def forget_in_scheduler(role: Any) -> set[str]:
    """The front still waits for it."""
    role.host.scheduler.running.clear()
    return {"page", "slot", "lock", "sequence"}


def keep_track_slot(role: Any) -> set[str]:
    assert role.host.scheduler.memory.take_track_slot(role.host.scheduler.running[0]) is not None
    return {"slot"}


def keep_page(role: Any) -> set[str]:
    role.host.scheduler.memory.pages.allocate(1, "cache")  # a name is not enough
    return {"page"}


def keep_lock(role: Any) -> set[str]:
    cache = role.host.scheduler.memory.cache
    cache.lock(next(iter(cache.locks)).node)
    return {"lock"}


LEAKS = [forget_sequence, forget_in_scheduler, keep_track_slot, keep_page, keep_lock]


@pytest.mark.parametrize("leak", LEAKS)
def test_what_is_owned_by_nobody_for_ten_seconds_is_counted_and_named(
    unified: Ranks, leak: Callable[[Any], set[str]], caplog: pytest.LogCaptureFixture
) -> None:
    (role,) = unified.roles
    outcome = run_to(unified, 3)
    assert leaks_after(role, 2 * LEAK_AFTER_S) == 0
    kinds = leak(role)
    now = time.monotonic()
    role.watch(now)
    role.watch(now + LEAK_AFTER_S - 0.1)
    state = ask(role, "state")
    assert state["leaks_total"] == state["leaks"] == 0 and not caplog.records
    role.watch(now + LEAK_AFTER_S)
    found = ask(role, "debug")["leaks"]
    assert {item["kind"] for item in found} == kinds
    state = ask(role, "state")
    assert state["leaks_total"] == state["leaks"] == len(found) > 0
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len({(item["kind"], item["owner"]) for item in found})
    assert all(str(item["number"]) in " ".join(said) for item in found if item["kind"] == "slot")
    if leak is forget_sequence:
        assert any(line.startswith("leak: slot 1 (owner r1, owned for ") for line in said)
    role.watch(now + 5 * LEAK_AFTER_S)
    assert ask(role, "state")["leaks_total"] == len(found), "each is counted once"
    assert outcome.error is None


def test_a_leak_that_is_mended_is_no_leak_any_more(unified: Ranks) -> None:
    (role,) = unified.roles
    run_to(unified, 3)
    slots = role.host.scheduler.memory.slots  # type: ignore[attr-defined]
    slot = slots.allocate("gone")
    assert leaks_after(role, LEAK_AFTER_S) == 1
    slots.free(slot)
    assert slots.allocate("gone") == slot
    role.watch(time.monotonic() + LEAK_AFTER_S)
    state = ask(role, "state")
    assert (state["leaks"], state["leaks_total"]) == (0, 1), "another use of the number is another item"
    assert leaks_after(role, 3 * LEAK_AFTER_S) == 2


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_room_that_its_role_or_its_transfer_has_forgotten(side: str) -> None:
    """Prefill's room and decode's lease are open for as long as the prompt of a throttled link is on its way."""
    with disaggregated_ranks(faults=LoopbackFaults(delay_s=0.03)) as ranks:
        role = getattr(ranks, side)
        outcome = ranks.submit(Request(prompt=PROMPT, max_new_tokens=4))
        ranks.run_until(lambda: "writing" in ranks.decode.transfer.room_states().values())
        ((number, room),) = role.rooms.items()
        del role.rooms[number]
        assert leaks_after(role, LEAK_AFTER_S) > 0
        assert {"lease"} <= {item["kind"] for item in ask(role, "debug")["leaks"]}
        role.rooms[number] = room
        ranks.run_until(lambda: outcome.ended)
        ranks.run_until(lambda: not role.rooms)
        role.rooms[number] = room  # over, and nobody will ever say so again
        assert leaks_after(role, LEAK_AFTER_S) > 0
        found = ask(role, "debug")
        assert {"room"} <= {item["kind"] for item in found["leaks"]} and found["rooms"][0]["phase"] == "over"
        del role.rooms[number]


# No false alarms


def assert_no_alarm(ranks: Ranks) -> None:
    for role in ranks.roles:
        assert leaks_after(role, 100 * LEAK_AFTER_S) == 0, ask(role, "debug")["leaks"]


def test_what_waits_runs_or_is_cached_is_no_leak(unified: Ranks) -> None:
    outcomes = [unified.submit(Request(prompt=PROMPT[i:], max_new_tokens=6)) for i in range(24)]
    while not all(outcome.ended for outcome in outcomes):
        unified.step()
        assert_all_owned(unified.roles[0])
    assert_no_alarm(unified)
    assert ask(unified.roles[0], "state")["slots_cached"] > 0


def test_held_rooms_and_leases_are_no_leaks(pair: Ranks) -> None:
    """First one whose prefill leg never comes, then one at every step of its way."""
    prefill_submit, pair.prefill.submit = pair.prefill.submit, lambda message: None  # type: ignore[method-assign]
    held = pair.submit(LONG)
    pair.run_until(lambda: "writing" in pair.decode.transfer.room_states().values())
    assert_no_alarm(pair)
    assert ask(pair.decode, "state")["pages_in_rooms"] == 19
    assert ask(pair.decode, "debug")["rooms"][0]["phase"] == "writing"
    pair.prefill.submit = prefill_submit  # type: ignore[method-assign]
    outcome = pair.submit(Request(prompt=PROMPT[7:], max_new_tokens=20))
    while not outcome.ended:
        pair.step()
        assert_all_owned(pair.prefill)
        assert_all_owned(pair.decode)
    pair.decode.abort(Abort(rid=held.rid))
    pair.run_until(lambda: held.ended)
    pair.assert_all_free()
    assert_no_alarm(pair)


def test_what_waits_for_memory_is_no_leak(pair: Ranks) -> None:
    scheduler = pair.decode.host.scheduler
    scheduler.limits = dataclasses.replace(scheduler.limits, max_running=0)
    outcome = pair.submit(LONG)
    pair.step()
    assert_all_owned(pair.decode)
    assert ask(pair.decode, "debug")["rooms"][0]["phase"] == "reserving"
    pair.abort(outcome)


def test_a_draining_lease_is_no_leak() -> None:
    with disaggregated_ranks(faults=LoopbackFaults(delay_s=1.0)) as ranks:
        outcome = ranks.submit(LONG)
        ranks.run_until(lambda: any(room.busy for room in ranks.prefill.transfer._rooms.values()))
        ranks.abort(outcome)
        ranks.run_until(lambda: outcome.ended)
        assert ask(ranks.decode, "debug")["rooms"][0] | {"age_s": 0} == {
            "room": 1,
            "owner": "r1",
            "phase": "draining",
            "age_s": 0,
            "failed": True,
            "own_pages": 19,
            "slot": 1,
            "track_slot": 23,
        }
        assert ask(ranks.decode, "state")["pages_draining"] == 19
        assert_no_alarm(ranks)
        ranks.assert_all_free()
        assert_no_alarm(ranks)


# /debug/state


def test_the_listing_names_everything_once(unified: Ranks) -> None:
    (role,) = unified.roles
    run_to(unified, 3)
    other = unified.submit(Request(prompt=PROMPT[:40], max_new_tokens=8))
    unified.run_until(lambda: len(other.tokens) >= 2)
    found, state = ask(role, "debug"), ask(role, "state")
    assert [(s["rid"], s["phase"], s["prompt_tokens"]) for s in found["sequences"]] == [
        ("r1", "running", 300),
        ("r2", "running", 40),
    ]
    pages = [page for entry in found["pages"] for page in range(entry["first"], entry["last"] + 1)]
    assert sorted(set(pages)) == sorted(pages) and len(pages) == state["pages_total"] - state["pages_free"]
    assert {(entry["owner"], entry["phase"]) for entry in found["pages"]} == {
        (None, "cache"),
        ("r1", "running"),
        ("r2", "running"),
    }
    assert [(s["slot"], s["use"], s["owner"]) for s in found["slots"]] == [
        (1, "main", "r1"),
        (2, "main", "r2"),
        (23, "cache", None),
    ]
    assert found["slots"][2]["generation"] == 2, "the request's, then the cache's"
    assert all(0 <= entry["age_s"] < 60 for name in ("sequences", "pages", "slots") for entry in found[name])
    used = sum(state[name] for name in ("pages_free", "pages_cached", "pages_in_requests", "pages_in_rooms"))
    assert used == state["pages_total"]
    assert sum(state[f"slots_{use}"] for use in ("free", "cached", "main", "track")) == state["slots_total"]
    assert not {str(PROMPT[0]), str(other.ids[0])} & {str(value) for s in found["sequences"] for value in s.items()}


def test_the_listing_is_cut_at_the_limit(unified: Ranks) -> None:
    (role,) = unified.roles
    outcomes = [unified.submit(Request(prompt=PROMPT[i:], max_new_tokens=30)) for i in range(5)]
    unified.run_until(lambda: all(outcome.tokens for outcome in outcomes))
    everything, cut = ask(role, "debug"), ask(role, "debug", limit=2)
    for name in ("sequences", "rooms", "pages", "slots", "leaks"):
        assert cut["omitted"][name] == max(0, len(everything[name]) - 2)
        assert len(cut[name]) == min(2, len(everything[name]))
    assert cut["omitted"]["sequences"] == 3
