"""The served system on this machine: one stream against 32, resident memory of every process, where the time goes.

`python bench/serving.py`: unified over HTTP for the streams (paired, repeated, as a ratio), router + prefill + decode
for the memory and the times of a hand-off.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import click
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accuracy.gsm_mini import few_shot, problems, prompt
from bench.results import write_result
from tests.support.stack import Stack, stack

NEW_TOKENS = 200
STREAMS = 32


async def stream(session: aiohttp.ClientSession, url: str, seed: int) -> tuple[float, float]:
    """One answer of NEW_TOKENS tokens: when its first event and its last came, seconds."""
    body = {
        "input_ids": [5 + (seed * 31 + i * 7) % 900 for i in range(64)],
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        "stream": True,
    }
    first, last, event = 0.0, 0.0, b""
    async with session.post(f"{url}/generate", json=body) as response:
        assert response.status == 200
        async for line in response.content:
            if line.startswith(b"data: {"):
                event, last = line, time.perf_counter()
                first = first or last
    made = len(json.loads(event.removeprefix(b"data: "))["output_ids"])
    assert made == NEW_TOKENS, f"{made} tokens, {NEW_TOKENS} asked"
    return first, last


async def decode_rate(url: str, streams: int) -> float:
    """Tokens a second of all streams together, from the first token of the first to the last token of the last."""
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=streams), timeout=timeout) as session:
        done = await asyncio.gather(*(stream(session, url, i) for i in range(streams)))
    span = max(last for _, last in done) - min(first for first, _ in done)
    return streams * (NEW_TOKENS - 1) / span


def memory_mb(running: Stack) -> dict[str, float]:
    processes = {
        "router": psutil.Process(running.router.process.pid),
        "prefill front": psutil.Process(running.prefill.process.pid),
        "prefill rank": running.prefill.rank(),
        "decode front": psutil.Process(running.decode.process.pid),
        "decode rank": running.decode.rank(),
    }
    return {name: round(process.memory_info().rss / 1e6, 1) for name, process in processes.items()}


async def hand_offs(url: str, count: int) -> dict[str, float]:
    """Median milliseconds of each part of a five-shot question that nobody has cached, one at a time."""
    rows: list[dict[str, float]] = []
    async with aiohttp.ClientSession() as session:
        for problem in problems("heldout", 5, count):
            await (await session.post(f"{url}/flush_cache?timeout=5")).read()
            body = {"text": prompt(problem, few_shot()), "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
            async with session.post(f"{url}/generate", json=body) as response:
                rows.append((await response.json())["meta_info"]["timing"])
    return {key.replace("_s", "_ms"): round(1e3 * statistics.median(r[key] for r in rows), 2) for key in rows[0]}


@click.command()
@click.option("--repeats", default=5, show_default=True)
def main(repeats: int) -> None:
    with tempfile.TemporaryDirectory() as folder, stack(Path(folder), with_unified=True) as running:
        assert running.unified is not None
        url = running.unified.url
        asyncio.run(decode_rate(url, STREAMS))
        pairs = [(asyncio.run(decode_rate(url, 1)), asyncio.run(decode_rate(url, STREAMS))) for _ in range(repeats)]
        times = asyncio.run(hand_offs(running.router.url, 20))
        memory = memory_mb(running)
    ratio = statistics.median(many / one for one, many in pairs)
    found: dict[str, Any] = {
        "one_stream_tokens_s": round(statistics.median(one for one, _ in pairs), 1),
        "all_streams_tokens_s": round(statistics.median(many for _, many in pairs), 1),
        "streams": STREAMS,
        "ratio": round(ratio, 2),
        "memory_mb": memory,
        "hand_off_medians_ms": times,
    }
    one, many = found["one_stream_tokens_s"], found["all_streams_tokens_s"]
    print(f"1 stream {one} tokens/s, {STREAMS} streams {many} tokens/s: {ratio:.2f}x")
    print("resident MB:", ", ".join(f"{name} {mb:.0f}" for name, mb in memory.items()))
    print("five-shot question, medians in ms:", ", ".join(f"{name} {ms:.1f}" for name, ms in times.items()))
    write_result("serving", found)


if __name__ == "__main__":
    main()
