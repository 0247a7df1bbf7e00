"""POST /generate's body: what is accepted, what it becomes, and what is refused with which words."""

from __future__ import annotations

import time
from typing import Any

import pytest

from common.config import Role
from common.errors import RequestError
from common.handoff import RoomAddress
from common.json_body import decode_object
from common.sampling import LogprobOptions, SamplingParams
from node.limits import ServingLimits
from node.requests import MAX_TEXTS_BYTES, GenerateRequest, check_text_sizes, expand, parse

VOCAB = 300
CONTEXT = 64
MEMORY = 50


def limits(role: Role = Role.UNIFIED, num_ranks: int = 1) -> ServingLimits:
    return ServingLimits(
        role=role,
        vocab_size=VOCAB,
        context_length=CONTEXT,
        max_total_tokens=MEMORY,
        num_ranks=num_ranks,
        bootstrap_host="10.0.0.1",
        bootstrap_port=8998,
    )


def read(body: dict[str, Any], role: Role = Role.UNIFIED, num_ranks: int = 1) -> GenerateRequest:
    """A request whose texts have one token a character."""
    parsed = parse(body, limits(role, num_ranks))
    token_ids = [list(map(ord, p)) if isinstance(p, str) else p for p in parsed.prompts]
    return expand(parsed, token_ids, limits(role, num_ranks), arrival_s=1.0)


def refusal(body: dict[str, Any], role: Role = Role.UNIFIED, num_ranks: int = 1) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(body, role, num_ranks)
    assert caught.value.http_status == 400
    return caught.value


def sampling(**values: Any) -> dict[str, Any]:
    return {"input_ids": [1, 2], "sampling_params": values}


# -- what is accepted ------------------------------------------------------------------------------


def test_the_smallest_request_gets_sglangs_defaults() -> None:
    (submit,) = read({"text": "ab"}).submits
    fitting = SamplingParams(max_new_tokens=MEMORY - 2, sampling_seed=submit.sampling.sampling_seed)
    assert submit.token_ids == [97, 98] and submit.arrival_s == 1.0 and submit.room is None
    assert submit.sampling == fitting and SamplingParams().max_new_tokens == 128
    assert submit.logprobs == LogprobOptions() and len(submit.rid) == 32


def test_every_sampling_parameter_arrives() -> None:
    given = {
        "max_new_tokens": 7,
        "min_new_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "frequency_penalty": -1,
        "presence_penalty": 1.5,
        "repetition_penalty": 1.2,
        "stop": ["x", "yz"],
        "stop_token_ids": [3, 4],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
        "logit_bias": {"5": -1, "6": 2.5},
        "sampling_seed": 9,
        "stream_interval": 4,
    }
    (submit,) = read(sampling(**given)).submits
    expected = {**given, "stop": ("x", "yz"), "stop_token_ids": (3, 4), "logit_bias": ((5, -1.0), (6, 2.5))}
    assert submit.sampling == SamplingParams(**expected)
    settable = {*SamplingParams.__struct_fields__} - {"grammar"}  # which is made of what a request says
    assert set(given) == settable, "a parameter that no request can set"


def test_null_means_the_default_and_a_null_length_means_what_fits() -> None:
    nothing = dict.fromkeys(SamplingParams.__struct_fields__) | {"max_new_tokens": 3, "json_schema": None, "n": None}
    (submit,) = read({**sampling(**nothing), "rid": None, "image_data": None, "made_up": None}).submits
    assert submit.sampling == SamplingParams(max_new_tokens=3, sampling_seed=submit.sampling.sampling_seed)
    (open_ended,) = read(sampling(max_new_tokens=None)).submits
    assert open_ended.sampling.max_new_tokens == MEMORY - 2


def test_one_stop_string_may_stand_alone_and_a_tiny_temperature_is_greedy() -> None:
    (submit,) = read(sampling(stop="x", temperature=1e-9)).submits
    assert submit.sampling.stop == ("x",) and submit.sampling.temperature == 0.0


def test_seeds_are_random_without_one_and_count_up_with_one() -> None:
    seeds = {s.sampling.sampling_seed for s in read({"text": ["a"] * 4, "sampling_params": {"n": 4}}).submits}
    assert len(seeds) == 4 * 4 and all(0 <= seed < 2**63 for seed in seeds)
    counted = read(sampling(n=3, sampling_seed=2**63 - 1)).submits
    assert [s.sampling.sampling_seed for s in counted] == [2**63 - 1, 0, 1]


def test_parameters_that_prompts_share_are_checked_once() -> None:
    """Prompts times what each of them carries must not be work, only to be refused."""
    body = {"text": ["a"] * 512, "sampling_params": {"stop_token_ids": [1] * 1_000_000}}
    start = time.process_time()
    assert refusal(body).param == "sampling_params.stop_token_ids"
    assert time.process_time() - start < 2
    seeds = {s.sampling.sampling_seed for s in read({"text": ["a"] * 3}).submits}
    assert len(seeds) == 3


def test_samples_of_a_batch_are_prompt_major() -> None:
    body = {
        "text": ["ab", "c"],
        "sampling_params": [{"n": 2, "max_new_tokens": 5}, {"n": 2, "max_new_tokens": 6}],
        "rid": ["p", "q"],
        "return_logprob": [True, False],
        "logprob_start_len": [0, 0],
        "top_logprobs_num": 3,
        "stream": True,
        "return_text_in_logprobs": True,
    }
    request = read(body)
    assert [s.rid for s in request.submits] == ["p_0", "p_1", "q_0", "q_1"]
    assert [len(s.token_ids) for s in request.submits] == [2, 2, 1, 1]
    assert [s.sampling.max_new_tokens for s in request.submits] == [5, 5, 6, 6]
    wanted = LogprobOptions(wanted=True, start_len=0, top_num=3)
    assert [s.logprobs for s in request.submits] == [wanted, wanted, LogprobOptions(), LogprobOptions()]
    assert request.is_list and request.stream and request.return_text


@pytest.mark.parametrize(
    ("body", "is_list"),
    [
        ({"text": "a"}, False),
        ({"text": ["a"]}, True),
        ({"input_ids": [1]}, False),
        ({"input_ids": [[1]]}, True),
        ({"text": "a", "sampling_params": {"n": 2}}, True),
    ],
)
def test_batches_and_several_samples_are_answered_with_a_list(body: dict[str, Any], is_list: bool) -> None:
    assert read(body).is_list is is_list


@pytest.mark.parametrize(
    ("rid", "rids", "groups"),
    [
        ("r", ["r_0", "r_1", "r_2", "r_3"], ["r"] * 4),
        (["a", "b"], ["a_0", "a_1", "b_0", "b_1"], ["a", "a", "b", "b"]),
        (["a", "b", "c", "d"], ["a", "b", "c", "d"], [None] * 4),
    ],
)
def test_rids_of_a_batch(rid: Any, rids: list[str], groups: list[str | None]) -> None:
    request = read({"text": ["a", "b"], "sampling_params": {"n": 2}, "rid": rid})
    assert [s.rid for s in request.submits] == rids and request.groups == groups


def test_an_extra_key_reaches_each_sequence() -> None:
    body = {"text": ["a", "b"], "sampling_params": {"n": 2}}
    for given, keys in (("k", ["k"] * 4), (["k", None], ["k", "k", None, None]), (None, [None] * 4)):
        assert [s.extra_key for s in read({**body, "extra_key": given}).submits] == keys


def test_texts_that_cannot_fit_are_refused_before_they_are_tokenised() -> None:
    longest = 7
    check_text_sizes(["é" * (CONTEXT * longest // 2)] * 2, longest, limits())
    for texts, name in ((["é" * (CONTEXT * longest // 2) + "a"], "text"), (["a", "b" * 449], r"text\[1\]")):
        with pytest.raises(RequestError, match=f"^{name}: it has 449 bytes, .*64 tokens holds at most 448") as caught:
            check_text_sizes(texts, longest, limits())
        assert caught.value.code == "context_length_exceeded"
    with pytest.raises(RequestError, match=f"^text: .*at most {MAX_TEXTS_BYTES} in one request"):
        check_text_sizes(["a" * 448] * (MAX_TEXTS_BYTES // 448 + 1), longest, limits())


def test_fields_that_have_no_effect_here_are_accepted() -> None:
    extra = {
        "priority": 3,
        "routing_key": "k",
        "extra_key": "e",
        "log_metrics": True,
        "image_data": [],
        "lora_path": [None],
    }
    assert len(read({"text": "a", **extra}).submits) == 1


# -- rooms and ranks -------------------------------------------------------------------------------

ENDPOINT = {"bootstrap_host": "h", "bootstrap_port": 1234}


def test_a_room_names_its_endpoint() -> None:
    (decode,) = read({"text": "a", "bootstrap_room": 0, **ENDPOINT}, Role.DECODE).submits
    assert decode.room == RoomAddress(host="h", port=1234, room=0)
    (defaulted,) = read({"text": "a", "bootstrap_room": 5, "bootstrap_host": "h"}, Role.DECODE).submits
    assert defaulted.room == RoomAddress(host="h", port=8998, room=5)
    (prefill,) = read({"text": "a", "bootstrap_room": 2**63 - 1}, Role.PREFILL).submits
    assert prefill.room == RoomAddress(host="10.0.0.1", port=8998, room=2**63 - 1)
    (alone,) = read({"text": "a"}, Role.DECODE).submits
    assert alone.room is None


@pytest.mark.parametrize(
    ("room", "n", "rooms"),
    [
        (7, 1, [7, 8]),
        (7, 2, [7, 8, 9, 10]),
        ([7, 3], 1, [7, 3]),
        ([7, 3], 2, [7, 8, 3, 4]),
        ([4, 3, 2, 1], 2, [4, 3, 2, 1]),
    ],
)
def test_rooms_of_a_batch(room: Any, n: int, rooms: list[int]) -> None:
    body = {"text": ["a", "b"], "sampling_params": {"n": n}, "bootstrap_room": room, **ENDPOINT}
    request = read({**body, "bootstrap_host": ["h", "i"]}, Role.DECODE)
    assert [s.room.room for s in request.submits if s.room] == rooms
    assert [s.room.host for s in request.submits if s.room] == ["h"] * n + ["i"] * n


@pytest.mark.parametrize(
    "room", [-1, 2**63, "abc", "5", True, 1.0, [1, 2], [[1]], {}, float("nan")], ids=lambda room: repr(room)
)
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_bad_rooms_are_refused(room: Any, role: Role) -> None:
    assert "bootstrap_room" in refusal({"text": "a", "bootstrap_room": room, **ENDPOINT}, role).message


@pytest.mark.parametrize("room", [[5, 5], [5, None], 2**63 - 1, [1]])
def test_bad_rooms_of_a_batch_are_refused(room: Any) -> None:
    error = refusal({"text": ["a", "b"], "bootstrap_room": room, **ENDPOINT}, Role.DECODE)
    assert "bootstrap_room" in error.message and "bootstrap_room" in str(error.param)


def test_roles_want_rooms_or_do_not() -> None:
    assert "bootstrap_room" in refusal({"text": "a"}, Role.PREFILL).message
    assert "bootstrap_room" in refusal({"text": "a", "bootstrap_room": 1, **ENDPOINT}, Role.UNIFIED).message
    assert "bootstrap_host" in refusal({"text": "a", "bootstrap_room": 1}, Role.DECODE).message


def test_a_rank_can_be_chosen_where_ranks_are_chosen() -> None:
    assert read({"text": "a", "routed_dp_rank": 1}, Role.DECODE, num_ranks=2).dp_rank == 1
    assert read({"text": "a", "data_parallel_rank": 1}, Role.DECODE, num_ranks=2).dp_rank == 1
    assert read({"text": "a", "routed_dp_rank": 7, "bootstrap_room": 1}, Role.PREFILL).dp_rank is None
    assert "routed_dp_rank: 1" in refusal({"text": "a", "routed_dp_rank": 1}).message
    both = {"text": "a", "routed_dp_rank": 1, "data_parallel_rank": 1}
    assert read(both, Role.DECODE, num_ranks=2).dp_rank == 1
    for value in (0, "x", 2, -1, True):
        error = refusal({**both, "data_parallel_rank": value}, Role.DECODE, num_ranks=2)
        assert error.param == "data_parallel_rank" and error.message.startswith("data_parallel_rank: ")


# -- what is refused -------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "text"),
    ({"sampling_params": {}}, "text"),
    ({"text": "a", "input_ids": [1]}, "input_ids"),
    ({"text": ""}, "text"),
    ({"text": []}, "text"),
    ({"text": 5}, "text"),
    ({"text": ["a", 5]}, "text[1]"),
    ({"text": ["a", ""]}, "text[1]"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": "1"}, "input_ids"),
    ({"input_ids": [[1], []]}, "input_ids[1]"),
    ({"input_ids": [[1], [1, VOCAB]]}, "input_ids[1][1]"),
    ({"input_ids": [[1], 2]}, "input_ids[1]"),
    ({"input_ids": [1, [2]]}, "input_ids[1]"),
    ({"input_ids": [1, -1]}, "input_ids[1]"),
    ({"input_ids": [True]}, "input_ids[0]"),
    ({"input_ids": [1.0]}, "input_ids[0]"),
    ({"input_ids": [10**30]}, "input_ids[0]"),
    ({"text": "a", "sampling_params": 5}, "sampling_params"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
    ({"text": ["a", "b"], "sampling_params": [{}, {"top_p": 2}]}, "sampling_params[1].top_p"),
    ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params[1].n"),
    ({"text": "a", "stream": "yes"}, "stream"),
    ({"text": "a", "return_logprob": 1}, "return_logprob"),
    ({"text": ["a", "b"], "return_logprob": [True, "x"]}, "return_logprob[1]"),
    ({"text": ["a", "b"], "return_logprob": [True]}, "return_logprob"),
    ({"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
    ({"text": "a", "return_logprob": True, "logprob_start_len": 1}, "logprob_start_len"),
    ({"text": "a", "top_logprobs_num": -1}, "top_logprobs_num"),
    ({"text": "a", "rid": 5}, "rid"),
    ({"text": "a", "rid": ""}, "rid"),
    ({"text": ["a", "b"], "rid": ["q", None]}, "rid[1]"),
    ({"text": "a", "rid": []}, "rid"),
    ({"text": "a", "extra_key": 5}, "extra_key"),
    ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid[1]"),
    ({"text": ["a"] * 513}, "text"),
    ({"text": ["a"] * 5, "sampling_params": {"n": 128}}, "sampling_params.n"),
    ({"text": "a", "lora_path": "x"}, "lora_path"),
    ({"text": "a", "image_data": ["x"]}, "image_data"),
    (sampling(temperature=-0.1), "sampling_params.temperature"),
    (sampling(temperature=1e9), "sampling_params.temperature"),
    (sampling(temperature="1"), "sampling_params.temperature"),
    (sampling(temperature=True), "sampling_params.temperature"),
    (sampling(temperature=float("nan")), "sampling_params.temperature"),
    (sampling(temperature=float("inf")), "sampling_params.temperature"),
    (sampling(top_p=0), "sampling_params.top_p"),
    (sampling(top_p=1.01), "sampling_params.top_p"),
    (sampling(top_k=0), "sampling_params.top_k"),
    (sampling(top_k=-2), "sampling_params.top_k"),
    (sampling(top_k=1.5), "sampling_params.top_k"),
    (sampling(top_k=10**400), "sampling_params.top_k"),
    (sampling(min_p=1.1), "sampling_params.min_p"),
    (sampling(frequency_penalty=2.1), "sampling_params.frequency_penalty"),
    (sampling(presence_penalty=-2.1), "sampling_params.presence_penalty"),
    (sampling(repetition_penalty=0), "sampling_params.repetition_penalty"),
    (sampling(max_new_tokens=-1), "sampling_params.max_new_tokens"),
    (sampling(max_new_tokens=1.0), "sampling_params.max_new_tokens"),
    (sampling(min_new_tokens=4, max_new_tokens=3), "sampling_params.min_new_tokens"),
    (sampling(n=0), "sampling_params.n"),
    (sampling(n=129), "sampling_params.n"),
    (sampling(stop=5), "sampling_params.stop"),
    (sampling(stop=""), "sampling_params.stop"),
    (sampling(stop=["a", 5]), "sampling_params.stop[1]"),
    (sampling(stop=["a"] * 65), "sampling_params.stop"),
    (sampling(stop=["a" * 1024] * 64, n=128), "sampling_params.stop"),
    (sampling(stop_token_ids=[1] * 9000, n=128), "sampling_params.stop_token_ids"),
    ({"text": ["a"] * 32, "sampling_params": {"stop": ["a" * 1024] * 64}}, "sampling_params.stop"),
    (sampling(stop_token_ids=5), "sampling_params.stop_token_ids"),
    (sampling(stop_token_ids=[VOCAB]), "sampling_params.stop_token_ids[0]"),
    (sampling(logit_bias=[1]), "sampling_params.logit_bias"),
    (sampling(logit_bias={"x": 1}), "sampling_params.logit_bias.x"),
    (sampling(logit_bias={str(VOCAB): 1}), f"sampling_params.logit_bias.{VOCAB}"),
    (sampling(logit_bias={"1": 101}), "sampling_params.logit_bias.1"),
    (sampling(ignore_eos=1), "sampling_params.ignore_eos"),
    (sampling(sampling_seed=-1), "sampling_params.sampling_seed"),
    (sampling(stream_interval=0), "sampling_params.stream_interval"),
    (sampling(regex=""), "sampling_params.regex"),
    (sampling(regex="a" * 65_537), "sampling_params.regex"),
    (sampling(regex=["a"]), "sampling_params.regex"),
    (sampling(regex="a", json_schema="{}"), "sampling_params.json_schema"),
    (sampling(json_schema=[]), "sampling_params.json_schema"),
    (sampling(ebnf={}), "sampling_params.ebnf"),
    (sampling(structural_tag=1), "sampling_params.structural_tag"),
    (sampling(stop_regex="a"), "sampling_params.stop_regex"),
    ({"text": ["a"] * 512, "sampling_params": {"regex": "a" * 20_000}}, "sampling_params.regex"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=lambda value: str(value)[:50])
def test_refusals_name_the_field(body: dict[str, Any], param: str) -> None:
    error = refusal(body)
    assert error.param == param and error.message.startswith(param)


def test_refusals_show_the_value_and_the_range() -> None:
    message = refusal(sampling(top_p=1.5)).message
    assert "1.5" in message and "from" not in message and "above 0 and up to 1" in message
    assert "-1" in refusal(sampling(top_k=0)).message
    assert len(refusal({"text": ["x", {"a": "y" * 10_000}]}).message) < 300


def test_an_unknown_name_gets_a_suggestion() -> None:
    error = refusal({"text": "a", "sampling_parms": {}})
    assert error.code == "unknown_parameter" and "did you mean sampling_params?" in error.message
    assert "did you mean temperature?" in refusal(sampling(temprature=1)).message
    assert "did you mean" not in refusal(sampling(qqqq=1)).message


# -- lengths ---------------------------------------------------------------------------------------


def test_a_prompt_needs_room_for_an_answer_in_the_context() -> None:
    body = {"input_ids": [1] * CONTEXT, "sampling_params": {"max_new_tokens": 1}}
    error = refusal(body)
    assert error.code == "context_length_exceeded" and str(CONTEXT) in error.message and error.param == "input_ids"


def test_a_length_beyond_the_context_is_clipped() -> None:
    wide = ServingLimits(**{**{f: getattr(limits(), f) for f in limits().__struct_fields__}, "max_total_tokens": 1000})
    parsed = parse(sampling(max_new_tokens=500, min_new_tokens=400), wide)
    (submit,) = expand(parsed, [[1, 2]], wide, arrival_s=0.0).submits
    assert submit.sampling.max_new_tokens == submit.sampling.min_new_tokens == CONTEXT - 2


def test_more_tokens_than_all_pages_hold_are_refused() -> None:
    fits = {"input_ids": [1] * 10, "sampling_params": {"max_new_tokens": MEMORY - 10}}
    assert read(fits).submits[0].sampling.max_new_tokens == MEMORY - 10
    error = refusal({"input_ids": [1] * 10, "sampling_params": {"max_new_tokens": MEMORY - 9}})
    assert error.code == "too_many_tokens" and str(MEMORY) in error.message
    assert read({**fits, "sampling_params": {"max_new_tokens": 41}, "bootstrap_room": 1}, Role.PREFILL).submits
    error = refusal({"input_ids": [[1], [1] * (MEMORY + 1)], "sampling_params": {"max_new_tokens": 0}})
    assert error.param == "input_ids[1]"


# -- JSON ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"a"', b'{"text": "\xff"}', b"[" * 100_000, b"\x00"])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match="JSON") as caught:
        decode_object(body)
    assert caught.value.code == "invalid_json" and len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"sampling_params": {"top_p": NaN}}', "sampling_params.top_p"),
        (b'{"sampling_params": [{}, {"top_p": -Infinity}]}', "sampling_params[1].top_p"),
        (b'{"sampling_params": {"top_p": 1e999}}', "sampling_params.top_p"),
        (b"NaN", "body"),
    ],
)
def test_numbers_that_json_does_not_have_are_named(body: bytes, param: str) -> None:
    with pytest.raises(RequestError, match="not a JSON number") as caught:
        decode_object(body)
    assert caught.value.param == param


def test_alternatives_of_prompts_are_bounded_together() -> None:
    asked = {"return_logprob": True, "logprob_start_len": 0}
    prompts = [[1] * 40] * 25  # 1,000 positions
    assert read({"input_ids": prompts, "top_logprobs_num": 1024} | asked)
    assert refusal({"input_ids": [*prompts, [1] * 25], "top_logprobs_num": 1024} | asked).param == "top_logprobs_num"
    assert read({"input_ids": prompts * 2, "top_logprobs_num": 1024} | asked | {"logprob_start_len": -1})
