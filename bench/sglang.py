"""SGLang as the engine: plain, disaggregated behind our router, its wrong states found, and beside the native engine.

`python bench/sglang.py --bundle FOLDER [--resume] [--rows NAME,NAME] [--out FOLDER]` on a machine with one CUDA device
(docs/sglang.md says how such a machine is set up). FOLDER has a `setup.sh` that unpacks a Python with sglang,
/tmp/env.sh and the models /tmp/models/{tiny,nano9b}. `--dry-run` tries all of it on the CPU with a stub in place of
SGLang. A row is written when it is done, so that the script can be continued; one table is printed last.

    no_buffer      prefill, decode, our router over Mooncake TCP, against plain SGLang: parity, abort, disconnect
    extra_buffer   the same, one prompt a prefill batch
    detector       `tandem gate parity`, many prompts at once: fails for extra_buffer without that limit and names the
                   prefix hits; passes for no_buffer and for the native engine
    gate           the paired gate on the bundled model: the same three
    native         the native engine with the same weights, against plain SGLang: parity or KL
    speed_sglang   the 9B shape, random weights: decode steps, prefill, hand-off over TCP, through the servers
    speed_native   the same of the native engine
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx

from bench.results import FOLDER, write_result
from bench.sglang_servers import Models, Scale, Servers, card, dry
from bench.sglang_speed import ratios, speed
from tests.support.stack import MODEL, REPO

NAME = "sglang"
TIE, KL_BOUND = "0.3", 0.002
"""The small model's largest logits are above 16, where one step of bfloat16 is 0.125; a wrong state is off by 2."""
COMMAND_S = 150.0
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    servers: Servers
    scale: Scale
    folder: Path

    def url(self, name: str) -> str:
        return self.servers.url(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """servers: what must be ready. group: rows whose servers are started together. estimate_s: of the work alone."""

    work: Callable[[Bench], Figures]
    servers: tuple[str, ...]
    group: int
    estimate_s: int


# Checks through the command line


def tandem(*words: str) -> tuple[int, list[str]]:
    """Exit status and what was printed."""
    done = subprocess.run(
        [sys.executable, "-m", "cli.main", *words], cwd=REPO, capture_output=True, text=True, timeout=COMMAND_S
    )
    return done.returncode, (done.stdout + done.stderr).strip().splitlines()


def write_prompts(path: Path, count: int) -> Path:
    """Beginnings, and prompts that go on from earlier ones, so that states are resumed from in either strategy."""
    rng = random.Random(1)
    prompts: list[list[int]] = [[rng.randrange(20, 900) for _ in range(n)] for n in (130, 200, 300, 640)]
    while len(prompts) < count:
        before = rng.choice([each for each in prompts if len(each) < 1200])
        prompts.append(before + [rng.randrange(20, 900) for _ in range(rng.randrange(1, 400))])
    path.write_text("".join(json.dumps({"input_ids": each}) + "\n" for each in prompts[:count]))
    return path


def parity(bench: Bench, subject: str, baseline: str, *, parallel: int) -> Figures:
    """`tandem gate parity`, cold and warm."""
    count, report = bench.scale.prompts, bench.folder / "parity.json"
    report.unlink(missing_ok=True)
    words = ["gate", "parity", "--url", bench.url(subject), "--baseline", bench.url(baseline), "--tie", TIE]
    words += ["--prompts", str(write_prompts(bench.folder / "prompts.jsonl", count)), "--num-prompts", str(count)]
    words += ["--new-tokens", str(bench.scale.new_tokens), "--parallel", str(parallel), "--output", str(report)]
    status, said = tandem(*words)
    rows = json.loads(report.read_text()) if report.is_file() else []
    different = [row for row in rows if row["likeness"] == "different"]
    return {
        "exit": status,
        "answers": Counter(f"{row['run']} {row['likeness']}" for row in rows),
        "prefix_hits": sum(row["prefix_hit"] for row in rows),
        "different_hits": sum(row["prefix_hit"] for row in different),
        "worst": max(different, key=lambda row: row["shortfall"] or 0.0, default=None),
        "said": [line[:300] for line in said[:7]],
    }


def gate(bench: Bench, subject: str, baseline: str) -> Figures:
    """`tandem gate gsm-mini`, paired, many questions at once."""
    folder, count = bench.folder / "gate", str(bench.scale.questions)
    words = ["gate", "gsm-mini", "--url", bench.url(subject), "--baseline", bench.url(baseline), "--warm", "1"]
    words += ["--num-questions", count, "--parallel", count, "--max-tokens", "256", "--output", str(folder)]
    status, said = tandem(*words)
    if status not in (0, 1):
        return {"exit": status, "said": said[-12:]}
    report = json.loads((folder / "report.json").read_text())
    runs = {f"{run['side']} {run['kind']}": f"{run['right']} of {run['asked']}" for run in report["runs"]}
    kept = ("run", "hits", "differing", "differing_hits", "only_baseline", "lost_hits", "p")
    pairings = [{key: pairing[key] for key in kept} for pairing in report["pairings"]]
    found = {"exit": status, "verdict": report["verdict"], "reasons": report["reasons"]}
    return found | {"runs": runs, "pairings": pairings}


# Rows


def pd(bench: Bench, name: str) -> Figures:
    """Of one strategy's three servers."""
    found = parity(bench, f"{name} router", "plain", parallel=8)
    freed = ends(bench.url(f"{name} router"), [bench.url(f"{name} {role}") for role in ("prefill", "decode")])
    holds = found["exit"] == 0 and all(value is not None for value in freed.values())
    return {"holds": holds, "parity": found} | freed


def ends(router: str, nodes: Sequence[str]) -> Figures:
    """An abort and a disconnect in mid-answer: seconds until both nodes have nothing left, by /flush_cache (400 while
    requests run)."""
    sampling = {"temperature": 0, "max_new_tokens": 4000, "ignore_eos": True}
    body = {"input_ids": [30, 777], "sampling_params": sampling, "stream": True}
    found: Figures = {}
    for how in ("abort", "disconnect"):
        with httpx.stream("POST", f"{router}/generate", json=body | {"rid": how}, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            busy = [httpx.post(f"{node}/flush_cache", timeout=30).status_code != 200 for node in nodes]
            if how == "abort":
                threading.Timer(0.2, httpx.post, (f"{router}/abort_request",), {"json": {"rid": how}}).start()
                for _ in lines:
                    pass
        found[f"{how}_free_s"] = _idle_after(nodes, time.monotonic()) if any(busy) else None
    return found


def _idle_after(nodes: Sequence[str], begin_s: float) -> float | None:
    while time.monotonic() - begin_s < 20:
        if all(httpx.post(f"{node}/flush_cache", timeout=30).status_code == 200 for node in nodes):
            return round(time.monotonic() - begin_s, 2)
        time.sleep(0.1)
    return None


def detector(bench: Bench) -> Figures:
    """The supervisor refuses the faulty setting, so that server is started as anybody would."""
    pairs = {"extra_buffer": ("faulty", "plain"), "no_buffer": ("right", "plain"), "native": ("native", "again")}
    found = {name: parity(bench, *pair, parallel=bench.scale.prompts) for name, pair in pairs.items()}
    wrong = found["extra_buffer"]
    is_told = wrong["exit"] == 1 and wrong["different_hits"] > 0
    return {"holds": is_told and found["no_buffer"]["exit"] == found["native"]["exit"] == 0} | found


def paired(bench: Bench) -> Figures:
    pairs = {
        "extra_buffer": ("mini faulty", "mini plain"),
        "no_buffer": ("mini plain", "mini native"),
        "native": ("mini native", "mini plain"),
    }
    found = {name: gate(bench, *pair) for name, pair in pairs.items()}
    wrong = found["extra_buffer"]
    is_told = wrong["exit"] == 1 and any("prefix hit" in reason for reason in wrong.get("reasons", []))
    return {"holds": is_told and found["no_buffer"]["exit"] == found["native"]["exit"] == 0} | found


def native(bench: Bench) -> Figures:
    """Either the same greedy tokens but for near ties, or KL within its bound over the tokens that are the same."""
    baseline, output = bench.scale.same_weights, bench.folder / "compare.json"
    found = parity(bench, "native", baseline, parallel=8)
    words = ["compare", f"sglang={bench.url(baseline)}", f"native={bench.url('native')}", "--api", "generate"]
    words += ["--prompts", str(bench.folder / "prompts.jsonl"), "--num-prompts", str(bench.scale.prompts)]
    words += ["--new-tokens", str(bench.scale.new_tokens), "--parallel", "8", "--output", str(output)]
    status, said = tandem(*words)
    assert status == 0, "\n".join(said)
    likeness = json.loads(output.read_text())[1]["likeness"]
    compared = {key: likeness[key] for key in ("equal", "prompts", "kl", "largest")}
    holds = found["exit"] == 0 or (compared["kl"] is not None and compared["kl"] <= KL_BOUND)
    return {"holds": holds, "parity": found, "compare": compared}


def speed_row(bench: Bench, engine: str) -> Figures:
    unified, router = bench.url(f"{engine} unified"), bench.url(f"{engine} router")
    return asyncio.run(speed(unified, router, bench.scale))


def triple(name: str) -> tuple[str, str, str]:
    return f"{name} router", f"{name} prefill", f"{name} decode"


def rows(scale: Scale) -> dict[str, Row]:
    """`PRESTART`: the servers of group 1 start while the rows of group 0 are made; for those of 2 and 1 together there
    is no memory."""
    return {
        "no_buffer": Row(
            work=lambda bench: pd(bench, "no_buffer"), servers=("plain", *triple("no_buffer")), group=0, estimate_s=15
        ),
        "extra_buffer": Row(
            work=lambda bench: pd(bench, "extra_buffer"),
            servers=("plain", *triple("extra_buffer")),
            group=0,
            estimate_s=15,
        ),
        "detector": Row(work=detector, servers=("plain", "faulty", "right", "native", "again"), group=0, estimate_s=25),
        "gate": Row(work=paired, servers=("mini faulty", "mini plain", "mini native"), group=0, estimate_s=40),
        "native": Row(work=native, servers=(scale.same_weights, "native"), group=0, estimate_s=15),
        "speed_sglang": Row(
            work=lambda bench: speed_row(bench, "sglang"),
            servers=("sglang unified", *triple("sglang")),
            group=1,
            estimate_s=60,
        ),
        "speed_native": Row(
            work=lambda bench: speed_row(bench, "native"),
            servers=("native unified", *triple("native")),
            group=2,
            estimate_s=60,
        ),
    }


PRESTART = {0: 1}
GROUP_START_S = {0: 100, 1: 70, 2: 40}


# All of them


def run(name: str, row: Row, bench: Bench) -> Figures:
    """What fails is told, and tried again by --resume."""
    begin_s = time.monotonic()
    try:
        bench.servers.wait(row.servers)
        ready_s = time.monotonic() - begin_s
        found = row.work(bench)
        times = {"waited_s": round(ready_s, 1), "took_s": round(time.monotonic() - begin_s - ready_s, 1)}
        found |= times
    except (AssertionError, httpx.HTTPError, subprocess.SubprocessError, OSError, ValueError, KeyError) as error:
        found = {"failed": f"{type(error).__name__}: {error}"[-3000:]}
    print(f"{name}: {time.monotonic() - begin_s:.1f} s, {found.get('holds', '')}", file=sys.stderr, flush=True)
    return found


def run_all(wanted: dict[str, Row], bench: Bench, found: Figures, out: Path) -> None:
    groups = sorted({row.group for row in wanted.values()})
    needed = {g: [name for row in wanted.values() if row.group == g for name in row.servers] for g in groups}
    for group in groups:
        following = needed.get(PRESTART.get(group, -1), [])
        bench.servers.end([name for name in bench.servers.names() if name not in needed[group]])
        bench.servers.start(needed[group])
        bench.servers.settle(needed[group])
        bench.servers.start(following)
        for name in (name for name, row in wanted.items() if row.group == group):
            found[name] = run(name, wanted[name], bench)
            write_result(NAME, found, out)


def estimate(wanted: dict[str, Row]) -> str:
    groups = {row.group for row in wanted.values()}
    starts = {g: GROUP_START_S[g] for g in groups if not (g in PRESTART.values() and 0 in groups)}
    parts = [f"{name} {row.estimate_s} s" for name, row in wanted.items()]
    total = sum(row.estimate_s for row in wanted.values()) + sum(starts.values())
    return f"estimate: {', '.join(parts)}; starts {sum(starts.values())} s; in all {total} s"


def show(found: Figures) -> None:
    for name, figures in found.items():
        print(f"== {name}")
        print(json.dumps(figures, indent=1))
    print(f"\n{'row':14} {'holds':6} {'took':>7}")
    for name, figures in found.items():
        verdict = "failed" if "failed" in figures else figures.get("holds", "")
        print(f"{name:14} {verdict!s:6} {figures.get('took_s', 0.0):6.1f}s")
    for line in ratios(found.get("speed_native", {}), found.get("speed_sglang", {})):
        print(line)


def unpack(bundle: Path, folder: Path) -> str:
    """A script that runs the bundle's Python in its environment, which is not to be ours."""
    path = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"
    setup = f'export PATH="$PATH:{path}"; unset PYTHONPATH; B={bundle} bash {bundle}/setup.sh'
    subprocess.run(["bash", "-c", setup], check=True, stdout=sys.stderr)
    script = folder / "python-sglang"
    lines = ["#!/bin/bash", f'export PATH="$PATH:{path}"', ". /tmp/env.sh", "cd /tmp", 'exec python3 "$@"', ""]
    script.write_text("\n".join(lines))
    script.chmod(0o755)
    return str(script)


def chosen(names: str | None, scale: Scale) -> dict[str, Row]:
    """`speed` is both of its rows. Raises ValueError for an unknown one."""
    known = rows(scale)
    if names is None:
        return known
    asked = {name for each in names.split(",") for name in known if each == name or each == name.partition("_")[0]}
    if unknown := [each for each in names.split(",") if each not in {*known, "speed"}]:
        raise ValueError(f"--rows: {', '.join(unknown)}: no such row")
    return {name: row for name, row in known.items() if name in asked}


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bundle", type=Path, help="folder with setup.sh, /tmp/env.sh's maker")
    parser.add_argument("--python", help="in place of --bundle: a Python that has sglang")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with a stub in place of SGLang")
    parser.add_argument("--tiny", type=Path, help="folder of the small model")
    parser.add_argument("--large", type=Path, help="folder of the 9B shape's config.json")
    parser.add_argument("--rows", help="these only, comma separated; speed: both of them")
    parser.add_argument("--resume", action="store_true", help=f"only the rows that {NAME}.json lacks")
    parser.add_argument("--out", type=Path, default=FOLDER)
    return parser


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are ended on the way out
    parser = options()
    arguments = parser.parse_args()
    if [arguments.bundle is None, arguments.python is None, not arguments.dry_run].count(False) != 1:
        print("give --bundle, --python or --dry-run: there is no sglang here to run")
        return 0
    kept = arguments.out / f"{NAME}.json"
    found: Figures = json.loads(kept.read_text())["figures"] if arguments.resume and kept.is_file() else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.dry_run:
            models = Models(folder, tiny=arguments.tiny or MODEL, large=arguments.large or MODEL)
            scale = dry(folder, models)
        else:
            python = arguments.python or unpack(arguments.bundle.resolve(), folder)
            places = (arguments.tiny or Path("/tmp/models/tiny"), arguments.large or Path("/tmp/models/nano9b"))
            models = Models(folder, tiny=places[0], large=places[1])
            scale = card(python, models)
        try:
            wanted = chosen(arguments.rows, scale)
        except ValueError as error:
            parser.error(str(error))
        wanted = {name: row for name, row in wanted.items() if "failed" in found.get(name, {"failed": ""})}
        print(estimate(wanted), file=sys.stderr, flush=True)
        with Servers(scale, folder) as servers:
            try:
                run_all(wanted, Bench(servers=servers, scale=scale, folder=folder), found, arguments.out)
            finally:
                servers.keep_logs(arguments.out / f"{NAME}.log")
    show(found)
    return 0 if all(figures.get("holds", "failed" not in figures) for figures in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
