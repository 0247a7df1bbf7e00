"""Answers that follow a grammar, on real ranks in this process and through real servers."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import jsonschema
import pytest
import tokenizers

from common.config import EngineConfig
from common.sampling import FinishReason, SamplingParams
from engine.grammar import compile_grammar
from node.messages import Submit
from tests.support.grammars import EOS, VOCAB, grammar, tokens
from tests.support.ranks import (
    WITH_LOGPROBS,
    Outcome,
    Ranks,
    Request,
    assert_equivalent,
    disaggregated_ranks,
    run_late,
    unified_ranks,
)
from tests.support.stack import MODEL, Stack, generate

ONE_CHARACTER = {"type": "string", "maxLength": 6}
SMALL = {"type": "integer", "minimum": -20, "maximum": 120}

SCHEMAS: list[dict[str, Any]] = [
    {"type": "boolean"},
    {"type": "null"},
    SMALL,
    ONE_CHARACTER,
    {"type": "number", "minimum": 0, "maximum": 9, "multipleOf": 0.5},
    {"enum": ["red", "green", 3, None, {"a": [1]}]},
    {"const": {"kind": "x", "n": 1}},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"type": "array", "items": SMALL, "minItems": 1, "maxItems": 4},
    {"type": "array", "prefixItems": [SMALL, {"type": "boolean"}], "items": False, "minItems": 2},
    {"type": "array", "items": {"type": "array", "items": {"type": "null"}, "maxItems": 2}, "maxItems": 3},
    {"type": ["integer", "null"], "minimum": 1, "maximum": 9},
    {"anyOf": [SMALL, {"type": "boolean"}]},
    {"oneOf": [{"type": "null"}, {"type": "string", "enum": ["a", "b"]}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 70},
    {"$defs": {"leaf": SMALL}, "$ref": "#/$defs/leaf"},
    {"type": "object", "properties": {}, "additionalProperties": False},
    {"type": "object", "properties": {"a": SMALL}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "properties": {"a": SMALL, "b": {"type": "boolean"}}, "additionalProperties": False},
    {
        "type": "object",
        "properties": {"name": ONE_CHARACTER, "age": SMALL},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "object", "patternProperties": {"^[a-c]$": {"type": "null"}}, "additionalProperties": False}
    | {"maxProperties": 1},
    {
        "type": "object",
        "properties": {"o": {"type": "object", "properties": {"p": {"const": 1}}, "required": ["p"]}},
        "required": ["o"],
    },
    {"type": "object", "properties": {'q"\\\n': {"type": "boolean"}}, "required": ['q"\\\n']}
    | {"additionalProperties": False},
    {
        "type": "object",
        "properties": {"é😀": {"enum": ["ä", "😀"]}},
        "required": ["é😀"],
        "additionalProperties": False,
    },
    {"type": "string", "enum": ["naïve", 'say "hi"', "a\\b", "tab\t", ""]},
    {"type": "string", "pattern": "^(ab|cd){2}$"},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1, "multipleOf": 0.25},
    {"type": "array", "items": {"enum": [1, 2]}, "minItems": 3, "maxItems": 3},
    {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"v": {"enum": [0, 1]}, "c": {"type": "array", "maxItems": 1, "items": {"type": "null"}}},
                "required": ["v", "c"],
                "additionalProperties": False,
            }
        },
        "type": "array",
        "items": {"$ref": "#/$defs/tree"},
        "minItems": 1,
        "maxItems": 2,
    },
    {"type": "object", "properties": {"t": {"type": "string", "format": "time"}}, "required": ["t"]}
    | {"additionalProperties": False},
]
REGEXES = ["[0-9]{3}", "(yes|no)", "[a-c]{2,9}x", r"\d{4}-\d{2}-\d{2}", "(ab|cde){2,3}", "[^a-z]{4}", "é[äö]+😀", "a"]

tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
PROMPT: list[int] = tokenizer.encode("Question: Tom has 12 apples and buys 7 more. How many has he?\nAnswer:").ids


def text_of(outcome: Outcome) -> str:
    assert outcome.error is None, outcome.error
    return str(tokenizer.decode([i for i in outcome.ids if i != EOS], skip_special_tokens=False))


def request(
    text: str | None, *, prompt: list[int] | None = None, seed: int = 0, temperature: float = 1.0, **more: Any
) -> Request:
    """text: of a grammar, in the engine's form."""
    sampling = {"max_new_tokens": 200, "sampling_seed": seed, "temperature": temperature, "grammar": text, **more}
    return Request(prompt=prompt or PROMPT, sampling=SamplingParams(**sampling))


def random_prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, VOCAB), k=5 + seed % 40)


def check_json(schema: dict[str, Any], outcome: Outcome) -> None:
    """Complete answers are JSON of this schema; one that was cut is the beginning of such an answer."""
    text = text_of(outcome)
    assert outcome.finish is not None
    if outcome.finish.type == "stop":
        jsonschema.validate(json.loads(text), schema)
    else:
        assert compile_grammar(tokens(), grammar("json_schema", json.dumps(schema))).consume_tokens(outcome.ids)


@pytest.fixture(scope="module")
def unified() -> Iterator[Ranks]:
    with unified_ranks() as ranks:
        yield ranks


# -- what is made follows the grammar ----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_answer_follows_its_schema(unified: Ranks, temperature: float) -> None:
    requests = [
        request(grammar("json_schema", json.dumps(schema)), prompt=random_prompt(i), seed=i, temperature=temperature)
        for i, schema in enumerate(SCHEMAS)
    ]
    outcomes = unified.run(requests)
    for schema, outcome in zip(SCHEMAS, outcomes, strict=True):
        check_json(schema, outcome)
    complete = [o for o in outcomes if o.finish is not None and o.finish.type == "stop"]
    assert len(complete) >= len(SCHEMAS) - 2, "a small schema's answer fits 200 tokens"
    unified.assert_all_free()


def test_every_answer_matches_its_regex(unified: Ranks) -> None:
    requests = [
        request(grammar("regex", pattern), prompt=random_prompt(seed), seed=seed)
        for pattern in REGEXES
        for seed in range(3)
    ]
    patterns = [pattern for pattern in REGEXES for _ in range(3)]
    for pattern, outcome in zip(patterns, unified.run(requests), strict=True):
        assert outcome.finish is not None
        whole = outcome.finish.type == "stop"
        assert re.fullmatch(pattern, text_of(outcome)) or not whole, (pattern, text_of(outcome))
        assert whole or pattern == "é[äö]+😀"


def test_an_ebnf_and_a_structural_tag_are_followed(unified: Ranks) -> None:
    lark = grammar("ebnf", 'start: "<" NUMBER ("," NUMBER){2} ">"\nNUMBER: /[0-9]{1,3}/')
    gbnf = grammar("ebnf", 'root ::= "<" num "," num ">"\nnum ::= [0-9] [0-9]?')
    tag = {"triggers": [" The"], "structures": [{"begin": " The", "end": "!", "schema": {"enum": [77]}}]}
    tagged = grammar("structural_tag", json.dumps(tag))
    first, second, third = unified.run(
        [request(lark), request(gbnf), request(tagged, temperature=0.0, max_new_tokens=20)]
    )
    assert re.fullmatch(r"<\d{1,3}(,\d{1,3}){2}>", text_of(first))
    assert re.fullmatch(r"<\d\d?,\d\d?>", text_of(second))
    free = text_of(unified.run([request(None, temperature=0.0, max_new_tokens=20)])[0])
    assert free.startswith(" The"), "the prompt must lead to the trigger"
    assert text_of(third).startswith(" The77!")


# -- the end -----------------------------------------------------------------------------------------------------------


def test_an_answer_ends_with_its_grammar(unified: Ranks) -> None:
    fixed, open_ended, first = unified.run(
        [
            request(grammar("regex", "[0-9]{3}"), min_new_tokens=50),
            request(grammar("regex", "[a-z]+"), min_new_tokens=12),
            request(grammar("regex", "a"), temperature=0.0),
        ]
    )
    assert fixed.finish == FinishReason(type="stop") and len(text_of(fixed)) == 3, "nothing can follow"
    assert open_ended.finish == FinishReason(type="stop", matched=EOS) and len(open_ended.ids) > 12
    assert EOS not in open_ended.ids[:-1]
    assert first.finish == FinishReason(type="stop") and text_of(first) == "a", "its first token is its last"


def test_stop_strings_and_length_count_too(unified: Ranks) -> None:
    cut, stopped = unified.run(
        [
            request(grammar("regex", "x{40}"), max_new_tokens=3),
            request(grammar("regex", "[a-c]{5}9{20}"), stop=("99",)),
        ]
    )
    assert cut.finish == FinishReason(type="length", length=3)
    assert stopped.finish == FinishReason(type="stop", matched="99")


def test_the_end_token_is_chosen_only_where_the_grammar_allows_it(unified: Ranks) -> None:
    """A bias towards the end token must not end an answer that is not complete."""
    (outcome,) = unified.run([request(grammar("regex", "[0-9]{4}x?"), logit_bias=((EOS, 100.0),))])
    assert outcome.finish == FinishReason(type="stop", matched=EOS)
    assert re.fullmatch("[0-9]{4}", text_of(outcome))


def test_logprobs_are_those_of_the_model(unified: Ranks) -> None:
    """Of its own distribution, not of the one that the grammar leaves over."""
    text = grammar("regex", "zzz")
    (outcome,) = unified.run([request(text, temperature=0.0)])
    free = Request(prompt=[*PROMPT, *outcome.ids[:-1]], sampling=SamplingParams(temperature=0.0, max_new_tokens=1))
    (reference,) = unified.run([free])
    found, expected = dict(map(reversed, outcome.tokens[-1].top)), dict(map(reversed, reference.tokens[0].top))
    assert found == pytest.approx(expected, abs=1e-4)
    assert outcome.tokens[0].logprob is not None and outcome.tokens[0].logprob < -1.0
    assert outcome.tokens[0].token_id != outcome.tokens[0].top[0][1], "the likeliest token is forbidden"


# -- whatever runs beside it and wherever it runs ----------------------------------------------------------------------

MIXED = [
    request(grammar("regex", "[0-9]{1,3}( [a-z]+){3}"), seed=1),
    request(None, seed=2, max_new_tokens=30),
    request(grammar("json_schema", json.dumps(SCHEMAS[23])), seed=3, temperature=0.0),
    request(None, temperature=0.0, max_new_tokens=40),
    request(grammar("json_schema", json.dumps(SCHEMAS[32])), seed=4, prompt=random_prompt(7)),
    request(grammar("regex", "[a-z ]{30,60}"), temperature=0.0, frequency_penalty=0.5, min_new_tokens=5),
]


@pytest.fixture(scope="module")
def alone(unified: Ranks) -> list[Outcome]:
    return [unified.run([each])[0] for each in MIXED]


def test_constrained_and_free_rows_in_one_batch_are_what_they_are_alone(unified: Ranks, alone: list[Outcome]) -> None:
    for outcome, reference in zip(unified.run(MIXED), alone, strict=True):
        assert_equivalent(outcome, reference)


@pytest.mark.parametrize("late", [False, True], ids=["overlap", "late"])
def test_with_overlap_the_mask_knows_the_newest_token(alone: list[Outcome], late: bool) -> None:
    engine = EngineConfig(
        max_total_tokens=8192, max_state_slots=24, max_running_requests=20, disable_overlap_schedule=False
    )
    with unified_ranks(engine=engine) as ranks:
        if late:
            run_late(ranks)
        for outcome, reference in zip(ranks.run(MIXED), alone, strict=True):
            assert_equivalent(outcome, reference)
        ranks.assert_all_free()


def test_a_grammar_that_is_being_compiled_holds_up_nobody_else() -> None:
    with unified_ranks() as ranks:
        busy = threading.Event()
        ranks.roles[0].host.grammars._thread.submit(busy.wait)  # type: ignore[attr-defined]
        constrained = ranks.submit(request(grammar("regex", "[0-9]{3}")))
        try:
            (free,) = ranks.run([request(None, max_new_tokens=5)])
            assert free.finish is not None and not constrained.tokens
        finally:
            busy.set()
        ranks.run_until(lambda: constrained.ended)
        assert re.fullmatch("[0-9]{3}", text_of(constrained))
        ranks.assert_all_free()


def test_disaggregated_is_unified(alone: list[Outcome]) -> None:
    with disaggregated_ranks() as ranks:
        for outcome, reference in zip(ranks.run(MIXED), alone, strict=True):
            assert_equivalent(outcome, reference)
        one_token = request(grammar("regex", "a"))
        assert ranks.run([one_token])[0].finish == FinishReason(type="stop"), "prefill made all of it"
        ranks.assert_all_free()


def test_a_turn_that_decode_computes_itself_follows_its_grammar(unified: Ranks) -> None:
    prompt = random.Random(1).choices(range(1, VOCAB), k=200)
    with disaggregated_ranks() as ranks:
        (first,) = ranks.run([request(grammar("regex", "[a-z ]{20}"), prompt=prompt)])
        turn = request(grammar("regex", "[0-9]{2}x{3}"), prompt=[*prompt, *first.ids, 9, 10], temperature=0.0)
        (second,) = ranks.run([turn])
        assert second.timing is not None and second.timing.transfer_bytes == {}, "nothing crossed the wire"
        assert_equivalent(second, unified.run([turn])[0])
        assert re.fullmatch("[0-9]{2}x{3}", text_of(second))
        ranks.assert_all_free()


def test_a_retracted_answer_goes_on_in_its_grammar() -> None:
    """Too few pages for all: answers are retracted and computed again, and still are what they are alone."""
    patterns = [f"([a-z] ){{40}}{i}" for i in range(6)]
    requests = [request(grammar("regex", pattern), seed=i, temperature=0.0) for i, pattern in enumerate(patterns)]
    engine = partial(EngineConfig, page_size=4, max_state_slots=16, max_running_requests=6, chunked_prefill_size=64)
    with unified_ranks(engine=engine(max_total_tokens=4096)) as roomy:
        references = roomy.run(requests)
    with unified_ranks(engine=engine(max_total_tokens=4 * 64)) as tight:
        outcomes = tight.run(requests)
        assert tight.roles[0].host.scheduler.counters.retractions > 0  # type: ignore[attr-defined]
        tight.assert_all_free()
    for pattern, outcome, reference in zip(patterns, outcomes, references, strict=True):
        assert_equivalent(outcome, reference)
        assert re.fullmatch(pattern, text_of(outcome))


def test_an_answer_that_another_rank_began_goes_on_in_its_grammar(unified: Ranks, alone: list[Outcome]) -> None:
    for each, reference in zip(MIXED, alone, strict=True):
        for begun in (1, len(reference.ids) // 2, len(reference.ids) - 1):
            outcome = resume(unified, each, reference.ids[:begun])
            assert [*reference.ids[:begun], *outcome.ids] == reference.ids
            assert outcome.finish == reference.finish
    unified.assert_all_free()


def test_an_answer_that_does_not_follow_the_grammar_is_refused_and_costs_nothing(unified: Ranks) -> None:
    outcome = resume(unified, request(grammar("regex", "[0-9]{9}")), tokenizer.encode("abc").ids)
    assert outcome.error is not None and outcome.error.code == "grammar_failed"
    assert outcome.error.status == 400
    unified.assert_all_free()


def resume(ranks: Ranks, request: Request, output_ids: list[int]) -> Outcome:
    rid = f"resumed-{len(ranks.outcomes)}"
    outcome = ranks.outcomes[rid] = Outcome(rid=rid)
    message = Submit(
        rid=rid,
        token_ids=request.prompt,
        sampling=request.params(),
        logprobs=WITH_LOGPROBS,
        room=None,
        arrival_s=0.0,
        output_ids=output_ids,
    )
    ranks.roles[-1].submit(message)
    ranks.run_until(lambda: outcome.ended)
    return outcome


# -- through servers ---------------------------------------------------------------------------------------------------

PERSON = json.dumps(SCHEMAS[23])


def ask(url: str, **sampling: Any) -> httpx.Response:
    return generate(url, {"text": "Question: who?\nAnswer:", "sampling_params": {"max_new_tokens": 100, **sampling}})


def test_a_constrained_answer_is_the_same_through_the_router_and_alone(shared_stack: Stack) -> None:
    assert shared_stack.unified is not None
    answers = []
    for server in (shared_stack.router, shared_stack.unified):
        response = ask(server.url, json_schema=PERSON, temperature=0)
        assert response.status_code == 200, response.text
        answers.append(response.json()["output_ids"])
        jsonschema.validate(json.loads(response.json()["text"]), SCHEMAS[23])
    assert answers[0] == answers[1]


def test_samples_of_one_prompt_follow_the_grammar_each(shared_stack: Stack) -> None:
    answers = ask(shared_stack.router.url, regex="[a-z]{6}[0-9]", n=6, sampling_seed=3).json()
    texts = [answer["text"] for answer in answers]
    assert all(re.fullmatch("[a-z]{6}[0-9]", text) for text in texts) and len(set(texts)) > 1


def test_each_prompt_of_a_batch_has_its_own_grammar(shared_stack: Stack) -> None:
    sampling = [{"regex": "[0-9]{4}"}, {"max_new_tokens": 3}, {"json_schema": {"enum": ["x", 7]}}]
    answers = generate(shared_stack.router.url, {"text": ["a", "b", "c"], "sampling_params": sampling}).json()
    assert re.fullmatch("[0-9]{4}", answers[0]["text"]) and answers[1]["meta_info"]["completion_tokens"] == 3
    assert json.loads(answers[2]["text"]) in ("x", 7)


def test_a_node_goes_on_with_a_constrained_answer_that_another_has_begun(shared_stack: Stack) -> None:
    body = {"text": "a", "sampling_params": {"regex": "[a-z ]{30}[0-9]{3}", "temperature": 0}}
    whole = generate(shared_stack.decode.url, body).json()
    begun = whole["output_ids"][:7]
    again = generate(shared_stack.decode.url, {**body, "resume": {"output_ids": begun}}).json()
    assert again["output_ids"] == whole["output_ids"] and re.fullmatch("[a-z ]{30}[0-9]{3}", again["text"])
    refused = generate(shared_stack.decode.url, {**body, "resume": {"output_ids": [*begun, *begun[:1], EOS]}})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "grammar_failed")


def test_a_stream_of_a_constrained_answer_ends_complete(shared_stack: Stack) -> None:
    body = {"text": "a", "stream": True, "sampling_params": {"regex": "[a-z]{20}", "temperature": 1}}
    with httpx.stream("POST", f"{shared_stack.router.url}/generate", json=body, timeout=60) as response:
        lines = [line for line in response.iter_lines() if line]
    last = json.loads(lines[-2].removeprefix("data: "))
    assert re.fullmatch("[a-z]{20}", last["text"])
    assert last["meta_info"]["finish_reason"] == {"type": "stop", "matched": None}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("regex", "[0-9"),
        ("regex", r"(a)\1"),
        ("json_schema", '{"type": "objekt"}'),
        ("json_schema", "{"),
        ("json_schema", '{"$ref": "#"}'),
        ("json_schema", {"propertyNames": {"enum": ["a"]}}),
        ("json_schema", {"type": "string", "minLength": 5, "maxLength": 2}),
        ("ebnf", "root ::= missing"),
        ("ebnf", "start: MISSING"),
        ("ebnf", "root ::= " + "(" * 5000),
        ("structural_tag", '{"structures": []}'),
        ("structural_tag", {"triggers": ["x"], "structures": [{"begin": "<", "end": ">", "schema": {}}]}),
    ],
)
def test_a_bad_grammar_is_a_400_that_names_its_field(shared_stack: Stack, field: str, value: Any) -> None:
    for server in (shared_stack.router, shared_stack.decode):
        response = ask(server.url, **{field: value})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, f"sampling_params.{field}"), response.text
        assert error["code"] == "invalid_grammar"
