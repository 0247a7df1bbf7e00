"""Compare an exported folder between our module and transformers' NemotronHForCausalLM, in float32 on the CPU.

python -m training.compare --model models/tandem-mini
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from training.export import load_exported

LENGTHS = (1, 63, 64, 65, 200, 1000)


@torch.inference_mode()
def largest_differences(folder: Path) -> dict[int, tuple[float, float]]:
    """For each length: the largest logit difference of whole-sequence runs, and of our own prefill plus steps."""
    from transformers import AutoModelForCausalLM

    ours = load_exported(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    differences = {}
    for length in LENGTHS:
        tokens = torch.randint(0, ours.config.vocab_size, (2, length), generator=generator)
        expected = theirs(tokens, use_cache=False).logits
        whole = (ours(tokens) - expected).abs().max().item()
        differences[length] = (whole, _stepwise_difference(ours, tokens, expected))
    return differences


def _stepwise_difference(model: torch.nn.Module, tokens: torch.Tensor, expected: torch.Tensor) -> float:
    """Prefill all but the last few tokens (one fewer in the second row), then step through the rest."""
    length = tokens.shape[1]
    start = max(2, length - 6)
    if start >= length:
        return 0.0
    position = torch.tensor([start, start - 1])
    rows, worst = torch.arange(2), 0.0
    logits, states = model.prefill(tokens[:, :start], position, room=16)
    for _ in range(length - start):
        worst = max(worst, (logits - expected[rows, position - 1]).abs().max().item())
        logits = model.step(tokens[rows, position], states, position)
        position = position + 1
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/tandem-mini"))
    for length, (whole, stepwise) in largest_differences(parser.parse_args().model).items():
        print(f"length {length:5d}: whole sequence {whole:.2e}, prefill and steps {stepwise:.2e}")


if __name__ == "__main__":
    main()
