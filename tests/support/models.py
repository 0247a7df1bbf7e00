"""Folders of small random models, one of each family and chunk, for tests that run ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.families import SMALL, make_model
from tests.support.stack import MODEL

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES = tuple(SMALL)


class Models:
    """(family, chunk) -> the folder of a random model with a tokenizer, made when it is first asked for.

    Tests do not change it.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, family: str, chunk: int) -> Path:
        folder = self._root / f"{family}-{chunk}"
        if not folder.exists():
            save_model(SMALL[family](chunk), folder, seed=chunk)
        return folder


def save_model(config: PretrainedConfig, folder: Path, seed: int = 0) -> None:
    """A random model with a tokenizer."""
    make_model(config, seed).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder / name)
