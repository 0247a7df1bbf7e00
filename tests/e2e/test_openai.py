"""The `openai` package, unchanged, against the router and against a unified node: the same answers from both."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from accuracy.gsm_mini import extract_answer, problems
from tests.support.stack import Stack, generate

NEAR = 1e-4
EOS = 0
PROMPT = "Question: Tom has 12 apples and buys 7 more. How many apples does he have?\nAnswer:"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def ask(index: int = 0) -> list[Any]:
    return [{"role": "user", "content": problems("heldout", 3, index + 1)[index].question}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    ours: openai.OpenAI
    reference: openai.OpenAI

    @property
    def both(self) -> tuple[openai.OpenAI, openai.OpenAI]:
        return self.ours, self.reference


@pytest.fixture(scope="module")
def clients(shared_stack: Stack) -> Iterator[Clients]:
    assert shared_stack.unified is not None
    with (
        openai.OpenAI(base_url=f"{shared_stack.router.url}/v1", api_key="none", max_retries=0) as ours,
        openai.OpenAI(base_url=f"{shared_stack.unified.url}/v1", api_key="none", max_retries=0) as reference,
    ):
        yield Clients(ours=ours, reference=reference)


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "tandem-mini", "messages": ask(), "temperature": 0} | fields)


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    return client.completions.create(**{"model": "tandem-mini", "prompt": PROMPT, "temperature": 0} | fields)


# -- chat --------------------------------------------------------------------------------------------------------------


def test_a_question_is_answered_right_and_as_unified_answers_it(clients: Clients) -> None:
    for index in range(3):
        ours, reference = (chat(client, messages=ask(index)) for client in clients.both)
        assert extract_answer(ours.choices[0].message.content) == problems("heldout", 3, index + 1)[index].answer
        assert ours.choices == reference.choices and ours.choices[0].finish_reason == "stop"
        assert ours.usage.prompt_tokens == reference.usage.prompt_tokens > 20
        assert ours.usage.completion_tokens == reference.usage.completion_tokens > 20
        assert ours.usage.prompt_tokens_details.cached_tokens >= 0
        assert ours.tandem["transfer_bytes"]["ssm"] > 0 and ours.tandem["timing"]["decode_s"] > 0


def test_a_stream_is_the_whole_answer(clients: Clients) -> None:
    whole = chat(clients.ours)
    *chunks, last = chat(clients.ours, stream=True, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.tandem["timing"]["decode_s"] > 0
    choices = [chunk.choices[0] for chunk in chunks]
    assert choices[0].delta.role == "assistant" and len(choices) > 2
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert len({chunk.id for chunk in [*chunks, last]}) == 1


def test_streams_by_the_clients_own_helper(clients: Clients) -> None:
    with clients.ours.chat.completions.stream(model="m", messages=ask(), temperature=0) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(texts) == final.choices[0].message.content == chat(clients.ours).choices[0].message.content


async def test_many_at_once(shared_stack: Stack, clients: Clients) -> None:
    expected = [chat(clients.reference, messages=ask(i)).choices[0].message.content for i in range(4)]
    async with openai.AsyncOpenAI(base_url=f"{shared_stack.router.url}/v1", api_key="none") as client:

        async def one(index: int, stream: bool) -> str:
            made = await client.chat.completions.create(model="m", messages=ask(index), temperature=0, stream=stream)
            if not stream:
                return str(made.choices[0].message.content)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in made])

        found = await asyncio.gather(*(one(i, stream) for stream in (False, True) for i in range(4)))
    assert found == expected * 2


def test_log_probabilities_are_unifieds_and_the_engines(clients: Clients, shared_stack: Stack) -> None:
    fields = {"logprobs": True, "top_logprobs": 3, "max_tokens": 12}
    ours, reference = (chat(client, **fields) for client in clients.both)
    tokens, expected = ours.choices[0].logprobs.content, reference.choices[0].logprobs.content
    assert len(tokens) == 12 == ours.usage.completion_tokens
    assert [t.token for t in tokens] == [t.token for t in expected]
    assert all(abs(a.logprob - b.logprob) < NEAR for a, b in zip(tokens, expected, strict=True))
    assert b"".join(bytes(t.bytes) for t in tokens).decode() == ours.choices[0].message.content
    assert all(len(t.top_logprobs) == 3 and t.top_logprobs[0].logprob == t.logprob for t in tokens)
    streamed = chat(clients.ours, stream=True, **fields)
    logprobs = [chunk.choices[0].logprobs for chunk in streamed]
    assert [t.token for item in logprobs if item is not None for t in item.content] == [t.token for t in expected]


def test_three_samples_of_a_seed_are_unifieds(clients: Clients) -> None:
    unsure = [{"role": "user", "content": "Ann"}]
    fields = {"messages": unsure, "n": 3, "seed": 5, "temperature": 2.0, "max_tokens": 16}
    ours, again, reference = (chat(client, **fields) for client in (clients.ours, *clients.both))
    texts = [choice.message.content for choice in ours.choices]
    assert len(set(texts)) == 3 and [choice.index for choice in ours.choices] == [0, 1, 2]
    assert ours.choices == again.choices == reference.choices
    assert ours.usage.completion_tokens == reference.usage.completion_tokens
    by_index: dict[int, str] = {0: "", 1: "", 2: ""}
    for chunk in chat(clients.ours, stream=True, **fields):
        by_index[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(by_index.values()) == texts


def test_a_stop_string_across_two_tokens(clients: Clients) -> None:
    tokens = chat(clients.reference, logprobs=True).choices[0].logprobs.content
    texts = [token.token for token in tokens]
    text = "".join(texts)
    # The end of one token and the beginning of the next, where the answer has that for the first time.
    at, stop = next(
        (at, a[-1] + b[0])
        for a, b, at in zip(texts, texts[1:], itertools.accumulate(map(len, texts)), strict=False)
        if at > 30 and text.find(a[-1] + b[0]) == at - 1
    )
    for client in clients.both:
        choice = chat(client, stop=[stop]).choices[0]
        assert choice.message.content == text[: at - 1] and choice.finish_reason == "stop"
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chat(client, stop=[stop], stream=True))
        assert streamed == text[: at - 1]


def test_the_end_as_the_very_first_token(clients: Clients) -> None:
    fields = {"logit_bias": {str(EOS): 100}}
    for client in clients.both:
        choice = chat(client, **fields).choices[0]
        assert (choice.message.content, choice.finish_reason, choice.matched_stop) == ("", "stop", EOS)
        chunks = list(chat(client, stream=True, **fields))
        assert [chunk.choices[0].delta.content for chunk in chunks] == ["", None]
        text = complete(client, **fields)
        assert (text.choices[0].text, text.usage.completion_tokens) == ("", 1)


def test_one_token(clients: Clients) -> None:
    for client in clients.both:
        whole = chat(client, max_tokens=1)
        assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (1, "length")
        chunks = list(chat(client, max_tokens=1, stream=True))
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content != ""


def test_an_answer_in_the_form_of_a_schema(clients: Clients) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
    for client in clients.both:
        found = json.loads(chat(client, response_format=form).choices[0].message.content)
        assert set(found) == {"city", "days"} and 1 <= found["days"] <= 9


def test_a_call_of_a_tool(clients: Clients) -> None:
    tool = {"type": "function", "function": {"name": "plan", "description": "a trip", "parameters": SCHEMA}}
    named = {"type": "function", "function": {"name": "plan"}}
    ours, reference = (chat(client, tools=[tool], tool_choice=named).choices[0] for client in clients.both)
    (call,) = ours.message.tool_calls
    assert call.function.name == "plan" and set(json.loads(call.function.arguments)) == {"city", "days"}
    assert ours.finish_reason == "tool_calls" and ours.message.content is None
    assert reference.message.tool_calls[0].function == call.function
    chunks = list(chat(clients.ours, tools=[tool], tool_choice=named, stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert "".join(call.function.arguments for call in calls) == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


# -- completions -------------------------------------------------------------------------------------------------------


def test_completions_are_those_of_generate(clients: Clients, shared_stack: Stack) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 20}
    expected = generate(shared_stack.router.url, {"text": PROMPT, "sampling_params": sampling}).json()
    made = complete(clients.ours, max_tokens=20)
    assert (
        made.choices[0].text == expected["text"] and made.usage.prompt_tokens == expected["meta_info"]["prompt_tokens"]
    )
    ids = clients.ours.post("/../tokenize", body={"prompt": PROMPT}, cast_to=httpx.Response).json()["tokens"]
    batch = complete(clients.ours, prompt=[ids, ids[:9]], max_tokens=20)
    assert [choice.index for choice in batch.choices] == [0, 1] and batch.choices[0].text == expected["text"]
    streamed = complete(clients.ours, prompt=[PROMPT, PROMPT], max_tokens=20, stream=True)
    by_index = {0: "", 1: ""}
    for chunk in streamed:
        by_index[chunk.choices[0].index] += chunk.choices[0].text
    assert by_index == {0: expected["text"], 1: expected["text"]}
    assert len(complete(clients.ours, max_tokens=None).choices[0].text) < 64  # OpenAI's default, 16 tokens


def test_prompt_and_answer_with_their_log_probabilities(clients: Clients) -> None:
    fields = {"echo": True, "logprobs": 2, "max_tokens": 6}
    ours, reference = (complete(client, **fields).choices[0] for client in clients.both)
    check_same(ours.logprobs, reference.logprobs)
    assert ours.text == reference.text and ours.text.startswith(PROMPT)
    assert "".join(ours.logprobs.tokens) == ours.text and ours.logprobs.token_logprobs[0] is None
    starts = ours.logprobs.text_offset
    assert all(ours.text[at:].startswith(token) for at, token in zip(starts, ours.logprobs.tokens, strict=True))
    chunks = list(complete(clients.ours, stream=True, **fields))
    tokens = [token for chunk in chunks for token in chunk.choices[0].logprobs.tokens]
    assert tokens == ours.logprobs.tokens and "".join(chunk.choices[0].text for chunk in chunks) == ours.text


def test_several_prompts_with_their_log_probabilities(clients: Clients) -> None:
    fields = {"prompt": [PROMPT, "Question: Ann"], "n": 2, "echo": True, "logprobs": 1, "max_tokens": 2}
    ours, reference = (complete(client, **fields) for client in clients.both)
    for a, b in zip(ours.choices, reference.choices, strict=True):
        assert a.text == b.text
        check_same(a.logprobs, b.logprobs)
    parts: dict[int, list[str]] = {i: [] for i in range(4)}
    for chunk in complete(clients.ours, stream=True, **fields):
        parts[chunk.choices[0].index] += chunk.choices[0].logprobs.tokens
    assert list(parts.values()) == [choice.logprobs.tokens for choice in ours.choices]


def test_a_prompt_is_scored_without_an_answer(clients: Clients, shared_stack: Stack) -> None:
    """How evaluations ask for the likelihood of a text."""
    ours, reference = (complete(client, echo=True, logprobs=1, max_tokens=0) for client in clients.both)
    check_same(ours.choices[0].logprobs, reference.choices[0].logprobs)
    body = {"text": PROMPT, "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}}
    scored = generate(shared_stack.router.url, body).json()["meta_info"]["input_token_logprobs"]
    expected = [logprob for logprob, _, _ in scored]
    found = ours.choices[0].logprobs.token_logprobs
    assert found[0] is None is expected[0] and len(found) == len(expected)
    assert all(abs(a - b) < NEAR for a, b in zip(found[1:], expected[1:], strict=True))
    assert ours.choices[0].text == PROMPT and ours.usage.completion_tokens == 0


def check_same(ours: Any, reference: Any) -> None:
    assert ours.tokens == reference.tokens and ours.text_offset == reference.text_offset
    pairs = zip(ours.token_logprobs[1:], reference.token_logprobs[1:], strict=True)
    assert all(abs(a - b) < NEAR for a, b in pairs)
    for a, b in zip(ours.top_logprobs[1:], reference.top_logprobs[1:], strict=True):
        assert a.keys() == b.keys() and all(abs(a[name] - b[name]) < NEAR for name in a)


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_models(clients: Clients) -> None:
    for client in clients.both:
        assert [model.id for model in client.models.list()] == ["tandem-mini"]
        assert client.models.retrieve("tandem-mini").id == "tandem-mini"
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("gpt/5")
        assert caught.value.code == "model_not_found"


def test_errors_are_the_clients_own(clients: Clients) -> None:
    for client in clients.both:
        for fields, param in (({"temperature": 101}, "temperature"), ({"n": 0}, "n"), ({"messages": []}, "messages")):
            for stream in (False, True):
                with pytest.raises(openai.BadRequestError) as caught:
                    chat(client, stream=stream, **fields)
                assert caught.value.param == param and caught.value.type == "invalid_request_error"
        with pytest.raises(openai.BadRequestError) as caught:
            complete(client, prompt="x " * 9000)
        assert caught.value.code == "context_length_exceeded" and caught.value.param == "prompt"


def test_an_answer_can_be_aborted_by_its_id(clients: Clients, shared_stack: Stack) -> None:
    stream = complete(clients.ours, max_tokens=4000, stream=True, extra_body={"ignore_eos": True})
    first = next(iter(stream))
    httpx.post(f"{shared_stack.router.url}/abort_request", json={"rid": first.id}).raise_for_status()
    with pytest.raises(openai.APIError) as caught:
        list(stream)
    assert caught.value.code == "aborted"
