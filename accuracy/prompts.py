"""Prompts of any kind from a file, for checks that compare tokens and not answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accuracy.tasks import gsm_mini_task
from common.errors import ConfigError

Prompt = dict[str, Any]
"""The part of a /generate request that is the prompt: {"text": …} or {"input_ids": …}."""


def load_prompts(path: Path | None, count: int) -> list[Prompt]:
    """The first `count` prompts of a file; without one, gsm-mini's five-shot prompts.

    A line is a prompt as it stands, or a JSON object with `text`, `prompt` or `input_ids`. Raises ConfigError.
    """
    if path is None:
        return [{"text": question.prompt} for question in gsm_mini_task(seed=0, count=count, shots=5).questions]
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: {error}", param="prompts") from error
    found = [_prompt(line, f"--prompts {path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError(f"--prompts {path}: no prompt in it", param="prompts")
    return found[:count]


def _prompt(line: str, where: str) -> Prompt:
    if not line.startswith("{"):
        return {"text": line}
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: no JSON: {error}", param="prompts") from error
    match found:
        case {"input_ids": [*ids]} if ids and all(isinstance(i, int) for i in ids):
            return {"input_ids": ids}
        case {"text": str(text)} | {"prompt": str(text)}:
            return {"text": text}
        case _:
            raise ConfigError(f"{where}: an object with text, prompt or input_ids is expected", param="prompts")
