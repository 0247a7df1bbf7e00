"""A checkpoint with random weights of a real model's shape, names and shards, to rehearse a night without the model.

`python deploy/nightly/random_checkpoint.py CONFIG_JSON FOLDER [--device cuda]`: the tokenizer is tandem-mini's, filled
up to the model's vocabulary with words that no text has.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import click
import torch
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine.families import read_config
from engine.weights import random_weights

MINI = Path(__file__).resolve().parents[2] / "models" / "tandem-mini"


def write_shards(weights: Mapping[str, Tensor], folder: Path, count: int) -> None:
    """Files of about equal size, in the order of the layers, and the index."""
    total = sum(tensor.nbytes for tensor in weights.values())
    shards: list[dict[str, Tensor]] = [{} for _ in range(count)]
    seen = 0
    for name, tensor in weights.items():
        shards[min(count - 1, seen * count // total)][name] = tensor.to("cpu", torch.bfloat16)
        seen += tensor.nbytes
    placed = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{count:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    tokenizer = json.loads((MINI / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    taken = len(vocab) + sum(token["content"] not in vocab for token in tokenizer["added_tokens"])
    vocab |= {f"<{number}>": number for number in range(taken, vocab_size)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text((MINI / "tokenizer_config.json").read_text())


@click.command()
@click.argument("config", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--device", default="cpu", show_default=True, help="Where the numbers are drawn")
@click.option("--shards", default=4, show_default=True)
def main(config: Path, folder: Path, device: str, shards: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config.read_text())
    hybrid = read_config(folder)
    drawn = random_weights(hybrid, torch.bfloat16, device)
    names = {name: name if name.startswith("lm_head") else f"backbone.{name}" for name in drawn}
    write_shards({names[name]: tensor for name, tensor in drawn.items()}, folder, shards)
    write_tokenizer(folder, hybrid.vocab_size)


if __name__ == "__main__":
    main()
