"""Folders of random models of every family, see `tests.support.families`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.families import SHAPES, make_model


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def reference_models() -> Callable[[str], Any]:
    """name of a shape -> the transformers model with its weights, made once."""
    made: dict[str, Any] = {}

    def model(name: str) -> Any:
        if name not in made:
            made[name] = make_model(SHAPES[name]())
        return made[name]

    return model


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory, reference_models: Callable[[str], Any]) -> Callable[[str], Path]:
    """name of a shape -> a folder that transformers saved; tests do not change it."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            reference_models(name).save_pretrained(made[name])
        return made[name]

    return folder
