"""CPU time that a router spends on a request, with mocked workers: Tandem's, and its peers where they are installed.

`python bench/router_cost.py [--peer-python PYTHON]`: PYTHON is an interpreter that has `sglang-router` (the Rust router
and mini_lb). Workers, routers and the load each run in processes of their own; what is measured is the user and system
time of the router's process. Rounds alternate between the routers, so that all meet the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import aiohttp
import httptools
import psutil
from results import write_result

CHUNKS = 64
ANSWER = json.dumps(
    {"text": "x" * 400, "output_ids": list(range(100)), "meta_info": {"id": "r", "finish_reason": {"type": "stop"}}}
).encode()
BODY = {"text": "word " * 300, "sampling_params": {"temperature": 0, "max_new_tokens": CHUNKS}}
TARGET_MS = {"json": 1.0, "stream": 5.0}


# Mocked workers


@dataclass(frozen=True)
class Pace:
    """Of a mocked worker's stream: seconds until the first chunk and between two, and how many there are."""

    first_s: float = 0.0
    gap_s: float = 0.004
    chunks: int = CHUNKS

    @property
    def duration_s(self) -> float:
        return self.first_s + self.gap_s * self.chunks


class MockWorker(asyncio.Protocol):
    """As cheap as can be, so that it takes no time from the router: any GET is 200, /generate answers at once."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.parser = httptools.HttpRequestParser(self)
        self.url, self.body, self.tasks = b"", bytearray(), set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, _: Exception | None) -> None:
        for task in self.tasks:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:  # sglang-router asks in HTTP/2 first
            self.transport.close()

    def on_url(self, url: bytes) -> None:
        self.url = url
        self.body.clear()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        if not self.url.startswith(b"/generate"):
            self.answer(b"{}")
        elif b'"stream":true' in self.body.replace(b": ", b":"):
            task = asyncio.get_running_loop().create_task(self.stream())
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        else:
            self.answer(ANSWER)

    def answer(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(head + body)

    async def stream(self) -> None:
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        await asyncio.sleep(self.pace.first_s)
        for number in range(self.pace.chunks):
            event = b'data: {"text": "%s", "output_ids": [%d]}\n\n' % (b"y" * 4 * number, number)
            self.transport.write(b"%x\r\n%s\r\n" % (len(event), event))
            await asyncio.sleep(self.pace.gap_s)
        done = b"data: [DONE]\n\n"
        self.transport.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(done), done))


PREFILL = Pace(gap_s=0.0, chunks=1)
"""A prefill leg that is asked for a stream makes one token."""


def serve_mocks(ports: list[int], pace: Pace) -> None:
    """A prefill worker at the first port, a decode worker of this pace at the second."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        servers = [
            await loop.create_server(partial(MockWorker, each), "127.0.0.1", port, backlog=4096)
            for port, each in zip(ports, (PREFILL, pace), strict=True)
        ]
        await asyncio.gather(*(server.serve_forever() for server in servers))

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(serve())


# Routers


@dataclass
class Router:
    """samples_ms: CPU time per request of each round, by kind."""

    name: str
    command: list[str]
    port: int
    process: subprocess.Popen[bytes] | None = None
    samples_ms: dict[str, list[float]] = field(default_factory=lambda: {"json": [], "stream": []})
    resident_mib: float = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def family(self) -> list[psutil.Process]:
        top = psutil.Process(self.process.pid)
        return [top, *top.children(recursive=True)]

    def cpu_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self.family())


def known_routers(prefill: str, decode: str, peer_python: str | None) -> list[Router]:
    ports = iter(free_ports(3))
    pair = ["--prefill", prefill, "8998", "--decode", decode]
    port = next(ports)
    routers = [
        Router("tandem", [sys.executable, "-m", "cli.main", "router", "--port", str(port), *pair], port),
    ]
    if peer_python and importable(peer_python, "sglang_router"):
        for name, extra in (("sglang-router", []), ("sglang mini_lb", ["--mini-lb"])):
            port = next(ports)
            command = [peer_python, "-m", "sglang_router.launch_router", "--pd-disaggregation", *extra]
            routers.append(Router(name, [*command, "--host", "127.0.0.1", "--port", str(port), *pair], port))
    return routers


def importable(python: str, module: str) -> bool:
    return subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def running(routers: list[Router]) -> Iterator[None]:
    try:
        for router in routers:
            router.process = subprocess.Popen(router.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        yield
    finally:
        for router in routers:
            if router.process is not None:
                family = router.family() if router.process.poll() is None else []
                for process in family:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                router.process.wait()


# Load


async def until_it_answers(session: aiohttp.ClientSession, router: Router) -> None:
    deadline = time.monotonic() + 30
    while True:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.post(f"{router.url}/generate", json=BODY) as answer:
                if answer.status == 200:
                    return
        if time.monotonic() > deadline or router.process.poll() is not None:
            raise SystemExit(f"{router.name} does not answer")
        await asyncio.sleep(0.2)


async def round_of(
    session: aiohttp.ClientSession, router: Router, *, stream: bool, count: int, parallel: int
) -> tuple[float, int]:
    """CPU milliseconds per request, and the fewest reads that a client needed for a stream (chunks that came apart)."""
    left = iter(range(count))
    fewest = CHUNKS + 1

    async def worker() -> None:
        nonlocal fewest
        for _ in left:
            async with session.post(f"{router.url}/generate", json=BODY | {"stream": stream}) as answer:
                assert answer.status == 200, answer.status
                reads = [chunk async for chunk in answer.content.iter_any()]
                if stream:
                    assert reads[-1].endswith(b"[DONE]\n\n")
                    fewest = min(fewest, len(reads))
                else:
                    assert b"finish_reason" in b"".join(reads)

    before = router.cpu_s()
    await asyncio.gather(*(worker() for _ in range(parallel)))
    return (router.cpu_s() - before) * 1e3 / count, fewest


async def measure(routers: list[Router], rounds: int, scale: float) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        for router in routers:
            await until_it_answers(session, router)
            await round_of(session, router, stream=False, count=100, parallel=8)
        for _ in range(rounds):
            for router in routers:
                plain, _ = await round_of(session, router, stream=False, count=int(600 * scale), parallel=8)
                stream, reads = await round_of(session, router, stream=True, count=int(100 * scale), parallel=8)
                router.samples_ms["json"].append(plain)
                router.samples_ms["stream"].append(stream)
                router.resident_mib = sum(process.memory_info().rss for process in router.family()) / 2**20
                if reads < CHUNKS // 2:
                    print(f"  {router.name}: a stream came in only {reads} reads", file=sys.stderr)


def figures(routers: list[Router]) -> dict[str, object]:
    return {
        router.name: {
            "json_cpu_ms": round(statistics.median(router.samples_ms["json"]), 3),
            "stream_64_chunks_cpu_ms": round(statistics.median(router.samples_ms["stream"]), 2),
            "json_cpu_ms_rounds": [round(sample, 3) for sample in router.samples_ms["json"]],
            "stream_cpu_ms_rounds": [round(sample, 2) for sample in router.samples_ms["stream"]],
            "resident_mib": round(router.resident_mib, 1),
        }
        for router in routers
    }


def table(routers: list[Router]) -> Iterator[str]:
    yield f"{'router':16} {'JSON request':>14} {'64-chunk stream':>16} {'resident':>10}"
    for router in routers:
        plain, stream = (statistics.median(router.samples_ms[kind]) for kind in ("json", "stream"))
        yield f"{router.name:16} {plain:11.2f} ms {stream:13.2f} ms {router.resident_mib:6.0f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of requests in a round")
    options = parser.parse_args()
    ports = free_ports(2)
    start: Callable[..., multiprocessing.Process] = multiprocessing.get_context("spawn").Process
    mocks = start(target=serve_mocks, args=(ports, Pace()), daemon=True)
    mocks.start()
    try:
        routers = known_routers(*(f"http://127.0.0.1:{port}" for port in ports), options.peer_python)
        with running(routers):
            asyncio.run(measure(routers, options.rounds, options.scale))
    finally:
        mocks.kill()
        mocks.join()
    print("\n".join(table(routers)))
    print(f"(CPU time of the router process; targets {TARGET_MS['json']} and {TARGET_MS['stream']} ms)")
    print(write_result("router_cost", figures(routers)))


if __name__ == "__main__":
    main()
