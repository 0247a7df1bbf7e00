"""The gate against servers that answer well, badly and not at all."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from accuracy.client import Api, Flush
from accuracy.gate import GateOptions, Report, run_gate
from accuracy.records import Grade, Record
from accuracy.report import write_reports
from accuracy.runs import RunPlan
from accuracy.tasks import Task
from accuracy.verdict import Verdict
from common.errors import ConfigError
from tests.accuracy.conftest import SGLANG
from tests.accuracy.stub import Behaviour, Says, serving

Options = Callable[..., GateOptions]


class Seen:
    """A progress that remembers."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.records: list[Record] = []

    def begin(self, plan: RunPlan, total: int) -> None:
        self.begun.append(f"{plan.name} {plan.side}")

    def record(self, record: Record) -> None:
        self.records.append(record)


async def gate(task: Task, options: GateOptions, progress: Seen | None = None) -> Report:
    return await run_gate(task, options, progress or Seen())


# -- verdicts ------------------------------------------------------------------------------------------------------


async def test_right_answers_pass(task: Task, right: Behaviour, options: Options) -> None:
    progress = Seen()
    with serving(right, info=SGLANG) as server:
        report = await gate(task, options(server.url, warm=2), progress)
    assert (report.verdict, report.exit_code) == (Verdict.PASS, 0)
    assert [run.name for run in report.runs] == ["1 cold", "2 warm", "3 warm"]
    assert [run.flush for run in report.runs] == [Flush.DONE, Flush.NOT_ASKED, Flush.NOT_ASKED]
    assert server.flushes == 1
    assert all(run.right == 200 and run.cached_share == 0.25 for run in report.runs)
    assert report.judgement.spread == 0
    assert progress.begun == ["1 cold subject", "2 warm subject", "3 warm subject"]
    assert len(progress.records) == 600
    body = server.bodies[0]
    assert set(body) == {"text", "sampling_params"}
    assert body["sampling_params"] == {"temperature": 0, "max_new_tokens": 64, "stop": list(task.stop)}


async def test_dropped_requests_make_it_invalid_and_are_not_wrong(
    task: Task, right: Behaviour, options: Options
) -> None:
    with serving(lambda n, prompt: "drop" if n % 33 == 5 else right(n, prompt), info=SGLANG) as server:
        report = await gate(task, options(server.url))
    assert (report.verdict, report.exit_code) == (Verdict.INVALID, 2)
    first = report.runs[0]
    assert (first.failed, first.wrong, first.right, first.accuracy) == (6, 0, 194, 1.0)
    assert "6 of 200 requests failed" in report.reasons[0]
    assert len(report.runs) == 2, "a few failures do not end it early"


async def test_few_failures_are_left_out(task: Task, right: Behaviour, options: Options) -> None:
    with serving(lambda n, prompt: "error" if n in (3, 50) else right(n, prompt), info=SGLANG) as server:
        report = await gate(task, options(server.url, warm=0))
    assert report.verdict is Verdict.PASS
    assert (report.runs[0].failed, report.runs[0].answered, report.runs[0].accuracy) == (2, 198, 1.0)
    assert report.runs[0].errors == {'UnusableAnswerError: HTTP 503: {"error": {"message": "no room"}}': 2}


async def test_failures_that_decide_make_it_invalid(task: Task, right: Behaviour, options: Options) -> None:
    """173 right, 25 wrong, 2 without an answer: 0.865 to 0.875 around the bar of 0.87."""

    def behave(number: int, prompt: str) -> Any:
        if number < 2:
            return "drop"
        return Says(" nothing") if number < 27 else right(number, prompt)

    with serving(behave, info=SGLANG) as server:
        report = await gate(task, options(server.url, warm=0))
    assert report.verdict is Verdict.INVALID
    assert "they decide" in report.reasons[0]


async def test_html_is_invalid_at_once(task: Task, options: Options) -> None:
    with serving(lambda number, prompt: "html") as server:
        report = await gate(task, options(server.url))
    assert report.verdict is Verdict.INVALID
    assert "no JSON but text/html: <html>" in report.reasons[0]
    assert len(report.runs) == 1
    assert report.runs[0].right == report.runs[0].wrong == 0
    assert report.runs[0].failed > 50
    assert report.runs[0].failed + report.runs[0].unasked == 200


async def test_a_server_that_hangs_is_invalid_after_one_time_out(task: Task, options: Options) -> None:
    begin = time.monotonic()
    with serving(lambda number, prompt: "hang", info=SGLANG) as server:
        report = await gate(task, options(server.url, timeout_s=1.0, parallel=8))
    assert report.verdict is Verdict.INVALID
    assert time.monotonic() - begin < 10, "not a time-out for each wave of requests"
    assert 3 <= report.runs[0].timed_out <= 8
    assert report.runs[0].unasked == 200 - report.runs[0].failed
    assert "no answer within 1 s" in report.reasons[0]


async def test_nobody_there_is_invalid(task: Task, options: Options) -> None:
    report = await gate(task, options("http://127.0.0.1:1"))
    assert report.verdict is Verdict.INVALID
    assert "Cannot connect" in report.reasons[0]


async def test_aborts_are_failures(task: Task, right: Behaviour, options: Options) -> None:
    with serving(lambda n, prompt: "abort" if n < 5 else right(n, prompt), info=SGLANG) as server:
        report = await gate(task, options(server.url, warm=0))
    assert report.verdict is Verdict.INVALID
    assert report.runs[0].failed == 5


async def test_cut_answers_are_wrong_and_counted(task: Task, right: Behaviour, options: Options) -> None:
    def behave(number: int, prompt: str) -> Says:
        whole = right(number, prompt)
        assert isinstance(whole, Says)
        return replace(whole, finish="length") if number % 4 == 0 else whole

    with serving(behave, info=SGLANG) as server:
        report = await gate(task, options(server.url, warm=0))
    assert (report.verdict, report.exit_code) == (Verdict.FAIL, 1)
    run = report.runs[0]
    assert (run.right, run.wrong, run.cut, run.failed, run.right_if_cut_counted) == (150, 50, 50, 0, 200)
    assert "50 cut by the length limit" in report.reasons[0]


async def test_the_worst_run_counts(task: Task, right: Behaviour, options: Options) -> None:
    """Right when cold, without a number when warm: what upstream's gate, which only runs cold, does not see."""
    with serving(lambda n, prompt: right(n, prompt) if n < 200 else Says("I do not know"), info=SGLANG) as server:
        report = await gate(task, options(server.url))
    assert report.verdict is Verdict.FAIL
    assert report.judgement.worst.name == "2 warm"
    assert report.judgement.worst.no_number == 200
    assert report.judgement.spread == pytest.approx(0.7071, abs=1e-4)


async def test_exactly_the_threshold_passes(task: Task, right: Behaviour, options: Options) -> None:
    with serving(lambda n, prompt: right(n, prompt) if n >= 26 else Says("-1"), info=SGLANG) as server:
        report = await gate(task, options(server.url, warm=0))
    assert (report.runs[0].right, report.verdict) == (174, Verdict.PASS)


# -- servers of other kinds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("api", "field"), [(None, "prompt"), (Api.COMPLETIONS, "prompt"), (Api.CHAT, "messages")])
async def test_completions(task: Task, right: Behaviour, options: Options, api: Api | None, field: str) -> None:
    with serving(right) as server:
        report = await gate(task, options(server.url, api=api, warm=0))
    assert report.verdict is Verdict.PASS
    assert report.api == (api or Api.COMPLETIONS)
    assert report.runs[0].cached_share == 0.25
    assert server.bodies[0]["model"] == "stub"
    assert server.bodies[0]["max_tokens"] == 64
    assert field in server.bodies[0]
    assert set(server.prompts()) == {q.prompt for q in task.questions}


# -- going on ------------------------------------------------------------------------------------------------------


async def test_what_was_stopped_goes_on(task: Task, right: Behaviour, options: Options) -> None:
    with serving(right, info=SGLANG) as server:
        whole = await gate(task, options(server.url))
        journal = options(server.url).output / "answers.jsonl"
        lines = journal.read_bytes().split(b"\n")
        assert len(lines) == 1 + 400 + 1
        journal.write_bytes(b"\n".join(lines[:250]) + b"\n" + lines[250][:20])
        asked = len(server.bodies)
        report = await gate(task, options(server.url, resume=True))
        assert len(server.bodies) - asked == 400 - 249
        assert report.runs[0].right == whole.runs[0].right == 200
        assert report.runs[1].right == 200
        again = await gate(task, options(server.url, resume=True))
        assert len(server.bodies) - asked == 400 - 249
        assert again.verdict is Verdict.PASS


async def test_other_settings_do_not_go_on(task: Task, right: Behaviour, options: Options) -> None:
    with serving(right, info=SGLANG) as server:
        await gate(task, options(server.url, warm=0))
        with pytest.raises(ConfigError, match=r"--resume: .*other settings"):
            await gate(task, options(server.url, warm=0, resume=True, max_tokens=65))
        journal = options(server.url).output / "answers.jsonl"
        journal.write_bytes(journal.read_bytes().replace(b'"grade":"right"', b'"grade":"splendid"', 1))
        with pytest.raises(ConfigError, match=r"answers.jsonl, line 2"):
            await gate(task, options(server.url, warm=0, resume=True))


# -- against a baseline --------------------------------------------------------------------------------------------


async def test_a_loss_is_told_from_a_weak_model(task: Task, right: Behaviour, options: Options, tmp_path: Path) -> None:
    bad = {q.prompt for q in task.questions[::5]}

    def weak(number: int, prompt: str) -> Any:
        return Says(" 1234567") if prompt in bad else right(number, prompt)

    with serving(right, info=SGLANG) as good, serving(weak, info=SGLANG) as poor:
        loses = await gate(task, options(poor.url, baseline=good.url, warm=0))
        both = await gate(task, options(poor.url, baseline=poor.url, warm=0))
        lenient = await gate(task, options(poor.url, baseline=good.url, warm=0, threshold=0.5))
        wins = await gate(task, options(good.url, baseline=poor.url, warm=0))
    assert [r.verdict for r in (loses, both, lenient, wins)] == ["fail", "fail", "fail", "pass"]
    assert "loses against the baseline" in loses.reasons[-2]
    assert loses.reasons[-1] == (
        "run 1 cold: 40 of 40 lost questions came after a prefix hit, first gsm-mini/0/0 "
        "(25 of 100 prompt tokens were cached, token 1 is the first that differs)"
    )
    assert "the model is weak" in both.reasons[-1]
    assert "loses against the baseline" in lenient.reasons[-2]
    pairing = loses.pairings[0]
    assert (pairing.both, pairing.only_subject, pairing.only_baseline, pairing.neither) == (160, 0, 40, 0)
    assert pairing.p == pytest.approx(2 * 0.5**40)
    assert (pairing.hits, pairing.differing_hits, pairing.lost_hits) == (200, 40, 40)
    one = pairing.differences[0]
    assert (one.first_token, one.first_character, one.cached_tokens) == (1, 1, 25)
    assert (one.subject_token, one.baseline_token) == (ord("1"), ord("I"))
    assert (one.subject_grade, one.baseline_grade) == (Grade.WRONG, Grade.RIGHT)


async def test_a_baseline_that_does_not_answer_makes_it_invalid(task: Task, right: Behaviour, options: Options) -> None:
    with serving(right, info=SGLANG) as good, serving(lambda n, p: "error", info=SGLANG) as broken:
        report = await gate(task, options(good.url, baseline=broken.url))
    assert report.verdict is Verdict.INVALID
    assert report.reasons[0].startswith("baseline, run 1 cold")


# -- reports -------------------------------------------------------------------------------------------------------


async def test_reports_say_the_same(task: Task, right: Behaviour, options: Options, tmp_path: Path) -> None:
    def nasty(number: int, prompt: str) -> Any:
        return Says("<script>alert('\x07')</script>&") if number % 3 == 0 else right(number, prompt)

    with serving(nasty, info=SGLANG) as poor, serving(right, info=SGLANG) as good:
        report = await gate(task, options(poor.url, baseline=good.url, warm=1, history=tmp_path / "nights"))
    write_reports(report, tmp_path)
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["verdict"] == "fail"
    assert len(found["runs"]) == 4
    suite = ET.parse(tmp_path / "report.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("7", "3", "0")
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "http://www" not in page and "src=" not in page, "nothing is loaded"
    assert page.count("<svg") == 1 + 1 + 4
    assert [night.accuracies for night in report.nights] == [[run.accuracy for run in report.runs[::2]]]


async def test_reports_of_an_odd_server(task: Task, options: Options, tmp_path: Path) -> None:
    with serving(lambda number, prompt: "html") as server:
        report = await gate(task, options(server.url))
    assert "\x07" in report.reasons[0]
    write_reports(report, tmp_path)
    suite = ET.parse(tmp_path / "report.xml").getroot()
    assert (suite.get("failures"), suite.get("errors")) == ("0", "1")
    assert "invalid" in (tmp_path / "report.html").read_text()
