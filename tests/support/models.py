"""Folders of small random models, one of each family and chunk, for tests that run ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.families import SMALL, make_model
from tests.support.stack import MODEL

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
            make_model(SMALL[family](chunk), seed=chunk).save_pretrained(folder)
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(MODEL / name, folder / name)
        return folder
