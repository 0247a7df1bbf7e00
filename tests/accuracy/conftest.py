"""A small task and the options of a gate, for tests without a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from accuracy.gate import GateOptions
from accuracy.tasks import Task, gsm_mini_task
from tests.accuracy.stub import Behaviour, Says

SGLANG = {"model_path": "stub"}


@pytest.fixture
def task() -> Task:
    return gsm_mini_task(seed=0, count=200, shots=0)


@pytest.fixture
def answers(task: Task) -> dict[str, Says]:
    """The right one to each prompt."""
    return {q.prompt: Says(f" It is {q.label}.\n#### {q.label}") for q in task.questions}


@pytest.fixture
def right(answers: dict[str, Says]) -> Behaviour:
    return lambda number, prompt: answers[prompt]


@pytest.fixture
def options(tmp_path: Path) -> Callable[..., GateOptions]:
    return partial(make_options, output=tmp_path / "out")


def make_options(url: str, *, output: Path, **changed: Any) -> GateOptions:
    values: dict[str, Any] = {
        "url": url,
        "baseline": None,
        "api": None,
        "model": None,
        "threshold": 0.87,
        "rounds": 1,
        "warm": 1,
        "parallel": 32,
        "max_tokens": 64,
        "max_failed": 0.01,
        "timeout_s": 60.0,
        "output": output,
        "resume": False,
        "history": None,
    }
    return GateOptions(**(values | changed))
