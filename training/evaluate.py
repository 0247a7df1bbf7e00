"""Greedy accuracy on held-out problems, decoded in one batch with recurrent states.

python -m training.evaluate --model models/tandem-mini --shots 5 --count 500 --device cuda
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from accuracy.gsm_mini import STOP, Problem, extract_answer, few_shot, problems, prompt
from training.export import load_exported
from training.model import NemotronH
from training.tokenizer import END_OF_TEXT_ID


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The result of one evaluation."""

    right: int
    count: int
    wrong_by_scheme: dict[str, int]
    examples: list[dict[str, str]]  # a few wrong ones

    @property
    def accuracy(self) -> float:
        return self.right / self.count


@torch.inference_mode()
def greedy(
    model: NemotronH, prompts: Sequence[list[int]], *, max_new_tokens: int, stop_ids: Sequence[int]
) -> list[list[int]]:
    """Continue each prompt with its likeliest tokens until a stop token (which is left out) or `max_new_tokens`."""
    device = model.lm_head.weight.device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    padded = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long, device=device)
    for row, tokens in enumerate(prompts):
        padded[row, : len(tokens)] = torch.tensor(tokens, device=device)
    logits, states = model.prefill(padded, lengths, max_new_tokens)
    stops = torch.tensor(list(stop_ids), device=device)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    output: list[torch.Tensor] = []
    for position in range(max_new_tokens):
        likeliest = logits.argmax(-1)  # [B]
        done |= torch.isin(likeliest, stops)
        output.append(torch.where(done, stops[0], likeliest))
        if position % 16 == 15 and bool(done.all()):
            break
        logits = model.step(likeliest, states, lengths + position)
    rows = torch.stack(output, 1).tolist()
    return [row[: row.index(stop_ids[0])] if stop_ids[0] in row else row for row in rows]


def score(
    model: NemotronH,
    tokenizer: Tokenizer,
    asked: Sequence[Problem],
    shots: Sequence[Problem],
    *,
    batch: int = 500,
    max_new_tokens: int = 320,
) -> Score:
    """Ask each problem after the same shots. An answer is right when its last number is the problem's."""
    stop_ids = [END_OF_TEXT_ID, tokenizer.token_to_id(STOP[0])]
    right, wrong, examples = 0, Counter[str](), list[dict[str, str]]()
    for start in range(0, len(asked), batch):
        part = asked[start : start + batch]
        prompts = [tokenizer.encode(prompt(problem, shots)).ids for problem in part]
        answers = greedy(model, prompts, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
        for problem, tokens in zip(part, answers, strict=True):
            text = tokenizer.decode(tokens)
            if extract_answer(text) == problem.answer:
                right += 1
                continue
            wrong[problem.scheme] += 1
            examples.append({"question": problem.question, "expected": problem.worked, "got": text})
    return Score(right=right, count=len(asked), wrong_by_scheme=dict(wrong.most_common()), examples=examples[:12])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/tandem-mini"))
    parser.add_argument("--shots", type=int, default=5)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--show", type=int, default=0, help="print so many wrong answers")
    args = parser.parse_args()
    model = load_exported(args.model, args.device).to(getattr(torch, args.dtype))
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    asked = problems("heldout", args.seed, args.count)
    result = score(model, tokenizer, asked, few_shot(0, args.shots), batch=args.batch)
    print(f"{args.shots}-shot, {args.dtype}: {result.right} of {result.count} right = {result.accuracy:.4f}")
    print(json.dumps(result.wrong_by_scheme))
    for example in result.examples[: args.show]:
        print(json.dumps(example, indent=1))


if __name__ == "__main__":
    main()
