"""What the clients ask, with the right answers.

Lengths around the boundaries of pages, chunks and steps, prompts that share their beginning, and conversations, whose
next turn is prompt and answer and more. The answers are those of a unified node that nobody disturbs, greedy. A task of
which any two tokens are nearly equally likely is left out: a step of another shape may rightly choose the other one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from common.errors import WorkerError

LENGTHS = (1, 2, 4, 15, 16, 17, 33, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 320, 511, 512, 513, 700, 1500)
SHARED_LENGTH, SHARED = 257, (1, 3, 17, 64, 130)
TURNS, CONVERSATIONS = 4, 3
SMALLEST_GAP = 1e-3
"""Between the log-probabilities of the likeliest two tokens; rounding moves them by 2e-4 at most."""

_VOCABULARY = range(3, 1024)
_PARALLEL = 6
_LIMIT = aiohttp.ClientTimeout(total=120.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A prompt and its right answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    text: str

    def body(self, rid: str, *, stream: bool) -> dict[str, Any]:
        return {"input_ids": self.prompt, "rid": rid, "stream": stream, "sampling_params": _sampling(len(self.answer))}


async def make_tasks(url: str, seed: int) -> list[Task]:
    """url: of the unified node. Raises WorkerError when it does not answer."""
    rng = random.Random(seed)
    start = _ids(rng, SHARED_LENGTH)
    chains = [[_ids(rng, n)] for n in LENGTHS] + [[start + _ids(rng, n)] for n in SHARED]
    chains += [[_ids(rng, rng.randint(5, 300)) for _ in range(TURNS)] for _ in range(CONVERSATIONS)]
    lengths = [[_answer_length(rng) for _ in chain] for chain in chains]
    gate = asyncio.Semaphore(_PARALLEL)
    async with aiohttp.ClientSession(timeout=_LIMIT) as session:
        oracle = _Oracle(session, url)

        async def follow(chain: list[tuple[int, ...]], counts: list[int]) -> list[Task]:
            async with gate:
                return await oracle.converse(chain, counts)

        found = await asyncio.gather(*map(follow, chains, lengths))
    return [task for tasks in found for task in tasks]


def _ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(_VOCABULARY, k=count))


def _answer_length(rng: random.Random) -> int:
    return rng.choice((1, 2, 8, 16, 17, 40, 120, 240))


def _sampling(max_new_tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}


class _Oracle:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def converse(self, said: Sequence[tuple[int, ...]], counts: Sequence[int]) -> list[Task]:
        """A task for each turn, but for those with nearly equal tokens. counts: tokens of each answer."""
        tasks: list[Task] = []
        history: tuple[int, ...] = ()
        for more, count in zip(said, counts, strict=True):
            prompt = history + more
            task, gap = await self._ask(prompt, count)
            if gap >= SMALLEST_GAP:
                tasks.append(task)
            history = prompt + task.answer
        return tasks

    async def _ask(self, prompt: tuple[int, ...], count: int) -> tuple[Task, float]:
        """The task, and the smallest gap between the likeliest two tokens anywhere in its answer."""
        body = {"input_ids": prompt, "sampling_params": _sampling(count)}
        options = {"return_logprob": True, "top_logprobs_num": 2}
        async with self._session.post(f"{self._url}/generate", json=body | options) as response:
            answer = await response.json()
            if response.status != 200:
                raise WorkerError(f"the unified node has no answer: {answer}")
        tops = answer["meta_info"]["output_top_logprobs"]
        gap = min(first[0] - second[0] for first, second in tops)
        return Task(prompt=prompt, answer=tuple(answer["output_ids"]), text=answer["text"]), gap
