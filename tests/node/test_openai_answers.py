"""From answer objects to OpenAI's objects and chunks: what is said once and only once, and how tokens are called."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from common.tools import ToolFormat, read_tools
from node.openai.answers import OpenAIAnswer
from node.openai.chat_text import ChatParts, ChatText
from node.openai.choices import ChatChoice, NewPart, TextChoice
from node.openai.fields import StreamOptions
from node.openai.logprobs import LOWEST, TextLogprobs, TokenNames, chat_logprobs
from node.tokenizer import Tokenizer, load_tokenizer

TOOLS = read_tools({"tools": [{"type": "function", "function": {"name": "add"}}]})
USAGE = StreamOptions(include_usage=True)


@pytest.fixture(scope="module")
def tokenizer(model_path: str) -> Tokenizer:
    return load_tokenizer(model_path)


def answer(text: str, ids: list[int], reason: str | None = None, **meta: Any) -> dict[str, Any]:
    end = {"timing": {"queue_s": 1.0}, "transfer_bytes": {"kv": 7}, "e2e_latency": 0.5} if reason else {}
    base = {"prompt_tokens": 3, "completion_tokens": len(ids), "cached_tokens": 2}
    finish = {"type": reason, "matched": 0} if reason else None
    return {"text": text, "output_ids": ids, "meta_info": {**base, "finish_reason": finish, **end, **meta}}


def growing(text: str, cuts: list[int], reason: str = "stop") -> list[dict[str, Any]]:
    """The objects of a stream: the text up to each cut, a token a character."""
    ids = list(range(len(text)))
    parts = [answer(text[:cut], ids[:cut]) for cut in cuts]
    return [*parts, answer(text, ids, reason)]


def chat_choice(parts: ChatParts = ChatParts(), **fields: Any) -> ChatChoice:  # noqa: B008 - it cannot change
    return ChatChoice(
        0, NewPart(), ChatText(parts, "rid"), **{"names": None, "token_ids": False, "begun": False} | fields
    )


def of_chat(options: StreamOptions = StreamOptions(), **fields: Any) -> OpenAIAnswer:  # noqa: B008
    return OpenAIAnswer("chat.completion", "rid", "m", [chat_choice(**fields)], samples=1, options=options)


def chunks(found: OpenAIAnswer, objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    data = b"".join(found.events([item], is_last=item is objects[-1]) for item in objects)
    lines = data.decode().split("\n\n")
    assert lines.pop() == "" and all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) for line in lines]


def deltas(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice["delta"] for chunk in found for choice in chunk["choices"]]


def test_the_role_comes_first_and_the_finish_reason_last() -> None:
    found = chunks(of_chat(), growing("abc", [1, 1, 2]))
    assert deltas(found) == [{"role": "assistant", "content": ""}, *({"content": c} for c in "abc")]
    assert [chunk["choices"][0]["finish_reason"] for chunk in found] == [None, None, None, "stop"]
    assert {chunk["object"] for chunk in found} == {"chat.completion.chunk"}
    assert found[-1]["tandem"]["timing"] == {"queue_s": 1.0} and all("tandem" not in chunk for chunk in found[:-1])


def test_an_end_without_text_has_a_chunk_of_its_own() -> None:
    found = chunks(of_chat(), [answer("a", [1]), answer("a", [1, 0], "stop")])
    assert deltas(found)[-1] == {} and found[-1]["choices"][0]["matched_stop"] == 0


def test_nothing_to_say_is_not_said_unless_tokens_are_wanted() -> None:
    held_back = [answer("", [1]), answer("ab", [1, 2], "length")]
    assert len(chunks(of_chat(), held_back)) == 2
    with_ids = chunks(of_chat(token_ids=True), held_back)
    assert [chunk["choices"][0].get("token_ids") for chunk in with_ids] == [None, [1], [2]]


def test_usage_comes_in_a_chunk_without_choices_or_in_every_one() -> None:
    *others, last = chunks(of_chat(USAGE), growing("ab", [1]))
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert last["choices"] == []
    assert last["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": 2}}
    assert all(chunk["usage"] is None for chunk in others) and "tandem" in last and "tandem" not in others[-1]
    each = chunks(of_chat(StreamOptions(continuous_usage_stats=True)), growing("ab", [1]))
    assert [chunk["usage"]["completion_tokens"] for chunk in each] == [1, 1, 2]
    assert all("usage" not in chunk for chunk in chunks(of_chat(), growing("ab", [1])))


def test_a_prompt_counts_once_and_bytes_are_summed() -> None:
    choices = [
        TextChoice(i, NewPart(), prompt="", prompt_logprobs=None, logprobs=None, token_ids=False) for i in range(4)
    ]
    found = OpenAIAnswer("text_completion", "r", "m", choices, samples=2, options=StreamOptions())
    body = found.whole([answer("x", [1, 2], "stop", e2e_latency=i, timing={"decode_s": i}) for i in range(4)])
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 6 and body["usage"]["completion_tokens"] == 8
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    own = body["tandem"]
    assert own["transfer_bytes"] == {"kv": 28} and own["timing"] == {"decode_s": 3} and own["cached_tokens"] == 4


SPLIT = ChatParts(thinking=False, tools=TOOLS, form=ToolFormat.HERMES)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "é😀"}}\n</tool_call>'
TEXT = f"<think>\nLet me add. </thin </think>\n\nSure:\n{CALL}"


def test_thought_content_and_calls_are_the_same_whole_and_in_any_pieces() -> None:
    whole = of_chat(parts=SPLIT).whole([answer(TEXT, [1], "stop")])["choices"][0]
    message = whole["message"]
    assert message["reasoning_content"] == "Let me add. </thin" and message["content"] == "Sure:"
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": "é😀"} and whole["finish_reason"] == "tool_calls"
    draw = random.Random(1)
    for _ in range(200):
        cuts = sorted(draw.sample(range(len(TEXT)), draw.randint(0, 12)))
        found = chunks(of_chat(parts=SPLIT), growing(TEXT, cuts))
        parts = deltas(found)
        assert "".join(part.get("reasoning_content", "") for part in parts) == message["reasoning_content"], cuts
        assert "".join(part.get("content", "") for part in parts) == message["content"], cuts
        assert [c for part in parts for c in part.get("tool_calls", [])] == [{"index": 0, **call}], cuts
        assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_calls_alone_have_null_content() -> None:
    text = '<tool_call>{"name": "add"}</tool_call>'
    choice = of_chat(parts=SPLIT).whole([answer(text, [1], "stop")])["choices"][0]
    assert choice["message"]["content"] is None
    cut_short = of_chat(parts=SPLIT).whole([answer(text, [1], "length")])["choices"][0]
    assert cut_short["finish_reason"] == "length"


# -- log-probabilities -------------------------------------------------------------------------------------------------


def test_tokens_that_are_no_text_are_called_by_their_bytes(tokenizer: Tokenizer) -> None:
    names = TokenNames(tokenizer)
    ids = tokenizer.encode("a😀")
    assert b"".join(map(names.bytes_of, ids)) == "a😀".encode()
    called = [names.name(token_id) for token_id in ids]
    assert called[0] == "a" and called[1].startswith("bytes:\\xf0") and "\ufffd" not in "".join(called)
    assert names.name(0) == "<|end|>"


def test_logprobs_of_a_chat(tokenizer: Tokenizer) -> None:
    names = TokenNames(tokenizer)
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    entries: list[Any] = [(-0.5, a, None), (float("-inf"), b, None)]
    found = chat_logprobs(names, entries, [[(-0.5, a, None), (-1.5, b, None)], []])["content"]
    assert [(token["token"], token["logprob"], token["bytes"]) for token in found] == [
        ("a", -0.5, [97]),
        ("b", LOWEST, [98]),
    ]
    assert [token["token"] for token in found[0]["top_logprobs"]] == ["a", "b"] and found[1]["top_logprobs"] == []
    assert [token["top_logprobs"] for token in chat_logprobs(names, entries, [])["content"]] == [[], []]


def test_logprobs_of_a_completion(tokenizer: Tokenizer) -> None:
    names = TokenNames(tokenizer)
    ids = tokenizer.encode("a😀é b")
    entries: list[Any] = [(None if i == 0 else -float(i), token_id, None) for i, token_id in enumerate(ids)]
    tops: list[Any] = [None, *([(-0.25, 5, None)] for _ in ids[1:])]
    writer = TextLogprobs(names, tokenizer, skip_special_tokens=True, offset=10)
    first, rest = writer.take(entries[:3], tops[:3]), writer.take(entries[3:], tops[3:])
    found = {name: first[name] + rest[name] for name in first}
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert found["token_logprobs"][1:] == [-float(i) for i in range(1, len(ids))]
    assert all(len(top) == 2 and names.name(5) in top for top in found["top_logprobs"][1:])
    # The tokens of the emoji begin at the same character, which is counted once it is whole.
    assert found["text_offset"][:5] == [10, 11, 11, 11, 12]
    assert len(set(map(len, found.values()))) == 1


def test_a_resumed_answer_tells_only_of_what_is_new() -> None:
    text = ChatText(ChatParts(thinking=True), "rid")
    text.push("I thi", is_last=False)
    choice = ChatChoice(0, NewPart(5, 2), text, names=None, token_ids=True, begun=True)
    found = choice.take(answer("I think</think>so", [1, 2, 3], "stop"))
    assert [item["delta"] for item in found] == [{"reasoning_content": "nk", "content": "so"}]
    assert found[0]["token_ids"] == [3]
