"""Decode speed of the engine alone: tokens/s at several batch sizes, a prefill, and `transformers` on the same weights.

`python bench/engine_decode.py [--model-path FOLDER] [--threads N] [--rounds N] [--context N]`. Greedy, float32, no HTTP
and no scheduler. Rounds alternate between the contenders, so that all meet the same machine; the best round of each
counts. A step's batch has pages that interleave, as they do once sequences have grown next to each other.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from results import write_result

from common.config import EngineConfig, ModelConfig
from engine.batch import Row
from engine.runner import ModelRunner

BATCHES = (1, 2, 8, 32)
PAGE = 16
STEPS = 32
PEER_BATCH, PEER_TOKENS = 2, 16
PREFILL_TOKENS = 1500
TARGETS = {"decode_1_ms": 3.0, "batch_32_gain": 8.0, "over_transformers": 20.0, "prefill_s": 0.5}


class Engine:
    """The runner and `max(BATCHES)` sequences of `context` random tokens, each in its own slot and pages."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        torch.set_num_threads(threads)
        self.context = context
        self.pages_each = -(-max(context + STEPS, PREFILL_TOKENS) // PAGE)
        rows = max(BATCHES)
        self.runner = ModelRunner.load(
            ModelConfig(path=path),
            EngineConfig(page_size=PAGE),
            num_pages=1 + rows * self.pages_each,
            num_slots=1 + rows,
            allocate=None,
        )
        for index in range(rows):
            self.runner.forward([Row([1 + index] * context, 0, self.pages(index, rows), 1 + index, 0, None)])

    def pages(self, index: int, rows: int) -> list[int]:
        return [1 + index + rows * k for k in range(self.pages_each)]

    def decode_s(self, batch: int) -> float:
        """Seconds a step, over STEPS greedy steps of `batch` sequences."""
        tables = [self.pages(index, max(BATCHES)) for index in range(batch)]
        tokens = [1] * batch
        begin = time.perf_counter()
        for step in range(STEPS):
            rows = [Row([tokens[i]], self.context + step, tables[i], 1 + i, 1, None) for i in range(batch)]
            tokens = self.runner.forward(rows).argmax(-1).tolist()
        return (time.perf_counter() - begin) / STEPS

    def prefill_s(self) -> float:
        begin = time.perf_counter()
        self.runner.forward([Row([5] * PREFILL_TOKENS, 0, self.pages(0, max(BATCHES)), 1, 1, None)])
        return time.perf_counter() - begin


class Peer:
    """`transformers` on the same weights: PEER_BATCH sequences through `generate`."""

    def __init__(self, path: str, context: int) -> None:
        from transformers import NemotronHForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.model: Any = NemotronHForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.prompt = torch.arange(PEER_BATCH * context).view(PEER_BATCH, context) % 500 + 1
        self.times_s: dict[int, list[float]] = {1: [], 1 + PEER_TOKENS: []}

    def measure(self) -> None:
        """One round: an answer of one token, and one with PEER_TOKENS more."""
        for tokens, times_s in self.times_s.items():
            begin = time.perf_counter()
            self.model.generate(
                self.prompt,
                attention_mask=torch.ones_like(self.prompt),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
            )
            times_s.append(time.perf_counter() - begin)

    def decode_s(self) -> float:
        """Seconds a decode step: the best long answer less the best short one, which takes the prefill off."""
        short, long = (min(times_s) for times_s in self.times_s.values())
        return (long - short) / PEER_TOKENS


def main() -> None:
    arguments = parse()
    engine = Engine(arguments.model_path, arguments.threads, arguments.context)
    peer = Peer(arguments.model_path, arguments.context)
    steps: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    prefills = []
    for _ in range(arguments.rounds):
        for batch in BATCHES:
            steps[batch].append(engine.decode_s(batch))
        prefills.append(engine.prefill_s())
        peer.measure()
    figures = summary({batch: min(found) for batch, found in steps.items()}, peer.decode_s(), min(prefills))
    show(figures)
    write_result("engine_decode", {**figures, **vars(arguments)})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default=str(Path(__file__).resolve().parents[1] / "models" / "tandem-mini"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--context", type=int, default=128)
    return parser.parse_args()


def summary(steps_s: dict[int, float], peer_s: float, prefill_s: float) -> dict[str, float]:
    speeds = {batch: batch / step_s for batch, step_s in steps_s.items()}
    peer_speed = PEER_BATCH / peer_s
    return {
        **{f"decode_{batch}_ms": round(step_s * 1000, 3) for batch, step_s in steps_s.items()},
        **{f"decode_{batch}_tokens_s": round(speed, 1) for batch, speed in speeds.items()},
        "transformers_2_ms": round(peer_s * 1000, 3),
        "transformers_2_tokens_s": round(peer_speed, 1),
        "batch_32_gain": round(speeds[32] / speeds[1], 2),
        "over_transformers": round(speeds[PEER_BATCH] / peer_speed, 1),
        "batch_32_over_transformers": round(speeds[32] / peer_speed, 1),
        "prefill_tokens": PREFILL_TOKENS,
        "prefill_s": round(prefill_s, 3),
    }


def show(figures: dict[str, float]) -> None:
    print(f"{'':24}{'ms a step':>12}{'tokens/s':>12}")
    for name, batch in [*(("engine", batch) for batch in BATCHES), ("transformers", PEER_BATCH)]:
        key = f"{'decode' if name == 'engine' else name}_{batch}"
        print(f"{name + f', batch {batch}':24}{figures[key + '_ms']:12.2f}{figures[key + '_tokens_s']:12.0f}")
    print(f"batch 32 over batch 1: {figures['batch_32_gain']} (target {TARGETS['batch_32_gain']})")
    print(f"over transformers at batch 2: {figures['over_transformers']} (target {TARGETS['over_transformers']})")
    print(f"32 sequences over transformers at batch 2: {figures['batch_32_over_transformers']}")
    print(f"prefill of {PREFILL_TOKENS} tokens: {figures['prefill_s']} s (target {TARGETS['prefill_s']} s)")
    print(f"decode step at batch 1: {figures['decode_1_ms']} ms (target {TARGETS['decode_1_ms']} ms)")


if __name__ == "__main__":
    main()
