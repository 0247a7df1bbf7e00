"""Reading weights: both naming schemes, shards, dtypes, and every way a folder can be wrong."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.config import LoadFormat, ModelConfig
from common.errors import ConfigError
from engine.families import read_config
from engine.weights import dummy_revision, expected_shapes, keep_float32, load_weights, weights_of, weights_revision

NAME = "backbone.layers.0.mixer.in_proj.weight"


@pytest.fixture
def folder(folders: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(folders("small"), tmp_path / "model"))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return load_weights(folder, read_config(folder), dtype, "cpu")


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder: Path) -> None:
    """Replace the single file by two and an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def test_every_weight_in_its_shape(folder: Path) -> None:
    weights = load(folder)
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == expected_shapes(read_config(folder))


def test_naming_schemes_and_shards_give_the_same(folder: Path) -> None:
    before = load(folder)

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("backbone.")]:
            tensors[name.replace("backbone.", "model.", 1)] = tensors.pop(name)
        tensors["model.embedding.weight"] = tensors.pop("model.embeddings.weight")

    rewrite(folder, rename)
    renamed = load(folder)
    shard(folder)
    for other in (renamed, load(folder)):
        assert other.keys() == before.keys()
        assert all(torch.equal(other[name], before[name]) for name in before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stored_and_wanted_dtypes(folder: Path, dtype: torch.dtype) -> None:
    rewrite(folder, lambda tensors: tensors.update({name: value.to(dtype) for name, value in tensors.items()}))
    stored = load_file(folder / "model.safetensors")
    for wanted in (torch.float32, torch.bfloat16):
        weights = load(folder, wanted)
        for name, weight in weights.items():
            assert weight.dtype is (torch.float32 if keep_float32(name) else wanted)
        assert torch.equal(weights["layers.0.mixer.A_log"], stored["backbone.layers.0.mixer.A_log"].float())
        assert torch.equal(weights["embeddings.weight"], stored["backbone.embeddings.weight"].to(wanted))
    assert {name.rsplit(".", 2)[-1] for name in weights if keep_float32(name)} == {"A_log", "D", "dt_bias", "weight"}
    assert not keep_float32("layers.0.mixer.conv1d.bias") and keep_float32("layers.0.mixer.norm.weight")


def test_a_tied_head_is_the_embedding(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ConfigError, match=r"lm_head\.weight: missing"):
        load(folder)
    tied = dataclasses.replace(read_config(folder), tie_word_embeddings=True)
    weights = load_weights(folder, tied, torch.float32, "cpu")
    assert weights["lm_head.weight"] is weights["embeddings.weight"]


def test_multi_token_prediction_weights_are_ignored(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"mtp.layers.0.norm.weight": torch.ones(3)}))
    assert not any(name.startswith("mtp") for name in load(folder))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.pop(NAME), r"layers\.0\.mixer\.in_proj\.weight: missing"),
        (lambda tensors: tensors.update({NAME: torch.zeros(3, 4)}), r"in_proj\.weight: its shape is \[3, 4\]"),
        (lambda tensors: tensors.update({"backbone.layers.0.mixer.scale": torch.zeros(1)}), r"scale: .* no such"),
        (lambda tensors: tensors.update({NAME: tensors[NAME].to(torch.int8)}), r"in_proj\.weight: its dtype is I8"),
        (lambda tensors: tensors.update({"model.norm_f.weight": torch.ones(48)}), r"norm_f\.weight: it is there twice"),
    ],
)
def test_wrong_tensors_are_named(folder: Path, change: Callable[[dict[str, Tensor]], object], reason: str) -> None:
    rewrite(folder, change)
    with pytest.raises(ConfigError, match=reason) as error:
        load(folder)
    assert str(folder / "model.safetensors") in error.value.message


def test_broken_files_are_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors: not a readable safetensors file"):
        load(folder)
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"model\.safetensors: not a readable safetensors file"):
        load(folder)
    file.unlink()
    with pytest.raises(ConfigError, match="neither"):
        load(folder)
    with pytest.raises(ConfigError, match="no such folder"):
        load_weights(folder / "nowhere", read_config(folder), torch.float32, "cpu")


def test_broken_shards_are_named(folder: Path) -> None:
    shard(folder)
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    swapped = {**places, NAME: next(file for file in places.values() if file != places[NAME])}
    index.write_text(json.dumps({"weight_map": swapped}))
    with pytest.raises(ConfigError, match=f"{swapped[NAME]}: tensor {NAME}: missing"):
        load(folder)
    index.write_text(json.dumps({"weight_map": places}))
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"part-1\.safetensors: no such file"):
        load(folder)
    index.write_text(json.dumps({}))
    with pytest.raises(ConfigError, match="weight_map"):
        load(folder)


@pytest.mark.parametrize("name", ["../part-1.safetensors", "/etc/passwd", "a\0b", "n" * 300, "\ud800", ""])
def test_an_index_names_files_in_its_folder(folder: Path, name: str) -> None:
    shard(folder)
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**places, NAME: name}}))
    for read in (load, weights_revision):
        with pytest.raises(ConfigError, match="weight_map names"):
            read(folder)


def test_revisions_follow_where_answers_end(folder: Path) -> None:
    """Two nodes of which only one knows an end are no pair."""
    before = weights_revision(folder), dummy_revision(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    after = weights_revision(folder), dummy_revision(folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("1e-05", "1e-06"))
    assert len({*before, *after, weights_revision(folder), dummy_revision(folder)}) == 6


def test_revision_follows_every_byte(folder: Path) -> None:
    first = weights_revision(folder)
    assert len(first) == 16 and int(first, 16) >= 0 and first == weights_revision(folder)
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    second = weights_revision(folder)
    config = folder / "config.json"
    config.write_text(config.read_text() + " ")
    assert len({first, second, weights_revision(folder)}) == 3
    shard(folder)
    assert len(weights_revision(folder)) == 16
    (folder / "part-0.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"part-0\.safetensors"):
        weights_revision(folder)


def test_dummy_weights_need_no_file_and_are_the_same_twice(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    config = read_config(folder)
    model = ModelConfig(path=str(folder), load_format=LoadFormat.DUMMY)
    (first, revision), (again, _) = (weights_of(model, config, torch.bfloat16, "cpu") for _ in range(2))
    assert {name: tuple(weight.shape) for name, weight in first.items()} == expected_shapes(config)
    for name, weight in first.items():
        assert weight.dtype is (torch.float32 if keep_float32(name) else torch.bfloat16)
        assert torch.equal(weight, again[name]) and weight.isfinite().all() and weight.any()
    assert re.fullmatch("dummy-[0-9a-f]{16}", revision)
    with pytest.raises(ConfigError, match="is there"):
        weights_of(ModelConfig(path=str(folder)), config, torch.bfloat16, "cpu")
