"""gsm-mini through the router, with the hand-off whole and with each part of the state zeroed, against unified.

`python bench/handoff_accuracy.py --count 200`: five-shot, greedy, 16 at once. Digests are off where a part is zeroed.
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
from accuracy.gsm_mini import Problem, few_shot, problems
from bench.results import write_result
from tests.support.stack import Server, stack

PARALLEL = 16
WHOLE_HAND_OFFS = ["--local-prefill-max-tokens", "0"]  # decode would compute the short ends of known prompts itself
ZEROED = ("ssm", "conv", "kv")


def ask(server: Server, tasks: Sequence[Problem]) -> Report:
    return asyncio.run(evaluate(server.url, tasks, shots=few_shot(), parallel=PARALLEL))


def whole(tasks: Sequence[Problem]) -> dict[str, Report]:
    with (
        tempfile.TemporaryDirectory() as folder,
        stack(Path(folder), with_unified=True, extra=WHOLE_HAND_OFFS) as running,
    ):
        assert running.unified is not None
        return {"unified": ask(running.unified, tasks), "disaggregated": ask(running.router, tasks)}


def zeroed(part: str, tasks: Sequence[Problem]) -> Report:
    # Without a prefix cache, which would keep KV that was not sent from being missed.
    options = ["--transport", "loopback", "--verify", "off", "--fault-zero", part]
    options += ["--mamba-scheduler-strategy", "no_buffer", "--disable-radix-cache"]
    with tempfile.TemporaryDirectory() as folder, stack(Path(folder), extra=options) as running:
        return ask(running.router, tasks)


def figures(report: Report, reference: Report) -> dict[str, Any]:
    same = sum(a.output_ids == b.output_ids for a, b in zip(report.answers, reference.answers, strict=True))
    return {
        "right": report.right,
        "asked": len(report.answers),
        "failed_requests": report.failed,
        "answers_equal_to_unified": same,
    }


@click.command()
@click.option("--count", default=200, show_default=True, help="Held-out problems.")
@click.option("--seed", default=0, show_default=True, help="Which ones.")
def main(count: int, seed: int) -> None:
    tasks = problems("heldout", seed, count)
    reports = whole(tasks)
    reports |= {f"{part} zeroed": zeroed(part, tasks) for part in ZEROED}
    found = {name: figures(report, reports["unified"]) for name, report in reports.items()}
    for name, row in found.items():
        print(f"{name:16} right {row['right']:4}/{row['asked']}  equal to unified {row['answers_equal_to_unified']:4}")
    write_result("handoff_accuracy", {"count": count, "seed": seed, "shots": 5, "parallel": PARALLEL, "runs": found})


if __name__ == "__main__":
    main()
