"""What a gate asks: questions with their numbers, whichever data set they come from."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from accuracy import gsm8k, gsm_mini


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """prompt: all that is sent. asked: its last part, the question itself. leaked: its answer stands in the prompt."""

    id: str
    prompt: str
    asked: str
    label: int
    leaked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """extract: the number that a text answers, None when there is none."""

    name: str
    questions: tuple[Question, ...]
    stop: tuple[str, ...]
    shots: int
    extract: Callable[[str], int | None]

    def digest(self) -> str:
        """Of everything that is asked, in its order."""
        asked = json.dumps([self.name, [(q.id, q.prompt, q.label) for q in self.questions], self.stop])
        return hashlib.sha256(asked.encode()).hexdigest()

    def shuffled(self, seed: int | None) -> Task:
        """The same questions in an order drawn from the seed; None: as they are."""
        if seed is None:
            return self
        order = random.Random(seed).sample(self.questions, len(self.questions))
        return replace(self, questions=tuple(order))


def gsm8k_task(path: Path, *, count: int, shots: int) -> Task:
    """The first `count` questions of the file, after its first `shots` items. Raises ConfigError."""
    items = gsm8k.read(path)
    before = gsm8k.shots(items, shots)
    return Task(
        name="gsm8k",
        questions=tuple(_gsm8k_question(i, item, before, shots) for i, item in enumerate(items[:count])),
        stop=gsm8k.STOP,
        shots=shots,
        extract=gsm8k.extract,
    )


def _gsm8k_question(index: int, item: gsm8k.Item, before: str, shots: int) -> Question:
    label = gsm8k.extract(item.answer)
    assert label is not None, "read() has refused such an item"
    asked = gsm8k.question(item)
    return Question(id=f"gsm8k/{index}", prompt=before + asked, asked=asked, label=label, leaked=index < shots)


def gsm_mini_task(*, seed: int, count: int, shots: int) -> Task:
    """Held-out problems drawn from the seed. The examples are training problems: none is leaked."""
    examples = gsm_mini.few_shot(0, shots)
    drawn = gsm_mini.problems("heldout", seed, count)
    return Task(
        name="gsm-mini",
        questions=tuple(_gsm_mini_question(f"gsm-mini/{seed}/{i}", p, examples) for i, p in enumerate(drawn)),
        stop=tuple(gsm_mini.STOP),
        shots=shots,
        extract=gsm_mini.extract_answer,
    )


def _gsm_mini_question(name: str, problem: gsm_mini.Problem, examples: Sequence[gsm_mini.Problem]) -> Question:
    return Question(
        id=name,
        prompt=gsm_mini.prompt(problem, examples),
        asked=gsm_mini.prompt(problem, ()),
        label=problem.answer,
    )
