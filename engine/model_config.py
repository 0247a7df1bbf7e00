"""What a Hugging Face folder says about a hybrid model: read once, checked, immutable. No tensors here."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import ConfigError

DEFAULT_CHUNK = 256


class LayerKind(enum.StrEnum):
    """The mixer of one layer, by its letter in `hybrid_override_pattern`."""

    MAMBA = "M"
    ATTENTION = "*"
    MLP = "-"


_LIST_NAMES: Mapping[str, str] = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig:
    """The architecture of a NemotronH model. Names follow its config.json where they are clear.

    layers: one kind a layer. num_heads, head_dim, d_state, n_groups, conv_kernel: of the Mamba2 mixers.
    attention_heads, kv_heads, attention_head_dim: of the attention mixers (no rotary embedding). chunk_size: tokens
    in a chunk of the scan. time_step_limit: bounds of dt after softplus. eos_token_ids: every id that ends an answer.
    """

    model: str
    layers: tuple[LayerKind, ...]
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    layer_norm_epsilon: float
    tie_word_embeddings: bool
    num_heads: int
    head_dim: int
    d_state: int
    n_groups: int
    conv_kernel: int
    chunk_size: int
    time_step_limit: tuple[float, float]
    use_bias: bool
    use_conv_bias: bool
    attention_heads: int
    kv_heads: int
    attention_head_dim: int
    intermediate_size: int
    mlp_bias: bool

    @property
    def d_inner(self) -> int:
        """Width of a Mamba2 mixer: heads x head_dim."""
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: x, B and C together."""
        return self.d_inner + 2 * self.n_groups * self.d_state

    def layers_of(self, kind: LayerKind) -> tuple[int, ...]:
        """Numbers of the layers of one kind, ascending."""
        return tuple(index for index, found in enumerate(self.layers) if found is kind)

    @classmethod
    def from_folder(cls, path: str | Path) -> HybridConfig:
        """Read config.json and generation_config.json.

        `time_step_limit` bounds dt; `time_step_min` and `time_step_max` only describe how dt_bias was initialised.
        `residual_in_fp32` has no effect, as in transformers: the residual has the dtype of the weights.
        Raises ConfigError naming the key: unknown model type, MoE layers, quantisation, a variant not implemented.
        """
        folder = Path(path)
        keys = _Keys(folder / "config.json", _read_json(folder / "config.json"))
        _refuse_variants(keys)
        config = cls(
            model=keys.text("model_type"),
            layers=_read_layers(keys),
            vocab_size=keys.count("vocab_size"),
            hidden_size=keys.count("hidden_size"),
            max_position_embeddings=keys.count("max_position_embeddings"),
            eos_token_ids=_read_eos(folder, keys),
            layer_norm_epsilon=keys.number("layer_norm_epsilon"),
            tie_word_embeddings=keys.flag("tie_word_embeddings", False),
            num_heads=keys.count("mamba_num_heads"),
            head_dim=keys.count("mamba_head_dim"),
            d_state=keys.count("ssm_state_size"),
            n_groups=keys.count("n_groups", "mamba_n_groups"),
            conv_kernel=keys.count("conv_kernel", "mamba_d_conv"),
            chunk_size=keys.count("chunk_size", "mamba_chunk_size", default=DEFAULT_CHUNK),
            time_step_limit=_read_limit(keys),
            use_bias=keys.flag("use_bias", False),
            use_conv_bias=keys.flag("use_conv_bias", True),
            attention_heads=keys.count("num_attention_heads"),
            kv_heads=keys.count("num_key_value_heads"),
            attention_head_dim=keys.count("head_dim", "attention_head_dim"),
            intermediate_size=keys.count("intermediate_size"),
            mlp_bias=keys.flag("mlp_bias", False),
        )
        _check_shapes(config, keys)
        return config


class _Keys:
    """Typed access to the keys of one JSON file; every refusal names file, key and value."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    def error(self, key: str, allowed: str) -> ConfigError:
        found = json.dumps(self.values[key], default=str) if key in self.values else "missing"
        return ConfigError(f"{self.path}: {key} is {found}; {allowed}", param=key)

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
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, "a positive integer is needed")
        return value

    def number(self, key: str) -> float:
        value = as_float(self.values.get(key))
        if value is None or not 0 < value < math.inf:
            raise self.error(key, "a positive number is needed")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false is needed")
        return value


def as_float(value: object) -> float | None:
    """A number, also in the form {"__float__": "Infinity"} that transformers writes; None when it is not one."""
    if isinstance(value, dict) and set(value) == {"__float__"}:
        value = value["__float__"]
        return {"Infinity": math.inf, "-Infinity": -math.inf}.get(str(value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", param="model_path") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON ({error})", param="model_path") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a JSON object is needed", param="model_path")
    return values


def _refuse_variants(keys: _Keys) -> None:
    if keys.values.get("model_type") != "nemotron_h":
        raise keys.error("model_type", "this engine runs nemotron_h")
    if keys.values.get("quantization_config") is not None:
        raise keys.error("quantization_config", "this engine runs unquantised weights only")
    only: dict[str, tuple[Any, ...]] = {
        "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "sliding_window": (),
    }
    for key, allowed in only.items():
        if keys.values.get(key) is not None and keys.values[key] not in allowed:
            raise keys.error(key, f"this engine runs {_either(allowed)}")
    if keys.flag("mamba_proj_bias", False) and not keys.flag("use_bias", False):
        raise keys.error("mamba_proj_bias", "biases of the Mamba projections are switched by use_bias")


def _either(allowed: tuple[Any, ...]) -> str:
    return " or ".join(json.dumps(value) for value in allowed) or "only models without it"


def _read_layers(keys: _Keys) -> tuple[LayerKind, ...]:
    key = "layers_block_type" if keys.values.get("layers_block_type") is not None else "hybrid_override_pattern"
    if keys.values.get(key) is None and keys.values.get("layer_types") is not None:
        key = "layer_types"
    value = keys.values.get(key)
    if not isinstance(value, str | list) or not value:
        raise keys.error(key, "a pattern of M, * and - is needed")
    letters = [_LIST_NAMES.get(name, name) for name in value] if isinstance(value, list) else list(value)
    for letter in letters:
        if letter == "E":
            raise keys.error(key, "MoE layers (E) are not implemented")
        if letter not in tuple(LayerKind):
            raise keys.error(key, f"{letter!r} is not one of M, *, -")
    layers = tuple(LayerKind(letter) for letter in letters)
    if isinstance(value, str) and keys.count("num_hidden_layers", default=len(layers)) != len(layers):
        raise keys.error("num_hidden_layers", f"the pattern has {len(layers)} layers")
    return layers


def _read_limit(keys: _Keys) -> tuple[float, float]:
    value = keys.values.get("time_step_limit")
    if value is None:
        return 0.0, math.inf
    if isinstance(value, list) and len(value) == 2:
        low, high = as_float(value[0]), as_float(value[1])
        if low is not None and high is not None and 0 <= low < high:
            return low, high
    raise keys.error("time_step_limit", "two numbers, 0 <= low < high, are needed")


def _read_eos(folder: Path, keys: _Keys) -> tuple[int, ...]:
    """The generation config wins over the config, as in transformers."""
    path = folder / "generation_config.json"
    if path.is_file():
        generation = _Keys(path, _read_json(path))
        if generation.values.get("eos_token_id") is not None:
            keys = generation
    value = keys.values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise keys.error("eos_token_id", "a token id or a list of them is needed")
    return tuple(ids)


def _check_shapes(config: HybridConfig, keys: _Keys) -> None:
    if config.attention_heads % config.kv_heads:
        raise keys.error("num_key_value_heads", f"it must divide num_attention_heads ({config.attention_heads})")
    if config.num_heads % config.n_groups:
        raise keys.error("n_groups", f"it must divide mamba_num_heads ({config.num_heads})")
    if config.conv_kernel < 2:
        raise keys.error("conv_kernel", "at least 2 is needed")
