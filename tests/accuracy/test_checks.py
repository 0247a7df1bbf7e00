"""What kl, parity and bisect make of the answers of servers that differ."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from accuracy.bisect import Bisection, compare_states
from accuracy.kl import estimate, measure_kl
from accuracy.parity import Hits, Likeness, compare_tokens, hits
from accuracy.prompts import load_prompts
from cli.gate.checks import bisection_lines, difference_line, failing_prompt, first_difference_line
from common.errors import ConfigError, WorkerError

# -- kl ------------------------------------------------------------------------------------------------------------


class Scorer:
    """A client whose server decodes with one log-probability and prefills with another one."""

    url = "http://scorer"

    def __init__(self, prefilled: float, *, flush: str = "flushed") -> None:
        self.prefilled, self.flushed = prefilled, flush
        self.asked: list[str] = []

    async def flush(self) -> Any:
        from accuracy.client import Flush

        self.asked.append("flush")
        return Flush(self.flushed)

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        return (await self.generate_all([body]))[0]

    async def generate_all(self, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self.asked.append("sample" if bodies[0]["sampling_params"]["max_new_tokens"] else "score")
        return [{"meta_info": self._meta(body)} for body in bodies]

    def _meta(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = body.get("input_ids") or [1, 2, 3]
        new = body["sampling_params"]["max_new_tokens"]
        start = body.get("logprob_start_len", len(ids))
        return {
            "input_token_logprobs": [[self.prefilled, token, None] for token in ids[start:]],
            "output_token_logprobs": [[-1.0, 7, None]] * new,
            "cached_tokens": 0,
        }


async def measured(scorer: Scorer) -> list[Any]:
    prompts = [{"text": "a"}, {"input_ids": [4, 5]}]
    return await measure_kl(scorer, prompts, new_tokens=3, bounds=(0.002, 0.01))  # type: ignore[arg-type]


def test_the_estimate_is_zero_for_equals_and_grows_to_both_sides() -> None:
    assert estimate([-0.1, -2.0], [-0.1, -2.0]) == 0.0
    assert estimate([-1.0], [-0.5]) == pytest.approx(math.exp(0.5) - 1.5)
    assert estimate([-1.0], [-1.5]) == pytest.approx(math.exp(-0.5) - 0.5)


async def test_equal_log_probabilities_are_within_the_bound_and_others_are_not() -> None:
    for prefilled, within in ((-1.0, [True, True]), (-1.1, [False, True]), (-2.0, [False, False])):
        found = await measured(Scorer(prefilled))
        assert [one.within for one in found] == within
        assert [(one.case, one.tokens, one.unsure) for one in found] == [("cold", 6, 6), ("warm", 6, 6)]
        assert found[0].largest == pytest.approx(abs(prefilled + 1.0))


async def test_what_is_scored_is_prefilled_and_not_found_in_a_cache() -> None:
    scorer = Scorer(-1.0)
    await measured(scorer)
    cold, warm = ["flush", "sample", "flush", "score"], ["flush", "sample", "sample", "flush", "score"]
    assert scorer.asked == ["score", *cold, *warm], "the first for the tokens of the prompt that is a text"


async def test_a_server_that_cannot_flush_is_no_reference() -> None:
    with pytest.raises(WorkerError, match="not flushed"):
        await measured(Scorer(-1.0, flush="not flushed: the server cannot"))


# -- parity --------------------------------------------------------------------------------------------------------


class Speaker:
    """A client whose server says these tokens. gap: between its two best ones."""

    def __init__(self, ids: list[int], gap: float = 3.0) -> None:
        self.ids, self.gap = ids, gap

    async def flush(self) -> None:
        """Nothing is kept."""

    async def generate_all(self, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        told = [[-0.1, token, None] for token in self.ids]
        top = [[[-0.1, token, None], [-0.1 - self.gap, 0, None]] for token in self.ids]
        meta = {"output_token_logprobs": told, "output_top_logprobs": top, "cached_tokens": 5}
        return [{"meta_info": meta} for _ in bodies]


@pytest.mark.parametrize(
    ("ours", "theirs", "gap", "likeness", "position"),
    [
        ([1, 2, 3], [1, 2, 3], 3.0, Likeness.EQUAL, None),
        ([1, 9, 3], [1, 2, 3], 3.0, Likeness.DIFFERENT, 1),
        ([1, 9, 3], [1, 2, 3], 1e-5, Likeness.NEAR_TIE, 1),
        ([1, 2], [1, 2, 3], 3.0, Likeness.DIFFERENT, 2),
        ([1, 2, 3], [1, 2], 1e-5, Likeness.DIFFERENT, 2),
    ],
)
async def test_tokens_are_compared(
    ours: list[int], theirs: list[int], gap: float, likeness: Likeness, position: int | None
) -> None:
    subject, baseline = Speaker(ours), Speaker(theirs, gap)
    found = await compare_tokens(subject, baseline, [{"text": "a"}], new_tokens=3, tie=1e-4)  # type: ignore[arg-type]
    assert [one.run for one in found] == ["cold", "warm"]
    assert (found[0].likeness, found[0].position) == (likeness, position)


def token(cached: int, *ids: int) -> dict[str, Any]:
    """An answer whose alternatives at each position are 2, 3 and 4, in that order."""
    top = [[-0.1, 2, None], [-0.4, 3, None], [-2.3, 4, None]]
    meta = {"output_token_logprobs": [[-0.1, i, None] for i in ids], "output_top_logprobs": [top] * len(ids)}
    return {"meta_info": meta | {"cached_tokens": cached, "prompt_tokens": 640}}


@pytest.mark.parametrize(
    ("ours", "shortfall", "likeness"),
    [(3, 0.3, Likeness.NEAR_TIE), (4, 2.2, Likeness.DIFFERENT), (9, 2.2, Likeness.DIFFERENT)],
)
async def test_a_token_that_differs_is_weighed_by_the_baseline(ours: int, shortfall: float, likeness: Likeness) -> None:
    """Not by its two best alone: the third one is no tie when they are close."""
    subject, baseline = Told([token(512, ours)]), Told([token(0, 2)])
    found = await compare_tokens(subject, baseline, [{"text": "a"}], new_tokens=1, tie=0.31)  # type: ignore[arg-type]
    assert found[0].shortfall == pytest.approx(shortfall) and found[0].likeness is likeness
    assert found[0].gap == pytest.approx(0.3)


class Told:
    """A client whose server gives these answers."""

    def __init__(self, answers: list[dict[str, Any]]) -> None:
        self.answers = answers

    async def flush(self) -> None:
        """Nothing is kept."""

    async def generate_all(self, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self.answers


async def test_wrong_answers_after_prefix_hits_are_set_against_the_others() -> None:
    subject = Told([token(512, 4), token(512, 2), token(0, 2)])
    baseline = Told([token(0, 2)] * 3)
    found = await compare_tokens(subject, baseline, [{"text": "a"}] * 3, new_tokens=1, tie=0.1)  # type: ignore[arg-type]
    both = hits(found)
    assert (both.hits, both.different_hits, both.others, both.different_others) == (4, 2, 2, 0)
    assert [one.prefix_hit for one in found[:3]] == [True, True, False]
    assert difference_line(found[0]) == (
        "cold, prompt 0: token 0 is 4 here and 2 there, which the baseline finds likelier by 2.2 "
        "(log-probability; its two best: 0.3); a prefix hit: 512 of 640 prompt tokens were cached"
    )


@pytest.mark.parametrize(
    ("counts", "suspected"),
    [
        ((10, 0, 10, 0), False),
        ((10, 5, 10, 5), False),
        ((10, 5, 10, 4), False),
        ((39, 1, 25, 0), False),
        ((10, 3, 10, 0), False),
        ((10, 4, 10, 0), True),
        ((10, 10, 0, 0), False),
        ((0, 0, 10, 9), False),
    ],
)
def test_prefix_hits_are_suspected_when_chance_is_no_reason(counts: tuple[int, ...], suspected: bool) -> None:
    made, wrong, others, wrong_others = counts
    found = Hits(hits=made, different_hits=wrong, others=others, different_others=wrong_others)
    assert found.are_suspected == suspected


# -- bisect --------------------------------------------------------------------------------------------------------


def state(tracked: int = 64, **changed: float) -> dict[str, Any]:
    """Two layers of conv and ssm around one of kv. changed: by part and layer, how far every projection is off."""
    names = [("kv", 1), ("conv", 0), ("ssm", 0), ("conv", 2), ("ssm", 2), ("track ssm", 0)]
    parts = []
    for part, layer in names:
        off = changed.get(f"{part.replace(' ', '_')}{layer}", 0.0)
        parts.append({"part": part, "layer": layer, "digest": f"d{off}", "norm": 10.0, "sketch": [5.0 + off] * 4})
    return {"tokens": 70, "tracked": tracked, "parts": parts}


def compared(notes: list[str] | None = None, **changed: Any) -> Bisection:
    found = compare_states("cold", "after commit", state(**changed), state(), 1e-4, notes if notes is not None else [])
    return Bisection(tolerance=1e-4, findings=found, notes=[], first_tokens={"cold": None})


def test_equal_states_do_not_differ() -> None:
    found = compared()
    assert not found.differs
    assert all(one.equal_bytes for one in found.findings)
    assert first_difference_line(found) == "no part of the state differs"


def test_rounding_does_not_differ() -> None:
    found = compared(ssm0=1e-5)
    assert not found.differs
    assert not found.findings[1].equal_bytes


def test_the_first_part_in_the_order_of_the_layers_is_named() -> None:
    found = compared(ssm2=0.1, track_ssm0=0.1)
    assert found.first is not None
    assert (found.first.part, found.first.layer, found.first.distance) == ("ssm", 2, pytest.approx(0.01))
    assert "first difference: cold, after commit: ssm of layer 2 (relative distance 0.01" in first_difference_line(
        found
    )
    assert "ssm 1.0e-02 (layers 2)" in bisection_lines(found)[0]


def test_no_number_differs() -> None:
    assert compared(conv0=math.nan).differs


def test_saved_states_of_other_positions_are_not_compared() -> None:
    notes: list[str] = []
    assert not compared(notes, tracked=128, track_ssm0=0.5).differs
    assert notes == ["cold, after commit: saved at 128, by the unified node at 64"]
    assert not compared(tracked=-1, track_ssm0=0.5).differs


# -- what is asked -------------------------------------------------------------------------------------------------


def test_prompts_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text('plain\n\n{"text": "a"}\n{"prompt": "b", "x": 1}\n{"input_ids": [1, 2]}\n')
    assert load_prompts(path, 10) == [{"text": "plain"}, {"text": "a"}, {"text": "b"}, {"input_ids": [1, 2]}]
    assert len(load_prompts(path, 2)) == 2
    assert len(load_prompts(None, 3)) == 3


@pytest.mark.parametrize(
    ("content", "word"),
    [("", "no prompt in it"), ("{", "line 1: no JSON"), ('a\n{"input_ids": []}', "line 2: an object with text")],
)
def test_prompts_that_are_none(tmp_path: Path, content: str, word: str) -> None:
    path = tmp_path / "prompts"
    path.write_text(content)
    with pytest.raises(ConfigError, match=word):
        load_prompts(path, 10)


def test_a_failing_prompt_is_one_that_the_baseline_had_right(tmp_path: Path) -> None:
    def line(side: str, name: str, grade: str) -> str:
        common = {"run": 0, "asked": "", "label": 1, "leaked": False, "found": None, "outcome": {}}
        return json.dumps({"side": side, "id": name, "prompt": f"prompt {name}", "grade": grade, **common})

    path = tmp_path / "answers.jsonl"
    rows = [("subject", "a", "wrong"), ("subject", "b", "cut"), ("baseline", "a", "wrong"), ("baseline", "b", "right")]
    path.write_text("{}\n" + "\n".join(line(*row) for row in rows) + "\n")
    assert failing_prompt(path, None) == {"text": "prompt b"}
    assert failing_prompt(path, "a") == {"text": "prompt a"}
    with pytest.raises(ConfigError, match="no question c"):
        failing_prompt(path, "c")
    path.write_text("{}\n" + line("subject", "a", "right") + "\n")
    with pytest.raises(ConfigError, match="answered wrong"):
        failing_prompt(path, None)
