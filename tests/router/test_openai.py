"""The router's side of OpenAI's endpoints: what it reads of a body, what it adds, merges and passes on."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from common.errors import RequestError, WorkerError
from router.logprobs import merger
from router.openai import CHAT, TEXT, parse_chat, parse_completion
from router.reply import Sent
from tests.router.mocks import MockWorker, RunningRouter, event, fails, never, streams

HELLO = {"messages": [{"role": "user", "content": "hi"}]}


def chunk(text: str = "", *, ids: list[int] | None = None, finish: str | None = None, **fields: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return compact({"choices": [choice | ({} if ids is None else {"token_ids": ids})], **fields})


def compact(value: Any) -> bytes:
    """As our nodes write it."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


DONE = event(b"[DONE]")
LAST = chunk(finish="stop", tandem={"timing": {}})


# -- bodies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "n", "sequences", "is_list"),
    [
        ("a", None, 1, False),
        ([1, 2, 3], None, 1, False),
        (["a"], None, 1, True),
        ([[1, 2]], None, 1, True),
        (["a", "b"], 3, 6, True),
        ("a", 2, 2, True),
        (None, 1, 1, False),
    ],
)
def test_rooms_of_a_completion(prompt: Any, n: int | None, sequences: int, is_list: bool) -> None:
    request = parse_completion(msgspec.json.encode({"prompt": prompt, "n": n}))
    assert (request.num_sequences, request.lists_rooms, request.path) == (sequences, is_list, TEXT)
    (rid,) = request.rids
    assert rid.startswith("cmpl-") and request.fields["rid"] == rid
    assert len(request.names) == (1 if sequences == 1 and not is_list else 1 + sequences)


def test_a_chat_is_one_prompt() -> None:
    request = parse_chat(msgspec.json.encode(HELLO | {"n": 3, "stream": True, "rid": "mine"}))
    assert (request.num_sequences, request.path, request.stream, request.rids) == (3, CHAT, True, ("mine",))
    assert request.names == {"mine", "mine_0", "mine_1", "mine_2"}


def test_prompts_are_merged_where_they_are_echoed_with_logprobs() -> None:
    assert parse_completion(b'{"prompt": "a", "echo": true, "logprobs": 0}').merges_logprobs
    for body in (b'{"prompt": "a", "echo": true}', b'{"prompt": "a", "logprobs": 1}', b'{"prompt": "a"}'):
        assert not parse_completion(body).merges_logprobs
    assert not parse_chat(b'{"echo": true, "logprobs": true}').merges_logprobs


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stream": "yes"}, "stream"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": 10**9}, "n"),
        ({"rid": 5}, "rid"),
        ({"bootstrap_room": 5}, "bootstrap_room"),
        ({"resume": {}}, "resume"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1] * 2000, "echo": True, "logprobs": 1000}, "logprobs"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_bodies_name_the_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_completion(msgspec.json.encode(body))
    assert caught.value.param == param and param in caught.value.message


def test_ids_are_asked_for_where_one_answer_may_have_to_go_on(prefill: MockWorker) -> None:
    def asks(parse: Any, **fields: Any) -> bool:
        return bool(parse(msgspec.json.encode(HELLO | {"prompt": "a"} | fields)).keeps_ids)

    assert asks(parse_chat, stream=True) and asks(parse_completion, stream=True)
    assert not asks(parse_chat) and not asks(parse_chat, stream=True, n=2)
    assert not asks(parse_completion, stream=True, echo=True)


# -- legs --------------------------------------------------------------------------------------------------------------


async def test_both_legs_go_to_the_clients_path(router: RunningRouter, prefill: MockWorker, decode: MockWorker) -> None:
    decode.script = streams(chunk("a", ids=[1]), LAST + DONE)
    for path in (CHAT, TEXT):
        answer = await router.client.post(path, json=HELLO | {"prompt": "x", "stream": True, "stream_options": {}})
        assert answer.status_code == 200 and answer.headers["content-type"] == "text/event-stream"
        assert answer.content == chunk("a", ids=[1]) + LAST + DONE
        ours, theirs = prefill.bodies[-1], decode.bodies[-1]
        assert ours["bootstrap_room"] == theirs["bootstrap_room"] and ours["bootstrap_port"] == 8998
        assert (ours["stream"], theirs["stream"], theirs["return_token_ids"]) == (False, True, True)
        assert prefill.paths[-1] == decode.paths[-1] == path
        assert "return_token_ids" not in ours and answer.headers["x-request-id"] == theirs["rid"]
    assert [path for path, _ in router.state.dispatcher.recorder.totals.requests] == [CHAT, TEXT]


async def test_errors_keep_their_status_and_have_openais_shape(
    router: RunningRouter, prefill: MockWorker, decode: MockWorker
) -> None:
    decode.script = never
    prefill.script = fails(400, b'{"error":{"message":"m","type":"invalid_request_error","param":"n","code":"c"}}')
    refused = await router.client.post(CHAT, json=HELLO)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
    ours = await router.client.post(CHAT, content=b"{")
    assert ours.status_code == 400 and set(ours.json()["error"]) >= {"message", "type", "param", "code"}


async def test_an_error_in_a_stream_is_an_event_of_openais_shape(router: RunningRouter, decode: MockWorker) -> None:
    decode.script = streams(chunk("a", ids=[1]), chunk("b", ids=[2]))
    answer = await router.client.post(CHAT, json=HELLO | {"stream": True})
    *chunks, error, done, end = answer.content.split(b"\n\n")
    assert len(chunks) == 2 and (done, end) == (DONE.strip(), b"")
    assert set(json.loads(error[6:])["error"]) >= {"message", "type", "param", "code"}


@pytest.mark.parametrize("is_last", [True, False])
async def test_a_stream_that_broke_after_its_last_chunk_is_complete(
    is_last: bool, router: RunningRouter, decode: MockWorker
) -> None:
    """With usage asked for, the finish reason is not the end."""
    decode.resumes = True
    end = LAST if is_last else chunk(finish="stop")
    decode.script = streams(chunk("a", ids=[1]), end)
    answer = await router.client.post(CHAT, json=HELLO | {"stream": True})
    assert answer.content.startswith(chunk("a", ids=[1]) + end) and answer.content.endswith(DONE)
    assert (b'"error"' in answer.content) is not is_last
    assert len(decode.bodies) == 1


def test_how_an_answer_goes_on() -> None:
    request = parse_chat(msgspec.json.encode(HELLO | {"stream": True}))
    sent = Sent()
    assert sent.resume_field(request) is None
    for whole in (chunk("a", ids=[1, 2]) + chunk("b", ids=[]), chunk('"token_ids":[9]', ids=[3])):
        sent.keep_ids(whole)
        sent.last = whole
    assert sent.resume_field(request) == {"output_ids": [1, 2, 3]} and not sent.is_complete(request)
    sent.before, sent.last = chunk(finish="stop"), chunk()
    assert sent.resume_field(request) is None  # all of it is there, but for the usage


async def test_any_live_worker_tells_of_models_and_tokens(
    router: RunningRouter, prefill: MockWorker, decode: MockWorker
) -> None:
    prefill.script = fails(200, b'{"tokens":[1]}')
    answer = await router.client.post("/tokenize", json={"prompt": "x"})
    assert (answer.status_code, answer.json(), prefill.bodies) == (200, {"tokens": [1]}, [{"prompt": "x"}])
    await prefill.stop()
    assert (await router.client.get("/v1/models")).json() == {"model_path": "mini"}
    await decode.stop()
    await router.until(lambda: not any(worker.alive for worker in router.state.workers.all))
    assert (await router.client.get("/v1/models")).status_code == 503


# -- merging -----------------------------------------------------------------------------------------------------------


def completion(*tokens: str, index: int = 0) -> dict[str, Any]:
    logprobs = {name: [f"{name} {token}" for token in tokens] for name in ("tokens", "token_logprobs", "text_offset")}
    return {"id": "x", "choices": [{"index": index, "text": "é", "logprobs": logprobs, "finish_reason": None}]}


def test_the_prompts_lists_come_in_front() -> None:
    prompt, answer = completion("a", "b"), completion("c")
    merged = json.loads(merger(TEXT, msgspec.json.encode(prompt)).merge_answer(msgspec.json.encode(answer)))
    assert merged == completion("a", "b", "c")
    assert json.loads(merger(TEXT, msgspec.json.encode(prompt)).merge_answer(b'{"choices":[]}')) == {"choices": []}


def test_in_a_stream_they_come_once_for_each_choice() -> None:
    prompts = {"choices": [completion("a")["choices"][0], completion("b", index=1)["choices"][0]]}
    found = merger(TEXT, msgspec.json.encode(prompts))
    for index, expected in ((0, ("a", "x")), (1, ("b", "x")), (0, ("x",)), (1, ("x",))):
        given = b"data: " + msgspec.json.encode(completion("x", index=index))
        assert json.loads(found.merge_event(given)[6:]) == completion(*expected, index=index)
    assert found.merge_event(b"data: [DONE]") == b"data: [DONE]"


def test_a_choice_without_logprobs_stays_as_it_is() -> None:
    found = merger(TEXT, msgspec.json.encode(completion("a")))
    body = {"choices": [{"index": 0, "text": "t", "logprobs": None}]}
    assert json.loads(found.merge_answer(msgspec.json.encode(body))) == body


@pytest.mark.parametrize("body", [b"<html>", b"3", b"{}", b'{"choices":3}', b'{"choices":[{"logprobs":[]}]}'])
def test_answers_of_another_shape_are_refused(body: bytes) -> None:
    with pytest.raises(WorkerError):
        merger(TEXT, body)
    with pytest.raises(WorkerError):
        merger(TEXT, msgspec.json.encode(completion("a"))).merge_answer(b'{"choices":3}')
