"""The files of models/tandem-mini: size, shape, names and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from accuracy.gsm_mini import few_shot, problems, prompt, shot

FOLDER = Path(__file__).parents[2] / "models" / "tandem-mini"


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / "config.json").read_text())
    return content


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def test_architecture(config: dict[str, Any]) -> None:
    pattern = config["hybrid_override_pattern"]
    assert config["architectures"] == ["NemotronHForCausalLM"]
    assert config["model_type"] == "nemotron_h"
    assert set(pattern) == {"M", "*", "-"}
    assert pattern.count("M") >= 4
    assert pattern.count("*") >= 2
    assert len(pattern) == config["num_hidden_layers"]
    assert config["num_attention_heads"] > config["num_key_value_heads"] >= 2
    assert config["n_groups"] >= 2
    assert config["conv_kernel"] == 4
    assert config["chunk_size"] == 64
    assert config["max_position_embeddings"] >= 8192
    assert config["mamba_num_heads"] * config["mamba_head_dim"] == config["expand"] * config["hidden_size"]
    assert config["torch_dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is False


def test_weights_are_small_bfloat16_and_well_named(config: dict[str, Any]) -> None:
    path = FOLDER / "model.safetensors"
    assert path.stat().st_size <= 10_000_000
    heads, groups, size = config["mamba_num_heads"], config["n_groups"], config["ssm_state_size"]
    inner = heads * config["mamba_head_dim"]
    with safe_open(path, "pt") as weights:
        names = set(weights.keys())
        assert all(weights.get_slice(name).get_dtype() == "BF16" for name in names)
        assert all(name.startswith("backbone.") or name == "lm_head.weight" for name in names)
        in_proj = weights.get_slice("backbone.layers.0.mixer.in_proj.weight").get_shape()
        assert in_proj == [2 * inner + 2 * groups * size + heads, config["hidden_size"]]
        conv = weights.get_slice("backbone.layers.0.mixer.conv1d.weight").get_shape()
        assert conv == [inner + 2 * groups * size, 1, config["conv_kernel"]]
    assert {"backbone.embeddings.weight", "backbone.norm_f.weight", "lm_head.weight"} <= names
    for layer, kind in enumerate(config["hybrid_override_pattern"]):
        tensor = {"M": "A_log", "*": "k_proj.weight", "-": "up_proj.weight"}[kind]
        assert f"backbone.layers.{layer}.mixer.{tensor}" in names


def test_digits_and_newlines_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("0123456789").ids) == 10
    assert len(tokenizer.encode("\n\n\n").ids) == 3
    for text in ("4827", " 4827", "$4827."):
        digits = [t for t in tokenizer.encode(text).tokens if any(c.isdigit() for c in t)]
        assert digits == list("4827")


@pytest.mark.parametrize("text", ["", " a  b\t\n", "12*3 = <<12*3=36>>36\n#### 36\n\n", "naïve 数学 ∑ 🙂", "<<>>"])
def test_tokenizer_returns_what_it_was_given(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_tokens_of_shots_are_the_shots_tokens_joined(tokenizer: Tokenizer) -> None:
    shots, asked = few_shot(), problems("heldout", 3, 1)[0]
    whole = tokenizer.encode(prompt(asked, shots)).ids
    joined = [i for s in shots for i in tokenizer.encode(shot(s)).ids] + tokenizer.encode(prompt(asked, [])).ids
    assert whole == joined
    assert len(whole) < 2048


def test_end_of_text_is_one_token(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    assert tokenizer.token_to_id("<|endoftext|>") == config["eos_token_id"]
    assert tokenizer.encode("a<|endoftext|>").ids[-1] == config["eos_token_id"]
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    assert generation["eos_token_id"] == config["eos_token_id"]
    assert generation["do_sample"] is False


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_training_module_and_transformers_agree() -> None:
    from training.compare import largest_differences

    for length, (whole, stepwise) in largest_differences(FOLDER).items():
        assert whole <= 1e-3, length
        assert stepwise <= 1e-3, length
