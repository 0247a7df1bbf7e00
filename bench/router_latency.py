"""What a router adds to a stream's first byte, and what open streams cost it, with mocked workers.

`python bench/router_latency.py [--peer-python PYTHON]`: PYTHON is an interpreter that has `sglang-router` (the Rust
router and mini_lb). Two parts:

First byte: 64 clients, each with one stream after the other. The prefill worker answers at once, the decode worker
sends its first chunk after 10 ms and another one every 20 ms, so a router that waits for the prefill leg loses nothing.
Rounds alternate between the routers and the decode worker itself, whose times are the floor.

Open streams: 2,000 at the same time, all of which get their chunks; what the router's process holds meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import aiohttp
from results import write_result
from router_cost import BODY, Pace, Router, free_ports, known_routers, running, serve_mocks, until_it_answers

CONCURRENT = 64
FIRST_BYTE = Pace(first_s=0.010, gap_s=0.020, chunks=16)
OPEN_STREAMS = 2000
OPEN = Pace(first_s=0.5, gap_s=2.0, chunks=8)
MAX_MIB = 400


@dataclass
class Target:
    """Where streams are asked for. first_bytes_ms: of each round, one value a stream."""

    name: str
    url: str
    first_bytes_ms: list[list[float]] = field(default_factory=list)

    def percentiles_ms(self) -> tuple[float, float]:
        """p50 and p99 of all streams of all rounds."""
        found = statistics.quantiles([value for round_ms in self.first_bytes_ms for value in round_ms], n=100)
        return found[49], found[98]


async def first_byte_ms(session: aiohttp.ClientSession, url: str) -> float:
    began_s = time.perf_counter()
    async with session.post(f"{url}/generate", json=BODY | {"stream": True}) as answer:
        assert answer.status == 200, answer.status
        await answer.content.readany()
        taken_ms = (time.perf_counter() - began_s) * 1e3
        async for _ in answer.content.iter_any():
            pass
    return taken_ms


async def round_of(session: aiohttp.ClientSession, target: Target, streams: int) -> None:
    left = iter(range(streams))
    found: list[float] = []

    async def client(number: int) -> None:
        await asyncio.sleep(number * FIRST_BYTE.duration_s / CONCURRENT)  # not all at the same instant
        found.extend([await first_byte_ms(session, target.url) for _ in left])

    await asyncio.gather(*(client(number) for number in range(CONCURRENT)))
    target.first_bytes_ms.append(found)


async def measure_first_byte(routers: list[Router], decode: str, rounds: int, streams: int) -> list[Target]:
    targets = [Target("worker itself", decode), *(Target(router.name, router.url) for router in routers)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for router in routers:
            await until_it_answers(session, router)
        for _ in range(rounds):
            for target in targets:
                await round_of(session, target, streams)
    return targets


async def held_mib(router: Router) -> float:
    """Resident memory of the router while all streams are open: each has had its first chunk and none its last."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=60)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        await until_it_answers(session, router)
        opened = 0
        all_open = asyncio.Event()

        async def stream() -> None:
            nonlocal opened
            async with session.post(f"{router.url}/generate", json=BODY | {"stream": True}) as answer:
                await answer.content.readany()
                opened += 1
                if opened == OPEN_STREAMS:
                    all_open.set()
                async for part in answer.content.iter_any():
                    last = part
            assert last.endswith(b"[DONE]\n\n")

        tasks = [asyncio.create_task(stream()) for _ in range(OPEN_STREAMS)]
        await asyncio.wait_for(all_open.wait(), OPEN.duration_s * 4)
        assert not any(task.done() for task in tasks), "the first streams ended before the last was open"
        held = sum(process.memory_info().rss for process in router.family()) / 2**20
        await asyncio.gather(*tasks)
        return held


def with_mocks(pace: Pace, peer_python: str | None) -> Iterator[tuple[list[Router], str]]:
    """Routers that run, in front of a pair of workers of this pace; and the decode worker's URL."""
    ports = free_ports(2)
    mocks = multiprocessing.get_context("spawn").Process(target=serve_mocks, args=(ports, pace), daemon=True)
    mocks.start()
    prefill, decode = (f"http://127.0.0.1:{port}" for port in ports)
    try:
        routers = known_routers(prefill, decode, peer_python)
        with running(routers):
            yield routers, decode
    finally:
        mocks.kill()
        mocks.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=640, help="of each router in a round")
    options = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    print(f"{'':16} {'first byte p50':>15} {'p99':>9}   ({CONCURRENT} streams at a time)")
    for routers, decode in with_mocks(FIRST_BYTE, options.peer_python):
        for target in asyncio.run(measure_first_byte(routers, decode, options.rounds, options.streams)):
            p50, p99 = target.percentiles_ms()
            figures[target.name] = {"first_byte_p50_ms": round(p50, 2), "first_byte_p99_ms": round(p99, 2)}
            print(f"{target.name:16} {p50:12.2f} ms {p99:6.2f} ms")
    print(f"{'':16} {'resident':>13}   ({OPEN_STREAMS} open streams)")
    for routers, _ in with_mocks(OPEN, None):
        held = asyncio.run(held_mib(routers[0]))
        figures[routers[0].name]["resident_with_2000_streams_mib"] = round(held, 1)
        print(f"{routers[0].name:16} {held:9.0f} MiB   (bound {MAX_MIB})")
    print(write_result("router_latency", figures))


if __name__ == "__main__":
    main()
