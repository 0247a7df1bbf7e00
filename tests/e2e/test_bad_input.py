"""Bad input gets its status and a message that names the field, and a request beside it never notices."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest

from tests.support.stack import Stack, generate

GREEDY = {"temperature": 0, "max_new_tokens": 5}


def sampling(**values: Any) -> dict[str, Any]:
    return {"text": "Question:", "sampling_params": values}


BAD_BODIES: list[tuple[dict[str, Any], str]] = [
    ({"sampling_params": GREEDY}, "text"),
    ({"text": "a", "input_ids": [1]}, "input_ids"),
    ({"text": ""}, "text"),
    ({"text": []}, "text"),
    ({"text": 5}, "text"),
    ({"text": ["a", 5]}, "text"),
    ({"text": ["a", ""]}, "text"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [[1], []]}, "input_ids"),
    ({"input_ids": [1, 10**6]}, "input_ids"),
    ({"input_ids": [-1]}, "input_ids"),
    ({"input_ids": [1.5]}, "input_ids"),
    ({"input_ids": [True]}, "input_ids"),
    ({"input_ids": [[1], ["x"]]}, "input_ids"),
    ({"text": "a", "sampling_params": 5}, "sampling_params"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
    ({"text": "a", "temprature": 1}, "temprature"),
    (sampling(temprature=1), "temprature"),
    (sampling(temperature=-1), "temperature"),
    (sampling(temperature="hot"), "temperature"),
    (sampling(top_p=0), "top_p"),
    (sampling(top_p=1.5), "top_p"),
    (sampling(top_k=0), "top_k"),
    (sampling(top_k=-2), "top_k"),
    (sampling(min_p=-0.1), "min_p"),
    (sampling(frequency_penalty=9), "frequency_penalty"),
    (sampling(presence_penalty=-9), "presence_penalty"),
    (sampling(repetition_penalty=0), "repetition_penalty"),
    (sampling(max_new_tokens=-1), "max_new_tokens"),
    (sampling(max_new_tokens=1.5), "max_new_tokens"),
    (sampling(min_new_tokens=9, max_new_tokens=3), "min_new_tokens"),
    (sampling(n=0), "n"),
    (sampling(n=10**6), "n"),
    (sampling(stop=5), "stop"),
    (sampling(stop=["a", 5]), "stop"),
    (sampling(stop=[""]), "stop"),
    (sampling(stop_token_ids=["x"]), "stop_token_ids"),
    (sampling(logit_bias={"999999": 1}), "logit_bias"),
    (sampling(json_schema='{"type": "objekt"}'), "json_schema"),
    (sampling(regex="[0-9"), "regex"),
    (sampling(ebnf="root ::= missing"), "ebnf"),
    (sampling(structural_tag="{}"), "structural_tag"),
    ({"text": "a", "return_logprob": "yes"}, "return_logprob"),
    ({"text": "a", "stream": "yes"}, "stream"),
    ({"text": "a", "rid": 5}, "rid"),
    ({"text": "Question: " * 9000}, "context"),
]


@pytest.mark.parametrize(("body", "named"), BAD_BODIES, ids=lambda value: str(value)[:60])
def test_bad_field_is_refused_by_name(shared_stack: Stack, body: dict[str, Any], named: str) -> None:
    assert shared_stack.unified is not None
    for server in (shared_stack.router, shared_stack.unified):
        response = httpx.post(
            f"{server.url}/generate", content=to_json(body), headers={"content-type": "application/json"}, timeout=20
        )
        assert response.status_code == 400, (server.name, response.text)
        error = response.json()["error"]
        assert named in error["message"] and error["type"] == "invalid_request_error"
        assert error["retryable"] is False


def to_json(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"",
        b"[1]",
        b'"text"',
        b'{"text": "\xff"}',
        b'{"text": "a", "sampling_params": {"top_p": NaN}}',
        b'{"text": "a", "sampling_params": {"top_p": 1e400}}',
    ],
)
def test_a_body_that_is_no_json_object_is_refused(shared_stack: Stack, content: bytes) -> None:
    response = httpx.post(f"{shared_stack.router.url}/generate", content=content)
    assert response.status_code == 400 and "JSON" in response.json()["error"]["message"]


@pytest.mark.parametrize("room", [2**63, -1, "abc", 1.5, True])
def test_bad_room_is_refused_by_both_legs(shared_stack: Stack, room: object) -> None:
    body = {"text": "a", "bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": room}
    for server in (shared_stack.prefill, shared_stack.decode):
        response = generate(server.url, body)
        assert response.status_code == 400 and "bootstrap_room" in response.json()["error"]["message"]


def test_a_room_in_use_is_refused_and_its_owner_lives_on(shared_stack: Stack) -> None:
    info = httpx.get(f"{shared_stack.prefill.url}/server_info").json()
    body = {
        "text": "Question: Tom",
        "sampling_params": GREEDY,
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": info["disaggregation_bootstrap_port"],
        "bootstrap_room": 4711,
    }
    answers: list[httpx.Response] = []
    owner = threading.Thread(target=lambda: answers.append(generate(shared_stack.prefill.url, body)))
    owner.start()
    threading.Event().wait(0.3)
    second = generate(shared_stack.prefill.url, body)
    assert second.status_code == 400 and "4711" in second.json()["error"]["message"]
    assert generate(shared_stack.decode.url, body).status_code == 200
    owner.join(10)
    assert answers[0].status_code == 200


def test_more_tokens_than_the_pages_hold_are_refused_at_once(shared_stack: Stack) -> None:
    response = generate(shared_stack.router.url, {"input_ids": [5] * 200_000})
    assert response.status_code == 400


def test_a_request_beside_bad_ones_is_undisturbed(shared_stack: Stack) -> None:
    body = {"text": "Question: Tom", "sampling_params": {"temperature": 0, "max_new_tokens": 300, "ignore_eos": True}}
    undisturbed = generate(shared_stack.router.url, body).json()
    answers: list[httpx.Response] = []
    neighbour = threading.Thread(target=lambda: answers.append(generate(shared_stack.router.url, body)))
    neighbour.start()
    for bad, _ in BAD_BODIES:
        httpx.post(f"{shared_stack.router.url}/generate", content=to_json(bad), timeout=20)
    neighbour.join(30)
    assert answers[0].json()["output_ids"] == undisturbed["output_ids"]


def test_unknown_path_and_wrong_method_have_the_same_error_shape(shared_stack: Stack) -> None:
    for server in (shared_stack.router, shared_stack.decode):
        missing, wrong = httpx.get(f"{server.url}/nope"), httpx.get(f"{server.url}/generate")
        assert (missing.status_code, wrong.status_code) == (404, 405)
        assert missing.json()["error"]["message"] and wrong.json()["error"]["message"]
