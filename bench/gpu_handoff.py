"""The section `handoff` of `gpu.py`: what a hand-off between two processes on one card costs.

Nodes of the 9B shape with random weights, asked over HTTP, one request at a time, no prompt twice. Time to first token:
from sending the request to the first event of its stream. unified; pair: both legs sent at once, as a router does, over
cuda_ipc; router: through one; tcp: a pair over Mooncake TCP (left out without a Mooncake for CUDA). exposed: from the
end of prefill until decode has accepted, as the prefill leg's answer says it. `together`: eight prompts at once, to the
first and to the last of their first tokens.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import torch

from common.config import TransferConfig, TransportName, Verify
from common.errors import ConfigError
from engine.model_config import HybridConfig, Mamba2Config
from engine.pools import StatePools
from node.transport_memory import pool_allocator
from tests.support.stack import MODEL, Server, free_port, node, running, wait_healthy
from transfer.cuda_ipc import CudaIpcTransport
from transfer.device_digest import DeviceReader
from transfer.plan import all_layers, plan_pages, plan_slot
from transfer.transport import open_transport

LENGTHS = (2048, 2100, 8192)
TOGETHER, TOGETHER_LENGTH = 8, 2048
REPEATS, WARM_UPS = 7, 2
PAGE = 16
NODE = {
    "device": "cuda",
    "load-format": "dummy",
    "dtype": "bfloat16",
    "chunked-prefill-size": 8192,
    "max-total-tokens": 40960,
    "max-mamba-cache-size": 24,
    "max-running-requests": 8,
}
JSON = {"content-type": "application/json"}
Figures = dict[str, Any]
Servers = dict[str, tuple[Server, int]]


def handoff(config: HybridConfig) -> Figures:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(config, folder / "model")
        with nodes(folder) as servers:
            figures = asyncio.run(measure(servers, config.vocab_size))
    return figures | pieces(config)


def write_model(config: HybridConfig, folder: Path) -> None:
    """A model's folder without weights, with the tokenizer of the bundled model: prompts are given as ids."""
    mamba = config.recurrence
    assert isinstance(mamba, Mamba2Config) and config.mlp is not None
    folder.mkdir()
    shutil.copy(MODEL / "tokenizer.json", folder)
    keys = json.loads((MODEL / "config.json").read_text()) | {
        "hybrid_override_pattern": "".join(kind.value for kind in config.layers),
        "num_hidden_layers": len(config.layers),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "max_position_embeddings": config.max_position_embeddings,
        "intermediate_size": config.mlp.intermediate_size,
        "mamba_num_heads": mamba.num_heads,
        "mamba_head_dim": mamba.head_dim,
        "ssm_state_size": mamba.d_state,
        "n_groups": mamba.n_groups,
        "conv_kernel": mamba.conv_kernel,
        "chunk_size": mamba.chunk_size,
        "num_attention_heads": config.attention.heads,
        "num_key_value_heads": config.attention.kv_heads,
        "head_dim": config.attention.head_dim,
    }
    (folder / "config.json").write_text(json.dumps(keys))


@contextmanager
def nodes(folder: Path) -> Iterator[Servers]:
    """unified, prefill, decode, router and, where it can be, the pair over TCP, by name, with the bootstrap port of a
    prefill node."""
    settings = NODE | {"model-path": folder / "model"}
    near, far = ["--transport", "cuda_ipc"], ["--transport", "mooncake"]
    model = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    found: Servers = {}
    with ExitStack() as exits:
        for name, role, extra in (
            ("unified", "unified", []),
            ("prefill", "prefill", near),
            ("decode", "decode", near),
            *((("prefill tcp", "prefill", far), ("decode tcp", "decode", far)) if has_far() else ()),
        ):
            port = free_port() if role == "prefill" else None
            logs = folder / name
            logs.mkdir()
            server = exits.enter_context(node(role, logs, [*model, *extra], bootstrap_port=port))
            found[name] = (server, port or 0)
        for server, _ in found.values():
            wait_healthy(server, 150)
        prefill, port = found["prefill"]
        own = free_port()
        arguments = ["router", "--port", str(own), "--decode", found["decode"][0].url]
        arguments += ["--prefill", prefill.url, str(port)]
        router = exits.enter_context(running("router", arguments, f"http://127.0.0.1:{own}", folder))
        wait_healthy(router, 60)
        found["router"] = (router, 0)
        yield found


def has_far() -> bool:
    """Whether Mooncake can carry a card's memory here."""
    try:
        open_transport(TransferConfig(transport=TransportName.MOONCAKE), "cuda").close()
    except ConfigError as error:
        print(f"without Mooncake: {error.message}", flush=True)
        return False
    return True


async def measure(servers: Servers, vocabulary: int) -> Figures:
    """By length and way, milliseconds: the median, the smallest and largest; of pairs the exposed part too."""
    draw, figures = random.Random(5), {}
    ways = ["unified", "pair", "router", *(["tcp"] if "decode tcp" in servers else [])]

    def prompt(length: int) -> list[int]:
        return [draw.randrange(1, vocabulary) for _ in range(length)]

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        for length in LENGTHS:
            rows: dict[str, list[Figures]] = {way: [] for way in ways}
            for _ in range(WARM_UPS + REPEATS):
                for way, found in rows.items():
                    found.append(await ask(session, servers, way, prompt(length), draw.randrange(2**40)))
            figures[f"ttft {length}"] = summary({way: found[WARM_UPS:] for way, found in rows.items()})
            print(f"ttft {length}", figures[f"ttft {length}"], flush=True)
        crowds: dict[str, list[list[float]]] = {way: [] for way in ways}
        for _ in range(WARM_UPS + REPEATS):
            for way, times in crowds.items():
                asked = (
                    ask(session, servers, way, prompt(TOGETHER_LENGTH), draw.randrange(2**40)) for _ in range(TOGETHER)
                )
                times.append([row["ttft_ms"] for row in await asyncio.gather(*asked)])
    figures["together"] = together({way: times[WARM_UPS:] for way, times in crowds.items()})
    print("together", figures["together"], flush=True)
    return figures


def together(crowds: dict[str, list[list[float]]]) -> Figures:
    """Medians of the first, mean and last first token of a crowd, and how much later the last one is than alone."""
    figures: Figures = {}
    for way, times in crowds.items():
        for name, pick in (("first", min), ("mean", statistics.fmean), ("last", max)):
            figures[f"{way}_{name}_ms"] = statistics.median(map(pick, times))
        figures[f"{way}_ratio"] = figures[f"{way}_last_ms"] / figures["unified_last_ms"]
    return figures


def summary(rows: dict[str, list[Figures]]) -> Figures:
    figures: Figures = {}
    for way, found in rows.items():
        times = [row["ttft_ms"] for row in found]
        figures[f"{way}_ms"] = statistics.median(times)
        figures[f"{way}_range_ms"] = f"{min(times):.1f}-{max(times):.1f}"
        for key in ("exposed_ms", "prefill_ms", "bytes"):
            values = [row[key] for row in found if key in row]
            if values:
                figures[f"{way}_{key}"] = statistics.median(values)
        figures[f"{way}_more_ms"] = figures[f"{way}_ms"] - figures["unified_ms"]
    return figures


async def ask(session: aiohttp.ClientSession, servers: Servers, way: str, ids: list[int], room: int) -> Figures:
    body: Figures = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
    }
    if way in ("unified", "router"):
        return {"ttft_ms": await first_event(session, servers[way][0].url, body)}
    kind = "" if way == "pair" else f" {way}"
    prefill, port = servers[f"prefill{kind}"]
    body |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}
    leg = asyncio.ensure_future(answer(session, prefill.url, json.dumps(body).encode()))
    ttft_ms = await first_event(session, servers[f"decode{kind}"][0].url, body)
    meta = (await leg)["meta_info"]
    return {
        "ttft_ms": ttft_ms,
        "exposed_ms": meta["timing"]["transfer_s"] * 1e3,
        "prefill_ms": meta["timing"]["prefill_s"] * 1e3,
        "bytes": sum(meta["transfer_bytes"].values()),
    }


async def answer(session: aiohttp.ClientSession, url: str, body: bytes) -> Figures:
    async with session.post(f"{url}/generate", data=body, headers=JSON) as response:
        assert response.status == 200, await response.text()
        found: Figures = await response.json()
        return found


async def first_event(session: aiohttp.ClientSession, url: str, body: Figures) -> float:
    """Milliseconds; reads the whole answer, so that nothing runs afterwards."""
    data = json.dumps(body | {"stream": True}).encode()
    begin, first_s = time.perf_counter(), 0.0
    async with session.post(f"{url}/generate", data=data, headers=JSON) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                assert b'"error"' not in line, line
                first_s = first_s or time.perf_counter() - begin
    return first_s * 1e3


def pieces(config: HybridConfig) -> Figures:
    """Parts of a hand-off by themselves, in this process and with nothing else on the card."""
    transport = CudaIpcTransport(torch.device("cuda"))
    pools = StatePools(
        config,
        num_pages=3000,
        num_slots=6,
        page_size=PAGE,
        dtype=torch.bfloat16,
        ssm_dtype=torch.float32,
        device="cuda",
        revision="random",
        allocate=pool_allocator(transport),
    )
    figures = {f"pieces {length}": pieces_of(pools, transport, length) for length in (2048, 8192)}
    transport.close()
    return figures


def pieces_of(pools: StatePools, transport: CudaIpcTransport, length: int) -> Figures:
    """Milliseconds of a whole request's writes with neighbouring pages and with scattered ones, of its digests, and of
    one plain copy of as many bytes."""
    layout, places, count = pools.layout(), pools.placements(), length // PAGE
    layers = all_layers(layout)
    state = plan_slot(layout, places, places, (1, 2), layers, track=False)
    mine = list(range(1, 1 + count))
    others = [1500 + i for i in range(count)]
    near = state + plan_pages(layout, places, places, list(zip(mine, others, strict=True)), layers)
    shuffled = random.Random(1).sample(others, count)
    far = state + plan_pages(layout, places, places, list(zip(mine, shuffled, strict=True)), layers)
    nbytes = sum(block.nbytes for block in near)
    reader = DeviceReader(layout, places, transport.card)

    def digest() -> None:
        digests = reader.begin(Verify.DIGEST)
        digests.pages(layers, mine)
        digests.slot(layers, 1, track=False)
        digests.digests()

    source, target = (torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))

    def plain() -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    return {
        "mib": nbytes / 2**20,
        "plain_copy_ms": timed(plain),
        "write_ms": timed(lambda: transport.write(transport.session, near)),
        "write_blocks": len(near),
        "scattered_write_ms": timed(lambda: transport.write(transport.session, far)),
        "scattered_blocks": len(far),
        "digest_ms": timed(digest),
    }


def timed(work: Callable[[], object], times: int = 15) -> float:
    """The median, milliseconds."""
    walls: Sequence[float] = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        walls = [*walls, time.perf_counter() - begin]
    return statistics.median(walls[3:]) * 1e3
