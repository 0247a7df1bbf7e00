"""gsm-mini cold, then warm twice, with extra_buffer and without, unified and disaggregated: answers and prefill work.

`python bench/gsm_mini_warm.py --count 200`: five-shot, greedy, 16 at once, the three runs against the same processes.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accuracy.evaluate import Report, evaluate
from accuracy.gsm_mini import Problem, few_shot, problems, prompt
from bench.kl import flush
from bench.results import write_result
from node.tokenizer import load_tokenizer
from tests.support.stack import MODEL, Server, stack

PARALLEL = 16
RUNS = ("cold", "warm 1", "warm 2")
STRATEGIES = {
    "extra_buffer": ["--mamba-scheduler-strategy", "extra_buffer"],
    "no_buffer": ["--mamba-scheduler-strategy", "no_buffer", "--page-size", "1", "--disable-overlap-schedule"],
}


def computed(nodes: Sequence[Server]) -> int:
    """Prompt tokens that these nodes have computed since they started."""
    return sum(int(str(node.state()["prefill_tokens_computed"])) for node in nodes)


def three_runs(front: Server, nodes: Sequence[Server], tasks: Sequence[Problem]) -> list[tuple[Report, int]]:
    """(answers, prompt tokens computed) of each run, the first one with empty caches. nodes: those that compute."""
    flush(front.url)
    found = []
    for _ in RUNS:
        before = computed(nodes)
        report = asyncio.run(evaluate(front.url, tasks, shots=few_shot(), parallel=PARALLEL))
        found.append((report, computed(nodes) - before))
    return found


def strategy_runs(options: Sequence[str], tasks: Sequence[Problem]) -> dict[str, list[tuple[Report, int]]]:
    with tempfile.TemporaryDirectory() as folder, stack(Path(folder), with_unified=True, extra=options) as running:
        assert running.unified is not None
        return {
            "unified": three_runs(running.unified, [running.unified], tasks),
            "disaggregated": three_runs(running.router, [running.prefill, running.decode], tasks),
        }


def rows(strategy: str, found: dict[str, list[tuple[Report, int]]], prompt_tokens: int) -> list[dict[str, Any]]:
    return [
        {
            "strategy": strategy,
            "mode": mode,
            "run": run,
            "right": report.right,
            "failed_requests": report.failed,
            "prefill_tokens_computed": tokens,
            "prefill_tokens_saved": round(1 - tokens / prompt_tokens, 3),
            "cut_against_cold_run": round(1 - tokens / runs[0][1], 3),
        }
        for mode, runs in found.items()
        for run, (report, tokens) in zip(RUNS, runs, strict=True)
    ]


@click.command()
@click.option("--count", default=200, show_default=True, help="Held-out problems.")
@click.option("--seed", default=0, show_default=True, help="Which ones.")
def main(count: int, seed: int) -> None:
    tasks, tokenizer = problems("heldout", seed, count), load_tokenizer(MODEL)
    prompt_tokens = sum(len(tokenizer.encode(prompt(task, few_shot()))) for task in tasks)
    table: list[dict[str, Any]] = []
    for strategy, options in STRATEGIES.items():
        table += rows(strategy, strategy_runs(options, tasks), prompt_tokens)
    for r in table:
        print(
            f"{r['strategy']:13} {r['mode']:14} {r['run']:7} right {r['right']}/{count} failed {r['failed_requests']}  "
            f"prefill tokens {r['prefill_tokens_computed']:7} of {prompt_tokens}, {r['prefill_tokens_saved']:.1%} saved"
        )
    right = [r["right"] for r in table]
    print(f"most and least right: {max(right)}, {min(right)}")
    write_result(
        "gsm_mini_warm",
        {
            "count": count,
            "seed": seed,
            "shots": 5,
            "parallel": PARALLEL,
            "prompt_tokens": prompt_tokens,
            "spread_of_right": max(right) - min(right),
            "rows": table,
        },
    )


if __name__ == "__main__":
    main()
