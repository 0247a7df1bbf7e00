"""Decoded against prefilled: how far the log-probabilities of an answer are from those of a prefill of the same tokens.

Answers are sampled at temperature 1; then, with empty caches, prompt and answer are prefilled together. With
r = log p(prefilled) - log p(decoded) the figure is the mean of exp(r) - 1 - r over the sampled tokens (Schulman's k3
estimate of the divergence): never negative, 0 where both agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from accuracy.client import Client, Flush
from accuracy.prompts import Prompt
from common.errors import WorkerError

_UNSURE_BELOW = math.log(0.9)


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """case: cold, or warm (every prompt was asked before). largest: |r| where it is largest. cached_share: of the
    prompts' tokens. unsure: how many tokens had a probability of less than 90 %; the others say little of a difference.
    """

    case: str
    kl: float
    bound: float
    largest: float
    tokens: int
    unsure: int
    cached_share: float

    @property
    def within(self) -> bool:
        return self.kl <= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampled:
    prompt: list[int]
    answer: list[int]
    logprobs: list[float]
    num_cached_tokens: int


def estimate(decoded: Sequence[float], prefilled: Sequence[float]) -> float:
    """log p of the same tokens, twice."""
    ratios = [b - a for a, b in zip(decoded, prefilled, strict=True)]
    return sum(math.expm1(r) - r for r in ratios) / len(ratios) if ratios else 0.0


async def measure_kl(
    client: Client, prompts: Sequence[Prompt], *, new_tokens: int, bounds: tuple[float, float]
) -> list[Divergence]:
    """Cold, then warm. bounds: of each. Raises WorkerError when the server does not do its part."""
    ids = [await _prompt_ids(client, prompt) for prompt in prompts]
    found = []
    for seed, (case, bound) in enumerate(zip(("cold", "warm"), bounds, strict=True)):
        await _flush(client)
        if case == "warm":
            await _sample(client, ids, 1, seed)
        samples = await _sample(client, ids, new_tokens, seed)
        found.append(await _compare(client, case, bound, samples))
    return found


async def _flush(client: Client) -> None:
    flushed = await client.flush()
    if flushed is not Flush.DONE:
        raise WorkerError(f"{client.url}: {flushed}: what is prefilled again would come from its caches")


async def _prompt_ids(client: Client, prompt: Prompt) -> list[int]:
    if "input_ids" in prompt:
        ids: list[int] = prompt["input_ids"]
        return ids
    found = await client.generate({**prompt, **_scoring(0)})
    return [token for _, token, *_ in found["meta_info"]["input_token_logprobs"]]


def _scoring(start: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 0}
    return {"sampling_params": sampling, "return_logprob": True, "logprob_start_len": start}


async def _sample(client: Client, prompts: Sequence[list[int]], length: int, seed: int) -> list[_Sampled]:
    sampling = {"temperature": 1.0, "max_new_tokens": length, "ignore_eos": True}
    bodies = [
        {
            "input_ids": prompt,
            "sampling_params": {**sampling, "sampling_seed": 1000 * seed + i},
            "return_logprob": True,
        }
        for i, prompt in enumerate(prompts)
    ]
    return [_sampled(p, answer) for p, answer in zip(prompts, await client.generate_all(bodies), strict=True)]


def _sampled(prompt: list[int], answer: dict[str, Any]) -> _Sampled:
    meta = answer["meta_info"]
    return _Sampled(
        prompt=prompt,
        answer=[token for _, token, *_ in meta["output_token_logprobs"]],
        logprobs=[logprob for logprob, *_ in meta["output_token_logprobs"]],
        num_cached_tokens=meta.get("cached_tokens") or 0,
    )


async def _compare(client: Client, case: str, bound: float, samples: Sequence[_Sampled]) -> Divergence:
    await _flush(client)
    again = await client.generate_all([{"input_ids": s.prompt + s.answer, **_scoring(len(s.prompt))} for s in samples])
    prefilled = [_scored(answer, s) for answer, s in zip(again, samples, strict=True)]
    decoded = [logprob for s in samples for logprob in s.logprobs]
    flat = [logprob for one in prefilled for logprob in one]
    return Divergence(
        case=case,
        kl=estimate(decoded, flat),
        bound=bound,
        largest=max((abs(b - a) for a, b in zip(decoded, flat, strict=True)), default=0.0),
        tokens=len(decoded),
        unsure=sum(logprob < _UNSURE_BELOW for logprob in decoded),
        cached_share=sum(s.num_cached_tokens for s in samples) / sum(len(s.prompt) for s in samples),
    )


def _scored(answer: dict[str, Any], sampled: _Sampled) -> list[float]:
    """log p of the answer's tokens, which are the last ones. Raises WorkerError when they are others."""
    told = answer["meta_info"]["input_token_logprobs"][-len(sampled.answer) :]
    if [token for _, token, *_ in told] != sampled.answer:
        raise WorkerError("the server scored other tokens than it was given")
    return [logprob for logprob, *_ in told]
