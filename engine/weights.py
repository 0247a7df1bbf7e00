"""Weights from a Hugging Face folder: which tensors there must be, with which shapes, and reading them."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.config import LoadFormat, ModelConfig
from common.errors import ConfigError
from engine.model_config import HybridConfig, LayerKind

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PREFIXES = ("backbone.", "model.")
_OTHER_NAMES = {"embedding.weight": "embeddings.weight"}
_DTYPES = ("F32", "BF16", "F16")
_READ_BYTES = 8 * 1024 * 1024


def load_weights(
    path: str | Path, config: HybridConfig, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor]:
    """Every weight by its canonical name: the file's name without its `backbone.` or `model.` prefix. Some
    versions of `transformers` write `embedding.weight` for `embeddings.weight`.

    Tensors get `dtype`, except A_log, D, dt_bias and the norms, which are float32. When `tie_word_embeddings` is set
    and lm_head.weight is absent, it is the embedding itself. Tensors named `mtp.*` are not read.
    Raises ConfigError naming the file and the tensor: missing, unexpected, of another shape, quantised, truncated.
    """
    folder = Path(path)
    expected = expected_shapes(config)
    files = _weight_files(folder)
    weights: dict[str, Tensor] = {}
    for file, wanted in files.items():
        for name, tensor in _read_file(file, wanted, expected):
            if name in weights:
                raise _error(file, name, "it is there twice")
            weights[name] = tensor.to(device=device, dtype=torch.float32 if keep_float32(name) else dtype, copy=True)
    if config.tie_word_embeddings and "embeddings.weight" in weights:
        weights.setdefault("lm_head.weight", weights["embeddings.weight"])
    _check_complete(next(iter(files)), expected, weights)
    return weights


def _check_complete(file: Path, expected: Mapping[str, object], found: Container[str]) -> None:
    missing = [name for name in expected if name not in found]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise _error(file, missing[0], f"missing{more}")


def stored_dtypes(path: str | Path, config: HybridConfig) -> dict[str, str]:
    """The dtype in its file ("BF16") of every weight by its canonical name, from the files' headers alone, which also
    tell a truncated file. Raises ConfigError for what `load_weights` would refuse."""
    expected = expected_shapes(config)
    files = _weight_files(Path(path))
    dtypes: dict[str, str] = {}
    for file, wanted in files.items():
        for name, full, tensors in _checked(file, wanted, expected):
            if name in dtypes:
                raise _error(file, name, "it is there twice")
            dtypes[name] = tensors.get_slice(full).get_dtype()
    if config.tie_word_embeddings and "embeddings.weight" in dtypes:
        dtypes.setdefault("lm_head.weight", dtypes["embeddings.weight"])
    _check_complete(next(iter(files)), expected, dtypes)
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
            return random_weights(config, dtype, device), "dummy"


def weights_revision(path: str | Path) -> str:
    """16 hex digits over config.json and the names and bytes of the weight files; equal folders, equal digest."""
    folder = Path(path)
    digest = xxhash.xxh3_64()
    for file in (folder / "config.json", *sorted(_weight_files(folder))):
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
    return name.endswith((".A_log", ".D", ".dt_bias", "norm.weight", "norm_f.weight"))


def expected_shapes(config: HybridConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name and shape of every weight of the model, in the order of the layers."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embeddings.weight": (config.vocab_size, hidden)}
    for layer, kind in enumerate(config.layers):
        shapes[f"layers.{layer}.norm.weight"] = (hidden,)
        for name, shape in _mixer_shapes(config, kind).items():
            shapes[f"layers.{layer}.mixer.{name}"] = shape
    shapes["norm_f.weight"] = (hidden,)
    shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _mixer_shapes(config: HybridConfig, kind: LayerKind) -> dict[str, tuple[int, ...]]:
    match kind:
        case LayerKind.MAMBA:
            return _mamba_shapes(config)
        case LayerKind.ATTENTION:
            return _attention_shapes(config)
        case LayerKind.MLP:
            return _linear("up_proj", config.intermediate_size, config.hidden_size, config.mlp_bias) | _linear(
                "down_proj", config.hidden_size, config.intermediate_size, config.mlp_bias
            )


def _mamba_shapes(config: HybridConfig) -> dict[str, tuple[int, ...]]:
    heads, inner, conv = config.num_heads, config.d_inner, config.conv_dim
    shapes = _linear("in_proj", inner + conv + heads, config.hidden_size, config.use_bias)
    shapes |= {"conv1d.weight": (conv, 1, config.conv_kernel)}
    shapes |= {"conv1d.bias": (conv,)} if config.use_conv_bias else {}
    shapes |= {"A_log": (heads,), "D": (heads,), "dt_bias": (heads,), "norm.weight": (inner,)}
    return shapes | _linear("out_proj", config.hidden_size, inner, config.use_bias)


def _attention_shapes(config: HybridConfig) -> dict[str, tuple[int, ...]]:
    query = config.attention_heads * config.attention_head_dim
    key = config.kv_heads * config.attention_head_dim
    return {
        "q_proj.weight": (query, config.hidden_size),
        "k_proj.weight": (key, config.hidden_size),
        "v_proj.weight": (key, config.hidden_size),
        "o_proj.weight": (config.hidden_size, query),
    }


def _linear(name: str, out: int, inner: int, bias: bool) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, inner)} | ({f"{name}.bias": (out,)} if bias else {})


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
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: no readable weight_map ({error!r})", param="model_path") from error
    if not isinstance(index, dict) or not index or not all(isinstance(file, str) for file in index.values()):
        raise ConfigError(f"{path}: weight_map must map tensor names to file names", param="model_path")
    return index


def _read_file(
    file: Path, wanted: tuple[str, ...] | None, expected: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensors.get_tensor(full)) for name, full, tensors in _checked(file, wanted, expected))


def _checked(
    file: Path, wanted: tuple[str, ...] | None, expected: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, str, Any]]:
    """(canonical name, name in the file, the open file) of each tensor, which has the right shape."""
    if not file.is_file():
        raise ConfigError(f"{file}: no such file", param="model_path")
    try:
        with safe_open(file, framework="pt") as tensors:
            stored = set(tensors.keys())
            for full in sorted(wanted if wanted is not None else stored):
                if full.startswith("mtp."):
                    continue
                name = _canonical(full)
                if full not in stored:
                    raise _error(file, full, "missing")
                _check(file, full, expected.get(name), tensors.get_slice(full))
                yield name, full, tensors
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file}: not a readable safetensors file ({error})", param="model_path") from error


def _check(file: Path, name: str, shape: tuple[int, ...] | None, stored: object) -> None:
    found, dtype = tuple(stored.get_shape()), stored.get_dtype()  # type: ignore[attr-defined]
    if shape is None:
        raise _error(file, name, "this model has no such tensor")
    if found != shape:
        raise _error(file, name, f"its shape is {list(found)}, the config says {list(shape)}")
    if dtype not in _DTYPES:
        raise _error(file, name, f"its dtype is {dtype}, one of {', '.join(_DTYPES)} is needed")


def _canonical(name: str) -> str:
    short = next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)
    return _OTHER_NAMES.get(short, short)


def _error(file: Path, tensor: str, reason: str) -> ConfigError:
    return ConfigError(f"{file}: tensor {tensor}: {reason}", param="model_path")
