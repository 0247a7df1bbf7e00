"""How far the log-probabilities of decoding are from those of a prefill of the same tokens: cold and after cache hits.

`python bench/kl.py`: answers are sampled at temperature 1, 16 at once, from a unified node and through the router;
then, with empty caches, prompt and answer are prefilled together. With r = log p(prefilled again) - log p(decoded) the
figure is the mean of exp(r) - 1 - r over the sampled tokens: never negative, 0 where both agree. The bundled model is
sure of most of its tokens, which then say nothing of a difference; so the figure is also given for the others alone.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import click
import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accuracy.gsm_mini import problems, shot
from bench.results import write_result
from common.config import DType
from node.tokenizer import load_tokenizer
from tests.support.stack import MODEL, Stack, stack

PARALLEL = 16
TRACK_INTERVAL = 256
PAST_CHECKPOINT = 20
UNSURE_BELOW = -0.1
NEXT_QUESTION = "\n\nQuestion:"
DTYPES = [dtype.value for dtype in DType]
POOLS = ["--max-total-tokens", "262144", "--max-mamba-cache-size", "192"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """An answer, the prompt it was sampled after, and log p of its tokens as they were decoded.

    num_cached_tokens: of the prompt. transfer_bytes: of the hand-off, 0 when there was none.
    """

    prompt: list[int]
    answer: list[int]
    logprobs: list[float]
    num_cached_tokens: int
    transfer_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """kl: the estimate. kl_unsure: over the tokens whose decoded log p is below UNSURE_BELOW alone. largest: |r| of the
    token where it is largest. The others: how the prompts were served."""

    kl: float
    kl_unsure: float
    unsure_tokens: int
    largest: float
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    transfer_bytes: int


def estimate(decoded: Sequence[float], prefilled: Sequence[float]) -> float:
    """KL between the two distributions from log p of tokens that were sampled from `decoded`, nats."""
    ratios = [b - a for a, b in zip(decoded, prefilled, strict=True)]
    return sum(math.expm1(r) - r for r in ratios) / len(ratios)


def bound(dtype: DType, case: str) -> float:
    if dtype is DType.FLOAT32:
        return 1e-5
    return 0.002 if case == "cold" else 0.01


def random_prompts(count: int, shortest: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Token ids of random shots, cut at lengths that are drawn evenly, then a question that is left to the model."""
    rng, tokenizer = random.Random(seed), load_tokenizer(MODEL)
    end = tokenizer.encode(NEXT_QUESTION)
    prompts = []
    for _ in range(count):
        length, ids = rng.randint(shortest, longest), list[int]()
        while len(ids) < length:
            drawn = problems("train", rng.getrandbits(32), 8)
            ids += tokenizer.encode("".join(shot(p) for p in drawn))
        prompts.append(ids[: length - len(end)] + end)
    return prompts


async def _post_all(url: str, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    connector, timeout = aiohttp.TCPConnector(limit=PARALLEL), aiohttp.ClientTimeout(total=3600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def post(body: dict[str, Any]) -> dict[str, Any]:
            async with session.post(f"{url}/generate", json=body) as response:
                answer: dict[str, Any] = await response.json()
                assert response.status == 200, answer
                return answer

        return list(await asyncio.gather(*(post(body) for body in bodies)))


def post_all(url: str, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every answer, in order; PARALLEL requests at once."""
    return asyncio.run(_post_all(url, bodies))


def flush(url: str, within_s: float = 5.0) -> None:
    """Empty the caches behind this address, which is refused until the last hand-off's memory is back."""
    deadline = time.monotonic() + within_s
    while (answer := httpx.post(f"{url}/flush_cache", timeout=30)).status_code != 200:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.02)


def sample(url: str, prompts: Sequence[list[int]], lengths: Sequence[int], seed: int) -> list[Sampled]:
    """An answer of that many tokens to each prompt, with log p of its tokens."""
    bodies = [
        {
            "input_ids": prompt,
            "sampling_params": {
                "temperature": 1.0,
                "max_new_tokens": length,
                "ignore_eos": True,
                "sampling_seed": seed + i,
            },
            "return_logprob": True,
        }
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    answers = post_all(url, bodies)
    return [_sampled(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]


def _sampled(prompt: list[int], answer: dict[str, Any]) -> Sampled:
    meta = answer["meta_info"]
    return Sampled(
        prompt=prompt,
        answer=answer["output_ids"],
        logprobs=[logprob for logprob, _, _ in meta["output_token_logprobs"]],
        num_cached_tokens=meta["cached_tokens"],
        transfer_bytes=sum(meta["transfer_bytes"].values()),
    )


def prefill_again(url: str, samples: Sequence[Sampled]) -> list[list[float]]:
    """log p of every answer's tokens when prompt and answer are one prompt and nothing is cached."""
    flush(url)
    bodies = [
        {
            "input_ids": s.prompt + s.answer,
            "sampling_params": {"temperature": 0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": len(s.prompt),
        }
        for s in samples
    ]
    found = []
    for answer, s in zip(post_all(url, bodies), samples, strict=True):
        assert answer["meta_info"]["cached_tokens"] == 0
        logprobs = answer["meta_info"]["input_token_logprobs"]
        assert [token for _, token, _ in logprobs] == s.answer
        found.append([logprob for logprob, _, _ in logprobs])
    return found


def measure(url: str, samples: Sequence[Sampled]) -> Figures:
    decoded = [logprob for s in samples for logprob in s.logprobs]
    prefilled = [logprob for one in prefill_again(url, samples) for logprob in one]
    unsure = [(a, b) for a, b in zip(decoded, prefilled, strict=True) if a < UNSURE_BELOW]
    return Figures(
        kl=estimate(decoded, prefilled),
        kl_unsure=estimate([a for a, _ in unsure], [b for _, b in unsure]),
        unsure_tokens=len(unsure),
        largest=max(abs(b - a) for a, b in zip(decoded, prefilled, strict=True)),
        tokens=len(decoded),
        prompt_tokens=sum(len(s.prompt) for s in samples),
        cached_tokens=sum(s.num_cached_tokens for s in samples),
        transfer_bytes=sum(s.transfer_bytes for s in samples),
    )


# -- the three ways to an answer -----------------------------------------------------------------------------------


def cold(url: str, prompts: Sequence[list[int]], new_tokens: int) -> list[Sampled]:
    flush(url)
    samples = sample(url, prompts, [new_tokens] * len(prompts), seed=0)
    assert all(s.num_cached_tokens == 0 for s in samples)
    return samples


def after_prefill_hits(
    url: str, prompts: Sequence[list[int]], new_tokens: int, decode_url: str | None
) -> list[Sampled]:
    """Every prompt was sent before. decode_url: where the cache is then emptied, so that prefill's is what is hit."""
    flush(url)
    sample(url, prompts, [1] * len(prompts), seed=0)
    if decode_url is not None:
        flush(decode_url)
    samples = sample(url, prompts, [new_tokens] * len(prompts), seed=1000)
    assert all(s.num_cached_tokens > 0 for s in samples)
    assert all((s.transfer_bytes > 0) == (decode_url is not None) for s in samples)
    return samples


def after_decode_hits(url: str, prompts: Sequence[list[int]], new_tokens: int) -> list[Sampled]:
    """Every prompt is the second turn of a conversation whose last state was saved while its answer was decoded."""
    flush(url)
    first = sample(url, prompts, [-len(p) % TRACK_INTERVAL + PAST_CHECKPOINT for p in prompts], seed=2000)
    end = load_tokenizer(MODEL).encode(NEXT_QUESTION)
    turns = [f.prompt + f.answer + end for f in first]
    samples = sample(url, turns, [new_tokens] * len(prompts), seed=3000)
    for s, f in zip(samples, first, strict=True):
        assert s.num_cached_tokens >= len(f.prompt), "resumed from a state of the prompt, not of the answer"
        assert s.transfer_bytes == 0, "the state came from prefill"
    return samples


def all_modes(running: Stack, prompts: Sequence[list[int]], new_tokens: int) -> Iterator[tuple[str, str, Figures]]:
    """(mode, case, figures), each as soon as it is known."""
    assert running.unified is not None
    for mode, url, decode_url in (
        ("unified", running.unified.url, None),
        ("disaggregated", running.router.url, running.decode.url),
    ):
        yield mode, "cold", measure(url, cold(url, prompts, new_tokens))
        yield mode, "prefill hit", measure(url, after_prefill_hits(url, prompts, new_tokens, decode_url))
        yield mode, "decode hit", measure(url, after_decode_hits(url, prompts, new_tokens))


def row(dtype: DType, mode: str, case: str, found: Figures) -> dict[str, Any]:
    return {
        "dtype": dtype.value,
        "mode": mode,
        "case": case,
        "kl": float(f"{found.kl:.3g}"),
        "bound": bound(dtype, case),
        "within": found.kl <= bound(dtype, case),
        "largest_logprob_difference": float(f"{found.largest:.3g}"),
        "tokens": found.tokens,
        "unsure_tokens": found.unsure_tokens,
        "kl_of_unsure_tokens": float(f"{found.kl_unsure:.3g}"),
        "cached_share_of_prompts": round(found.cached_tokens / found.prompt_tokens, 3),
        "transfer_bytes": found.transfer_bytes,
    }


def line(r: dict[str, Any]) -> str:
    verdict = "ok" if r["within"] else "ABOVE"
    return (
        f"{r['dtype']:9} {r['mode']:14} {r['case']:12} KL {r['kl']:.2e}  bound {r['bound']:.0e}  {verdict:5} "
        f"largest |r| {r['largest_logprob_difference']:.2e}  cached {r['cached_share_of_prompts']:.2f}  "
        f"{r['unsure_tokens']} unsure of {r['tokens']} tokens, their KL {r['kl_of_unsure_tokens']:.2e}"
    )


@click.command()
@click.option("--dtype", "dtypes", type=click.Choice(DTYPES), multiple=True, default=DTYPES, show_default=True)
@click.option("--prompts", "count", default=48, show_default=True)
@click.option("--new-tokens", default=512, show_default=True)
def main(dtypes: Sequence[str], count: int, new_tokens: int) -> None:
    prompts = random_prompts(count, 1500, 3500)
    rows = []
    for dtype in map(DType, dtypes):
        options = ["--dtype", dtype.value, *POOLS]
        with tempfile.TemporaryDirectory() as folder, stack(Path(folder), with_unified=True, extra=options) as running:
            for mode, case, found in all_modes(running, prompts, new_tokens):
                rows.append(row(dtype, mode, case, found))
                print(line(rows[-1]), flush=True)
    write_result(
        "kl",
        {"prompts": count, "prompt_tokens": "1500-3500", "new_tokens": new_tokens, "parallel": PARALLEL, "rows": rows},
    )


if __name__ == "__main__":
    main()
