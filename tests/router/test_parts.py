"""The router's pure parts: cutting events, claiming rooms, merging."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from common.errors import RequestError, WorkerError
from router import logprobs
from router.events import WholeEvents, split_events
from router.in_flight import InFlight, random_room
from router.logprobs import PromptLogprobs, merger


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_events_come_out_whole_however_they_are_cut(end: bytes) -> None:
    rng = random.Random(0)
    for _ in range(300):
        text = b"".join(b"data: " + b"x\n" * rng.randrange(3) + b"y" + end for _ in range(rng.randrange(1, 6)))
        text += b"tail"
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))
        events, out = WholeEvents(), b""
        for begin, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
            whole = events.feed(text[begin:stop])
            assert not whole or whole.endswith(end)
            out += whole
            # Nothing that is complete is held back.
            assert end not in events.rest()
        assert events.rest() == b"tail"
        assert out + events.rest() == text


def test_split_events() -> None:
    assert split_events(b"data: a\n\ndata: b\r\n\r\n") == [b"data: a", b"data: b"]


def test_rooms_are_in_range_and_unique_in_flight() -> None:
    drawn = iter([7, 7, 0, 7, 2**63 - 1, 7])
    in_flight = InFlight(lambda: next(drawn))
    assert in_flight.claim({"a"}, 2) == [7, 0]
    assert in_flight.claim({"b"}, 1) == [2**63 - 1]
    in_flight.release({"a"}, [7, 0])
    assert in_flight.claim({"a"}, 1) == [7]
    assert all(0 <= random_room() < 2**63 for _ in range(1000))
    assert max(random_room() for _ in range(200)) > 2**61


def test_a_refused_claim_takes_nothing() -> None:
    in_flight = InFlight()
    in_flight.claim({"a"}, 1)
    with pytest.raises(RequestError, match="'a'"):
        in_flight.claim({"b", "a"}, 5)
    assert in_flight.rids == {"a"}
    assert len(in_flight.rooms) == 1


def test_merge_leaves_other_fields_and_other_items_alone() -> None:
    prompt = PromptLogprobs(b'[{"meta_info":{"input_token_logprobs":[[null,1,null]],"input_top_logprobs":null}},{}]')
    body = b'[{"text":"a","meta_info":{"id":"x","input_token_logprobs":null}},{"meta_info":{}},{"meta_info":{}}]'
    assert msgspec.json.decode(prompt.merge_answer(body)) == [
        {"text": "a", "meta_info": {"id": "x", "input_token_logprobs": [[None, 1, None]]}},
        {"meta_info": {}},
        {"meta_info": {}},
    ]
    assert prompt.merge_event(b"data: [DONE]") == b"data: [DONE]"


def test_prompt_logprobs_are_not_read_again_for_every_event() -> None:
    """What is not merged passes as it was written."""
    prompt = PromptLogprobs(b'{"meta_info":{"input_token_logprobs":[ [-1.50, 1, null],2 ],"input_top_logprobs":[]}}')
    event = b'data: {"text" : "\\u00e9","meta_info":{"id": 1.0,"input_token_logprobs":[3]}}'
    assert prompt.merge_event(event) == (
        b'data: {"text":"\\u00e9","meta_info":{"id":1.0,"input_token_logprobs":[[-1.50, 1, null],2,3],'
        b'"input_top_logprobs":[]}}'
    )


@pytest.mark.parametrize(
    ("prompt", "event", "merged"),
    [
        ("[1]", {"meta_info": {}}, {"meta_info": {"input_token_logprobs": [1]}}),
        ("[]", {"meta_info": {"input_token_logprobs": [2]}}, {"meta_info": {"input_token_logprobs": [2]}}),
        ("[]", {"meta_info": {}, "a": 1}, {"meta_info": {"input_token_logprobs": []}, "a": 1}),
        ("null", {"meta_info": {"b": 1}}, {"meta_info": {"b": 1}}),
        ("[1]", {"meta_info": None}, {"meta_info": None}),
        ("[1]", {"error": {}}, {"error": {}}),
        ("[1]", {"meta_info": {}, "index": 1}, {"meta_info": {}, "index": 1}),
        ("[1]", {"meta_info": {}, "index": -1}, {"meta_info": {}, "index": -1}),
    ],
)
def test_merging_at_its_edges(prompt: str, event: dict[str, Any], merged: dict[str, Any]) -> None:
    logprobs = PromptLogprobs(f'{{"meta_info":{{"input_token_logprobs":{prompt}}}}}'.encode())
    assert msgspec.json.decode(logprobs.merge_event(b"data: " + msgspec.json.encode(event))[6:]) == merged
    assert msgspec.json.decode(logprobs.merge_answer(msgspec.json.encode([{}, event])))[0] == {}


def test_prompt_logprobs_beyond_reason_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "_MAX_BYTES", 10)
    with pytest.raises(RequestError) as caught:
        merger("/generate", b'{"meta_info":{}}')
    assert caught.value.param == "top_logprobs_num"


@pytest.mark.parametrize(
    "body", [b"<html>", b"\xff", b"3", b"[1]", b'{"meta_info":{"input_token_logprobs":{}}}', b'{"meta_info":[]}']
)
def test_answers_of_another_shape_are_refused(body: bytes) -> None:
    with pytest.raises(WorkerError):
        PromptLogprobs(body)
