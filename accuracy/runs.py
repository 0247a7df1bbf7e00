"""One run: all questions of a task asked of one server, some at a time, until done or hopeless."""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from accuracy.client import Client, Flush
from accuracy.records import Grade, Journal, Record, grade
from accuracy.tasks import Question, Task


class Kind(enum.StrEnum):
    """COLD: after the caches were emptied. WARM: the same questions again."""

    COLD = "cold"
    WARM = "warm"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """side: subject or baseline. number counts cold and warm runs together, from 0."""

    number: int
    kind: Kind
    side: str

    @property
    def name(self) -> str:
        return f"{self.number + 1} {self.kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What came of it: records in the order of the task, without those that were not asked any more.

    gave_up: so much failed that nothing could make the run valid.
    """

    plan: RunPlan
    flush: Flush
    records: tuple[Record, ...]
    asked: int
    seconds: float
    gave_up: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How a run asks. max_failed: share of requests that may fail. on_record: told of every answer."""

    max_tokens: int
    max_failed: float
    parallel: int
    on_record: Callable[[Record], None] = lambda record: None


def plan_runs(rounds: int, warm: int, sides: tuple[str, ...]) -> list[RunPlan]:
    """Each round cold, then warm so many times; every side takes its turn within a run."""
    kinds = [Kind.COLD, *[Kind.WARM] * warm] * rounds
    return [RunPlan(number=n, kind=kind, side=side) for n, kind in enumerate(kinds) for side in sides]


async def ask_all(client: Client, task: Task, plan: RunPlan, asking: Asking, journal: Journal) -> Run:
    """Ask what the journal does not have yet."""
    loop = asyncio.get_running_loop()
    known = {q.id: journal.done[key] for q in task.questions if (key := (plan.number, plan.side, q.id)) in journal.done}
    left = [q for q in task.questions if q.id not in known]
    flush = await client.flush() if plan.kind is Kind.COLD and left else Flush.NOT_ASKED
    begin = loop.time()
    pass_ = _Pass(client=client, task=task, plan=plan, asking=asking, journal=journal, found=dict(known))
    await pass_.ask(left)
    return Run(
        plan=plan,
        flush=flush,
        records=tuple(pass_.found[q.id] for q in task.questions if q.id in pass_.found),
        asked=len(task.questions),
        seconds=loop.time() - begin,
        gave_up=pass_.is_hopeless(),
    )


@dataclass(slots=True, kw_only=True)
class _Pass:
    """A run under way. found: by question."""

    client: Client
    task: Task
    plan: RunPlan
    asking: Asking
    journal: Journal
    found: dict[str, Record] = field(default_factory=dict)

    async def ask(self, questions: list[Question]) -> None:
        """Workers take the questions in their order; all stop as soon as the run is hopeless."""
        waiting = iter(questions)

        async def work() -> None:
            for question in waiting:
                await self._ask_one(question)
                if self.is_hopeless():
                    raise _HopelessError

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.asking.parallel, len(questions))):
                    group.create_task(work())
        except* _HopelessError:
            pass  # the group has cancelled the others

    async def _ask_one(self, question: Question) -> None:
        asking = self.asking
        outcome = await self.client.ask(question.prompt, max_tokens=asking.max_tokens, stop=self.task.stop)
        record = grade(self.task, question, outcome, run=self.plan.number, side=self.plan.side)
        self.found[question.id] = record
        self.journal.add(record)
        asking.on_record(record)

    def is_hopeless(self) -> bool:
        """More time-outs than may fail, each of which takes long, or a quarter of everything failed."""
        failed = [record for record in self.found.values() if record.grade is Grade.FAILED]
        timed_out = sum(record.outcome.timed_out for record in failed)
        limit = failures_allowed(len(self.task.questions), self.asking.max_failed)
        return timed_out > limit or len(failed) > max(limit, len(self.task.questions) // 4)


class _HopelessError(Exception):
    """Ends the workers of a run."""


def failures_allowed(asked: int, max_failed: float) -> int:
    return math.floor(asked * max_failed)
