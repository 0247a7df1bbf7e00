"""SGLang as the engine: plain, disaggregated behind our router, its wrong states found, and beside the native engine.

`python bench/sglang.py --bundle FOLDER [--resume] [--rows NAME,NAME] [--out FOLDER]` on a machine with one CUDA device.
FOLDER has a `setup.sh` that unpacks a Python with sglang, /tmp/env.sh and the models /tmp/models/{tiny,nano9b}.
Each row is written when it is done, so that the script can be continued; one table is printed last.

    no_buffer      prefill, decode, our router over Mooncake TCP, against plain SGLang: parity, abort, disconnect
    extra_buffer   the same, one prompt a prefill batch
    detector       parity of many prompts at once with no_buffer: extra_buffer must fail, no_buffer must pass
    native         the native engine with the same weights, against plain SGLang: parity
    speed          the 9B shape, random weights: `tandem compare` of both engines with 1, 8, 32, 128 requests at once
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx

from bench.results import FOLDER, write_result
from tests.support.stack import MODEL, Server, command, free_port, running, stop, wait_healthy

NAME = "sglang"
START_S = 240.0
BASE = ("--skip-tokenizer-init", "--grammar-backend", "none", "--skip-server-warmup", "--mem-fraction-static")
TIE = "0.12"
PARALLEL = (1, 8, 32, 128)
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """python: what has sglang. tiny, large: model folders. share: of the card's memory that one server takes."""

    python: str
    tiny: Path
    large: Path
    logs: Path
    share: str = "0.2"

    @contextmanager
    def sglang(self, role: str, model: Path, *options: str, passed: Sequence[str] = ()) -> Iterator[Server]:
        """Not ready yet."""
        port = free_port()
        words = [role, "--engine", "sglang", "--sglang-python", self.python, "--model-path", str(model)]
        words += ["--port", str(port), *options]
        words += [f"--sglang-arg={each}" for each in (*BASE, self.share, *passed)]
        with running(f"sglang-{role}-{port}", words, f"http://127.0.0.1:{port}", self.logs) as server:
            yield server


def plain_sglang(bench: Bench) -> AbstractContextManager[Server]:
    """What is right: one server, no_buffer."""
    return bench.sglang("unified", bench.tiny, "--mamba-scheduler-strategy", "no_buffer")


def wait(*servers: Server) -> None:
    for server in servers:
        wait_healthy(server, START_S)


@contextmanager
def disaggregated(bench: Bench, *options: str) -> Iterator[tuple[Server, Server, Server]]:
    """Router, prefill and decode, ready."""
    port, bootstrap = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    with ExitStack() as exits:
        router = exits.enter_context(running(f"router-{port}", ["router", "--port", str(port)], url, bench.logs))
        meet = ("--router", url, *options)
        prefill = exits.enter_context(bench.sglang("prefill", bench.tiny, "--bootstrap-port", str(bootstrap), *meet))
        decode = exits.enter_context(bench.sglang("decode", bench.tiny, *meet))
        wait(prefill, decode, router)
        yield router, prefill, decode


def pd(bench: Bench, *options: str) -> Figures:
    with plain_sglang(bench) as plain, disaggregated(bench, *options) as (router, prefill, decode):
        wait(plain)
        figures = parity(router.url, plain.url, bench, parallel=8)
        return figures | ends(router.url, (prefill.url, decode.url))


def parity(url: str, baseline: str, bench: Bench, *, parallel: int, count: int = 32) -> Figures:
    """`tandem gate parity`, cold and warm. Prompts share beginnings, so that states are resumed from."""
    prompts = bench.logs / "prompts.jsonl"
    rng = random.Random(1)
    shared = [[rng.randrange(20, 900) for _ in range(length)] for length in (300, 640)]
    tails = [[rng.randrange(20, 900) for _ in range(rng.randrange(1, 400))] for _ in range(count)]
    prompts.write_text("".join(json.dumps({"input_ids": shared[i % 2] + tail}) + "\n" for i, tail in enumerate(tails)))
    words = ["gate", "parity", "--url", url, "--baseline", baseline, "--prompts", str(prompts), "--tie", TIE]
    words += ["--num-prompts", str(count), "--parallel", str(parallel)]
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=500)
    return {"parity_exit": done.returncode, "parity_said": (done.stdout + done.stderr).strip().splitlines()[-6:]}


def ends(router: str, nodes: Sequence[str]) -> Figures:
    """An abort and a disconnect in mid-answer: seconds until both nodes have nothing left, by /flush_cache (400 while
    requests run)."""
    body = {"input_ids": [30, 31], "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}, "stream": True}
    found: Figures = {}
    for how in ("abort", "disconnect"):
        with httpx.stream("POST", f"{router}/generate", json=body | {"rid": how}, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            if how == "abort":
                threading.Timer(0.2, httpx.post, (f"{router}/abort_request",), {"json": {"rid": how}}).start()
                for _ in lines:
                    pass
        begin_s = time.monotonic()
        found[f"{how}_free_s"] = _idle_after(nodes, begin_s)
    return found


def _idle_after(nodes: Sequence[str], begin_s: float) -> float | None:
    while time.monotonic() - begin_s < 20:
        if all(httpx.post(f"{node}/flush_cache", timeout=30).status_code == 200 for node in nodes):
            return round(time.monotonic() - begin_s, 2)
        time.sleep(0.1)
    return None


def detector(bench: Bench) -> Figures:
    """The supervisor refuses that setting, so SGLang is started as anybody would."""
    port = free_port()
    words = [bench.python, "-m", "sglang.launch_server", "--model-path", str(bench.tiny), "--port", str(port), *BASE]
    words += [bench.share, "--mamba-radix-cache-strategy", "extra_buffer"]
    log = bench.logs / "faulty.log"
    with plain_sglang(bench) as plain, plain_sglang(bench) as right:
        with log.open("wb") as output:
            process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        faulty = Server(name="faulty", process=process, url=f"http://127.0.0.1:{port}", log=log)
        try:
            wait(plain, right, faulty)
            return {
                "extra_buffer": parity(faulty.url, plain.url, bench, parallel=32),
                "no_buffer": parity(right.url, plain.url, bench, parallel=32),
            }
        finally:
            stop(process)


def native_folder(model: Path, made: Path) -> Path:
    """The same model for our nodes, which want a tokenizer in its folder."""
    made.mkdir(exist_ok=True)
    for file in (*model.iterdir(), MODEL / "tokenizer.json"):
        if not (made / file.name).exists():
            (made / file.name).symlink_to(file)
    return made


@contextmanager
def native(bench: Bench, model: Path, *options: str) -> Iterator[Server]:
    port = free_port()
    folder = native_folder(model, bench.logs / model.name)
    words = ["unified", "--model-path", str(folder), "--device", "cuda", "--dtype", "bfloat16", "--port", str(port)]
    with running(f"native-{port}", [*words, *options], f"http://127.0.0.1:{port}", bench.logs) as server:
        yield server


def native_parity(bench: Bench) -> Figures:
    with plain_sglang(bench) as plain, native(bench, bench.tiny) as ours:
        wait(plain, ours)
        return parity(ours.url, plain.url, bench, parallel=8)


def speed(bench: Bench) -> Figures:
    """One engine has the card at a time."""
    found: Figures = {}
    sizes = ("--max-running-requests", "128", "--max-total-tokens", "180000", "--max-mamba-cache-size", "200")
    random_weights = ("--load-format", "dummy", *sizes)
    for name in ("sglang", "native"):
        with ExitStack() as exits:
            if name == "sglang":
                large = Bench(python=bench.python, tiny=bench.tiny, large=bench.large, logs=bench.logs, share="0.85")
                graphs = ("--cuda-graph-bs-decode", *map(str, PARALLEL))
                server = exits.enter_context(large.sglang("unified", bench.large, *random_weights, passed=graphs))
            else:
                server = exits.enter_context(native(bench, bench.large, *random_weights))
            wait(server)
            for parallel in PARALLEL:
                found[f"{name}, {parallel} at once"] = figures_of(server.url, bench, parallel)
    return found


def figures_of(url: str, bench: Bench, parallel: int) -> Figures:
    """Of one server: it is compared with itself, the second time counts, when everything is warm."""
    prompts, output = bench.logs / "long.jsonl", bench.logs / "compare.json"
    rng = random.Random(parallel)
    ids = [[rng.randrange(20, 900) for _ in range(1024)] for _ in range(2 * parallel)]
    prompts.write_text("".join(json.dumps({"input_ids": each}) + "\n" for each in ids))
    words = ["compare", f"first={url}", f"second={url}", "--api", "generate", "--prompts", str(prompts)]
    words += [
        "--num-prompts",
        str(len(ids)),
        "--new-tokens",
        "128",
        "--parallel",
        str(parallel),
        "--output",
        str(output),
    ]
    subprocess.run(command(*words), check=True, capture_output=True, timeout=500)
    told: Figures = json.loads(output.read_text())[1]["speed"]
    return told


ROWS: dict[str, Callable[[Bench], Figures]] = {
    "no_buffer": lambda bench: pd(bench, "--mamba-scheduler-strategy", "no_buffer"),
    "extra_buffer": lambda bench: pd(bench, "--mamba-scheduler-strategy", "extra_buffer"),
    "detector": detector,
    "native": native_parity,
    "speed": speed,
}


def unpack(bundle: Path, logs: Path) -> str:
    """A script that runs the bundle's Python in its environment, which is not to be ours."""
    subprocess.run(
        ["bash", str(bundle / "setup.sh")], env={"B": str(bundle), "PATH": "/usr/bin:/bin:/usr/local/bin"}, check=True
    )
    script = logs / "python-sglang"
    script.write_text('#!/bin/bash\nexport B=/nowhere\n. /tmp/env.sh\ncd /tmp\nexec python3 "$@"\n')
    script.chmod(0o755)
    return str(script)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bundle", type=Path, help="folder with setup.sh, /tmp/env.sh's maker")
    parser.add_argument("--python", help="in place of --bundle: a Python that has sglang")
    parser.add_argument("--tiny", type=Path, default=Path("/tmp/models/tiny"))
    parser.add_argument("--large", type=Path, default=Path("/tmp/models/nano9b"))
    parser.add_argument("--rows", default=",".join(ROWS), help="these only, comma separated")
    parser.add_argument("--resume", action="store_true", help=f"only the rows that {NAME}.json lacks")
    parser.add_argument("--out", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    if (arguments.bundle is None) == (arguments.python is None):
        print("give --bundle or --python: there is no sglang here to run")
        return 0
    if unknown := {*arguments.rows.split(",")} - ROWS.keys():
        parser.error(f"--rows: {', '.join(sorted(unknown))}: no such row")
    kept = arguments.out / f"{NAME}.json"
    found: Figures = json.loads(kept.read_text())["figures"] if arguments.resume and kept.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        python = arguments.python or unpack(arguments.bundle, Path(folder))
        bench = Bench(python=python, tiny=arguments.tiny, large=arguments.large, logs=Path(folder))
        for name in arguments.rows.split(","):
            if "failed" in found.get(name, {"failed": ""}):
                found[name] = measured(ROWS[name], bench)
                write_result(NAME, found, arguments.out)
    for name, figures in found.items():
        print(name, json.dumps(figures, indent=1))
    return 1 if any("failed" in figures for figures in found.values()) else 0


def measured(row: Callable[[Bench], Figures], bench: Bench) -> Figures:
    """What fails is told, and tried again by --resume."""
    try:
        return row(bench)
    except (AssertionError, httpx.HTTPError, subprocess.SubprocessError, OSError) as error:
        return {"failed": f"{type(error).__name__}: {error}"[-3000:]}


if __name__ == "__main__":
    sys.exit(main())
