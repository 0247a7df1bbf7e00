"""What is read from the folders of each family, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

from common.errors import ConfigError
from engine.families import FAMILIES, read_config
from engine.model_config import GatedDeltaConfig, GateNorm, HybridConfig, Mamba2Config, Router
from engine.weights import expected_shapes, keep_float32, load_weights, random_weights, stored_dtypes
from tests.support.families import FAMILY_SHAPES

Folders = Callable[[str], Path]
EXPERTS = "model.layers.0.mlp.experts"
LOADED = ("nemotron3_latent", "falcon_normed", "granite", "granite_sparse", "qwen_dense")


@pytest.fixture
def copied(folders: Folders, tmp_path: Path) -> Folders:
    """A folder that a test may change."""
    return lambda name: Path(shutil.copytree(folders(name), tmp_path / name))


def change_config(folder: Path, **changes: Any) -> Path:
    """None leaves a key out."""
    values = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return load_weights(folder, read_config(folder), dtype, "cpu")


@pytest.mark.parametrize("name", [name for names in FAMILY_SHAPES.values() for name in names])
def test_every_weight_has_its_place_and_shape(name: str, folders: Folders) -> None:
    weights, shapes = load(folders(name)), expected_shapes(read_config(folders(name)))
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == shapes
    assert stored_dtypes(folders(name), read_config(folders(name))).keys() == shapes.keys()


def test_layers_in_the_order_of_the_engine(folders: Folders) -> None:
    found = {name: "".join(read_config(folders(name)).layers) for name in LOADED}
    assert found == {
        "nemotron3_latent": "EM-*ME",
        "falcon_normed": "H-H-H-",
        "granite": "M-*-M-",
        "granite_sparse": "*EMEME*E",
        "qwen_dense": "*EG-GE",
    }


def test_the_architecture_of_falcon(folders: Folders) -> None:
    config = read_config(folders("falcon_normed"))
    mamba = config.recurrence
    assert isinstance(mamba, Mamba2Config) and mamba.norm is GateNorm.NORM_FIRST
    assert (mamba.conv_blocks, mamba.state_shape, mamba.conv_kernel) == ((48, 32, 32), (4, 12, 16), 3)
    assert config.attention.scale == pytest.approx(12**-0.5 * 0.7) and config.attention.rotary_dim == 12
    assert read_config(folders("falcon")).attention.scale == pytest.approx(12**-0.5 * 0.7 * 1.5**2)
    assert config.embedding_multiplier == 0.8 and config.attention.rope_theta == 1e6


def test_the_architecture_of_granite(folders: Folders) -> None:
    config = read_config(folders("granite_sparse"))
    assert config.attention.scale == 0.35 and config.attention.rotary_dim == 12
    assert read_config(folders("granite")).attention.rotary_dim == 0
    assert config.moe is not None and config.moe.router is Router.SOFTMAX_OF_TOP_K and config.mlp is None
    assert config.embedding_multiplier == 0.8 and config.recurrence.chunk_size == 16


def test_the_architecture_of_qwen(folders: Folders, copied: Folders) -> None:
    config = read_config(folders("qwen_dense"))
    delta = config.recurrence
    assert isinstance(delta, GatedDeltaConfig)
    assert (delta.conv_blocks, delta.state_shape, delta.conv_kernel) == ((48, 48, 64), (4, 12, 16), 3)
    assert config.attention.rotary_dim == 4 and config.attention.qk_norm and config.attention.output_gate
    folder = change_config(copied("qwen"), chunk_size=None, layer_types=None, full_attention_interval=2)
    assert "".join(read_config(folder).layers) == "GE*EGE*E" and read_config(folder).chunk_size == 64


def test_the_rotary_keys_of_older_files(folders: Folders, copied: Folders) -> None:
    folder, wanted = copied("qwen"), read_config(folders("qwen")).attention
    older = change_config(folder, rope_parameters=None, rope_theta=1e7, partial_rotary_factor=0.25)
    assert read_config(older).attention == wanted
    scaling = {"type": "default", "rope_theta": 1e7}
    assert read_config(change_config(folder, rope_theta=None, rope_scaling=scaling)).attention == wanted


def test_the_rotated_share_is_the_familys(folders: Folders, copied: Folders) -> None:
    """Qwen3-Next rotates a quarter of a head unless told; the others the whole of it, whatever they are told."""
    folder = copied("qwen")
    for theta in ({"rope_parameters": {"rope_theta": 1e7}}, {"rope_parameters": None, "rope_theta": 1e7}):
        assert read_config(change_config(folder, **theta)).attention.rotary_dim == 4
    told = change_config(copied("falcon"), partial_rotary_factor=0.5)
    assert read_config(told).attention == read_config(folders("falcon")).attention


@pytest.mark.parametrize("name", LOADED)
def test_bfloat16_is_the_rounded_float32(name: str, folders: Folders) -> None:
    """Multipliers and offsets are applied before the rounding."""
    exact, rounded = load(folders(name)), load(folders(name), torch.bfloat16)
    for key, value in exact.items():
        assert torch.equal(rounded[key], value if keep_float32(key) else value.bfloat16()), key


def test_what_is_multiplied_into_the_weights(folders: Folders) -> None:
    stored, weights = load_file(folders("falcon") / "model.safetensors"), load(folders("falcon"))
    prefix, mixer = "model.layers.1.", "layers.2.mixer."
    inner = stored[f"{prefix}mamba.in_proj.weight"] * 1.25
    parts = zip(torch.split(inner, [48, 48, 16, 16, 4]), (1.1, 1.2, 1.5, 1.4, 1.3), strict=True)
    assert_close(weights[f"{mixer}mamba.in_proj.weight"], torch.cat([part * factor for part, factor in parts]))
    assert_close(weights[f"{mixer}mamba.out_proj.weight"], stored[f"{prefix}mamba.out_proj.weight"] * 1.5)
    assert_close(weights[f"{mixer}attention.o_proj.weight"], stored[f"{prefix}self_attn.o_proj.weight"] * 1.5 * 0.8)
    assert torch.equal(weights[f"{mixer}attention.k_proj.weight"], stored[f"{prefix}self_attn.k_proj.weight"])
    assert_close(weights["layers.3.mixer.gate_proj.weight"], stored[f"{prefix}feed_forward.gate_proj.weight"] * 0.75)
    assert_close(weights["norm_f.weight"], stored["model.final_layernorm.weight"] * 1.4)
    stored, weights = load_file(folders("qwen") / "model.safetensors"), load(folders("qwen"))
    assert_close(weights["layers.1.norm.weight"], stored["model.layers.0.post_attention_layernorm.weight"] + 1)
    assert torch.equal(weights["layers.0.mixer.norm.weight"], stored["model.layers.0.linear_attn.norm.weight"])
    third = stored["model.layers.0.mlp.experts.2.up_proj.weight"]
    assert torch.equal(weights["layers.1.mixer.experts.up_proj.weight"][2], third)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("qwen", lambda t: t.pop(f"{EXPERTS}.5.up_proj.weight"), r"1\.mixer\.experts\.up_proj\.weight\[5\]: missing$"),
        ("qwen", lambda t: t.pop("model.layers.3.self_attn.q_norm.weight"), r"layers\.6\.mixer\.q_norm\.weight: miss"),
        (
            "qwen",
            lambda t: t.update({f"{EXPERTS}.8.up_proj.weight": torch.zeros(24, 48)}),
            r"experts\.8\.up_proj\.weight: this model has no such",
        ),
        (
            "qwen",
            lambda t: t.update({f"{EXPERTS}.1.up_proj.weight": torch.zeros(24, 47)}),
            r"experts\.1\.up_proj\.weight: its shape is \[24, 47\]",
        ),
        (
            "granite_sparse",
            lambda t: t.update({"model.layers.0.block_sparse_moe.input_linear.weight": torch.zeros(7, 48, 48)}),
            r"input_linear\.weight: its shape is \[7, 48, 48\]",
        ),
        ("falcon", lambda t: t.update({"model.layers.9.mamba.D": torch.zeros(4)}), r"9\.mamba\.D: this model has no"),
        ("falcon", lambda t: t.update({"model.layers.0.mamba.norm.weight": torch.zeros(48)}), r"norm\.weight: this"),
        (
            "nemotron3",
            lambda t: t.pop("backbone.layers.1.mixer.gate.e_score_correction_bias"),
            r"1\.mixer\.router\.e_score_correction_bias: missing",
        ),
        (
            "qwen",
            lambda t: [t.pop(f"{EXPERTS}.{i}.up_proj.weight") for i in (2, 7)],
            r"experts\.up_proj\.weight\[2\]: missing \(and 1 more\)",
        ),
        (
            "falcon",
            lambda t: t.update({"layers.0.mixer.mamba.D": t.pop("model.layers.0.mamba.D")}),
            r"layers\.0\.mixer\.mamba\.D: this model has no such",
        ),
        (
            "nemotron3",
            lambda t: t.update({"backbone.layers.1.mixer.router.weight": t.pop("backbone.layers.1.mixer.gate.weight")}),
            r"router\.weight: this model has no such",
        ),
    ],
)  # fmt: skip
def test_wrong_tensors_are_named(
    name: str, change: Callable[[dict[str, Tensor]], object], reason: str, copied: Folders
) -> None:
    folder = copied(name)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    for read in (load, lambda folder: stored_dtypes(folder, read_config(folder))):
        with pytest.raises(ConfigError, match=reason):
            read(folder)


def test_a_stack_and_a_piece_of_it_are_one_too_many(copied: Folders) -> None:
    folder = copied("nemotron3")
    tensors = load_file(folder / "model.safetensors")
    stacked = torch.stack([tensors[f"backbone.layers.1.mixer.experts.{i}.up_proj.weight"] for i in range(8)])
    save_file({**tensors, "backbone.layers.1.mixer.experts.up_proj.weight": stacked}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="it is there twice"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("falcon", "hidden_act", "gelu"),
        ("falcon", "mamba_n_heads", 5),
        ("falcon", "mamba_d_conv", 1),
        ("falcon", "ssm_multipliers", [1.0, 2.0]),
        ("falcon", "mlp_multipliers", "many"),
        ("falcon", "key_multiplier", -1),
        ("falcon", "rope_parameters", {"rope_type": "yarn", "factor": 4.0}),
        ("falcon", "num_key_value_heads", 3),
        ("falcon_normed", "attention_in_multiplier", 2.0),
        ("granite", "position_embedding_type", "alibi"),
        ("granite", "layer_types", ["linear_attention", "rwkv", "linear_attention"]),
        ("granite", "num_hidden_layers", 4),
        ("granite_sparse", "num_experts_per_tok", 9),
        ("granite", "logits_scaling", 0),
        ("qwen", "hidden_act", "relu"),
        ("qwen", "linear_num_key_heads", 3),
        ("qwen", "mlp_only_layers", "all"),
        ("qwen", "num_experts_per_tok", 9),
        ("qwen", "partial_rotary_factor", 2.0),
        ("qwen", "quantization_config", {"quant_method": "fp8"}),
        ("qwen", "rope_parameters", {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}),
        ("qwen", "max_position_embeddings", 10**30),
        ("falcon", "num_hidden_layers", 10**9),
        ("falcon", "attention_in_multiplier", 10**400),
        ("falcon", "rms_norm_eps", 10**400),
        ("falcon", "hidden_size", 10**400),
        ("nemotron3", "layers_block_type", [["mamba"]]),
        ("nemotron3", "layers_block_type", [{}]),
        ("nemotron3", "routed_scaling_factor", 10**400),
        ("nemotron3", "topk_group", 2),
        ("nemotron3", "n_group", 3),
        ("nemotron3", "n_group", 8),
        ("nemotron3", "num_experts_per_tok", 9),
        ("nemotron3", "n_shared_experts", 2),
        ("nemotron3", "moe_latent_size", 0),
    ],
)
def test_a_variant_that_is_not_run_is_refused_by_its_key(name: str, key: str, value: Any, copied: Folders) -> None:
    folder = copied(name)
    if key == "partial_rotary_factor":
        change_config(folder, rope_parameters={"rope_theta": 1e7, key: value})
    else:
        change_config(folder, **{key: value})
    with pytest.raises(ConfigError, match=key) as error:
        read_config(folder)
    assert error.value.param == key and str(folder) in error.value.message


@pytest.mark.parametrize("ends", [[2, 97], 10**30, -1, [True], "end"])
def test_an_end_that_the_vocabulary_does_not_have_is_refused(ends: Any, copied: Folders) -> None:
    folder = copied("qwen")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id is .* below vocab_size \(97\)"):
        read_config(folder)


@pytest.mark.parametrize("theta", [0, -1.0, "wide", math.nan, math.inf, 10**400])
@pytest.mark.parametrize("name", ["falcon", "qwen"])
def test_a_theta_that_turns_nothing_is_refused(name: str, theta: Any, copied: Folders) -> None:
    folder = change_config(copied(name), rope_parameters={"rope_theta": theta})
    with pytest.raises(ConfigError, match=r"rope_theta is (?!missing)"):
        read_config(folder)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_brackets_without_end_are_no_json(file: str, copied: Folders) -> None:
    folder = copied("small")
    (folder / file).write_text('{"a":' + "[" * 100_000)
    with pytest.raises(ConfigError, match=f"{file}: not valid JSON"):
        read_config(folder)


@pytest.mark.parametrize("number", ["01", "1" * 5000, "\u0661", "-1"])
def test_numbers_in_names_are_plain(number: str, copied: Folders) -> None:
    folder = copied("qwen")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{EXPERTS}.{number}.up_proj.weight"] = tensors.pop(f"{EXPERTS}.1.up_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"up_proj\.weight: this model has no such"):
        load(folder)


def test_an_unknown_family_is_told_which_there_are(copied: Folders) -> None:
    folder = change_config(copied("falcon"), model_type="zamba2")
    with pytest.raises(ConfigError, match=r"model_type is \"zamba2\"; this engine runs falcon_h1, granite.*qwen3_next"):
        read_config(folder)
    assert {read_config(change_config(folder, model_type=name)).model for name in ("falcon_h1",)} < set(FAMILIES)


@pytest.mark.parametrize("name", LOADED)
def test_made_up_weights_are_of_the_right_shapes(name: str, folders: Folders) -> None:
    config: HybridConfig = read_config(folders(name))
    made = random_weights(config, torch.bfloat16, "cpu")
    assert {name: tuple(weight.shape) for name, weight in made.items()} == expected_shapes(config)
    assert all(weight.isfinite().all() for weight in made.values())
