"""The states of SGLang's stub: sums of tokens, kept in a prefix cache as SGLang keeps its Mamba states.

    no_buffer      the state at the end of a prompt is kept; what goes on from there resumes
    extra_buffer   (auto too) the state at the last multiple of CHUNK is kept; the same prompt resumes there as well

What `mixes` is wrong as SGLang before 0.5.20 is: of the prompts that are computed together every one but the first
keeps a wrong state with extra_buffer. Its own answer is right, those that resume from it are not.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

CHUNK = 64
TOGETHER_S = 0.05
"""How long prompts are waited for that are to be computed together."""


@dataclass(slots=True, kw_only=True)
class States:
    """strategy: none: nothing is kept. at_once: prompts of a batch."""

    strategy: str
    mixes: bool
    at_once: int
    kept: dict[tuple[int, ...], int] = field(default_factory=dict)
    _waiting: list[tuple[list[int], asyncio.Future[tuple[int, int]]]] = field(default_factory=list)
    _batches: asyncio.Task[None] | None = None

    def flush(self) -> None:
        self.kept.clear()

    async def prefill(self, prompt: list[int]) -> tuple[int, int]:
        """The state after the prompt, and of how many tokens it was cached. Short ones wait for nobody."""
        if len(prompt) < CHUNK:
            return sum(prompt), 0
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((prompt, done))
        if self._batches is None:
            self._batches = asyncio.create_task(self._compute_all())
        found: tuple[int, int] = await done
        return found

    async def _compute_all(self) -> None:
        while self._waiting:
            await asyncio.sleep(TOGETHER_S)
            batch, self._waiting = self._waiting[: self.at_once], self._waiting[self.at_once :]
            found = [self._resume(prompt) for prompt, _ in batch]
            for place, ((prompt, done), (state, cached)) in enumerate(zip(batch, found, strict=True)):
                self._keep(prompt, state, cached, place)
                if not done.done():
                    done.set_result((state, cached))
        self._batches = None

    def _resume(self, prompt: list[int]) -> tuple[int, int]:
        """From the longest beginning that is kept, but for one token."""
        cached = next((n for n in range(len(prompt) - 1, 0, -1) if tuple(prompt[:n]) in self.kept), 0)
        return self.kept.get(tuple(prompt[:cached]), 0) + sum(prompt[cached:]), cached

    def _keep(self, prompt: list[int], state: int, cached: int, place: int) -> None:
        if self.strategy == "none":
            return
        if self.strategy == "no_buffer":
            self.kept[tuple(prompt)] = state
            return
        tracked = len(prompt) // CHUNK * CHUNK
        if tracked > cached:
            wrong = 1 if self.mixes and place else 0
            self.kept[tuple(prompt[:tracked])] = state - sum(prompt[tracked:]) + wrong
