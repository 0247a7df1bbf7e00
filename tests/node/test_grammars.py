"""Grammars are tried out in a process of their own, which may die of one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import uvloop

from common.config import Role
from common.errors import CapacityError, RequestError
from node import grammars
from node.grammars import CPU_S, MAX_REMEMBERED, GrammarChecker, Settings
from node.sampling_fields import GrammarSource, read_sampling
from tests.node.conftest import FakeNode, fake_node, node_config
from tests.support.grammars import EOS, VOCAB
from tests.support.stack import MODEL

SETTINGS = Settings(model_path=str(MODEL), vocab_size=VOCAB, eos_ids=[EOS])
GIANTS = {
    "a large divisor": ("json_schema", json.dumps({"type": "integer", "multipleOf": 2_375_701})),
    "intersections": ("ebnf", "start: A\nA: " + " & ".join(f"/.*a.{{{i}}}.*/" for i in range(300))),
    "a chain of terminals": (
        "ebnf",
        "start: R0\n" + "".join(f'R{i}: R{i + 1} "x"?\n' for i in range(2000)) + 'R2000: "a"',
    ),
    "ambiguity": ("ebnf", "start: s\ns: s s" + ' | "a" s' * 3000),
    "many optional properties": (
        "json_schema",
        json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2500)}}),
    ),
    "alternatives": ("regex", "(a|b|ab)*" * 5000),
    "nested groups": ("regex", "(" * 20_000 + "a" + ")" * 20_000),
    "nested rules": ("ebnf", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "nested GBNF": ("ebnf", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "a long chain of GBNF": (
        "ebnf",
        "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(3500)) + 'r3500 ::= "a" missing',
    ),
    "nested schemas": ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
}


def source(kind: str, text: str) -> GrammarSource:
    return GrammarSource(kind=kind, text=text, path=f"sampling_params.{kind}")


@pytest_asyncio.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(SETTINGS)
    yield checker
    await checker.close()


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "NUM_PROCESSES", 1)


@pytest_asyncio.fixture
async def single(one_process: None) -> AsyncIterator[GrammarChecker]:
    """With one process, for tests that stop it."""
    checker = GrammarChecker(SETTINGS)
    yield checker
    await checker.close()


def pids_of(checker: GrammarChecker) -> list[int]:
    return [p._process.pid for p in checker._processes if p._process is not None]


def pid_of(checker: GrammarChecker) -> int:
    (pid,) = pids_of(checker)
    return pid


async def until_asked(checker: GrammarChecker) -> None:
    async with asyncio.timeout(20):
        while not checker._free.empty():  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0)


async def refusal(checker: GrammarChecker, kind: str, text: str) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await checker.check(source(kind, text))
    assert caught.value.param == f"sampling_params.{kind}" and caught.value.http_status == 400
    return caught.value


async def test_a_grammar_comes_back_in_the_engines_form(checker: GrammarChecker) -> None:
    assert "lark_grammar" in await checker.check(source("regex", "[0-9]+"))
    schema = await checker.check(source("json_schema", '{"type": "boolean"}'))
    assert "boolean" in schema and "whitespace_pattern" in schema
    assert "start" in await checker.check(source("ebnf", 'root ::= "a"'))


SLOW = {"intersections", "a chain of terminals"}  # in their way like the first


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in GIANTS])
async def test_a_giant_is_refused_in_bounded_time_and_the_next_one_is_checked(
    checker: GrammarChecker, name: str
) -> None:
    await checker.check(source("regex", "warm"))
    begin_s = psutil.Process().cpu_times().children_user
    error = await refusal(checker, *GIANTS[name])
    assert len(error.message) < 1000
    pids = pids_of(checker)
    assert (await refusal(checker, *GIANTS[name])).message == error.message and pids_of(checker) == pids
    assert await checker.check(source("regex", "[0-9]+"))
    await checker.close()
    assert psutil.Process().cpu_times().children_user - begin_s < 2 * CPU_S + 2, "of processor time, starts included"


async def test_what_is_remembered_is_bounded(checker: GrammarChecker) -> None:
    for n in range(MAX_REMEMBERED + 5):
        await checker.check(source("regex", f"a{n}"))
    assert len(checker._good) == MAX_REMEMBERED


async def test_many_at_once_get_their_own_answers(checker: GrammarChecker) -> None:
    texts = [f"[a-z]{{{n}}}" for n in range(20)]
    found = await asyncio.gather(*(checker.check(source("regex", text)) for text in texts))
    assert all(f"{{{n}}}" in answer for n, answer in enumerate(found))


async def test_bad_grammars_do_not_push_good_ones_out(checker: GrammarChecker) -> None:
    await checker.check(source("regex", "good"))
    for n in range(MAX_REMEMBERED + 5):
        await refusal(checker, "regex", f"[{n}")
    assert ("regex", "good") in checker._good and len(checker._refused) == MAX_REMEMBERED


async def test_a_request_that_is_given_up_leaves_no_answer_for_the_next(single: GrammarChecker) -> None:
    await single.check(source("regex", "warm"))
    os.kill(pid_of(single), signal.SIGSTOP)
    given_up = asyncio.create_task(single.check(source("regex", "first")))
    await until_asked(single)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert "second" in await single.check(source("regex", "second"))


async def test_a_process_that_says_nothing_is_replaced(single: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    await single.check(source("regex", "warm"))
    os.kill(pid_of(single), signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(grammars, "ANSWER_S", 0.1)
        with pytest.raises(CapacityError):
            await single.check(source("regex", "a"))
    assert await single.check(source("regex", "a"))


async def test_a_process_that_is_killed_costs_nobody_an_answer(single: GrammarChecker) -> None:
    await single.check(source("regex", "warm"))
    for n in range(3):  # while nobody asks
        process = psutil.Process(pid_of(single))
        process.kill()
        psutil.wait_procs([process], timeout=0.2)
        assert await single.check(source("regex", f"idle{n}"))
    os.kill(pid_of(single), signal.SIGSTOP)  # while it is asked
    asked = asyncio.create_task(single.check(source("regex", "a")))
    await until_asked(single)
    os.kill(pid_of(single), signal.SIGKILL)
    assert await asked


async def test_uvloop_too_finds_that_the_process_is_gone(one_process: None) -> None:
    async def kill_and_ask() -> None:
        checker = GrammarChecker(SETTINGS)
        for pause_s in (0.0, 0.2):
            await checker.check(source("regex", f"warm{pause_s}"))
            os.kill(pid_of(checker), signal.SIGKILL)
            await asyncio.sleep(pause_s)
            assert await checker.check(source("regex", f"a{pause_s}"))
        await checker.close()

    await asyncio.to_thread(uvloop.run, kill_and_ask())


async def test_a_process_that_dies_every_time_ends_the_tries(
    single: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(CapacityError):
        await single.check(source("regex", "a"))
    monkeypatch.setattr(sys, "executable", "/no/such/program")
    with pytest.raises(CapacityError):
        await single.check(source("regex", "a"))


async def test_who_waits_too_long_in_line_is_told_to_come_again(
    single: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await single.check(source("regex", "warm"))
    os.kill(pid_of(single), signal.SIGSTOP)
    first = asyncio.create_task(single.check(source("regex", "first")))
    await until_asked(single)
    with monkeypatch.context() as patch:
        patch.setattr(grammars, "LINE_S", 0.05)
        for text in ("second", "first"):  # the same one waits for that answer
            with pytest.raises(CapacityError) as caught:
                await single.check(source("regex", text))
            assert caught.value.retryable
    with monkeypatch.context() as patch:
        patch.setattr(grammars, "MAX_WAITING", 0)
        with pytest.raises(CapacityError, match="wait to be checked"):
            await single.check(source("regex", "third"))
    os.kill(pid_of(single), signal.SIGCONT)
    assert "first" in await first
    assert "second" in await single.check(source("regex", "second")), "the line goes on"


async def test_one_that_takes_long_holds_nobody_up(checker: GrammarChecker) -> None:
    await checker.check(source("regex", "warm"))
    os.kill(pid_of(checker), signal.SIGSTOP)
    stuck = asyncio.create_task(checker.check(source("regex", "stuck")))
    await asyncio.sleep(0)
    assert "quick" in await checker.check(source("regex", "quick"))
    assert not stuck.done() and len(pids_of(checker)) == 2
    stuck.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stuck


async def test_the_same_grammar_of_many_is_tried_once(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_WAITING", 0)
    found = await asyncio.gather(*(checker.check(source("regex", "same")) for _ in range(100)))
    assert len(set(found)) == 1 and len(pids_of(checker)) == 1


async def test_nothing_stays_behind() -> None:
    await GrammarChecker(SETTINGS).close()
    checker = GrammarChecker(SETTINGS)
    await checker.check(source("regex", "a"))
    process = psutil.Process(pid_of(checker))
    await checker.close()
    assert not process.is_running()


async def test_only_prompts_with_a_grammar_are_changed(checker: GrammarChecker) -> None:
    free = read_sampling("sampling_params[0]", {}, VOCAB)
    bound = read_sampling("sampling_params[1]", {"regex": "a", "ignore_eos": True, "n": 2}, VOCAB)
    assert not bound.params.ignore_eos, "the grammar says where the answer ends"
    first, second = await checker.resolve([free, bound])
    assert first is free and second.params.grammar is not None and second.sample(1, 9).grammar == second.params.grammar


async def test_a_model_whose_tokenizer_is_not_known_refuses_every_grammar() -> None:
    checker = GrammarChecker(Settings(model_path=str(MODEL), vocab_size=VOCAB // 2, eos_ids=[EOS]))
    try:
        assert "tokenizer" in (await refusal(checker, "regex", "a")).message
    finally:
        await checker.close()


# -- in a node ---------------------------------------------------------------------------------------------------------


def checkers(node: FakeNode) -> list[psutil.Process]:
    return [child for child in node.ranks() if "node.grammar_check" in child.cmdline()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_starts_with_the_first_grammar_and_ends_with_its_node(
    model_path: str, tmp_path: Path, number: signal.Signals
) -> None:
    with fake_node(node_config(model_path, Role.UNIFIED), tmp_path / "log") as node:
        assert node.post({"text": "a"}).status_code == 200 and not checkers(node)
        for _ in range(2):
            assert node.post({"text": "a", "sampling_params": {"regex": "a"}}).status_code == 200
        refused = node.post({"text": "a", "sampling_params": {"regex": "[a"}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "sampling_params.regex")
        (checker,) = checkers(node)
        node.process.send_signal(number)
        node.process.wait(20)
        checker.wait(10)
