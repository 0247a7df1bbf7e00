"""What prefix caching gains and costs: time to the first token, decode throughput, state slots of a running request.

`python bench/prefix_cache.py`: (1) the same prompt of 1,416 tokens, cold and with its first 1,400 cached, unified and
through the router; (2) 32 streams with extra_buffer, against no_buffer (pages of one token, no overlap) and against no
cache at all (everything else as with extra_buffer), one after the other in every round; (3) slots that are neither free
nor the cache's, over the number of running requests, looked at all the time while 32 streams decode.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.kl import flush
from bench.results import write_result
from tests.support.stack import Server, node, stack, wait_healthy

PREFIX_TOKENS, SUFFIX_TOKENS = 1400, 16
STREAMS, NEW_TOKENS = 32, 256
SAMPLE_EVERY_S = 0.05
TTFT_BOUND, THROUGHPUT_BOUND, SLOTS_BOUND = 0.35, 0.97, 1.15
SETTINGS = {
    "extra_buffer": ["--mamba-scheduler-strategy", "extra_buffer"],
    "no_buffer": ["--mamba-scheduler-strategy", "no_buffer", "--page-size", "1", "--disable-overlap-schedule"],
    "no cache": ["--mamba-scheduler-strategy", "no_buffer", "--disable-radix-cache"],
}


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 1000) for _ in range(count)]


def sampling(new_tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}


# -- time to the first token -------------------------------------------------------------------------------------------


async def first_token_s(session: aiohttp.ClientSession, url: str, prompt: Sequence[int]) -> float:
    """Seconds from the request to the first event of its stream; the stream is read to its end."""
    body = {"input_ids": list(prompt), "sampling_params": sampling(2), "stream": True}
    sent, first = time.perf_counter(), 0.0
    async with session.post(f"{url}/generate", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter()
    return first - sent


async def ttft_pair(url: str, rng: random.Random) -> tuple[float, float]:
    """Milliseconds to the first token of a prompt: cold, and when its prefix alone was sent before."""
    prefix, suffix = random_tokens(rng, PREFIX_TOKENS), random_tokens(rng, SUFFIX_TOKENS)
    found = []
    async with aiohttp.ClientSession() as session:
        for is_cached in rng.sample([False, True], 2):
            await asyncio.to_thread(flush, url)
            # In both cases a request comes before, so that connections and processes are as warm.
            await first_token_s(session, url, prefix if is_cached else prefix[::-1])
            found.append((is_cached, 1e3 * await first_token_s(session, url, [*prefix, *suffix])))
    return dict(found)[False], dict(found)[True]


def ttft(url: str, rounds: int) -> dict[str, Any]:
    rng = random.Random(1)
    pairs = [asyncio.run(ttft_pair(url, rng)) for _ in range(rounds + 2)][2:]
    ratios = sorted(cached / cold for cold, cached in pairs)
    return {
        "rounds": rounds,
        "cold_ms": round(statistics.median(cold for cold, _ in pairs), 1),
        "cached_ms": round(statistics.median(cached for _, cached in pairs), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_of_nine_in_ten_at_most": round(ratios[int(0.9 * (rounds - 1))], 3),
        "bound": TTFT_BOUND,
    }


# -- decoding ----------------------------------------------------------------------------------------------------------


def staggered_prompts(seed: int) -> list[list[int]]:
    """Of 33, 41, … tokens, so that the streams come to a state to be saved one after the other."""
    rng = random.Random(seed)
    return [random_tokens(rng, 33 + 8 * i) for i in range(STREAMS)]


async def decode_rate(url: str, prompts: Sequence[Sequence[int]]) -> float:
    """Tokens a second that the rank decodes while all of them run: by the time that the last one to start took."""
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=len(prompts)), timeout=timeout) as session:

        async def decode_s(prompt: Sequence[int]) -> float:
            body = {"input_ids": list(prompt), "sampling_params": sampling(NEW_TOKENS)}
            async with session.post(f"{url}/generate", json=body) as response:
                answer = await response.json()
                assert response.status == 200 and len(answer["output_ids"]) == NEW_TOKENS, answer
                return float(answer["meta_info"]["timing"]["decode_s"])

        shortest = min(await asyncio.gather(*(decode_s(prompt) for prompt in prompts)))
    return len(prompts) * (NEW_TOKENS - 1) / shortest


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens a second of wall time, and tokens a second of the rank's CPU time (user and system, the prompts' too)."""

    wall: float
    cpu: float


def rate(server: Server, prompts: Sequence[Sequence[int]]) -> Rate:
    before = cpu_s(server)
    wall = asyncio.run(decode_rate(server.url, prompts))
    return Rate(wall, len(prompts) * NEW_TOKENS / (cpu_s(server) - before))


def cpu_s(server: Server) -> float:
    times = server.rank().cpu_times()
    return float(times.user + times.system)


def rates(servers: dict[str, Server], rounds: int) -> list[dict[str, Rate]]:
    """By setting, once in every round, in an order that turns."""
    names, found = list(servers), []
    for index in range(rounds + 1):
        turned = names[index % len(names) :] + names[: index % len(names)]
        prompts = staggered_prompts(index)
        found.append({name: rate(servers[name], prompts) for name in turned})
    return found[1:]


def throughput(servers: dict[str, Server], rounds: int) -> dict[str, Any]:
    """Medians; of ratios also the quartiles, which say how much of a difference this machine lets one see."""
    found = rates(servers, rounds)
    figures: dict[str, Any] = {
        "rounds": rounds,
        "streams": STREAMS,
        "new_tokens": NEW_TOKENS,
        "bound": THROUGHPUT_BOUND,
    }
    for name in servers:
        figures[f"{key(name)}_tokens_s"] = round(statistics.median(f[name].wall for f in found), 1)
    for name in ("no_buffer", "no cache"):
        figures[f"ratio_to_{key(name)}"] = spread([f["extra_buffer"].wall / f[name].wall for f in found])
        figures[f"ratio_to_{key(name)}_by_cpu_time"] = spread([f["extra_buffer"].cpu / f[name].cpu for f in found])
    return figures


def key(name: str) -> str:
    return name.replace(" ", "_")


def spread(ratios: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"median": round(middle, 3), "lower_quartile": round(low, 3), "upper_quartile": round(high, 3)}


async def watch_slots(url: str, into: list[tuple[int, int]]) -> None:
    """(slots owned, requests running) again and again, until cancelled."""
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/server_info") as response:
                state = (await response.json())["internal_states"][0]
            owned = state["slots_total"] - state["slots_free"] - state["slots_cached"]
            into.append((owned, state["num_running"]))
            await asyncio.sleep(SAMPLE_EVERY_S)


async def decode_watched(url: str, prompts: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    samples: list[tuple[int, int]] = []
    watch = asyncio.create_task(watch_slots(url, samples))
    await decode_rate(url, prompts)
    watch.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watch
    return [(owned, running) for owned, running in samples if running == len(prompts)]


def slots(server: Server) -> dict[str, Any]:
    samples = [s for seed in range(3) for s in asyncio.run(decode_watched(server.url, staggered_prompts(500 + seed)))]
    shares = [owned / running for owned, running in samples]
    return {
        "samples": len(samples),
        "slots_per_running_request": round(statistics.mean(shares), 3),
        "largest": round(max(shares), 3),
        "bound": SLOTS_BOUND,
        "checkpoints": server.state()["checkpoints"],
        "checkpoints_skipped": server.state()["checkpoints_skipped"],
    }


def measure_ttft(rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, stack(Path(folder), with_unified=True) as running:
        assert running.unified is not None
        return {"unified": ttft(running.unified.url, rounds), "router": ttft(running.router.url, rounds)}


def measure_decoding(rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as exits:
        servers = {}
        for name, options in SETTINGS.items():
            own = Path(folder) / key(name)
            own.mkdir()
            servers[name] = exits.enter_context(node("unified", own, options))
        for server in servers.values():
            wait_healthy(server)
        return throughput(servers, rounds), slots(servers["extra_buffer"])


@click.command()
@click.option("--ttft-rounds", default=30, show_default=True)
@click.option("--decode-rounds", default=30, show_default=True)
def main(ttft_rounds: int, decode_rounds: int) -> None:
    first = measure_ttft(ttft_rounds)
    decoding, owned = measure_decoding(decode_rounds)
    for mode, f in first.items():
        print(f"first token, {mode}: cold {f['cold_ms']} ms, cached {f['cached_ms']} ms: {f['ratio']} (≤ {TTFT_BOUND})")
    print(f"decode, {STREAMS} streams: extra_buffer {decoding['extra_buffer_tokens_s']} tokens/s")
    for name in ("no_buffer", "no_cache"):
        for suffix, unit in (("", "wall"), ("_by_cpu_time", "CPU")):
            r = decoding[f"ratio_to_{name}{suffix}"]
            print(
                f"  over {name}, {unit} time: {r['median']} (≥ {THROUGHPUT_BOUND}), "
                f"quartiles {r['lower_quartile']} and {r['upper_quartile']}"
            )
    print(
        f"slots a running request: {owned['slots_per_running_request']} (≤ {SLOTS_BOUND}), largest {owned['largest']}"
    )
    write_result(
        "prefix_cache",
        {"time_to_first_token": first, "decode_throughput": decoding, "slots_of_running_requests": owned},
    )


if __name__ == "__main__":
    main()
