"""Speed of the native engine on one CUDA device at the shape of Nemotron Nano 9B v2, with random weights.

`python bench/gpu.py [--resume] [--out FOLDER] [--sections NAME,NAME]`; sections: rates, products, handoff (see
`gpu_handoff.py`), links (see `links.py`; both ends on the one card), router (see `gpu_router.py`), decode, engine,
effects, prefill, profile. Speed does not depend on the weights. A section is written when it is done, so that the
script can be continued.
Floors: decode at batch b reads the weights without the input embedding once, reads and writes b slots and reads b x
context tokens of KV, at the copy rate of the same run (bytes read plus bytes written); prefill computes 2 FLOP for each
weight but embedding and head, at the rate of a large matrix product of the same run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.gpu_handoff import handoff, write_model
from bench.gpu_router import router
from bench.links import Shape
from bench.links import measure as measure_links
from bench.results import FOLDER, write_result
from common.config import TransportName
from common.sampling import LogprobOptions, SamplingParams
from engine.allocator import PageAllocator, SlotAllocator
from engine.batch import Row
from engine.cuda.device import CudaDevice
from engine.cuda.linear import FEW_ROWS, tiling, workspace
from engine.cuda.memory import plan_memory
from engine.cuda.runner import CudaRunner
from engine.kernels.linear import project
from engine.memory import SequenceMemory
from engine.model_config import (
    Activation,
    AttentionConfig,
    GateNorm,
    HybridConfig,
    LayerKind,
    Mamba2Config,
    MlpConfig,
)
from engine.pools import StatePools
from engine.radix_cache import RadixCache
from engine.scheduler import Limits, Scheduler
from engine.sequence import Phase, Sequence
from engine.stopping import StopChecker
from engine.weights import random_weights

PATTERN = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
BATCHES = (1, 8, 32, 128)
CONTEXT = 1024
PAGE = 16
PROMPTS = ((1, 1024), (1, 2048), (8, 2048), (4, 8192))
BOUNDS = {"decode": {1: 1.24, 8: 1.30, 32: 1.32, 128: 1.36}, "prefill": {(8, 2048): 0.52, (1, 1024): 0.48}}
Figures = dict[str, Any]


def nano_9b() -> HybridConfig:
    return HybridConfig(
        model="nemotron_h",
        layers=tuple(LayerKind(letter) for letter in PATTERN),
        vocab_size=131072,
        hidden_size=4480,
        max_position_embeddings=131072,
        eos_token_ids=(),
        norm_eps=1e-5,
        tie_word_embeddings=False,
        embedding_multiplier=1.0,
        recurrence=Mamba2Config(
            num_heads=128,
            head_dim=80,
            d_state=128,
            n_groups=8,
            conv_kernel=4,
            chunk_size=128,
            time_step_limit=(0.0, math.inf),
            in_bias=False,
            out_bias=False,
            conv_bias=True,
            norm=GateNorm.GATE_FIRST,
        ),
        attention=AttentionConfig(
            heads=40,
            kv_heads=8,
            head_dim=128,
            bias=False,
            scale=128**-0.5,
            rotary_dim=0,
            rope_theta=1.0,
            qk_norm=False,
            output_gate=False,
        ),
        mlp=MlpConfig(intermediate_size=15680, activation=Activation.RELU2, bias=False, fused=False),
        moe=None,
        adjustments=(),
    )


class Bench:
    """One runner of the 9B shape, with room for the largest batch."""

    def __init__(self, rows: int, tokens: int) -> None:
        self.device = torch.device("cuda")
        torch.manual_seed(0)
        self.config = nano_9b()
        weights = random_weights(self.config, torch.bfloat16, self.device)
        pages = 1 + max(rows * (CONTEXT + 512), 4 * 8192 + 64) // PAGE
        pools = StatePools(
            self.config,
            num_pages=pages,
            num_slots=rows + 2,
            page_size=PAGE,
            dtype=torch.bfloat16,
            ssm_dtype=torch.float32,
            device=self.device,
            revision="random",
            allocate=None,
        )
        begin = time.perf_counter()
        self.runner = CudaRunner(
            self.config, weights, pools, max_rows=rows, max_tokens=tokens, max_pages=1024, use_graphs=True
        )
        torch.cuda.synchronize()
        self.planned_bytes = plan_memory(
            self.config,
            dtype=torch.bfloat16,
            ssm_dtype=torch.float32,
            num_pages=pages,
            page_size=PAGE,
            num_slots=rows + 2,
            step_tokens=tokens,
            logit_rows=rows,
        ).total
        self.capture_s = time.perf_counter() - begin
        self.weight_bytes = sum(w.nbytes for name, w in weights.items() if name != "embeddings.weight")
        self.slot_bytes = pools.conv[0].nbytes + pools.ssm[0].nbytes
        self.token_bytes = pools.kv[:, :, 0].nbytes // PAGE
        kept = ("embeddings.weight", "lm_head.weight")
        self.token_flop = 2 * sum(w.numel() for name, w in weights.items() if w.dim() == 2 and name not in kept)

    def decode_floor_ms(self, batch: int, copy_tb_s: float) -> float:
        nbytes = self.weight_bytes + batch * (2 * self.slot_bytes + CONTEXT * self.token_bytes)
        return nbytes / copy_tb_s / 1e9

    def rows(self, batch: int, start: int, tokens: int) -> list[Row]:
        """Rows of `tokens` random tokens from position `start`, each in its own slot and pages."""
        each = -(-(start + tokens + 256) // PAGE)
        ids = torch.randint(1, self.config.vocab_size, (batch, tokens)).tolist()
        return [Row(ids[i], start, list(range(1 + i * each, 1 + (i + 1) * each)), 1 + i, 1, None) for i in range(batch)]


def timed_ms(run: Callable[[], object], times: int, warm: int = 3) -> float:
    """Median milliseconds of one call, by events."""
    for _ in range(warm):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))


def rates() -> Figures:
    """Copy rate, and the rate of a large bf16 matrix product on random data."""
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    copy_ms = timed_ms(lambda: target.copy_(source), 10)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_ms = timed_ms(lambda: torch.mm(a, b), 10)
    return {"copy_tb_s": 2 * source.nbytes / copy_ms / 1e9, "matrix_tflop_s": 2 * 8192**3 / product_ms / 1e9}


def products() -> Figures:
    """The model's products for few rows, TB/s of weight: cuBLAS, and the kernel that reads the weight once, which also
    does the norm before or the addition after."""
    figures: Figures = {}
    device = torch.device("cuda")
    shapes = {
        "in": (22656, 4480),
        "out": (4480, 10240),
        "up": (15680, 4480),
        "down": (4480, 15680),
        "head": (131072, 4480),
    }
    cut = tiling(device)
    space = workspace(cut, 131072, FEW_ROWS, device)
    for name, (outputs, inputs) in shapes.items():
        copies = max(1, 400_000_000 // (outputs * inputs * 2))
        weights = [torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) for _ in range(copies)]
        norm = torch.rand(inputs, device=device)
        for rows in (1, FEW_ROWS):
            x = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16)
            out = torch.empty(rows, outputs, device=device, dtype=torch.bfloat16)
            kind = {"norm": None, "residual": out} if name in ("out", "down") else {"norm": norm, "residual": None}
            args = kind | {"eps": 1e-5, "square": False, "tiling": cut, "workspace": space}
            found = {
                "cublas": _graph_ms([lambda w=w, x=x, out=out: torch.mm(x, w.t(), out=out) for w in weights]),
                "kernel": _graph_ms([lambda w=w, x=x, args=args: project(x, w, **args) for w in weights]),
            }
            figures[f"{name} {rows}"] = {key: outputs * inputs * 2 / ms / 1e9 for key, ms in found.items()}
        del weights
    return figures


def _graph_ms(calls: list[Callable[[], object]]) -> float:
    """Milliseconds of one call, in a graph of all of them, several times over."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    rounds = max(1, 8 // len(calls))
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return timed_ms(graph.replay, 5, warm=1) / (rounds * len(calls))


def decode(bench: Bench, copy_tb_s: float) -> Figures:
    """Graph replays alone: device time of a step."""
    figures = {}
    for batch in BATCHES:
        rows = bench.rows(batch, CONTEXT - 1, 1)
        ms = timed_ms(lambda rows=rows: bench.runner.step(rows), 20)
        floor = bench.decode_floor_ms(batch, copy_tb_s)
        figures[str(batch)] = {"step_ms": ms, "floor_ms": floor, "ratio": ms / floor, "bound": BOUNDS["decode"][batch]}
    return figures


def make_scheduler(bench: Bench, rows: int, *, overlap: bool, saves: bool) -> Scheduler:
    """saves: prefix cache with extra_buffer, a state every 256 tokens."""
    pools = bench.runner.pools
    pages, slots = PageAllocator(pools.num_pages), SlotAllocator(pools.num_slots)
    return Scheduler(
        device=CudaDevice(bench.runner, frozenset()),
        memory=SequenceMemory(
            pages=pages,
            slots=slots,
            cache=RadixCache(pages, slots, page_size=PAGE, cache_chunk=128) if saves else None,
            copy_slots=bench.runner.copy_slots,
            page_size=PAGE,
            num_row_slots=0,
        ),
        stopping=StopChecker(lambda ids: "", frozenset()),
        limits=Limits(
            page_size=PAGE,
            prefill_budget=8192,
            cache_chunk=128,
            max_running=rows,
            track_interval=256 if saves else None,
            tracks_prefill=saves,
            caches_final_state=False,
            mixed=False,
        ),
        overlap=overlap,
        hold_after_prefill=False,
    )


def steady(bench: Bench, batch: int, *, overlap: bool = True, saves: bool = False, steps: int = 60) -> Figures:
    """Whole steps: scheduler, launches, device, results. Wall time of a step in steady decode; how idle the card is."""
    scheduler = make_scheduler(bench, batch, overlap=overlap, saves=saves)
    for i in range(batch):
        prompt = torch.randint(1, 131072, (CONTEXT - 32,)).tolist()
        params = SamplingParams(temperature=0.0, max_new_tokens=400, ignore_eos=True)
        scheduler.add(Sequence(rid=str(i), prompt_ids=prompt, sampling=params, logprobs=LogprobOptions(), arrival_s=i))
    while not (len(scheduler.running) == batch and all(s.phase is Phase.RUNNING for s in scheduler.running)):
        scheduler.step()
    for _ in range(8):
        scheduler.step()
    marks = [time.perf_counter()]
    for _ in range(steps):
        scheduler.step()
        marks.append(time.perf_counter())
    walls = sorted((b - a) * 1e3 for a, b in itertools.pairwise(marks))
    figures = {"step_ms": statistics.mean(walls), "median_ms": statistics.median(walls), "max_ms": walls[-1]}
    figures |= device_share(scheduler.step, 10)
    for sequence in list(scheduler.running):
        scheduler.remove(sequence)
        scheduler.release(sequence)
    while scheduler.has_work():
        scheduler.step()
    return figures


def engine(bench: Bench, copy_tb_s: float) -> Figures:
    figures = {}
    for batch in BATCHES:
        floor = bench.decode_floor_ms(batch, copy_tb_s)
        found = steady(bench, batch)
        figures[str(batch)] = found | {"floor_ms": floor, "ratio": found["step_ms"] / floor}
    return figures


def effects(bench: Bench) -> Figures:
    """Steady decode at batch 32 with one thing changed."""
    figures = {
        "as it is": steady(bench, 32),
        "no overlap": steady(bench, 32, overlap=False),
        "extra_buffer": steady(bench, 32, saves=True, steps=260),
    }
    graphs, bench.runner._graphs = bench.runner._graphs, None
    figures["no graphs"] = steady(bench, 32)
    bench.runner._graphs = graphs
    return figures


def device_share(step: Callable[[], object], times: int) -> Figures:
    """Share of the time in which no kernel ran, from the first kernel to the last of `times` steps."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(times):
            step()
        torch.cuda.synchronize()
    spans = sorted((e.time_range.start, e.time_range.end) for e in profile.events() if e.device_type.name == "CUDA")
    busy, last = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    return {"idle_share": 1 - busy / (last - spans[0][0])}


def prefill(bench: Bench, matrix_tflop_s: float) -> Figures:
    figures = {}
    for batch, length in PROMPTS:
        rows = bench.rows(batch, 0, length)
        walls = []
        for _ in range(5):
            begin = time.perf_counter()
            bench.runner.step(rows).report.tolist()
            walls.append(time.perf_counter() - begin)
        wall_s = statistics.median(walls[1:])
        rate = batch * length / wall_s
        share = rate * bench.token_flop / matrix_tflop_s / 1e12
        bound = BOUNDS["prefill"].get((batch, length))
        figures[f"{batch}x{length}"] = {"ms": wall_s * 1e3, "tokens_s": rate, "matrix_share": share, "bound": bound}
    return figures


def profile(bench: Bench) -> Figures:
    """Device time by kernel, microseconds and calls: of a decode step and of two prefills."""
    cases = {f"decode {b}": bench.rows(b, CONTEXT - 1, 1) for b in BATCHES}
    cases |= {f"prefill {b}x{n}": bench.rows(b, 0, n) for b, n in ((1, 1024), (8, 2048))}
    figures = {}
    for name, rows in cases.items():
        bench.runner.step(rows)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            bench.runner.step(rows)
            torch.cuda.synchronize()
        totals: dict[str, list[float]] = {}
        for event in found.events():
            if event.device_type.name == "CUDA":
                total = totals.setdefault(event.name[:60], [0.0, 0])
                total[0] += event.time_range.elapsed_us()
                total[1] += 1
        top = sorted(totals.items(), key=lambda item: -item[1][0])[:14]
        figures[name] = {key: [round(us, 1), int(calls)] for key, (us, calls) in top}
        figures[name]["sum"] = [round(sum(us for us, _ in totals.values()), 1), int(sum(n for _, n in totals.values()))]
    return figures


def show(name: str, figures: Figures) -> None:
    print(f"== {name}")
    for key, value in figures.items():
        if isinstance(value, dict):
            cells = " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in value.items())
            print(f"  {key:14} {cells}" if name != "profile" else f"  {key}")
            for k, v in value.items() if name == "profile" else ():
                print(f"      {v[0]:10.1f} us {v[1]:5}  {k}")
        else:
            print(f"  {key} = {value:.4g}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of gpu.json")
    parser.add_argument("--resume", action="store_true", help="go on with the sections that gpu.json lacks")
    parser.add_argument("--sections", default="rates,handoff,links,router,decode,engine,effects,prefill,profile")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing to measure")
        return
    found: Figures = {}
    if arguments.resume and (arguments.out / "gpu.json").is_file():
        found = json.loads((arguments.out / "gpu.json").read_text())["figures"]
    bench: Bench | None = None
    for name in arguments.sections.split(","):
        if name in found:
            continue
        if name not in ("rates", "products", "handoff", "links", "router"):
            bench = bench or Bench(max(BATCHES), max(b * n for b, n in PROMPTS))
        found[name] = measure(name, bench, found.get("rates", {}))
        found.setdefault("made", {})[name] = circumstances(bench)
        write_result("gpu", found, arguments.out)
        show(name, found[name])


def measure(name: str, bench: Bench | None, measured: Figures) -> Figures:
    match name:
        case "rates":
            return rates()
        case "products":
            return products()
        case "handoff":
            torch.cuda.empty_cache()
            return handoff(nano_9b())
        case "links":
            torch.cuda.empty_cache()
            return links()
        case "router":
            torch.cuda.empty_cache()
            return served()
    assert bench is not None
    match name:
        case "decode":
            return decode(bench, measured["copy_tb_s"])
        case "engine":
            return engine(bench, measured["copy_tb_s"])
        case "effects":
            return effects(bench)
        case "prefill":
            return prefill(bench, measured["matrix_tflop_s"])
        case "profile":
            return profile(bench)
    raise SystemExit(f"--sections: {name} is none of them")


def links() -> Figures:
    """By transport; over TCP with page-locked memory at the sender and without."""
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(nano_9b(), Path(folder) / "model")
        shape = Shape(model=Path(folder) / "model", dtype=torch.bfloat16, tokens=(2048, 8192))
        for name, transport, pinned in (
            ("cuda_ipc", TransportName.CUDA_IPC, True),
            ("tcp", TransportName.MOONCAKE, True),
            ("tcp, not pinned", TransportName.MOONCAKE, False),
        ):
            figures[name] = measure_links(transport, ("cuda:0", "cuda:0"), shape, pinned=pinned)
            print(name, figures[name], flush=True)
    return figures


def served() -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        write_model(nano_9b(), Path(folder) / "model")
        return router(Path(folder) / "model", nano_9b().vocab_size)


def circumstances(bench: Bench | None) -> Figures:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        **({"capture_s": bench.capture_s, "planned_gib": bench.planned_bytes / 2**30} if bench else {}),
    }


if __name__ == "__main__":
    main()
