"""The model families that the engine runs, each as its Hugging Face folders tell it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from engine.config_keys import Keys, read_json
from engine.families import falcon_h1, granitemoehybrid, nemotron_h, qwen3_next
from engine.families.family import Family, Place
from engine.model_config import HybridConfig

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "falcon_h1": Family(falcon_h1.read, falcon_h1.place),
        "granitemoehybrid": Family(granitemoehybrid.read, granitemoehybrid.place),
        "nemotron_h": Family(nemotron_h.read, nemotron_h.place),
        "qwen3_next": Family(qwen3_next.read, qwen3_next.place),
    }
)


def read_config(path: str | Path) -> HybridConfig:
    """Read config.json and generation_config.json of a model's folder.

    Raises ConfigError naming the key: unknown model type, quantisation, a variant not implemented.
    """
    folder = Path(path)
    keys = Keys(folder / "config.json", read_json(folder / "config.json"))
    family = FAMILIES.get(str(keys.values.get("model_type")))
    if family is None:
        raise keys.error("model_type", f"this engine runs {', '.join(sorted(FAMILIES))}")
    if keys.values.get("quantization_config") is not None:
        raise keys.error("quantization_config", "this engine runs unquantised weights only")
    return family.read(keys, folder)


def place_of(config: HybridConfig, stored: str) -> Place | None:
    """Where the tensor that a file calls `stored` belongs; None when the engine does not read it."""
    return FAMILIES[config.model].place(config, stored)
