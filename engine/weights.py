"""Weights from a Hugging Face folder: which tensors there must be, with which shapes, and reading them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.config import LoadFormat, ModelConfig
from common.errors import ConfigError
from engine.families import place_of
from engine.families.family import Place
from engine.mixers.attention import attention_shapes
from engine.mixers.gated_delta import gated_delta_shapes
from engine.mixers.mamba2 import mamba2_shapes
from engine.mixers.mixer import Shapes
from engine.mixers.mlp import mlp_shapes
from engine.mixers.moe import moe_shapes
from engine.model_config import GatedDeltaConfig, HybridConfig, LayerKind

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = ("F32", "BF16", "F16")
_FILE_NAME = re.compile(r"(?!/)[^\0-\x1f\ud800-\udfff]{1,250}")
_READ_BYTES = 8 * 1024 * 1024

Seen = dict[str, set[int | None]]  # name -> pieces of its stack, or None: the whole


def load_weights(
    path: str | Path, config: HybridConfig, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor]:
    """Every weight by the engine's name for it, whatever the family's files call it, see `engine.families.place_of`.

    Tensors get `dtype`, except those of `keep_float32`; `config.adjustments` are applied before. Tensors of experts are
    stacked. When `tie_word_embeddings` is set and lm_head.weight is absent, it is the embedding itself.
    Raises ConfigError naming the file and the tensor: missing, unexpected, of another shape, quantised, truncated.
    """
    expected = expected_shapes(config)
    weights: dict[str, Tensor] = {}
    for place, full, tensors in _stored(Path(path), config, expected):
        value = _adjusted(config, place.name, tensors.get_tensor(full))
        kept = torch.float32 if keep_float32(place.name) else dtype
        if place.piece is None:
            weights[place.name] = value.to(device=device, dtype=kept, copy=True)
            continue
        if place.name not in weights:
            weights[place.name] = torch.empty(expected[place.name], device=device, dtype=kept)
        weights[place.name][place.piece].copy_(value)
    if config.tie_word_embeddings:
        weights.setdefault("lm_head.weight", weights["embeddings.weight"])
    return weights


def _adjusted(config: HybridConfig, name: str, value: Tensor) -> Tensor:
    for adjustment in config.adjustments:
        if re.fullmatch(rf"(.*\.)?{adjustment.pattern}", name):
            value = value.float() * adjustment.factor + adjustment.offset
            if adjustment.rows:
                parts = torch.split(value, [count for count, _ in adjustment.rows])
                for part, (_, factor) in zip(parts, adjustment.rows, strict=True):
                    part.mul_(factor)
    return value


def _stored(
    folder: Path, config: HybridConfig, expected: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[Place, str, Any]]:
    """What `_checked` yields of all files of the folder, each tensor once, and at the end none is missing."""
    files, seen = _weight_files(folder), Seen()
    for file, wanted in files.items():
        for place, full, tensors in _checked(file, wanted, config, expected):
            _see(place, seen, file, full)
            yield place, full, tensors
    _check_complete(next(iter(files)), config, expected, seen)


def _see(place: Place, seen: Seen, file: Path, full: str) -> None:
    pieces = seen.setdefault(place.name, set())
    if pieces and (place.piece in pieces or None in pieces or place.piece is None):
        raise _error(file, full, "it is there twice")
    pieces.add(place.piece)


def _check_complete(file: Path, config: HybridConfig, expected: Mapping[str, tuple[int, ...]], seen: Seen) -> None:
    """Every tensor has been seen, or every piece of it."""
    missing = [each for name, shape in expected.items() for each in _missing(name, shape, seen.get(name, set()))]
    if config.tie_word_embeddings:
        missing = [name for name in missing if name != "lm_head.weight"]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise _error(file, missing[0], f"missing{more}")


def _missing(name: str, shape: tuple[int, ...], pieces: set[int | None]) -> list[str]:
    """What is not there of a tensor: it, or pieces of its stack."""
    if not pieces:
        return [name]
    return [] if None in pieces else [f"{name}[{piece}]" for piece in range(shape[0]) if piece not in pieces]


def stored_dtypes(path: str | Path, config: HybridConfig) -> dict[str, str]:
    """The dtype in its file ("BF16") of every weight by the engine's name, from the files' headers alone, which also
    tell a truncated file. Raises ConfigError for what `load_weights` would refuse."""
    dtypes = {
        place.name: tensors.get_slice(full).get_dtype()
        for place, full, tensors in _stored(Path(path), config, expected_shapes(config))
    }
    if config.tie_word_embeddings:
        dtypes.setdefault("lm_head.weight", dtypes["embeddings.weight"])
    return dtypes


def random_weights(
    config: HybridConfig, dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> dict[str, Tensor]:
    """What `load_weights` returns, made up, of a scale at which states neither die nor explode."""
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for name, shape in expected_shapes(config).items():
        kept = torch.float32 if keep_float32(name) else dtype
        value = torch.randn(shape, device=device, dtype=kept, generator=generator)
        if name.endswith("A_log"):
            value = value.uniform_(1, 16, generator=generator).log()
        elif name.endswith("dt_bias"):
            value = value * 0.5 - 4
        elif len(shape) == 1:
            value = value * 0.1 + 1
        elif "embeddings" not in name:
            value *= shape[-1] ** -0.5 * (0.3 if name.endswith(("out_proj.weight", "down_proj.weight")) else 1.0)
        weights[name] = value
    return weights


def weights_of(
    model: ModelConfig, config: HybridConfig, dtype: torch.dtype, device: torch.device | str
) -> tuple[dict[str, Tensor], str]:
    """The weights that the settings ask for and their revision. Raises ConfigError."""
    match model.load_format:
        case LoadFormat.AUTO:
            return load_weights(model.path, config, dtype, device), weights_revision(model.path)
        case LoadFormat.DUMMY:
            try:
                return random_weights(config, dtype, device), dummy_revision(model.path)
            except (RuntimeError, MemoryError, OverflowError) as error:
                reason = str(error).partition("\n")[0]
                raise ConfigError(f"{model.path}: its weights cannot be made: {reason}", param="model_path") from error


def weights_revision(path: str | Path) -> str:
    """16 hex digits over the names and bytes of the configs and the weight files; equal folders, equal digest."""
    folder = Path(path)
    return _digest((*_configs(folder), *sorted(_weight_files(folder))))


def dummy_revision(path: str | Path) -> str:
    """Of made-up weights, which follow from the configs: "dummy-" and 16 hex digits over these."""
    return f"dummy-{_digest(_configs(Path(path)))}"


def _configs(folder: Path) -> tuple[Path, ...]:
    """What both ends of a hand-off must have alike: the generation config says where answers end."""
    names = ("config.json", "generation_config.json")
    return tuple(folder / name for name in names if name == "config.json" or (folder / name).is_file())


def _digest(files: Iterable[Path]) -> str:
    digest = xxhash.xxh3_64()
    for file in files:
        digest.update(file.name.encode())
        try:
            with file.open("rb") as stream:
                while block := stream.read(_READ_BYTES):
                    digest.update(block)
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror or error}", param="model_path") from error
    return str(digest.hexdigest())


def keep_float32(name: str) -> bool:
    """Whether a weight stays float32 whatever the model's dtype: small, and used in float32 arithmetic."""
    ends = (".A_log", ".D", ".dt_bias", "norm.weight", "norm_f.weight", "router.weight", "score_correction_bias")
    return name.endswith(ends)


def expected_shapes(config: HybridConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of the model, in the order of the layers."""
    hidden = config.hidden_size
    shapes: Shapes = {"embeddings.weight": (config.vocab_size, hidden)}
    of_kind = {kind: _mixer_shapes(config, kind) for kind in set(config.layers)}
    for layer, kind in enumerate(config.layers):
        shapes[f"layers.{layer}.norm.weight"] = (hidden,)
        shapes |= {f"layers.{layer}.mixer.{name}": shape for name, shape in of_kind[kind].items()}
    shapes["norm_f.weight"] = (hidden,)
    shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _mixer_shapes(config: HybridConfig, kind: LayerKind) -> Shapes:
    hidden = config.hidden_size
    match kind:
        case LayerKind.MAMBA:
            return _recurrent_shapes(config)
        case LayerKind.GATED_DELTA:
            return _recurrent_shapes(config)
        case LayerKind.ATTENTION:
            return attention_shapes(config.attention, hidden)
        case LayerKind.PARALLEL:
            mamba = {f"mamba.{name}": shape for name, shape in _recurrent_shapes(config).items()}
            return mamba | {
                f"attention.{name}": shape for name, shape in attention_shapes(config.attention, hidden).items()
            }
        case LayerKind.MLP:
            assert config.mlp is not None
            return mlp_shapes(config.mlp, hidden)
        case LayerKind.MOE:
            assert config.moe is not None
            return moe_shapes(config.moe, hidden)


def _recurrent_shapes(config: HybridConfig) -> Shapes:
    if isinstance(config.recurrence, GatedDeltaConfig):
        return gated_delta_shapes(config.recurrence, config.hidden_size)
    return mamba2_shapes(config.recurrence, config.hidden_size)


def _weight_files(folder: Path) -> dict[Path, tuple[str, ...] | None]:
    """Weight files and the tensors that the index places in each; None for a single file: all that it has."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder", param="model_path")
    if not (folder / _INDEX).is_file():
        if not (folder / _SINGLE).is_file():
            raise ConfigError(f"{folder}: neither {_SINGLE} nor {_INDEX} is there", param="model_path")
        return {folder / _SINGLE: None}
    placed: dict[Path, list[str]] = {}
    for name, file in _read_index(folder / _INDEX).items():
        placed.setdefault(folder / file, []).append(name)
    return {file: tuple(names) for file, names in sorted(placed.items())}


def _read_index(path: Path) -> Mapping[str, str]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path}: no readable weight_map ({error!r})", param="model_path") from error
    if not isinstance(index, dict) or not index or not all(isinstance(file, str) for file in index.values()):
        raise ConfigError(f"{path}: weight_map must map tensor names to file names", param="model_path")
    for file in set(index.values()):
        if not _FILE_NAME.fullmatch(file) or ".." in Path(file).parts:
            raise ConfigError(f"{path}: weight_map names {file!r}, which is no file in the folder", param="model_path")
    return index


def _checked(
    file: Path, wanted: tuple[str, ...] | None, config: HybridConfig, expected: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[Place, str, Any]]:
    """(where it belongs, name in the file, the open file) of each tensor, which has the right shape."""
    if not file.is_file():
        raise ConfigError(f"{file}: no such file", param="model_path")
    try:
        with safe_open(file, framework="pt") as tensors:
            stored = set(tensors.keys())
            for full in sorted(wanted if wanted is not None else stored):
                place = place_of(config, full)
                if place is None:
                    continue
                if full not in stored:
                    raise _error(file, full, "missing")
                _check(file, full, place, expected.get(place.name), tensors.get_slice(full))
                yield place, full, tensors
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file}: not a readable safetensors file ({error})", param="model_path") from error


def _check(file: Path, name: str, place: Place, shape: tuple[int, ...] | None, stored: object) -> None:
    found, dtype = tuple(stored.get_shape()), stored.get_dtype()  # type: ignore[attr-defined]
    if shape is None or (place.piece is not None and place.piece >= shape[0]):
        raise _error(file, name, "this model has no such tensor")
    shape = shape if place.piece is None else shape[1:]
    if found != shape:
        raise _error(file, name, f"its shape is {list(found)}, the config says {list(shape)}")
    if dtype not in _DTYPES:
        raise _error(file, name, f"its dtype is {dtype}, one of {', '.join(_DTYPES)} is needed")


def _error(file: Path, tensor: str, reason: str) -> ConfigError:
    return ConfigError(f"{file}: tensor {tensor}: {reason}", param="model_path")
