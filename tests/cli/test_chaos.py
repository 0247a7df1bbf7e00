"""The parts of `tandem chaos` that need no processes: the plan, the judgement of answers and of states."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli.chaos import checks
from cli.chaos.fleet import Process
from cli.chaos.load import End, JudgementError, Outcome, judge_piece, judge_whole
from cli.chaos.options import chaos_options
from cli.chaos.plan import OF_CLIENTS, OF_TRANSPORT, ROLE_OF, Kind, make_plan, possible_kinds
from cli.chaos.run import _Run
from cli.chaos.tasks import Task
from common.config import TransportName
from common.errors import ConfigError

TASK = Task(prompt=(5, 6, 7), answer=(10, 11, 12), text="abc")
IDLE: dict[str, Any] = {
    "num_running": 0,
    "pages_total": 10,
    "pages_free": 7,
    "pages_cached": 3,
    "slots_total": 4,
    "slots_free": 4,
    "slots_cached": 0,
    "leaks_total": 0,
    "transfer": {"leases": {}, "rooms": {}, "quarantined": 0},
}


def plan(seed: int = 1, transport: TransportName = TransportName.LOOPBACK) -> list[Any]:
    return make_plan(seed, 120.0, possible_kinds(transport), 3.0)


class TestPlan:
    def test_the_seed_alone_decides(self) -> None:
        assert plan(1) == plan(1) != plan(2)

    def test_every_kind_occurs_and_none_that_the_transport_cannot_do(self) -> None:
        assert {fault.kind for fault in plan()} == set(Kind) - OF_CLIENTS
        assert {fault.kind for fault in plan(transport=TransportName.MOONCAKE)} == set(Kind) - OF_CLIENTS - OF_TRANSPORT

    @pytest.mark.parametrize("seed", range(20))
    def test_a_node_is_stopped_only_while_its_twin_runs(self, seed: int) -> None:
        down = [fault for fault in plan(seed) if fault.kind not in (Kind.CORRUPT, Kind.DELAY)]
        for i, fault in enumerate(down):
            for earlier in down[:i]:
                if ROLE_OF[earlier.node] is ROLE_OF[fault.node]:
                    assert fault.at_s > earlier.at_s + earlier.last_s

    def test_only_what_was_asked_for(self) -> None:
        kinds = frozenset({Kind.KILL_RANK, Kind.LEAVE})
        assert {fault.kind for fault in make_plan(1, 60.0, kinds, 3.0)} == {Kind.KILL_RANK}
        assert make_plan(1, 60.0, OF_CLIENTS, 3.0) == []


def options(**changed: Any) -> dict[str, Any]:
    given = {"seconds": 10.0, "seed": 0, "transport": "loopback", "verify": "digest", "kinds": (), "concurrency": 2}
    times = {"rate": 1.0, "liveness_s": 3.0, "margin_s": 1.0, "settle_s": 1.0}
    return given | times | {"model_path": "m", "dp_size": 1, "report": None, "logs": None} | changed


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"seconds": 0.0}, "--seconds 0"),
        ({"rate": float("inf")}, "--rate inf"),
        ({"concurrency": 0}, "--concurrency 0"),
        ({"kinds": ("kil",)}, "--fault kil.*kill-front"),
        ({"kinds": ("corrupt",), "transport": "mooncake"}, "--fault corrupt.*mooncake"),
        ({"report": Path("/nowhere/at/all")}, "no folder /nowhere/at"),
    ],
)
def test_settings_refused(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        chaos_options(options(**changed))


def test_all_faults_of_the_transport_unless_told() -> None:
    assert chaos_options(options()).kinds == frozenset(Kind)
    assert chaos_options(options(transport="mooncake")).kinds == frozenset(Kind) - OF_TRANSPORT
    assert chaos_options(options(kinds=("leave",))).kinds == {Kind.LEAVE}


def whole(**changed: Any) -> dict[str, Any]:
    meta = {"id": "r", "prompt_tokens": 3, "completion_tokens": 3, "finish_reason": {"type": "length", "length": 3}}
    answer = {"output_ids": [10, 11, 12], "text": "abc"}
    return {name: changed.get(name, value) for name, value in answer.items()} | {
        "meta_info": {name: changed.get(name, value) for name, value in meta.items()}
    }


class TestJudgement:
    def test_the_right_answer(self) -> None:
        judge_whole(TASK, whole(), "r")
        first = {"output_ids": [10], "text": "a"}
        judge_piece(TASK, first, None)
        judge_piece(TASK, {"output_ids": [10, 11], "text": "ab"}, first)

    @pytest.mark.parametrize(
        "changed",
        [
            {"output_ids": [10, 11, 13]},
            {"output_ids": [10, 11]},
            {"output_ids": [10, 11, 12, 13]},
            {"text": "abd"},
            {"id": "s"},
            {"prompt_tokens": 4},
            {"completion_tokens": 2},
            {"finish_reason": {"type": "stop", "matched": 2}},
            {"finish_reason": None},
        ],
    )
    def test_anything_else_is_wrong(self, changed: dict[str, Any]) -> None:
        with pytest.raises(JudgementError) as judged:
            judge_whole(TASK, whole(**changed), "r")
        assert judged.value.end is End.WRONG

    @pytest.mark.parametrize(
        "event",
        [
            {"output_ids": [10], "text": "a"},
            {"output_ids": [10, 12], "text": "ac"},
            {"output_ids": [10, 11, 11], "text": "abb"},
            {"output_ids": [10, 11], "text": "aab"},
        ],
    )
    def test_a_stream_has_no_gap_and_no_repeat(self, event: dict[str, Any]) -> None:
        with pytest.raises(JudgementError) as judged:
            judge_piece(TASK, event, {"output_ids": [10], "text": "a"})
        assert judged.value.end is End.WRONG


class TestChecks:
    def test_an_idle_rank_holds_nothing(self) -> None:
        assert checks.in_use(IDLE) == []

    @pytest.mark.parametrize(
        ("changed", "said"),
        [
            ({"num_running": 1}, "num_running 1"),
            ({"pages_free": 6}, "pages that nobody can use 1"),
            ({"slots_free": 3}, "slots that nobody can use 1"),
            ({"leaks_total": 2}, "leaks_total 2"),
            ({"transfer": {"rooms": {"expected": 1}}}, "rooms expected 1"),
            ({"transfer": {"leases": {"draining": 2}, "quarantined": 0}}, "leases draining 2"),
            ({"transfer": {"leases": {}, "quarantined": 1}}, "quarantined 1"),
        ],
    )
    def test_what_it_should_not_hold_is_named(self, changed: dict[str, Any], said: str) -> None:
        assert checks.in_use(IDLE | changed) == [said]

    def test_growth(self) -> None:
        assert checks.grown({"a": 100, "b": 100}, {"a": 110, "b": 111}) == ["b grew from 0.0 to 0.0 MB"]

    def test_a_request_that_ran_twice_or_was_not_counted(self) -> None:
        counts = Counter({"once": 1, "twice": 2})
        assert checks.computed_twice(counts, [outcome("once"), outcome("twice")]) == ["twice: 2 times"]
        assert checks.computed_twice(Counter(), [outcome("none")]) == ["none: answered, but not counted"]

    def test_ends_that_may_not_be(self) -> None:
        found = [outcome(end.value, end) for end in End]
        assert [line.partition(":")[0] for line in checks.wrong_outcomes(found, all_right=False)] == [
            "wrong",
            "late",
            "broken",
        ]
        assert len(checks.wrong_outcomes(found, all_right=True)) == len(End) - 1

    def test_errors_alone_are_not_enough(self) -> None:
        assert checks.too_few_right([outcome("a"), outcome("b", End.ERROR), outcome("c", End.LEFT)]) == []
        assert checks.too_few_right([outcome("a"), outcome("b", End.ERROR), outcome("c", End.ERROR)])

    @pytest.mark.parametrize("line", ["Traceback (most recent call last):", "… ERROR node.accounting: leak: slot 3"])
    def test_logs_are_read(self, line: str, tmp_path: Path) -> None:
        log = tmp_path / "log"
        node = Process(name="n", command=(), url="", log=log, environment={}, faults=tmp_path / "faults")
        log.write_text("a line\n")
        assert checks.logged_faults([node]) == []
        log.write_text(f"a line\n{line}\n")
        assert checks.logged_faults([node]) == [f"n: 1 in {log}"]


def outcome(rid: str, end: End = End.RIGHT) -> Outcome:
    return Outcome(rid=rid, end=end, seconds=1.0, silence_s=1.0)


async def test_a_fault_waits_until_its_node_has_stayed_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A front may answer for a moment as if its rank lived; what is done to the node then would hit it as it starts."""
    monkeypatch.setattr("cli.chaos.run._NOTICE_S", 0)
    node = SimpleNamespace(lives=3)
    seen: list[tuple[bool, int]] = [(True, 3), (False, 3), (True, 4), (True, 5), (True, 5), (True, 5), (False, 5)]
    asked = iter(seen)

    class Fleet:
        async def all_healthy(self, nodes: object, deadline_s: float) -> bool:
            healthy, node.lives = next(asked)
            return healthy

    storm = _Run.__new__(_Run)
    storm._fleet = Fleet()  # type: ignore[assignment]
    await storm._all_steady([node], 1.0)  # type: ignore[list-item]
    assert list(asked) == seen[-1:]
    asked = iter(seen[-1:])
    await storm._all_steady([node], 1.0)  # type: ignore[list-item]
