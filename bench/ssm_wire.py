"""What `--ssm-wire-dtype bfloat16` changes in the answers: float32 and bfloat16 on the wire, the same greedy questions.

`python bench/ssm_wire.py [--count N]`: TOKENS tokens each, a prefill and a decode rank in this process, both with
float32 pools. Log-probabilities of the chosen tokens are compared up to the first token that differs. Two sorts of
prompts: five-shot gsm-mini, where the bundled model is sure of nearly every token, and random tokens, where it is not.
"""

from __future__ import annotations

import random
import statistics
import sys
from pathlib import Path
from typing import Any

import click
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accuracy.gsm_mini import few_shot, problems, prompt
from bench.results import write_result
from common.config import DType, EngineConfig
from node.tokenizer import load_tokenizer
from tests.support.ranks import Outcome, Request, disaggregated_ranks
from tests.support.stack import MODEL

TOKENS, PARALLEL = 64, 16
ENGINE = EngineConfig(local_prefill_max_tokens=0)


def answers(tasks: list[Request], wire: DType | None) -> tuple[list[Outcome], dict[str, int]]:
    """The answers, and the bytes of all hand-offs by part."""
    with disaggregated_ranks(engine=ENGINE, ssm_wire_dtype=wire) as ranks:
        found = [done for i in range(0, len(tasks), PARALLEL) for done in ranks.run(tasks[i : i + PARALLEL], 600)]
        return found, ranks.decode.transfer.stats()["bytes"]


def differences(ours: Outcome, theirs: Outcome) -> list[float]:
    """|difference| of the log-probabilities, up to the first token that differs and with it."""
    found = []
    for a, b in zip(ours.tokens, theirs.tokens, strict=True):
        if a.token_id != b.token_id:
            break
        assert a.logprob is not None and b.logprob is not None
        found.append(abs(a.logprob - b.logprob))
    return found


def compare(tasks: list[Request]) -> dict[str, Any]:
    exact, exact_bytes = answers(tasks, None)
    again, _ = answers(tasks, DType.FLOAT32)
    narrowed, narrowed_bytes = answers(tasks, DType.BFLOAT16)
    found = [d for ours, theirs in zip(narrowed, exact, strict=True) for d in differences(ours, theirs)]
    return {
        "answers": len(tasks),
        "same_answers": sum(a.ids == b.ids for a, b in zip(narrowed, exact, strict=True)),
        "same_answers_float32_twice": sum(a.ids == b.ids for a, b in zip(again, exact, strict=True)),
        "tokens_compared": len(found),
        "logprob_difference_mean": statistics.fmean(found),
        "logprob_difference_p99": statistics.quantiles(found, n=100)[-1],
        "logprob_difference_max": max(found),
        "float32_bytes": exact_bytes,
        "bfloat16_bytes": narrowed_bytes,
    }


@click.command()
@click.option("--count", default=64)
def main(count: int) -> None:
    torch.set_num_threads(1)
    tokenizer, shots = load_tokenizer(str(MODEL)), few_shot()
    prompts = [tokenizer.encode(prompt(problem, shots)) for problem in problems("heldout", 0, count)]
    rng = random.Random(0)
    noise = [[rng.randrange(3, 1024) for _ in range(400 + 7 * i)] for i in range(count)]
    figures = {}
    for name, ids_of in (("gsm_mini", prompts), ("random_tokens", noise)):
        figures[name] = compare([Request(prompt=ids, max_new_tokens=TOKENS) for ids in ids_of])
        print(name, *(f"  {what}: {value}" for what, value in figures[name].items()), sep="\n")
    write_result("ssm_wire", figures)


if __name__ == "__main__":
    main()
