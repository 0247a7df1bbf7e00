"""The HTTP contract of a node, through real processes: answers, streams, errors, rooms, the other endpoints."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from typing import Any

import httpx
import pytest

from tests.node.conftest import FakeNode, wait_for
from tests.node.fake_rank import CONTEXT_LENGTH, MAX_TOTAL_TOKENS

TEXT = "Tom has 12 €5 😀 apples."
SLOW = {"frequency_penalty": 1, "max_new_tokens": 150, "ignore_eos": True}
SILENT = {"min_p": 0.5, "max_new_tokens": 5}
FAILING = {"presence_penalty": 1, "max_new_tokens": 9}


def prompt_length(node: FakeNode, text: str = TEXT) -> int:
    answer = node.post({"text": text, "sampling_params": {"max_new_tokens": 0}}).json()
    return int(answer["meta_info"]["prompt_tokens"])


def room(number: Any) -> dict[str, Any]:
    return {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": number}


def in_background(call: Any) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    return thread, results


# -- answers ---------------------------------------------------------------------------------------


def test_json_answer(unified: FakeNode) -> None:
    length = prompt_length(unified)
    response = unified.post({"text": TEXT, "sampling_params": {"max_new_tokens": length}, "rid": "mine"})
    assert response.status_code == 200 and response.headers["content-type"] == "application/json"
    answer = response.json()
    assert answer["text"] == TEXT and len(answer["output_ids"]) == length
    meta = answer["meta_info"]
    assert meta["id"] == "mine" and meta["finish_reason"] == {"type": "length", "length": length}
    assert 0 < meta["e2e_latency"] < 10 and meta["transfer_bytes"] == {"kv": 7}
    assert meta["timing"] == {"queue_s": 0.1, "prefill_s": 0.2, "transfer_s": 0.3, "decode_s": 0.4}


def test_stream_is_cumulative_and_ends_like_the_json_answer(unified: FakeNode) -> None:
    body = {"text": TEXT, "sampling_params": {"max_new_tokens": prompt_length(unified), "stop": ["apples"]}}
    whole = unified.post(body).json()
    body["sampling_params"] |= {"frequency_penalty": 1}  # so slow that each token has an event
    *updates, done = unified.events(body)
    assert done == "[DONE]" and len(updates) > 3
    shown = [u["text"] for u in updates]  # type: ignore[index]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(shown))
    assert not any("\ufffd" in text or "ap" in text for text in shown)
    last = updates[-1]
    assert last["text"] == whole["text"] == TEXT[: TEXT.index("apples")]  # type: ignore[index]
    assert last["output_ids"] == whole["output_ids"]  # type: ignore[index]
    reasons = [u["meta_info"]["finish_reason"] for u in updates]  # type: ignore[index]
    assert reasons == [None] * (len(updates) - 1) + [{"type": "stop", "matched": "apples"}]
    assert "index" not in last  # type: ignore[operator]


def test_a_slow_stream_has_an_event_a_token(unified: FakeNode) -> None:
    sampling = {**SLOW, "max_new_tokens": 6}
    *updates, _ = unified.events({"text": TEXT, "sampling_params": sampling})
    assert [len(u["output_ids"]) for u in updates] == [1, 2, 3, 4, 5, 6]  # type: ignore[index]
    *updates, _ = unified.events({"text": TEXT, "sampling_params": {**sampling, "stream_interval": 4}})
    assert [len(u["output_ids"]) for u in updates] == [1, 5, 6]  # type: ignore[index]


def test_batch_and_samples_keep_their_places(unified: FakeNode) -> None:
    body = {"input_ids": [[5, 6], [7, 8, 9]], "sampling_params": {"max_new_tokens": 3, "n": 2}}
    answers = unified.post(body).json()
    assert [a["output_ids"] for a in answers] == [[5, 6, 5]] * 2 + [[7, 8, 9]] * 2
    *updates, done = unified.events(body)
    last = {u["index"]: u["output_ids"] for u in updates}  # type: ignore[index]
    assert done == "[DONE]" and [last[i] for i in range(4)] == [a["output_ids"] for a in answers]


def test_logprobs(unified: FakeNode) -> None:
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 2},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 1,
    }
    for answer in (unified.post(body).json(), unified.events(body)[-2]):
        meta = answer["meta_info"]  # type: ignore[index]
        assert meta["input_token_logprobs"] == [[None, 5, None], [-1.5, 6, None], [-1.5, 7, None]]
        assert meta["input_top_logprobs"] == [None, [[-1.5, 6, None]], [[-1.5, 7, None]]]
        assert meta["output_token_logprobs"] == [[-0.5, 5, None], [-0.5, 6, None]]


def test_no_new_tokens_is_an_answer_too(unified: FakeNode) -> None:
    body = {"text": TEXT, "sampling_params": {"max_new_tokens": 0}}
    answer = unified.post(body).json()
    assert answer["text"] == "" and answer["output_ids"] == []
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert len(unified.events(body)) == 2


def test_the_end_token_is_an_output_id_but_no_text(unified: FakeNode) -> None:
    answer = unified.post({"text": "a<|end|>b", "sampling_params": {"max_new_tokens": 9}}).json()
    assert answer["text"] == "a" and answer["output_ids"][-1] == 0
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 0}


def test_a_long_text_is_read(unified: FakeNode) -> None:
    response = unified.post({"text": "apples " * 12_000})
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
    assert str(CONTEXT_LENGTH) in response.json()["error"]["message"]


# -- roles -----------------------------------------------------------------------------------------


def test_prefill_answers_one_json_object_also_when_a_stream_is_asked_for(prefill: FakeNode) -> None:
    body = {"input_ids": [5, 6], "return_logprob": True, "logprob_start_len": 0, "stream": True, **room(0)}
    response = prefill.post(body)
    assert response.headers["content-type"] == "application/json"
    answer = response.json()
    assert answer["output_ids"] == [5] and len(answer["meta_info"]["input_token_logprobs"]) == 2
    batch = prefill.post({"input_ids": [[5], [6]], "stream": True, **room(2**63 - 2)}).json()
    assert [a["output_ids"] for a in batch] == [[5], [6]]


@pytest.mark.parametrize("number", [2**63, -1, "abc", 1.5, True])
def test_bad_rooms_are_refused_by_both_legs(prefill: FakeNode, decode: FakeNode, number: Any) -> None:
    for node in (prefill, decode):
        response = node.post({"text": "a", **room(number)})
        assert response.status_code == 400 and "bootstrap_room" in response.json()["error"]["message"]


def test_roles_want_rooms_or_refuse_them(unified: FakeNode, prefill: FakeNode, decode: FakeNode) -> None:
    refused = [prefill.post({"text": "a"}), unified.post({"text": "a", **room(1)})]
    assert [r.status_code for r in refused] == [400, 400]
    assert all(r.json()["error"]["param"] == "bootstrap_room" for r in refused)
    assert decode.post({"text": "a"}).status_code == decode.post({"text": "a", **room(1)}).status_code == 200


def test_a_room_and_a_rid_in_use_are_refused_until_their_owner_ends(decode: FakeNode) -> None:
    owner = {"text": TEXT, "sampling_params": SLOW, "rid": "owner", **room(4711)}
    thread, results = in_background(lambda: decode.post(owner))
    wait_for(lambda: sum(decode.state(r)["num_running"] for r in (0, 1)) == 1)  # type: ignore[misc]
    same_room, same_rid = decode.post({"text": "a", **room(4711)}), decode.post({"text": "a", "rid": "owner"})
    assert same_room.status_code == 400 and "4711" in same_room.json()["error"]["message"]
    assert same_rid.status_code == 400 and same_rid.json()["error"]["param"] == "rid"
    decode.post({"rid": "owner"}, "/abort_request")
    thread.join(5)
    assert results[0].status_code == 499 and results[0].json()["error"]["type"] == "aborted_error"
    again = decode.post({"text": "a", "sampling_params": {"max_new_tokens": 1}, "rid": "owner", **room(4711)})
    assert again.status_code == 200


def test_requests_go_to_the_rank_that_they_name(decode: FakeNode) -> None:
    for extra, rank in (({"routed_dp_rank": 1}, 1), ({"data_parallel_rank": 0, **room(7)}, 0)):
        body = {"text": "a", "sampling_params": SLOW, "rid": f"to-{rank}", **extra}
        thread, _ = in_background(lambda body=body: decode.post(body))
        wait_for(lambda rank=rank: decode.state(rank)["num_running"] == 1)
        assert decode.state(1 - rank)["num_running"] == 0
        decode.post({"rid": f"to-{rank}"}, "/abort_request")
        thread.join(5)


# -- failures --------------------------------------------------------------------------------------


def test_a_failure_before_the_first_token_has_its_status_also_for_a_stream(unified: FakeNode) -> None:
    for stream in (False, True):
        thread, results = in_background(
            lambda stream=stream: unified.post({"text": "a", "sampling_params": SILENT, "rid": "s", "stream": stream})
        )
        wait_for(lambda: unified.state()["num_running"] == 1)
        unified.post({"rid": "s"}, "/abort_request")
        thread.join(5)
        assert results[0].status_code == 499 and results[0].headers["content-type"] == "application/json"


def test_a_failure_inside_a_stream_is_its_last_event_but_one(unified: FakeNode) -> None:
    body = {"text": TEXT, "sampling_params": {**FAILING, "frequency_penalty": 1}}
    *_, update, error, done = unified.events(body)
    assert len(update["output_ids"]) == 2 and done == "[DONE]"  # type: ignore[index]
    assert error == {
        "error": {
            "message": "made to fail",
            "type": "worker_error",
            "param": None,
            "code": "worker_unavailable",
            "retryable": True,
        }
    }


@pytest.mark.parametrize("stream", [False, True])
def test_one_failed_sequence_fails_its_batch_and_frees_the_others(unified: FakeNode, stream: bool) -> None:
    body = {
        "text": [TEXT, TEXT],
        "sampling_params": [{**FAILING, "frequency_penalty": 1}, SLOW],
        "rid": [f"bad-{stream}", f"good-{stream}"],
    }
    if stream:
        *_, error, done = unified.events(body)
        assert error["error"]["type"] == "worker_error" and done == "[DONE]"  # type: ignore[index]
    else:
        response = unified.post(body)
        assert response.status_code == 503 and response.json()["error"]["message"] == "made to fail"
    wait_for(lambda: unified.state()["num_running"] == 0)
    assert f"good-{stream}" in unified.state()["aborted"]  # type: ignore[operator]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_sequences_at_once(unified: FakeNode, stream: bool) -> None:
    rids = [f"gone-{stream}-{i}" for i in range(3)]
    body = {"text": [TEXT] * 3, "sampling_params": SLOW, "rid": rids, "stream": stream}
    content = json.dumps(body).encode()
    host, port = unified.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content) + content)
        wait_for(lambda: unified.state()["num_running"] == 3)
        if stream:
            client.recv(100)
    left = time.monotonic()
    wait_for(lambda: unified.state()["num_running"] == 0, within_s=2)
    assert time.monotonic() - left < 1
    assert set(rids) <= set(unified.state()["aborted"])  # type: ignore[call-overload]


def test_a_slow_reader_misses_events_but_no_text(unified: FakeNode) -> None:
    """Every answer of a batch arrives whole, although nobody read for a while."""
    body = {"input_ids": [[65] * 50] * 64, "sampling_params": {"max_new_tokens": 150}, "stream": True}
    with httpx.stream("POST", f"{unified.url}/generate", json=body, timeout=20) as response:
        time.sleep(1.0)
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    last = {u["index"]: u for u in map(json.loads, lines)}
    assert len(last) == 64 and all(len(u["output_ids"]) == 150 for u in last.values())


@pytest.mark.parametrize("content", [b"{", b"", b"[1]", b'{"text": "\xff"}', b'{"text": "a", "top_p": NaN}'])
def test_a_body_that_is_no_json_object(unified: FakeNode, content: bytes) -> None:
    response = httpx.post(f"{unified.url}/generate", content=content)
    error = response.json()["error"]
    assert response.status_code == 400 and "JSON" in error["message"] and error["type"] == "invalid_request_error"


def test_a_body_that_is_too_large(unified: FakeNode) -> None:
    for content in (b"x" * 100_001, b"x" * 700_000):
        response = httpx.post(f"{unified.url}/generate", content=content)
        assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"
    for path in ("/generate", "/debug/states"):
        chunked = httpx.post(f"{unified.url}{path}", content=iter([b"x" * 60_000] * 3))
        assert chunked.status_code == 413
    assert unified.post({"text": "a" * 60_000}).status_code == 400


def test_a_body_that_says_that_it_is_too_large_is_refused_unread(unified: FakeNode) -> None:
    assert b" 413 " in say(unified, b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 100001\r\n\r\n")


@pytest.mark.parametrize("path", [b"/generate", b"/abort_request", b"/debug/states"])
def test_a_body_that_does_not_come_times_out(unified: FakeNode, path: bytes) -> None:
    start = time.monotonic()
    answer = say(unified, b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{" % path, until_closed=True)
    assert 0.9 < time.monotonic() - start < 3
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"code":"upload_timeout"' in answer


BIG_HEADS = [
    b"a: " + b"x" * 70_000 + b"\r\n\r\n",
    b"a: " + b"x" * 70_000,  # its end never comes
    b"a: b\r\n" * 200 + b"\r\n",
    b"a: b\r\n" * 20_000,
]


@pytest.mark.parametrize("headers", BIG_HEADS, ids=range(len(BIG_HEADS)))
def test_headers_that_are_too_much(unified: FakeNode, headers: bytes) -> None:
    answer = say(unified, b"GET /health HTTP/1.1\r\nhost: x\r\n" + headers, until_closed=True)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ") and json.loads(body)["error"]["code"] == "headers_too_large"


def test_what_is_no_http_gets_our_error_shape(unified: FakeNode) -> None:
    head, _, body = say(unified, b"what?\r\n\r\n", until_closed=True).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and json.loads(body)["error"]["code"] == "bad_http"


def say(node: FakeNode, request: bytes, *, until_closed: bool = False) -> bytes:
    """What the node answers to these bytes: the first of it, or all until it closes the connection."""
    host, port = node.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as client:
        client.sendall(request)
        answer = client.recv(65536)
        while until_closed and (more := client.recv(65536)):
            answer += more
    return answer


def test_tokens_beyond_all_pages_are_refused(unified: FakeNode) -> None:
    sampling = {"max_new_tokens": MAX_TOTAL_TOKENS - 1}
    response = unified.post({"input_ids": [1, 2], "sampling_params": sampling})
    assert response.status_code == 400 and str(MAX_TOTAL_TOKENS) in response.json()["error"]["message"]


def test_unknown_paths_and_wrong_methods_have_the_same_shape(unified: FakeNode) -> None:
    missing, wrong = unified.get("/nope"), unified.get("/generate")
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert missing.json()["error"]["code"] == "not_found" and "/nope" in missing.json()["error"]["message"]
    assert wrong.json()["error"]["code"] == "method_not_allowed" and wrong.headers["allow"] == "POST"


# -- the other endpoints ---------------------------------------------------------------------------


def test_health(unified: FakeNode, prefill: FakeNode, decode: FakeNode) -> None:
    for node in (unified, prefill, decode):
        assert node.get("/health").status_code == node.get("/health_generate").status_code == 200


def test_server_info(unified: FakeNode, prefill: FakeNode, decode: FakeNode) -> None:
    info = unified.get("/get_server_info").json()
    assert info["disaggregation_mode"] == "null" and info["bootstrap_port"] is None
    assert info["fingerprint"] == "0123456789abcdef" and info["version"] and info["page_size"] == 16
    assert info["disable_radix_cache"] is False and info["mamba_scheduler_strategy"] == "extra_buffer"
    assert info["context_length"] == CONTEXT_LENGTH and info["dtype"] == "float32" and info["host"] == "127.0.0.1"
    assert len(info["internal_states"]) == info["dp_size"] == 1
    info = prefill.get("/server_info").json()
    assert info["disaggregation_mode"] == "prefill"
    assert info["bootstrap_port"] == info["disaggregation_bootstrap_port"] > 0
    info = decode.get("/server_info").json()
    assert info["disaggregation_mode"] == "decode" and [s["rank"] for s in info["internal_states"]] == [0, 1]


def test_model_info(unified: FakeNode, model_path: str) -> None:
    for path in ("/model_info", "/get_model_info"):
        info = unified.get(path).json()
        assert info["model_path"] == info["tokenizer_path"] == model_path and info["is_generation"] is True
        assert info["model_type"] == "nemotron_h" and info["architectures"] == ["NemotronHForCausalLM"]


def test_flush_is_refused_while_requests_run_and_may_wait(unified: FakeNode) -> None:
    assert unified.get("/flush_cache").status_code == unified.post({}, "/flush_cache").status_code == 200
    body = {"text": TEXT, "sampling_params": {**SLOW, "max_new_tokens": 20}}
    thread, _ = in_background(lambda: unified.post(body))
    wait_for(lambda: unified.state()["num_running"] == 1)
    refused = unified.get("/flush_cache")
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "flush_refused"
    assert unified.post({}, "/flush_cache?timeout=10").status_code == 200
    thread.join(5)
    assert unified.get("/flush_cache?timeout=soon").status_code == 400
    assert unified.get("/flush_cache?timeout=nan").status_code == 400


def test_abort_by_rid_by_group_and_of_all(unified: FakeNode) -> None:
    for abort in ({"rid": "one"}, {"rid": "group"}, {"abort_all": True}, {"rid": ["one", "group"]}):
        calls = [
            in_background(lambda: unified.post({"text": TEXT, "sampling_params": SLOW, "rid": "one"})),
            in_background(lambda: unified.post({"text": [TEXT] * 2, "sampling_params": SLOW, "rid": "group"})),
        ]
        wait_for(lambda: unified.state()["num_running"] == 3)
        assert unified.post(abort, "/abort_request").status_code == 200
        if abort in ({"rid": "one"}, {"rid": "group"}):
            left = 2 if abort["rid"] == "one" else 1
            wait_for(lambda left=left: unified.state()["num_running"] == left)
            unified.post({"abort_all": True}, "/abort_request")
        for thread, results in calls:
            thread.join(5)
            assert results[0].status_code == 499


def test_a_rid_of_a_list_names_all_samples_of_its_prompt(unified: FakeNode) -> None:
    body = {"text": [TEXT] * 2, "sampling_params": {**SLOW, "n": 2}, "rid": ["p", "q"]}
    thread, results = in_background(lambda: unified.post(body))
    wait_for(lambda: unified.state()["num_running"] == 4)
    unified.post({"rid": "q"}, "/abort_request")
    thread.join(5)
    assert results[0].status_code == 499
    wait_for(lambda: unified.state()["num_running"] == 0)
    aborted = unified.state()["aborted"]
    assert {"p_0", "p_1", "q_0", "q_1"} <= set(aborted)  # type: ignore[call-overload]


def test_a_client_that_left_may_send_the_same_ids_again_at_once(unified: FakeNode) -> None:
    rids = ["again-0", "again-1"]
    for _ in range(10):
        with pytest.raises(httpx.ReadTimeout):
            body = {"text": [TEXT] * 2, "sampling_params": SLOW, "rid": rids}
            httpx.post(f"{unified.url}/generate", json=body, timeout=0.08)
        again = unified.post({"text": [TEXT] * 2, "sampling_params": {"max_new_tokens": 1}, "rid": rids})
        assert again.status_code == 200, again.text


def test_abort_wants_to_know_what(unified: FakeNode) -> None:
    assert unified.post({"rid": "unknown"}, "/abort_request").status_code == 200
    for body in ({}, {"rid": 5}, {"abort_all": "yes"}, []):
        assert unified.post(body, "/abort_request").status_code == 400


def test_an_abort_names_only_so_many(unified: FakeNode) -> None:
    assert unified.post({"rid": [f"r{i}" for i in range(4096)]}, "/abort_request").json()["ended"] is True
    for rids, param in (["r"] * 4097, "rid"), (["r", 5], "rid[1]"), (["r", ""], "rid[1]"):
        refused = unified.post({"rid": rids}, "/abort_request")
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param


UPGRADES = [
    b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n",
    b"connection: upgrade\r\nUpgrade: websocket\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
]


@pytest.mark.parametrize("upgrade", UPGRADES, ids=["h2c", "websocket"])
@pytest.mark.parametrize("step", [7, 100_000], ids=["in pieces", "at once"])
def test_a_wish_to_speak_another_protocol_is_ignored(unified: FakeNode, upgrade: bytes, step: int) -> None:
    """Bodies of both kinds and what follows on the same connection are read as if it was not there."""
    body = b'{"input_ids": [65, 66], "sampling_params": {"max_new_tokens": 2}}'
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\n" + upgrade
    requests = head + b"content-length: %d\r\n\r\n" % len(body) + body
    requests += head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    requests += b"GET /health HTTP/1.1\r\nhost: x\r\n" + upgrade + b"\r\n"
    requests += b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    host, port = unified.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(requests), step):
            client.sendall(requests[start : start + step])
        answer = b""
        while more := client.recv(65536):
            answer += more
    assert answer.count(b"HTTP/1.1 200 OK") == 4 and answer.count(b'"output_ids":[65,66]') == 2


def test_many_such_wishes_at_once(unified: FakeNode) -> None:
    request = b"GET /health HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n"
    requests = (request + b"\r\n") * 700 + request + b"connection: close\r\n\r\n"
    assert say(unified, requests, until_closed=True).count(b"HTTP/1.1 200 OK") == 701


def test_a_tunnel_is_refused(unified: FakeNode) -> None:
    answer = say(unified, b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n" + UPGRADES[0] + b"\r\n", until_closed=True)
    assert answer.startswith(b"HTTP/1.1 400 ") and b'"code":"bad_http"' in answer
