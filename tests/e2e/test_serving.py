"""The served contract, through real processes: answers, streams, batches, logprobs, counters, aborts."""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
from typing import Any

import httpx
import pytest

from accuracy.gsm_mini import STOP, extract_answer, few_shot, problems, prompt
from tests.support.stack import Stack, generate

GREEDY = {"temperature": 0, "max_new_tokens": 200, "stop": STOP}


def question(index: int = 0) -> tuple[str, int]:
    problem = problems("heldout", 3, index + 1)[index]
    return prompt(problem, few_shot()), problem.answer


def events(url: str, body: dict[str, Any]) -> list[Any]:
    """The parsed `data:` lines of a stream, the last one being the string [DONE]."""
    with httpx.stream("POST", f"{url}/generate", json={**body, "stream": True}, timeout=60) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_a_question_is_answered_in_sglangs_shape(shared_stack: Stack) -> None:
    text, expected = question()
    response = generate(shared_stack.router.url, {"text": text, "sampling_params": GREEDY})
    assert response.status_code == 200
    answer = response.json()
    assert extract_answer(answer["text"]) == expected
    meta = answer["meta_info"]
    assert meta["finish_reason"]["type"] == "stop"
    assert meta["completion_tokens"] == len(answer["output_ids"]) > 5
    assert meta["prompt_tokens"] > 100 and meta["cached_tokens"] >= 0
    assert meta["e2e_latency"] > 0 and meta["id"]
    assert set(meta["timing"]) >= {"queue_s", "prefill_s", "transfer_s", "decode_s"}
    assert meta["transfer_bytes"]["ssm"] > 0 and meta["transfer_bytes"]["kv"] > 0 and meta["transfer_bytes"]["conv"] > 0


def test_router_answers_what_unified_answers(shared_stack: Stack) -> None:
    assert shared_stack.unified is not None
    for index in range(4):
        text, _ = question(index)
        body = {"text": text, "sampling_params": GREEDY}
        ours = generate(shared_stack.router.url, body).json()
        reference = generate(shared_stack.unified.url, body).json()
        assert ours["output_ids"] == reference["output_ids"] and ours["text"] == reference["text"]


def test_decode_rank_never_computes_a_prompt(shared_stack: Stack) -> None:
    assert httpx.post(f"{shared_stack.router.url}/flush_cache").status_code == 200
    before = shared_stack.decode.state(), shared_stack.prefill.state()
    text, _ = question()
    prompt_tokens = generate(shared_stack.router.url, {"text": text, "sampling_params": GREEDY}).json()["meta_info"][
        "prompt_tokens"
    ]
    after = shared_stack.decode.state(), shared_stack.prefill.state()
    assert after[0]["prefill_tokens_computed"] == before[0]["prefill_tokens_computed"]
    assert after[1]["prefill_tokens_computed"] - before[1]["prefill_tokens_computed"] == prompt_tokens  # type: ignore[operator]
    assert after[1]["decode_tokens_computed"] == 0


def test_front_and_rank_are_processes_of_their_own(shared_stack: Stack) -> None:
    pids = {shared_stack.router.process.pid}
    for server in (shared_stack.prefill, shared_stack.decode):
        pids |= {server.process.pid, server.rank().pid}
    assert len(pids) == 5


def test_stream_is_cumulative_and_ends_with_the_whole_answer(shared_stack: Stack) -> None:
    text, _ = question(1)
    body = {"text": text, "sampling_params": GREEDY}
    whole = generate(shared_stack.router.url, body).json()
    *updates, done = events(shared_stack.router.url, body)
    assert done == "[DONE]" and len(updates) > 3
    texts = [u["text"] for u in updates]
    assert all(b.startswith(a) for a, b in itertools.pairwise(texts))
    assert updates[-1]["text"] == whole["text"] and updates[-1]["output_ids"] == whole["output_ids"]
    assert [u["meta_info"]["finish_reason"] for u in updates[:-1]] == [None] * (len(updates) - 1)
    assert updates[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]


def test_batch_keeps_its_order_and_equals_its_parts(shared_stack: Stack) -> None:
    texts = [question(i)[0] for i in range(3)]
    alone = [generate(shared_stack.router.url, {"text": t, "sampling_params": GREEDY}).json() for t in texts]
    batch = generate(shared_stack.router.url, {"text": texts, "sampling_params": GREEDY}).json()
    assert [b["text"] for b in batch] == [a["text"] for a in alone]
    *updates, done = events(shared_stack.router.url, {"text": texts, "sampling_params": GREEDY})
    last = {u["index"]: u["text"] for u in updates}
    assert done == "[DONE]" and [last[i] for i in range(3)] == [a["text"] for a in alone]


def test_input_ids_mean_the_same_as_text(shared_stack: Stack) -> None:
    ids = [[5, 6, 7, 8], [9]]
    answers = generate(shared_stack.router.url, {"input_ids": ids, "sampling_params": {"temperature": 0}}).json()
    assert [a["meta_info"]["prompt_tokens"] for a in answers] == [4, 1]


def test_n_gives_that_many_answers_of_each_prompt_and_seeds_repeat(shared_stack: Stack) -> None:
    body = {
        "text": ["Question: Tom", "Question: Ann"],
        "sampling_params": {"temperature": 1.0, "n": 3, "max_new_tokens": 12, "sampling_seed": 11},
    }
    first, second = (generate(shared_stack.router.url, body).json() for _ in range(2))
    assert len(first) == 6
    assert [a["output_ids"] for a in first] == [a["output_ids"] for a in second]
    assert len({tuple(a["output_ids"]) for a in first[:3]}) > 1


def test_sampled_answers_are_unifieds_for_the_same_seed(shared_stack: Stack) -> None:
    assert shared_stack.unified is not None
    for seed in range(5):
        sampling = {"temperature": 0.9, "top_p": 0.95, "max_new_tokens": 24, "sampling_seed": seed, "ignore_eos": True}
        body = {"text": "Question: A baker", "sampling_params": {**sampling, "repetition_penalty": 1.1}}
        ours = generate(shared_stack.router.url, body).json()
        assert ours["output_ids"] == generate(shared_stack.unified.url, body).json()["output_ids"]


@pytest.mark.parametrize("start_len", [0, 7, -1])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_prompt_and_answer_are_unifieds(shared_stack: Stack, start_len: int, stream: bool) -> None:
    assert shared_stack.unified is not None
    body = {
        "text": question(2)[0][:300],
        "sampling_params": {"temperature": 0, "max_new_tokens": 8},
        "return_logprob": True,
        "logprob_start_len": start_len,
        "top_logprobs_num": 3,
    }
    if stream:
        ours, reference = (events(s.url, body)[-2]["meta_info"] for s in (shared_stack.router, shared_stack.unified))
    else:
        ours, reference = (
            generate(s.url, body).json()["meta_info"] for s in (shared_stack.router, shared_stack.unified)
        )
    for key in ("input_token_logprobs", "output_token_logprobs"):
        assert [t[1] for t in ours[key]] == [t[1] for t in reference[key]]
        for (a, _, _), (b, _, _) in zip(ours[key], reference[key], strict=True):
            assert (a is None and b is None) or math.isclose(a, b, abs_tol=1e-4)
    assert len(ours["input_token_logprobs"]) == (0 if start_len == -1 else ours["prompt_tokens"] - start_len)
    assert len(ours["output_token_logprobs"]) == 8
    assert all(len(top) == 3 for top in ours["output_top_logprobs"])


@pytest.mark.parametrize("max_new_tokens", [0, 1, 2])
def test_the_shortest_answers(shared_stack: Stack, max_new_tokens: int) -> None:
    body = {"text": "Question:", "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens}}
    answer = generate(shared_stack.router.url, body).json()
    assert len(answer["output_ids"]) == max_new_tokens
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": max_new_tokens}


@pytest.mark.parametrize("room", [0, 2**63 - 1])
def test_both_legs_by_hand_with_the_rooms_at_the_ends_of_the_range(shared_stack: Stack, room: int) -> None:
    info = httpx.get(f"{shared_stack.prefill.url}/server_info").json()
    body = {
        "text": "Question: Tom",
        "sampling_params": {"temperature": 0, "max_new_tokens": 5},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": info["disaggregation_bootstrap_port"],
        "bootstrap_room": room,
    }
    answers: dict[str, httpx.Response] = {}

    def leg(name: str, url: str) -> None:
        answers[name] = generate(url, body)

    threads = [
        threading.Thread(target=leg, args=("decode", shared_stack.decode.url)),
        threading.Thread(target=leg, args=("prefill", shared_stack.prefill.url)),
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.2)  # decode asks for the room before prefill has heard of it
    for thread in threads:
        thread.join()
    assert answers["decode"].status_code == answers["prefill"].status_code == 200
    first = answers["prefill"].json()["output_ids"]
    assert len(first) == 1 and answers["decode"].json()["output_ids"][:1] == first


def test_decode_serves_alone_without_a_room_and_prefill_refuses(shared_stack: Stack) -> None:
    body = {"text": "Question: Tom", "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    assert generate(shared_stack.decode.url, body).json()["meta_info"]["completion_tokens"] == 4
    refused = generate(shared_stack.prefill.url, body)
    assert refused.status_code == 400 and "bootstrap_room" in refused.json()["error"]["message"]


LONG = {"temperature": 0, "max_new_tokens": 5000, "ignore_eos": True}


def test_a_client_that_leaves_while_it_waits_frees_everything(shared_stack: Stack) -> None:
    with pytest.raises(httpx.ReadTimeout):
        generate(shared_stack.router.url, {"text": "Question: Tom", "sampling_params": LONG}, timeout_s=0.5)
    assert_idle(shared_stack)


def test_a_client_that_leaves_a_stream_frees_everything(shared_stack: Stack) -> None:
    body = {"text": "Question: Tom", "sampling_params": LONG, "stream": True}
    with httpx.stream("POST", f"{shared_stack.router.url}/generate", json=body, timeout=20) as response:
        lines = response.iter_lines()
        assert '"output_ids"' in next(lines)
        assert int(shared_stack.decode.state()["num_running"]) == 1  # type: ignore[call-overload]
    assert_idle(shared_stack)


def test_abort_by_rid_ends_the_request(shared_stack: Stack) -> None:
    body = {
        "text": "Question: Tom",
        "rid": "to-be-aborted",
        "sampling_params": LONG,
    }
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(generate(shared_stack.router.url, body)))
    thread.start()
    time.sleep(0.5)
    assert httpx.post(f"{shared_stack.router.url}/abort_request", json={"rid": "to-be-aborted"}).status_code == 200
    thread.join(5)
    assert not thread.is_alive() and answers[0].status_code == 499
    assert answers[0].json()["error"]["type"] == "aborted_error"
    assert_idle(shared_stack)


def assert_idle(running: Stack, within_s: float = 3.0) -> None:
    """No page, slot or room belongs to a request any more."""
    deadline = time.monotonic() + within_s
    while True:
        if running.prefill.is_idle() and running.decode.is_idle():
            return
        assert time.monotonic() < deadline, (running.prefill.state(), running.decode.state())
        time.sleep(0.05)


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/server_info", "/get_server_info", "/model_info"])
def test_endpoints_of_every_role(shared_stack: Stack, path: str) -> None:
    assert shared_stack.unified is not None
    for server in (shared_stack.router, shared_stack.prefill, shared_stack.decode, shared_stack.unified):
        assert httpx.get(f"{server.url}{path}", timeout=20).status_code == 200, (server.name, path)


def test_flush_cache_is_refused_while_requests_run(shared_stack: Stack) -> None:
    assert httpx.post(f"{shared_stack.router.url}/flush_cache").status_code == 200
    body = {"text": "Question:", "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}, "stream": True}
    with httpx.stream("POST", f"{shared_stack.router.url}/generate", json=body, timeout=30) as response:
        lines = response.iter_lines()
        assert '"output_ids"' in next(lines)
        assert httpx.post(f"{shared_stack.router.url}/flush_cache").status_code == 400
    assert_idle(shared_stack)
