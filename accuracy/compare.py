"""The same prompts through several stacks, one stack after the other: what they answer and how fast.

Answers are greedy and streamed. The first stack is the one that the others are compared with.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from accuracy.client import Api, Client
from accuracy.kl import estimate
from accuracy.paired import first_difference
from accuracy.prompts import Prompt
from accuracy.statistics import quantile
from common.errors import RequestError, WorkerError

_SHOWN_CHARACTERS = 200


@dataclass(slots=True)
class Answer:
    """Of one prompt. tokens: ids where the stack tells them, else the tokens' texts, empty where neither is told.
    logprobs: of them, as far as they are told. at_s: when each piece came, since the request was sent, with its number
    of tokens."""

    text: str = ""
    tokens: list[int | str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    at_s: list[tuple[float, int]] = field(default_factory=list)
    num_tokens: int = 0

    def arrived(self, now_s: float, num_tokens: int) -> None:
        if num_tokens > 0:
            self.at_s.append((now_s, num_tokens))

    @property
    def ttft_s(self) -> float | None:
        return self.at_s[0][0] if self.at_s else None

    @property
    def gaps_s(self) -> list[float]:
        """One a token but the first ones; tokens of one piece share its gap."""
        pairs = zip(self.at_s, self.at_s[1:], strict=False)
        return [(at - before) / count for (before, _), (at, count) in pairs for _ in range(count)]


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Of one stack. None where nothing came. itl: gaps between tokens. tokens_s: a second, of all prompts together."""

    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    output_tokens: int
    wall_s: float
    tokens_s: float


class Likeness(msgspec.Struct, frozen=True, kw_only=True):
    """A stack's answers beside the first stack's. unit: what was compared, `tokens` or `characters`. differences: of
    each prompt that differs, the first unit that does. kl: over the tokens before that, None without log-probabilities;
    largest: the largest difference of one."""

    unit: str
    equal: int
    prompts: int
    differences: dict[int, int]
    kl: float | None
    largest: float | None


class Stack(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one stack. flushed: what became of the wish for empty caches. likeness: None of the first one."""

    name: str
    url: str
    api: str
    flushed: str
    speed: Speed
    ttft_s: list[float]
    gaps_s: list[float]
    likeness: Likeness | None
    answers: list[str]


async def compare(stacks: Sequence[tuple[str, Client]], prompts: Sequence[Prompt], *, new_tokens: int) -> list[Stack]:
    """stacks: names, and clients that are not open yet. Raises WorkerError for the first request that fails, and
    RequestError for token ids at a stack that takes text only."""
    found: list[Stack] = []
    first: list[Answer] | None = None
    for name, client in stacks:
        async with client:
            flushed = await client.flush()
            await _ask(client, prompts[0], 1)
            begin_s = time.monotonic()
            answers = await _ask_all(client, prompts, new_tokens)
            wall_s = time.monotonic() - begin_s
        assert client.api is not None
        found.append(
            Stack(
                name=name,
                url=client.url,
                api=client.api.value,
                flushed=flushed.value,
                speed=speed(answers, wall_s),
                ttft_s=[answer.ttft_s for answer in answers if answer.ttft_s is not None],
                gaps_s=[gap for answer in answers for gap in answer.gaps_s],
                likeness=None if first is None else likeness(answers, first),
                answers=[answer.text for answer in answers],
            )
        )
        first = first or answers
    return found


def speed(answers: Sequence[Answer], wall_s: float) -> Speed:
    firsts = sorted(answer.ttft_s for answer in answers if answer.ttft_s is not None)
    gaps = sorted(gap for answer in answers for gap in answer.gaps_s)
    total = sum(answer.num_tokens for answer in answers)
    return Speed(
        ttft_p50_ms=_ms(firsts, 0.5),
        ttft_p99_ms=_ms(firsts, 0.99),
        itl_p50_ms=_ms(gaps, 0.5),
        itl_p99_ms=_ms(gaps, 0.99),
        output_tokens=total,
        wall_s=wall_s,
        tokens_s=total / wall_s if wall_s else 0.0,
    )


def _ms(values: Sequence[float], share: float) -> float | None:
    return quantile(values, share) * 1000 if values else None


def likeness(answers: Sequence[Answer], first: Sequence[Answer]) -> Likeness:
    """answers, first: of the same prompts, in order. Tokens are compared where both stacks tell the same kind."""
    by_tokens = all(_same_kind(a, b) for a, b in zip(answers, first, strict=True))
    differences: dict[int, int] = {}
    ours: list[float] = []
    theirs: list[float] = []
    for number, (answer, other) in enumerate(zip(answers, first, strict=True)):
        place = (
            first_difference(answer.tokens, other.tokens) if by_tokens else first_difference(answer.text, other.text)
        )
        if place is not None:
            differences[number] = place
        if by_tokens:
            shared = min(len(answer.logprobs), len(other.logprobs), len(answer.tokens) if place is None else place)
            ours += answer.logprobs[:shared]
            theirs += other.logprobs[:shared]
    return Likeness(
        unit="tokens" if by_tokens else "characters",
        equal=len(first) - len(differences),
        prompts=len(first),
        differences=differences,
        kl=estimate(theirs, ours) if ours else None,
        largest=max((abs(a - b) for a, b in zip(ours, theirs, strict=True)), default=None),
    )


def _same_kind(one: Answer, other: Answer) -> bool:
    kinds = {type(token) for token in (*one.tokens, *other.tokens)}
    return len(kinds) == 1 and bool(one.tokens) and bool(other.tokens)


# Asking


async def _ask_all(client: Client, prompts: Sequence[Prompt], new_tokens: int) -> list[Answer]:
    gate = asyncio.Semaphore(client.parallel)

    async def one(prompt: Prompt) -> Answer:
        async with gate:
            return await _ask(client, prompt, new_tokens)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(prompt)) for prompt in prompts]
    except* (WorkerError, RequestError) as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _ask(client: Client, prompt: Prompt, new_tokens: int) -> Answer:
    path, body = _question(client, prompt, new_tokens)
    read = _read_generate if client.api is Api.GENERATE else _read_completion
    answer = Answer()
    begin_s = time.monotonic()
    try:
        async with asyncio.timeout(client.timeout_s):
            async with client.session.post(client.url + path, json=body, timeout=_NO_LIMIT) as response:
                if response.status != 200:
                    shown = (await response.read())[:_SHOWN_CHARACTERS].decode(errors="replace")
                    raise WorkerError(f"{client.url}{path}: HTTP {response.status}: {shown}")
                async for event in _events(response.content):
                    before = answer.num_tokens
                    read(event, answer)
                    answer.arrived(time.monotonic() - begin_s, answer.num_tokens - before)
    except TimeoutError as error:
        raise WorkerError(f"{client.url}{path}: no answer within {client.timeout_s:g} s") from error
    except (aiohttp.ClientError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WorkerError(f"{client.url}{path}: {type(error).__name__}: {error}") from error
    if not answer.at_s:
        raise WorkerError(f"{client.url}{path}: a stream without a token")
    return answer


_NO_LIMIT = aiohttp.ClientTimeout(total=None, sock_connect=5.0)


def _question(client: Client, prompt: Prompt, new_tokens: int) -> tuple[str, dict[str, Any]]:
    if client.api is Api.GENERATE:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens}
        return "/generate", {**prompt, "sampling_params": sampling, "stream": True, "return_logprob": True}
    asked = {"model": client.model, "temperature": 0, "max_tokens": new_tokens, "stream": True}
    if client.api is Api.COMPLETIONS:
        text = prompt["text"] if "text" in prompt else prompt["input_ids"]
        return "/v1/completions", {**asked, "prompt": text, "logprobs": 1}
    if "text" not in prompt:
        raise RequestError(f"{client.url}: --api chat takes text, a prompt has input_ids", param="prompts")
    messages = [{"role": "user", "content": prompt["text"]}]
    return "/v1/chat/completions", {**asked, "messages": messages, "logprobs": True}


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The objects of a server-sent stream. Raises WorkerError for an error in it, or a stream that is cut."""
    rest = b""
    async for chunk in stream.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data == b"[DONE]":
                return
            if data:
                event = msgspec.json.decode(data)
                if not isinstance(event, dict) or "error" in event:
                    raise WorkerError(f"the stream says: {data[:_SHOWN_CHARACTERS].decode(errors='replace')}")
                yield event
    raise WorkerError("the stream was cut off")


def _read_generate(event: dict[str, Any], answer: Answer) -> None:
    """Text, ids and log-probabilities are all there are so far, or only the new ones: the token count tells which."""
    meta = event.get("meta_info") or {}
    reason = meta.get("finish_reason") or {}
    if reason.get("type") == "abort":
        raise WorkerError(f"the server ended the request: {reason.get('message')}")
    ids, logprobs = event.get("output_ids") or [], meta.get("output_token_logprobs") or []
    answer.num_tokens = meta.get("completion_tokens") or 0
    answer.text = event.get("text") or answer.text
    answer.tokens = _so_far(answer.tokens, ids, answer.num_tokens)
    answer.logprobs = _so_far(answer.logprobs, [entry[0] for entry in logprobs], answer.num_tokens)


def _so_far(before: list[Any], told: list[Any], count: int) -> list[Any]:
    return told if len(told) >= count else before + told


def _read_completion(event: dict[str, Any], answer: Answer) -> None:
    """Of a completion or a chat. A piece whose tokens are not told counts as one."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        new = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
        told = choice.get("logprobs") or {}
        entries = told.get("content") or []
        tokens = told.get("tokens") or [entry.get("token") for entry in entries]
        answer.text += new
        answer.tokens += tokens
        answer.logprobs += told.get("token_logprobs") or [entry.get("logprob") for entry in entries]
        answer.num_tokens += len(tokens) or (1 if new else 0)
