"""Typed access to the keys of a model's JSON files: every refusal names the file, the key and the value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import ConfigError

LARGEST = 2**31 - 1
MOST_LAYERS = 10_000
_TOLD_CHARACTERS = 200


class Keys:
    """The keys of one JSON file. A key that is null counts as missing."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    def error(self, key: str, allowed: str, found: object = None) -> ConfigError:
        """found: the value, where it is not the one under the key."""
        value = self.values.get(key) if found is None else found
        told = "missing" if value is None and key not in self.values else _told(value)
        return ConfigError(f"{self.path}: {key} is {told}; {allowed}", param=key)

    def text(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str):
            raise self.error(key, "a string is needed")
        return value

    def count(self, *names: str, default: int | None = None) -> int:
        """A positive integer under the first of these names that is there."""
        key = next((name for name in names if self.values.get(name) is not None), names[0])
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST:
            raise self.error(key, f"a positive integer is needed, up to {LARGEST}")
        return value

    def layers(self) -> int:
        """`num_hidden_layers`, where the layers are listed nowhere."""
        layers = self.count("num_hidden_layers")
        if layers > MOST_LAYERS:
            raise self.error("num_hidden_layers", f"at most {MOST_LAYERS}")
        return layers

    def number(self, key: str, default: float | None = None) -> float:
        if self.values.get(key) is None and default is not None:
            return default
        value = as_float(self.values.get(key))
        if value is None or not 0 < value < math.inf:
            raise self.error(key, "a positive number is needed")
        return value

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """So many positive numbers; ones when the key is missing."""
        value = self.values.get(key)
        if value is None:
            return (1.0,) * count
        found = [as_float(each) for each in value] if isinstance(value, list) else []
        if len(found) != count or not all(each is not None and 0 < each < math.inf for each in found):
            raise self.error(key, f"{count} positive numbers are needed")
        return tuple(each for each in found if each is not None)

    def only(self, key: str, *allowed: Any) -> None:
        """Raises ConfigError unless the key is missing or has one of these values."""
        if self.values.get(key) is not None and self.values[key] not in allowed:
            either = " or ".join(json.dumps(value) for value in allowed) or "only models without it"
            raise self.error(key, f"this engine runs {either}")

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false is needed")
        return value


def _told(value: object) -> str:
    """A value as JSON, short."""
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):  # too many digits, or brackets
        return "too long to be told"
    return text if len(text) <= _TOLD_CHARACTERS else text[:_TOLD_CHARACTERS] + "…"


def as_float(value: object) -> float | None:
    """A number, also in the form {"__float__": "Infinity"} that transformers writes; None when it is not one."""
    if isinstance(value, dict) and set(value) == {"__float__"}:
        value = value["__float__"]
        return {"Infinity": math.inf, "-Infinity": -math.inf}.get(str(value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", param="model_path") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error})", param="model_path") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a JSON object is needed", param="model_path")
    return values


def read_time_step_limit(keys: Keys) -> tuple[float, float]:
    """Bounds of dt after softplus."""
    value = keys.values.get("time_step_limit")
    if value is None:
        return 0.0, math.inf
    if isinstance(value, list) and len(value) == 2:
        low, high = as_float(value[0]), as_float(value[1])
        if low is not None and high is not None and 0 <= low < high:
            return low, high
    raise keys.error("time_step_limit", "two numbers, 0 <= low < high, are needed")


def read_eos(folder: Path, keys: Keys) -> tuple[int, ...]:
    """Every token that ends an answer. The generation config wins over the config, as in transformers."""
    path, vocab_size = folder / "generation_config.json", keys.count("vocab_size")
    if path.is_file():
        generation = Keys(path, read_json(path))
        if generation.values.get("eos_token_id") is not None:
            keys = generation
    value = keys.values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size for token in ids):
        raise keys.error("eos_token_id", f"a token id or a list of them is needed, below vocab_size ({vocab_size})")
    return tuple(ids)
