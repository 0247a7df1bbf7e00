"""Gated delta recurrence at the shape of Qwen3-Next: this project's kernels beside flash-linear-attention's.

`python bench/gated_delta.py [--out FOLDER] [--sweep]` on a CUDA device, with the packages `flash-linear-attention` and
`fla-core` (without them, our kernels alone); `--dry-run` tries it on the CPU with tiny sizes, by Triton's interpreter,
and writes nothing. Both get the same bfloat16 inputs and float32 states and are replayed from a CUDA graph: device
time. The library is given decay and beta, computed beforehand and not timed; ours computes them itself, and writes the
states into their slots and one inside the prompt into a track slot. Errors: ||found - exact|| / ||exact|| of one row,
exact being token by token in float64. Bound: 1.3 times the library's time. `--sweep` times each kernel, and other cuts
of ours.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if "--dry-run" in sys.argv or not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from triton.runtime.errors import OutOfResources

from bench.results import FOLDER, write_result
from engine.kernels.gated_delta import Cut, gated_delta_prefill, gated_delta_step
from engine.kernels.rows import PackedRows
from engine.ops.gated_delta import gated_delta_sequential_ref

CHUNK = 64
BOUND = 1.3
COLD_BYTES = 400_000_000  # of state that is passed through between two uses of one, several times the L2 cache
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Scale:
    """Key heads, heads, key and value dim; (rows, tokens) of prefills; rows of decode steps."""

    device: torch.device
    key_heads: int
    heads: int
    dim: int
    size: int
    prefills: tuple[tuple[int, int], ...]
    decodes: tuple[int, ...]


def scale(device: torch.device) -> Scale:
    if device.type == "cuda":
        return Scale(device, 16, 32, 128, 128, ((1, 1024), (8, 2048), (1, 8192)), (1, 8, 32, 128))
    return Scale(device, 1, 2, 16, 16, ((1, 70), (2, 20)), (1, 3))


@dataclass(frozen=True, slots=True)
class Inputs:
    """`count` rows of `length` tokens: qkv [T, C], a, b [T, H], bias, rate [H], states [count + 1, layers, H, K, V]."""

    count: int
    length: int
    qkv: Tensor
    a: Tensor
    b: Tensor
    bias: Tensor
    rate: Tensor
    states: Tensor

    @property
    def gates(self) -> tuple[Tensor, Tensor]:
        """Logarithm of the decay, and beta, float32 [T, H]."""
        return self.rate * F.softplus(self.a.float() + self.bias), torch.sigmoid(self.b.float())


def make_inputs(of: Scale, count: int, length: int, layers: int) -> Inputs:
    """Row i is in slot 1 + i; the last slot is for a state inside a prompt."""
    torch.manual_seed(0)
    tokens, device = count * length, of.device
    a, b = torch.randn(2, tokens, of.heads, device=device).bfloat16()
    return Inputs(
        count=count,
        length=length,
        qkv=torch.randn(tokens, 2 * of.key_heads * of.dim + of.heads * of.size, device=device).bfloat16(),
        a=a,
        b=b,
        bias=torch.randn(of.heads, device=device) - 3,
        rate=-16 * torch.rand(of.heads, device=device) - 0.01,
        states=torch.randn(count + 2, layers, of.heads, of.dim, of.size, device=device),
    )


def make_rows(of: Scale, count: int, length: int, start: int) -> PackedRows:
    """The last row's state at the last multiple of the chunk goes to the last slot."""

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=of.device)

    kept = (start + length) // CHUNK * CHUNK - start
    none = [0] * (count - 1)
    return PackedRows(
        count=count,
        longest=length,
        begins=ints([i * length for i in range(count + 1)]),
        starts=ints([start] * count),
        slots=ints(range(1, count + 1)),
        track_slots=ints([*none, count + 1 if kept > 0 else 0]),
        track_offsets=ints([*none, max(kept, 0)]),
        table=ints([0]),
        width=ints([1]),
    )


# --- time -------------------------------------------------------------------------------------------------------------


def timed_ms(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Milliseconds of one call, in a graph of all of them; on the CPU by the clock."""
    for call in calls:
        call()
    if device.type == "cpu":
        begin = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - begin) * 1e3 / len(calls)
    torch.cuda.synchronize()
    graph, rounds = torch.cuda.CUDAGraph(), max(1, 8 // len(calls))
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return replayed_ms(graph) / (rounds * len(calls))


def replayed_ms(graph: torch.cuda.CUDAGraph) -> float:
    """Median of ten replays after two, by events."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(13)]
    for mark in marks:
        mark.record()
        graph.replay()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks[2:]))


# --- ours and the library's -------------------------------------------------------------------------------------------


def ours(of: Scale, inputs: Inputs, rows: PackedRows, pool: Tensor, **cuts: Cut) -> Tensor:
    args = (inputs.qkv, inputs.a, inputs.b, inputs.bias, inputs.rate, pool, rows)
    if inputs.length == 1:
        return gated_delta_step(*args, key_heads=of.key_heads, **cuts)
    return gated_delta_prefill(*args, key_heads=of.key_heads, chunk=CHUNK, **cuts)


def parts(of: Scale, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [T, J, K], v [T, H, V]."""
    width = of.key_heads * of.dim
    q, k, v = inputs.qkv.split([width, width, of.heads * of.size], dim=1)
    return q.unflatten(1, (-1, of.dim)), k.unflatten(1, (-1, of.dim)), v.unflatten(1, (-1, of.size))


def library() -> dict[str, Callable[..., tuple[Tensor, Tensor]]] | None:
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    except ImportError:
        return None
    return {"prefill": chunk_gated_delta_rule, "step": fused_recurrent_gated_delta_rule}


def theirs(
    of: Scale, inputs: Inputs, rules: dict[str, Callable[..., Any]]
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """A call of the library from states [rows, H, K, V]: y [rows, tokens, H, V], new states."""
    batch = (inputs.count, inputs.length)
    decay, beta = (value.unflatten(0, batch) for value in inputs.gates)
    q, k, v = (value.unflatten(0, batch).contiguous() for value in parts(of, inputs))
    rule = rules["step" if inputs.length == 1 else "prefill"]

    def call(states: Tensor) -> tuple[Tensor, Tensor]:
        return rule(
            q=q,
            k=k,
            v=v,
            g=decay,
            beta=beta,
            initial_state=states,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )

    return call


# --- errors -----------------------------------------------------------------------------------------------------------


def exact(of: Scale, inputs: Inputs, tokens: slice, state: Tensor) -> tuple[Tensor, Tensor]:
    decay = inputs.rate.double() * F.softplus(inputs.a[tokens].double() + inputs.bias)
    beta = torch.sigmoid(inputs.b[tokens].double())
    return gated_delta_sequential_ref(*(part[tokens] for part in parts(of, inputs)), decay, beta, state)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.reshape(found.shape)).norm() / wanted.norm())


def errors(
    of: Scale, inputs: Inputs, rows: PackedRows, call: Callable[[Tensor], tuple[Tensor, Tensor]] | None
) -> Figures:
    """Of the last row, from a state that is not zero: y, the final state, the state inside the prompt."""
    last, length, slot = slice((inputs.count - 1) * inputs.length, None), inputs.length, inputs.count
    pool = inputs.states[:, 0].clone()
    y = ours(of, inputs, rows, pool)[last]
    before = inputs.states[slot, 0]
    wanted, after = exact(of, inputs, last, before)
    found = {"error": error(y, wanted), "state_error": error(pool[slot], after)}
    if kept := int(rows.track_offsets[-1]):
        inside = exact(of, inputs, slice(last.start, last.start + kept), before)[1]
        found["track_error"] = error(pool[slot + 1], inside)
    if call is not None:
        their_y, their_states = call(inputs.states[1:-1, 0].contiguous())
        found |= {"library_error": error(their_y[-1], wanted), "library_state_error": error(their_states[-1], after)}
    assert length == 1 or y.shape[0] == length
    return found


# --- the table --------------------------------------------------------------------------------------------------------


def cases(of: Scale) -> Iterator[tuple[str, int, int]]:
    """Name, rows, tokens of a row."""
    for count, length in of.prefills:
        yield f"prefill {count}x{length}", count, length
    for count in of.decodes:
        yield f"decode {count}", count, 1


def setting(of: Scale, count: int, length: int) -> tuple[Inputs, PackedRows]:
    state_bytes = 4 * count * of.heads * of.dim * of.size
    layers = -(-COLD_BYTES // state_bytes) if length == 1 and of.device.type == "cuda" else 1
    return make_inputs(of, count, length, layers), make_rows(of, count, length, 64 if length > 1 else 9)


def measure(of: Scale, count: int, length: int, rules: dict[str, Callable[..., Any]] | None) -> Figures:
    inputs, rows = setting(of, count, length)
    call = theirs(of, inputs, rules) if rules else None
    found = errors(of, inputs, rows, call)
    layers = range(inputs.states.shape[1])
    found["ms"] = timed_ms([lambda i=i: ours(of, inputs, rows, inputs.states[:, i]) for i in layers], of.device)
    if length == 1:
        found["state_gb_s"] = 8 * count * of.heads * of.dim * of.size / found["ms"] / 1e6
    if call is not None:
        states = [inputs.states[1:-1, i].contiguous() for i in layers]
        found["library_ms"] = timed_ms([lambda state=state: call(state) for state in states], of.device)
        found["ratio"] = found["ms"] / found["library_ms"]
        found["met"] = found["ratio"] <= BOUND
    return found


COLUMNS = {
    "ms": "ms",
    "library_ms": "library ms",
    "ratio": "ratio",
    "state_gb_s": "state GB/s",
    "error": "error of y",
    "library_error": "library's",
    "state_error": "of state",
    "library_state_error": "library's",
    "track_error": "inside prompt",
}


def table(figures: Figures) -> str:
    lines = [f"{'':16}" + "".join(f"{title:>14}" for title in COLUMNS.values())]
    for name, found in figures.items():
        cells = [f"{found[key]:.3g}" if key in found else "-" for key in COLUMNS]
        lines.append(f"{name:16}" + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join(lines)


# --- other cuts -------------------------------------------------------------------------------------------------------


def cuts(of: Scale, length: int) -> Iterator[dict[str, Cut]]:
    """First none: the kernels' own choice."""
    yield {}
    if length == 1:
        for values, warps in itertools.product((4, 8, 16, 32, 64), (1, 2, 4, 8)):
            yield {"cut": Cut(values, warps)}
        return
    for values, warps in itertools.product((64, 128), (4, 8)):
        yield {"prepare": Cut(min(values, of.size), warps)}
    for values, warps, stages in itertools.product((16, 32, 64, 128), (4, 8), (1, 2, 3)):
        yield {"advance": Cut(min(values, of.size), warps, stages)}


def sweep(of: Scale, count: int, length: int) -> Figures:
    """Milliseconds by cut, fastest first."""
    inputs, rows = setting(of, count, length)
    layers = range(inputs.states.shape[1])
    found: Figures = {}
    for chosen in cuts(of, length):
        name = " ".join(f"{key}={cut.values}/{cut.warps}/{cut.stages}" for key, cut in chosen.items()) or "own choice"
        calls = [lambda i=i, chosen=chosen: ours(of, inputs, rows, inputs.states[:, i], **chosen) for i in layers]
        try:
            found[name] = timed_ms(calls, of.device)
        except OutOfResources:  # more shared memory than the card has
            continue
    return dict(sorted(found.items(), key=lambda item: item[1]))


def kernels(call: Callable[[], object]) -> Figures:
    """Microseconds of each kernel of a call, the longest first."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    totals: dict[str, float] = {}
    for event in profile.events():
        if event.device_type.name == "CUDA":
            totals[event.name[:60]] = totals.get(event.name[:60], 0.0) + event.time_range.elapsed_us()
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def details(of: Scale, count: int, length: int, rules: dict[str, Callable[..., Any]] | None) -> Figures:
    found: Figures = {"cuts_ms": sweep(of, count, length)}
    if of.device.type == "cuda":
        inputs, rows = setting(of, count, length)
        found["kernels_us"] = kernels(lambda: ours(of, inputs, rows, inputs.states[:, 0]))
        if rules is not None:
            call, states = theirs(of, inputs, rules), inputs.states[1:-1, 0].contiguous()
            found["library_kernels_us"] = kernels(lambda: call(states))
    return found


def show(name: str, found: Figures) -> None:
    cuts = found["cuts_ms"]
    print(
        f"{name}: own choice {cuts['own choice']:.4g} ms; " + ", ".join(f"{cut} {ms:.4g}" for cut, ms in cuts.items())
    )
    for key in ("kernels_us", "library_kernels_us"):
        for kernel, us in found.get(key, {}).items():
            print(f"    {us:10.1f} us  {kernel}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of gated_delta.json")
    parser.add_argument("--sweep", action="store_true", help="time each kernel and other cuts of the launches")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, nothing is written")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.dry_run:
        print("no CUDA device here: nothing to measure")
        return
    of = scale(torch.device("cpu" if arguments.dry_run else "cuda"))
    rules = None if arguments.dry_run else library()
    if rules is None:
        print("without flash-linear-attention: our kernels alone")
    figures: Figures = {"bound": BOUND, "device": device_name(), "library": library_version() if rules else None}
    figures["cases"] = {name: measure(of, count, length, rules) for name, count, length in cases(of)}
    print(table(figures["cases"]))
    if not arguments.dry_run:
        write_result("gated_delta", figures, arguments.out)
    if not arguments.sweep:
        return
    figures["details"] = {name: details(of, count, length, rules) for name, count, length in cases(of)}
    for name, one in figures["details"].items():
        show(name, one)
    if not arguments.dry_run:
        write_result("gated_delta", figures, arguments.out)


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def library_version() -> str:
    try:
        return importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


if __name__ == "__main__":
    main()
