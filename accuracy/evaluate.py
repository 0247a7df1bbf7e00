"""Ask a server gsm-mini questions over /generate and count the right answers.

`python -m accuracy.evaluate --url http://127.0.0.1:30000 --count 200 --parallel 16`
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import click

from accuracy.gsm_mini import STOP, Problem, extract_answer, few_shot, problems, prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One problem's outcome. error: why there is no answer, e.g. an HTTP status."""

    problem: Problem
    text: str
    output_ids: tuple[int, ...]
    error: str | None

    @property
    def right(self) -> bool:
        return self.error is None and extract_answer(self.text) == self.problem.answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    answers: tuple[Answer, ...]

    @property
    def right(self) -> int:
        return sum(a.right for a in self.answers)

    @property
    def failed(self) -> int:
        return sum(a.error is not None for a in self.answers)

    @property
    def accuracy(self) -> float:
        return self.right / len(self.answers)


async def evaluate(
    url: str, tasks: Sequence[Problem], *, shots: Sequence[Problem], parallel: int, max_new_tokens: int = 256
) -> Report:
    """Greedy answers to every task, `parallel` at a time, in the order of the tasks."""
    gate = asyncio.Semaphore(parallel)
    connector = aiohttp.TCPConnector(limit=parallel)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:

        async def one(task: Problem) -> Answer:
            async with gate:
                return await _ask(session, url, task, shots, max_new_tokens)

        return Report(answers=tuple(await asyncio.gather(*(one(task) for task in tasks))))


async def _ask(
    session: aiohttp.ClientSession, url: str, task: Problem, shots: Sequence[Problem], max_new_tokens: int
) -> Answer:
    body = {
        "text": prompt(task, shots),
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "stop": STOP},
    }
    try:
        async with session.post(f"{url}/generate", json=body) as response:
            answer: dict[str, Any] = await response.json()
            error = None if response.status == 200 else f"HTTP {response.status}: {json.dumps(answer)}"
    except aiohttp.ClientError as exception:
        answer, error = {}, f"{type(exception).__name__}: {exception}"
    return Answer(
        problem=task,
        text=answer.get("text", ""),
        output_ids=tuple(answer.get("output_ids", ())),
        error=error,
    )


@click.command()
@click.option("--url", default="http://127.0.0.1:30000", show_default=True)
@click.option("--count", default=200, show_default=True, help="Held-out problems to ask.")
@click.option("--seed", default=0, show_default=True, help="Which held-out problems.")
@click.option("--shots", default=5, show_default=True, help="Worked examples before each question.")
@click.option("--parallel", default=16, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Write every answer here, one JSON object a line.")
def main(url: str, count: int, seed: int, shots: int, parallel: int, output: Path | None) -> None:
    """Accuracy of the server at URL on held-out gsm-mini problems."""
    tasks = problems("heldout", seed, count)
    report = asyncio.run(evaluate(url, tasks, shots=few_shot(0, shots), parallel=parallel))
    if output is not None:
        lines = (
            {
                "question": a.problem.question,
                "answer": a.problem.answer,
                "text": a.text,
                "right": a.right,
                "error": a.error,
            }
            for a in report.answers
        )
        output.write_text("".join(json.dumps(line) + "\n" for line in lines))
    click.echo(f"right {report.right} of {count} ({report.accuracy:.3f}), failed requests {report.failed}")


if __name__ == "__main__":
    main()
