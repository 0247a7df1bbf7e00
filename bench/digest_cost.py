"""What the digests of a hand-off cost: CPU time beside that of the prefill, and at the sizes of Nemotron Nano.

`python bench/digest_cost.py [--rounds N]`: a prompt of 1,500 tokens of the bundled model is prefilled in two steps;
then the digests of its pages, slot and track slot are taken, as each end of a hand-off takes them. For Nemotron Nano 9B
v2 the same is done with memory of its sizes (27 slots of 5.2 MB, 16 KiB of KV a token), without a prefill. Time is that
of the thread alone (`thread_time`), which a busy machine changes least. One end; the other takes as long, on its own.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.results import write_result
from common.config import EngineConfig, ModelConfig, Verify
from common.layout import PoolLayout, PoolPlacement, StateKind, StateLayout
from engine.batch import Row, Track
from engine.runner import ModelRunner
from tests.support.stack import MODEL
from transfer.digest import StateDigests, StateReader
from transfer.plan import all_layers

PROMPT_TOKENS, TARGET_SHARE = 1500, 0.03
STEPS = ((0, 1024), (1024, PROMPT_TOKENS))
TRACKED = 1472
NANO_MAMBA, NANO_ATTENTION, NANO_TOKENS = 27, 4, (1500, 4096)
CONV_BYTES, SSM_BYTES, PAGE_BYTES = 12288 * 3 * 2, 128 * 80 * 128 * 4, 16 * 8 * 128 * 2


def prefill_s(runner: ModelRunner, pages: list[int], seed: int) -> float:
    text = torch.randint(3, 1024, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()
    began_s = time.thread_time()
    for start, end in STEPS:
        track = Track(position=TRACKED, slot=2) if end == PROMPT_TOKENS else None
        runner.forward([Row(text[start:end], start, pages, 1, int(end == PROMPT_TOKENS), track)])
    return time.thread_time() - began_s


def digest_s(layout: StateLayout, reader: StateReader, pages: list[int], *, layer_by_layer: bool) -> float:
    everywhere = all_layers(layout)
    began_s = time.thread_time()
    digests = StateDigests(reader, Verify.DIGEST)
    for layers in [(layer,) for layer in everywhere] if layer_by_layer else [everywhere]:
        digests.pages(layers, pages)
        digests.slot(layers, 1, track=False)
        digests.slot(layers, 2, track=True)
    digests.digests()
    return time.thread_time() - began_s


def bundled(rounds: int) -> dict[str, Any]:
    num_pages = -(-PROMPT_TOKENS // 16)
    runner = ModelRunner.load(
        ModelConfig(path=str(MODEL)), EngineConfig(), num_pages=num_pages + 1, num_slots=4, allocate=None
    )
    layout, pages = runner.pools.layout(), list(range(1, num_pages + 1))
    reader = StateReader(layout, runner.pools.placements())
    prefill, once, by_layer = [], [], []
    for i in range(rounds + 1):
        times = (
            prefill_s(runner, pages, i),
            digest_s(layout, reader, pages, layer_by_layer=False),
            digest_s(layout, reader, pages, layer_by_layer=True),
        )
        for found, seconds in zip((prefill, once, by_layer), times, strict=True):
            found += [seconds] if i else []  # the first one warms up
    nbytes = sum(pool.item_bytes * (num_pages if pool.kind is StateKind.KV else 2) for pool in layout.pools)
    share = statistics.median(by_layer) / statistics.median(prefill)
    return {
        "megabytes": round(nbytes / 1e6, 2),
        "prefill_cpu_ms": round(1e3 * statistics.median(prefill), 2),
        "digest_cpu_ms": round(1e3 * statistics.median(once), 3),
        "digest_by_layer_cpu_ms": round(1e3 * statistics.median(by_layer), 3),
        "share_of_prefill": round(share, 4),
    }


def nano_layout() -> StateLayout:
    def pool(kind: StateKind, layer: int, part: str, nbytes: int) -> PoolLayout:
        return PoolLayout(
            kind=kind, layer=layer, part=part, dtype="uint8", item_shape=(nbytes,), item_bytes=nbytes, blocks=()
        )

    pools = [pool(StateKind.KV, layer, part, PAGE_BYTES) for layer in range(NANO_ATTENTION) for part in "kv"]
    for layer in range(NANO_ATTENTION, NANO_ATTENTION + NANO_MAMBA):
        pools += [pool(StateKind.CONV, layer, "conv", CONV_BYTES), pool(StateKind.SSM, layer, "ssm", SSM_BYTES)]
    return StateLayout(
        model="nano", revision="bench", page_size=16, chunk=128, conv_width=4, vocab_size=1, pools=tuple(pools)
    )


def nano(tokens: int, rounds: int) -> dict[str, Any]:
    layout, num_pages = nano_layout(), -(-tokens // 16)
    counts = [num_pages + 1 if pool.kind is StateKind.KV else 3 for pool in layout.pools]
    sizes = [pool.item_bytes * count for pool, count in zip(layout.pools, counts, strict=True)]
    memory = np.random.default_rng(0).integers(0, 256, sum(sizes), np.uint8)
    starts = np.cumsum([0, *sizes[:-1]]) + memory.ctypes.data
    places = [
        PoolPlacement(base=int(start), stride_bytes=pool.item_bytes, count=count)
        for start, pool, count in zip(starts, layout.pools, counts, strict=True)
    ]
    reader, pages = StateReader(layout, places), list(range(1, num_pages + 1))
    times = [digest_s(layout, reader, pages, layer_by_layer=True) for _ in range(rounds + 1)][1:]
    nbytes = sum(pool.item_bytes * (num_pages if pool.kind is StateKind.KV else 2) for pool in layout.pools)
    last = CONV_BYTES + SSM_BYTES
    seconds = statistics.median(times)
    return {
        "tokens": tokens,
        "megabytes": round(nbytes / 1e6, 1),
        "digest_cpu_ms": round(1e3 * seconds, 2),
        "gigabytes_s": round(nbytes / seconds / 1e9, 2),
        "last_layer_cpu_ms": round(1e3 * seconds * 2 * last / nbytes, 2),
    }


@click.command()
@click.option("--rounds", default=15)
def main(rounds: int) -> None:
    torch.set_num_threads(1)
    figures = {"bundled": bundled(rounds), "nano_9b_v2_sizes": [nano(tokens, rounds) for tokens in NANO_TOKENS]}
    print(f"bundled model, {PROMPT_TOKENS} tokens, target share {TARGET_SHARE}: {figures['bundled']}")
    print(f"sizes of Nemotron Nano 9B v2: {figures['nano_9b_v2_sizes']}")
    write_result("digest_cost", {"rounds": rounds, **figures})


if __name__ == "__main__":
    main()
