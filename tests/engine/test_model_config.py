"""HybridConfig: what it reads from a folder and what it refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from engine.families import read_config
from engine.model_config import HybridConfig, LayerKind, Mamba2Config

BASE: dict[str, Any] = {
    "model_type": "nemotron_h",
    "vocab_size": 64,
    "hidden_size": 32,
    "hybrid_override_pattern": "M-*",
    "max_position_embeddings": 128,
    "layer_norm_epsilon": 1e-5,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "eos_token_id": 3,
}


def read(folder: Path, **changes: Any) -> HybridConfig:
    """Write BASE with these keys changed (None: left out) and read it."""
    values = {key: value for key, value in {**BASE, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))
    return read_config(folder)


def limits(folder: Path, **changes: Any) -> tuple[float, float]:
    mamba = read(folder, **changes).recurrence
    assert isinstance(mamba, Mamba2Config)
    return mamba.time_step_limit


def test_reads_what_transformers_saved(folders: Callable[[str], Path]) -> None:
    config = read_config(folders("biased"))
    assert "".join(config.layers) == "*M-M*M-"
    mamba, attention = config.recurrence, config.attention
    assert isinstance(mamba, Mamba2Config)
    assert (mamba.num_heads, mamba.head_dim, mamba.d_state, mamba.n_groups) == (6, 8, 20, 3)
    assert (attention.heads, attention.kv_heads, attention.head_dim) == (6, 1, 10)
    assert (mamba.conv_kernel, config.chunk_size, mamba.conv_dim) == (3, 16, 48 + 2 * 3 * 20)
    assert mamba.time_step_limit == (0.0, math.inf)
    assert mamba.in_bias and mamba.out_bias and mamba.conv_bias and config.mlp is not None and config.mlp.bias
    assert config.eos_token_ids == (2,)


def test_pattern_string_and_lists_agree(tmp_path: Path) -> None:
    pattern = read(tmp_path).layers
    named = read(
        tmp_path, layers_block_type=["linear_attention", "mlp", "full_attention"], hybrid_override_pattern=None
    )
    legacy = read(tmp_path, layers_block_type=["mamba", "mlp", "attention"], hybrid_override_pattern=None)
    assert pattern == named.layers == legacy.layers == (LayerKind.MAMBA, LayerKind.MLP, LayerKind.ATTENTION)


def test_defaults_and_limits(tmp_path: Path) -> None:
    assert read(tmp_path).chunk_size == 256
    assert read(tmp_path, chunk_size=64).chunk_size == 64
    assert limits(tmp_path) == (0.0, math.inf)
    assert limits(tmp_path, time_step_limit=[0.01, 0.5]) == (0.01, 0.5)
    assert limits(tmp_path, time_step_limit=[0.0, {"__float__": "Infinity"}]) == (0.0, math.inf)
    assert limits(tmp_path, time_step_limit=[0.0, math.inf]) == (0.0, math.inf)


def test_eos_ids_of_the_generation_config_come_first(tmp_path: Path) -> None:
    assert read(tmp_path).eos_token_ids == (3,)
    assert read(tmp_path, eos_token_id=[5, 6]).eos_token_ids == (5, 6)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert read(tmp_path).eos_token_ids == (7, 8)
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    assert read(tmp_path).eos_token_ids == (3,)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "mamba2"),
        ("quantization_config", {"quant_method": "fp8"}),
        ("mlp_hidden_act", "silu"),
        ("mamba_hidden_act", "gelu"),
        ("attention_bias", True),
        ("mamba_proj_bias", True),
        ("sliding_window", 16),
        ("hybrid_override_pattern", "MX"),
        ("hybrid_override_pattern", ""),
        ("layers_block_type", ["mlp", "rwkv"]),
        ("num_hidden_layers", 4),
        ("time_step_limit", [0.5, 0.1]),
        ("time_step_limit", "wide"),
        ("n_groups", 3),
        ("num_key_value_heads", 3),
        ("conv_kernel", 1),
        ("hidden_size", "32"),
        ("hidden_size", True),
        ("layer_norm_epsilon", -1.0),
        ("eos_token_id", "end"),
        ("use_bias", "yes"),
    ],
)
def test_refuses_naming_the_key(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key) as error:
        read(tmp_path, **{key: value})
    assert error.value.param == key
    assert str(tmp_path) in error.value.message


@pytest.mark.parametrize("key", [key for key in BASE if key not in ("eos_token_id",)])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is missing"):
        read(tmp_path, **{key: None})


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="a JSON object"):
        read_config(tmp_path)
