"""The section `router` of `gpu.py`: requests at growing rates through a router to two processes on one card, against a
unified node on the same card, one of the two at a time."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench import load
from bench.fleet import Fleet, Options, fleet

LENGTH, NEW_TOKENS = 1024, 128
RATES, SECONDS = (4.0, 8.0, 16.0), 8.0
CARD: Options = {
    "device": "cuda",
    "load-format": "dummy",
    "dtype": "bfloat16",
    "chunked-prefill-size": 1024,
    "enable-mixed-chunk": True,
    "max-total-tokens": 98304,
    "max-mamba-cache-size": 96,
    "max-running-requests": 64,
}
Figures = dict[str, Any]


def router(
    model: Path, vocabulary: int, options: Options = CARD, rates: Sequence[float] = RATES, seconds: float = SECONDS
) -> Figures:
    """By way and rate: TTFT and ITL of requests of LENGTH tokens that get NEW_TOKENS, arriving at random."""
    with tempfile.TemporaryDirectory() as folder, fleet(Path(folder)) as servers:
        start(servers, {**options, "model-path": model})
        figures: Figures = {}
        for rate in rates:
            for name in ("unified", "router"):
                figures[f"{name} at {rate:g}/s"] = asyncio.run(at_rate(servers.url(name), vocabulary, rate, seconds))
        return figures


def start(servers: Fleet, options: Options) -> None:
    for role in ("unified", "prefill", "decode"):
        servers.node(role, role, options)
    servers.router("router", ["prefill"], ["decode"], {})
    servers.wait(servers.names(), 150)


async def at_rate(url: str, vocabulary: int, rate: float, seconds: float) -> Figures:
    prompts, times = load.Prompts(vocabulary, 3), load.arrivals(rate, seconds, seed=13)
    bodies = iter([load.body_of(prompts(LENGTH), NEW_TOKENS) for _ in times])
    async with load.session(60) as client:
        await load.listen(client, url, load.body_of(prompts(LENGTH), 4))
        return load.summary(await load.open_loop(client, [url], times, partial(next, bodies)))
