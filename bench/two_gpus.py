"""Prefill on one card, decode on another: links, parity, time to first token, token gaps under load, goodput.

`python bench/two_gpus.py [--resume] [--rows NAME,NAME] [--out FOLDER] [--sglang BUNDLE]` on a machine with two CUDA
devices; `--device cpu` tries all of it with tiny sizes and the bundled model. Each row has a time limit and is written
when it is done, so that the script can be continued; what failed is told and tried again by the next one.

    mini        the bundled model, float32: parity with a unified node, gsm-mini cold and warm
    split       the same with a decode node of two ranks, one on the prefill node's card
    first       time to first token at the shape of Nemotron Nano 9B v2, random weights (as all that follow)
    links       GB/s between the cards, by transport, against plain peer copies of the same blocks
    streams     gaps between the tokens of running answers while prompts arrive
    goodput     the highest rate of these prompts at which bounds hold
    chat        requests with short prompts and long answers, at growing rates
    saturated   more prompts than the prefill card can compute: what the router answers
    one card    requests at growing rates, both halves on one card
    first tcp, streams tcp   over Mooncake TCP
    sglang      a real SGLang on the same cards, by a bundle's own script
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench import links, load
from bench.fleet import Fleet, fleet
from bench.gpu_router import at_rate
from bench.results import FOLDER, commit, write_result
from common.config import TransportName
from common.errors import ServingError
from tests.support.stack import MODEL, REPO

NAME = "two_gpus"
TTFT_S, ITL_MS = 2.0, 50.0
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Sizes of everything. prompt: of those that arrive while streams run. first: (how many at once, tokens) and how
    often each. rates: a second, of the pair; mixed_rates: of two unified nodes. peer: what carries state between cards,
    tcp: where it goes by TCP."""

    devices: tuple[str, str]
    vocabulary: int
    transports: tuple[TransportName, ...]
    peer: TransportName
    tcp: TransportName
    pieces: tuple[int, ...]
    first: tuple[tuple[int, int, int], ...]
    streams: int
    crowd: int
    stream_prompt: int
    stream_tokens: int
    prompt: int
    fixed_rates: tuple[float, ...]
    rates: tuple[float, ...]
    mixed_rates: tuple[float, ...]
    chat: tuple[int, int]
    chat_rates: tuple[float, ...]
    one_card_rates: tuple[float, ...]
    quiet_s: float
    loaded_s: float
    questions: int
    start_s: float
    node: dict[str, object]
    mini: dict[str, object]
    chunk: int
    mixed_chunk: int


CARDS = Scale(
    devices=("cuda:0", "cuda:1"),
    vocabulary=131072,
    transports=(TransportName.CUDA_IPC, TransportName.MOONCAKE),
    peer=TransportName.CUDA_IPC,
    tcp=TransportName.MOONCAKE,
    pieces=(2048, 8192),
    first=((1, 2048, 7), (1, 8192, 5), (1, 32768, 1), (8, 2048, 3)),
    streams=24,
    crowd=32,
    stream_prompt=512,
    stream_tokens=4000,
    prompt=8192,
    fixed_rates=(2.0, 5.0),
    rates=(3.0, 3.5, 4.0),
    mixed_rates=(5.0, 6.0, 7.0, 8.0),
    chat=(1024, 256),
    chat_rates=(8.0, 24.0),
    one_card_rates=(4.0, 8.0, 16.0),
    quiet_s=2.0,
    loaded_s=8.0,
    questions=200,
    start_s=240.0,
    node={
        "load-format": "dummy",
        "dtype": "bfloat16",
        "max-total-tokens": 163840,
        "max-mamba-cache-size": 96,
        "max-running-requests": 64,
    },
    mini={},
    chunk=8192,
    mixed_chunk=1024,
)
CPU = Scale(
    devices=("cpu", "cpu"),
    vocabulary=900,
    transports=(TransportName.LOOPBACK, TransportName.MOONCAKE),
    peer=TransportName.LOOPBACK,
    tcp=TransportName.MOONCAKE,
    pieces=(128,),
    first=((1, 64, 1), (2, 64, 1)),
    streams=2,
    crowd=2,
    stream_prompt=16,
    stream_tokens=1500,
    prompt=256,
    fixed_rates=(2.0,),
    rates=(1.0,),
    mixed_rates=(1.0, 2.0),
    chat=(64, 16),
    chat_rates=(2.0,),
    one_card_rates=(1.0,),
    quiet_s=0.5,
    loaded_s=1.5,
    questions=4,
    start_s=90.0,
    node={},
    mini={},
    chunk=512,
    mixed_chunk=128,
)


# Nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What may be started, by name. nodes: role, which device, more options. routers: their nodes, and options."""

    scale: Scale
    nano: Path

    def node(self, name: str) -> tuple[str, dict[str, object]]:
        role, place, options = self._nodes()[name]
        return role, {"device": self.scale.devices[place], **options}

    def _nodes(self) -> dict[str, tuple[str, int, dict[str, object]]]:
        scale = self.scale
        peer, tcp = ({"transport": transport.value} for transport in (scale.peer, scale.tcp))
        mini = {"model-path": MODEL, **scale.mini}
        nano = {"model-path": self.nano, "chunked-prefill-size": scale.chunk, **scale.node}
        mixed = nano | {"chunked-prefill-size": scale.mixed_chunk, "enable-mixed-chunk": True}
        source = nano | ({"max-mamba-cache-size": 40} if scale.node else {})
        return {
            "mini unified": ("unified", 0, mini),
            "mini prefill": ("prefill", 0, mini | peer),
            "mini decode": ("decode", 1, mini | peer),
            "mini decode ranks": (
                "decode",
                0,
                mini | peer | {"dp-size": 2, "device": scale.devices[0].partition(":")[0]},
            ),
            "unified 0": ("unified", 0, nano),
            "unified 1": ("unified", 1, nano),
            "mixed 0": ("unified", 0, mixed),
            "mixed 1": ("unified", 1, mixed),
            "prefill": ("prefill", 0, source | peer),
            "late prefill": ("prefill", 0, source | peer | {"disable-layerwise-transfer": True}),
            "decode": ("decode", 1, nano | peer),
            "decode beside": ("decode", 0, nano | peer),
            "tcp prefill": ("prefill", 0, source | tcp),
            "tcp decode": ("decode", 1, nano | tcp),
        }

    @staticmethod
    def routers() -> dict[str, tuple[list[str], list[str], dict[str, object]]]:
        return {
            "mini router": (["mini prefill"], ["mini decode"], {}),
            "split router": (["mini prefill"], ["mini decode ranks"], {}),
            "router": (["prefill"], ["decode"], {}),
            "late router": (["late prefill"], ["decode"], {}),
            "one card router": (["prefill"], ["decode beside"], {}),
            "tcp router": (["tcp prefill"], ["tcp decode"], {}),
            "bounded router": (["prefill"], ["decode"], BOUNDED),
        }


BOUNDED: dict[str, object] = {"max-concurrent-requests": 6, "queue-size": 2}
UNIFIED, MIXED, PAIR = ("unified 0", "unified 1"), ("mixed 0", "mixed 1"), ("prefill", "decode", "router")
MINI = ("mini unified", "mini prefill", "mini decode", "mini router")
TCP = ("tcp prefill", "tcp decode", "tcp router")


def start(servers: Fleet, stack: Stack, names: Sequence[str]) -> None:
    """Those of the names that are not there yet: nodes, then routers."""
    wanted = [name for name in dict.fromkeys(names) if name not in servers.names()]
    routers = stack.routers()
    for name in wanted:
        if name not in routers:
            servers.node(name, *stack.node(name))
    for name in wanted:
        if name in routers:
            servers.router(name, *routers[name])


# Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    servers: Fleet
    scale: Scale
    nano: Path
    folder: Path
    sglang: Path | None

    def urls(self, names: Sequence[str]) -> list[str]:
        return [self.servers.url(name) for name in names]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """limit_s: of its work, from when its servers are up. group: rows whose servers are started together; there is no
    memory for those of two groups."""

    name: str
    work: Callable[[Bench], Figures]
    servers: tuple[str, ...] = ()
    limit_s: float
    group: int = 0


def rows() -> list[Row]:
    """Those with the bundled model come first: its nodes are up while the others load."""
    return [
        Row(name="mini", work=mini, servers=MINI, limit_s=90),
        Row(name="split", work=split, servers=(*MINI, "mini decode ranks", "split router"), limit_s=40),
        Row(
            name="first",
            work=partial(first, ways={"unified": "unified 0", "router": "router", "late": "late router"}),
            servers=("unified 0", *PAIR, "late prefill", "late router"),
            limit_s=120,
        ),
        Row(
            name="one card",
            work=one_card,
            servers=("mixed 0", "prefill", "decode beside", "one card router"),
            limit_s=90,
        ),
        Row(name="links", work=links_row, limit_s=60),
        Row(name="streams", work=streams, servers=(*UNIFIED, *MIXED, *PAIR), limit_s=120),
        Row(name="goodput", work=goodput, servers=(*MIXED, *PAIR), limit_s=220),
        Row(name="chat", work=chat, servers=(*MIXED, *PAIR), limit_s=120),
        Row(name="saturated", work=saturated, servers=(*PAIR, "bounded router"), limit_s=60),
        Row(
            name="first tcp",
            work=partial(first, ways={"unified": "unified 0", "tcp": "tcp router"}),
            servers=("unified 0", *TCP),
            limit_s=90,
            group=1,
        ),
        Row(name="streams tcp", work=streams_tcp, servers=TCP, limit_s=60, group=1),
        Row(name="sglang", work=sglang, limit_s=420, group=2),
    ]


def links_row(bench: Bench) -> Figures:
    scale = bench.scale
    dtype = torch.bfloat16 if scale.node else torch.float32
    shape = links.Shape(model=bench.nano, dtype=dtype, tokens=scale.pieces)
    figures: Figures = {"topology": topology(scale.devices)}
    for transport in scale.transports:
        try:
            figures[transport.value] = links.measure(transport, scale.devices, shape)
        except ServingError as error:
            figures[transport.value] = {"failed": error.message}
    return figures


def topology(devices: tuple[str, str]) -> Figures:
    if not devices[0].startswith("cuda"):
        return {}
    table = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False).stdout
    return {
        "devices": [torch.cuda.get_device_name(device) for device in devices],
        "peer_access": torch.cuda.can_device_access_peer(0, 1),
        "table": [line.strip() for line in table.splitlines() if line.startswith(("\x1b", "\tGPU", "GPU"))],
    }


def mini(bench: Bench) -> Figures:
    return checked(bench, "mini router", "mini decode") | {
        "gsm-mini": gate(bench, "mini router", "mini unified", bench.scale.questions),
        "handed over": handed_over(bench, "mini router"),
    }


def split(bench: Bench) -> Figures:
    """Decode nodes on both cards, fed by one prefill node: what data-parallel decode will be, by nodes."""
    return checked(bench, "split router", "mini decode ranks")


def checked(bench: Bench, router: str, decode: str) -> Figures:
    """Parity, and what the decode node says of what it received. Raises AssertionError for another transport."""
    found = {"parity": parity(bench, router, "mini unified", 32)}
    info = bench.servers.info(decode)
    asked = bench.scale.peer.value
    assert info["transport"].startswith(asked), f"{info['transport']} in place of {asked}"
    counters = [rank["transfer"] for rank in info["internal_states"]]
    assert all(each["rooms_total"].get("committed") for each in counters), f"a rank has received nothing: {counters}"
    return found | {"transport": info["transport"], "verify": info["verify"], "transfer": counters}


def parity(bench: Bench, url: str, baseline: str, count: int) -> Figures:
    report = bench.folder / f"parity {url}.json"
    words = ["parity", "--url", *bench.urls([url]), "--baseline", *bench.urls([baseline]), "--output", str(report)]
    status = command("gate", *words, "--num-prompts", str(min(count, bench.scale.questions * 4)))
    kinds = Counter(f"{row['run']} {row['likeness']}" for row in json.loads(report.read_text()))
    return {"status": status, **kinds}


def gate(bench: Bench, url: str, baseline: str, questions: int) -> Figures:
    folder = bench.folder / "gate"
    words = ["gsm-mini", "--url", *bench.urls([url]), "--baseline", *bench.urls([baseline]), "--output", str(folder)]
    status = command("gate", *words, "--num-questions", str(questions), "--warm", "1", "--parallel", "64")
    report = json.loads((folder / "report.json").read_text())
    runs = {f"{run['side']} {run['kind']}": f"{run['right']} of {run['asked']}" for run in report["runs"]}
    return {"status": status, "verdict": report["verdict"], "reasons": report["reasons"], "runs": runs}


def handed_over(bench: Bench, router: str) -> Figures:
    """Of one answer: bytes by part."""
    heard = asyncio.run(_one(bench.servers.url(router), load.body_of(load.Prompts(900, 9)(100), 4)))
    return dict(heard.meta()["transfer_bytes"])


def command(*words: str) -> int:
    return subprocess.run(
        [sys.executable, "-m", "cli.main", *words], cwd=REPO, stdout=sys.stderr, check=False
    ).returncode


async def _one(url: str, body: bytes) -> load.Heard:
    async with load.session(120) as client:
        return await load.listen(client, url, body)


# Time to first token


def first(bench: Bench, ways: dict[str, str]) -> Figures:
    figures: Figures = {}
    prompts = load.Prompts(bench.scale.vocabulary, 5)
    for count, length, repeats in bench.scale.first:
        found = asyncio.run(_first(bench, ways, prompts, (count, length, repeats)))
        figures[f"{count} x {length}"] = found
        print(f"first {count} x {length}", found, file=sys.stderr, flush=True)
    return figures


async def _first(bench: Bench, ways: dict[str, str], prompts: load.Prompts, case: tuple[int, int, int]) -> Figures:
    """Milliseconds until the last of `count` prompts sent at once has its first token: medians; the ways by turns."""
    count, length, repeats = case
    asked: dict[str, list[list[load.Heard]]] = {way: [] for way in ways}
    async with load.session(120) as client:
        for _ in range(repeats + 2):
            for way, server in ways.items():
                bodies = [load.body_of(prompts(length), 4) for _ in range(count)]
                url = bench.servers.url(server)
                asked[way].append(list(await asyncio.gather(*(load.listen(client, url, body) for body in bodies))))
    figures: Figures = {}
    for way, rounds in asked.items():
        figures |= _first_figures(way, rounds[2:])
    for way in ways:
        figures[f"{way}_more_ms"] = round(figures[f"{way}_ms"] - figures["unified_ms"], 2)
    return figures


def _first_figures(way: str, rounds: Sequence[Sequence[load.Heard]]) -> Figures:
    failed = [each.failed for one in rounds for each in one if each.failed]
    assert not failed, f"{way}: {failed}"
    times = [max(each.first_s for each in one) * 1e3 for one in rounds]
    figures = {f"{way}_ms": round(statistics.median(times), 2), f"{way}_range_ms": f"{min(times):.1f}-{max(times):.1f}"}
    metas = [each.meta() for one in rounds for each in one]
    for part in ("queue", "prefill", "transfer"):
        figures[f"{way}_{part}_ms"] = round(statistics.median(meta["timing"][f"{part}_s"] for meta in metas) * 1e3, 2)
    figures[f"{way}_mb"] = round(sum(metas[0].get("transfer_bytes", {}).values()) / 1e6, 1)
    return figures


# Streams


def streams(bench: Bench) -> Figures:
    """At fixed rates: two unified cards that take prompts whole, two that take them in pieces with decode, the pair."""
    found = {}
    for name, servers in (("unified", UNIFIED), ("mixed", MIXED), ("pair", ("router",))):
        found |= _streams(bench, name, servers)
    return found


def streams_tcp(bench: Bench) -> Figures:
    return _streams(bench, "tcp", ("tcp router",))


def _streams(bench: Bench, name: str, servers: Sequence[str]) -> Figures:
    scale, figures = bench.scale, {}
    for rate in scale.fixed_rates:
        times = [i / rate for i in range(int(rate * scale.loaded_s))]
        figures[f"{name} at {rate:g}/s"] = asyncio.run(under_load(bench, servers, scale.streams, times, 1))
        print(f"streams {name} {rate:g}", figures[f"{name} at {rate:g}/s"], file=sys.stderr, flush=True)
    return figures


async def under_load(
    bench: Bench, servers: Sequence[str], count: int, times: Sequence[float], new_tokens: int
) -> Figures:
    """Gaps of running streams while nothing else runs, and while prompts arrive at these times."""
    scale, urls = bench.scale, bench.urls(servers)
    prompts = load.Prompts(scale.vocabulary, 31)
    bodies = [load.body_of(prompts(scale.prompt), new_tokens) for _ in times]
    first_bodies = iter([load.body_of(prompts(scale.stream_prompt), scale.stream_tokens) for _ in range(count)])
    async with (
        load.session(120) as client,
        load.running_streams(client, urls, count, partial(next, first_bodies)) as on,
    ):
        quiet_s = time.perf_counter()
        await asyncio.sleep(scale.quiet_s)
        begin_s = time.perf_counter()
        left = iter(bodies)
        asked = asyncio.create_task(load.open_loop(client, urls, times, partial(next, left)))
        await asyncio.sleep(scale.loaded_s)
        end_s = time.perf_counter()
        heard = await asked
        running = sum(1 for each in on if each.failed is None)
    figures = load.percentiles(load.gaps_ms(on, quiet_s + 0.2, begin_s), "quiet")
    figures |= load.percentiles(load.gaps_ms(on, begin_s, end_s), "loaded")
    return figures | {"streams": running} | {k: v for k, v in load.summary(heard).items() if not k.startswith("itl")}


def goodput(bench: Bench) -> Figures:
    """`crowd` streams; prompts arrive at random. Until the bounds do not hold any more."""
    figures: Figures = {"bounds": {"ttft_p99_ms": TTFT_S * 1e3, "itl_p99_ms": ITL_MS}}
    scale = bench.scale
    for name, servers, rates in (("pair", ["router"], scale.rates), ("mixed", MIXED, scale.mixed_rates)):
        figures[name + " holds"] = 0.0
        for rate in rates:
            times = load.arrivals(rate, scale.loaded_s, seed=7)
            found = asyncio.run(under_load(bench, servers, scale.crowd, times, 1))
            figures[f"{name} at {rate:g}/s"] = found
            print(f"goodput {name} {rate:g}", found, file=sys.stderr, flush=True)
            if found["ttft_p99_ms"] > TTFT_S * 1e3 or found["loaded_p99_ms"] > ITL_MS or "failed" in found:
                break
            figures[name + " holds"] = rate
    return figures


def chat(bench: Bench) -> Figures:
    """Requests alone, at random: tokens in and out as in `Scale.chat`."""
    figures: Figures = {}
    length, new_tokens = bench.scale.chat
    for rate in bench.scale.chat_rates:
        for name, servers in (("pair", ["router"]), ("mixed", MIXED)):
            times = load.arrivals(rate, bench.scale.loaded_s, seed=11)
            found = asyncio.run(_arrivals(bench, servers, times, length, new_tokens))
            figures[f"{name} at {rate:g}/s"] = found
            print(f"chat {name} {rate:g}", found, file=sys.stderr, flush=True)
    return figures


async def _arrivals(bench: Bench, servers: Sequence[str], times: Sequence[float], length: int, new: int) -> Figures:
    prompts = load.Prompts(bench.scale.vocabulary, 17)
    bodies = iter([load.body_of(prompts(length), new) for _ in times])
    async with load.session(60) as client:
        return load.summary(await load.open_loop(client, bench.urls(servers), times, partial(next, bodies)))


def one_card(bench: Bench) -> Figures:
    """Both halves on one card, against a unified node there: rows of `gpu_router.py`."""
    figures: Figures = {}
    for rate in bench.scale.one_card_rates:
        for name, server in (("unified", "mixed 0"), ("router", "one card router")):
            url = bench.servers.url(server)
            found = asyncio.run(at_rate(url, bench.scale.vocabulary, rate, bench.scale.loaded_s))
            figures[f"{name} at {rate:g}/s"] = found
            print(f"one card {name} {rate:g}", found, file=sys.stderr, flush=True)
    return figures


def saturated(bench: Bench) -> Figures:
    """Twice what the prefill card computes, through a router that bounds what it has taken."""
    rate = 2 * max(bench.scale.rates)
    times = [i / rate for i in range(int(rate * bench.scale.loaded_s))]
    found = asyncio.run(_arrivals(bench, ["bounded router"], times, bench.scale.prompt, 4))
    return {f"bounded router at {rate:g}/s": found}


def sglang(bench: Bench) -> Figures:
    if bench.sglang is None:
        return {"lines": ["no bundle was given (--sglang)"]}
    script = "unset PYTHONPATH; B={0} bash {0}/setup.sh; . /tmp/env.sh; cd /tmp; python3 two_gpus.py"
    script = script.format(bench.sglang.resolve())
    done = subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.stdout is not None
    said = []
    for line in done.stdout:
        print("sglang", line, end="", file=sys.stderr, flush=True)
        said.append(line.rstrip())
    return {"lines": [line for line in said if " ms" in line], "status": done.wait()}


# All of them


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises TimeoutError inside when it takes longer."""

    def late(*_: object) -> None:
        raise TimeoutError(f"longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(row: Row, bench: Bench, found: Figures) -> None:
    """Its figures, or why there are none, into `found`."""
    begin = time.perf_counter()
    try:
        bench.servers.wait(row.servers, bench.scale.start_s)
        ready_s = time.perf_counter() - begin
        with limited(row.limit_s):
            found[row.name] = row.work(bench)
        found.get("failures", {}).pop(row.name, None)
        seconds = {"waited_s": round(ready_s, 1), "took_s": round(time.perf_counter() - begin - ready_s, 1)}
        when = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit()}
        found.setdefault("made", {})[row.name] = seconds | when
    except (ServingError, AssertionError, OSError, RuntimeError, ValueError, KeyError) as error:
        found.setdefault("failures", {})[row.name] = f"{type(error).__name__}: {error}"[-1500:]
    print(f"{row.name}: {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)


def run_all(wanted: Sequence[Row], scale: Scale, found: Figures, out: Path, sglang_folder: Path | None) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stack = Stack(scale=scale, nano=nano_folder(scale, folder))
        with fleet(folder) as servers:
            bench = Bench(servers=servers, scale=scale, nano=stack.nano, folder=folder, sglang=sglang_folder)
            for group in sorted({row.group for row in wanted}):
                members = [row for row in wanted if row.group == group]
                needed = [server for row in members for server in row.servers]
                servers.end([server for server in servers.names() if server not in needed])
                start(servers, stack, needed)
                for row in members:
                    run(row, bench, found)
                    write_result(NAME, found, out)


def nano_folder(scale: Scale, folder: Path) -> Path:
    """The model of the rows after `split`."""
    if not scale.node:
        return MODEL
    from bench.gpu import nano_9b
    from bench.gpu_handoff import write_model

    write_model(nano_9b(), folder / "nano9b")
    return folder / "nano9b"


def show(found: Figures) -> None:
    for name, figures in found.items():
        print(f"== {name}")
        for line in load.lines(figures):
            print(line)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=FOLDER, help=f"folder of {NAME}.json")
    parser.add_argument("--resume", action="store_true", help=f"go on with the rows that {NAME}.json lacks")
    parser.add_argument("--rows", help="these rows only, by name, comma separated")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--sglang", type=Path, help="folder of the bundle, for the row of that name")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and torch.cuda.device_count() < 2:
        print("no two CUDA devices here: nothing to measure")
        return 0
    found: Figures = {}
    if arguments.resume and (arguments.out / f"{NAME}.json").is_file():
        found = json.loads((arguments.out / f"{NAME}.json").read_text())["figures"]
    names = [row.name for row in rows()] if arguments.rows is None else arguments.rows.split(",")
    if unknown := {*names} - {row.name for row in rows()}:
        parser.error(f"--rows: {', '.join(sorted(unknown))}: no such row")
    wanted = [row for row in rows() if row.name in names and row.name not in found]
    run_all(wanted, CARDS if arguments.device == "cuda" else CPU, found, arguments.out, arguments.sglang)
    show(found)
    return 1 if found.get("failures") else 0


if __name__ == "__main__":
    sys.exit(main())
