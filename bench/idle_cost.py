"""CPU time of a stack that nobody asks anything: router, prefill and decode node, each front and rank.

`python bench/idle_cost.py [--seconds 60] [--transport mooncake|loopback]`. `tandem up` starts the stack and asks it one
question; then its processes' user and system time is counted. Exits 1 when all of them together take LIMIT_SHARE of a
core or more.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
from results import write_result

LIMIT_SHARE = 0.02
SETTLE_S = 5.0
START_S = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--transport", default="mooncake", choices=["mooncake", "loopback"])
    arguments = parser.parse_args()
    with serving(arguments.transport) as up:
        processes = {name_of(each): each for each in up.children(recursive=True)} | {"tandem up": up}
        time.sleep(SETTLE_S)
        shares = shares_of(processes, arguments.seconds)
    total = sum(shares.values())
    for name, share in sorted(shares.items(), key=lambda item: -item[1]):
        print(f"{name:20} {share:7.2%} of a core")
    print(f"{'total':20} {total:7.2%} of a core, less than {LIMIT_SHARE:.0%} is wanted")
    figures = {"seconds": arguments.seconds, "transport": arguments.transport, "total_share": round(total, 5)}
    write_result("idle_cost", figures | {"shares": {name: round(share, 5) for name, share in shares.items()}})
    return int(total >= LIMIT_SHARE)


@contextlib.contextmanager
def serving(transport: str) -> Iterator[psutil.Process]:
    """`tandem up`, which has asked its question and serves."""
    command = [sys.executable, "-m", "cli.main", "up", "--port", "0", "--transport", transport]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        deadline = time.monotonic() + START_S
        while "serving on" not in (line := process.stdout.readline()):
            assert line and time.monotonic() < deadline, "the stack does not serve"
        yield psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def name_of(process: psutil.Process) -> str:
    """prefill_node.rank, or the command that `tandem` was given."""
    words = process.cmdline()
    module = words[words.index("-m") + 1] if "-m" in words else words[0]
    return f"{words[words.index('-m') + 2]} front" if module == "cli.main" else module


def shares_of(processes: dict[str, psutil.Process], seconds: float) -> dict[str, float]:
    """Of a core, by process, over so many seconds."""
    before, began = {name: cpu_s(each) for name, each in processes.items()}, time.monotonic()
    time.sleep(seconds)
    passed_s = time.monotonic() - began
    return {name: (cpu_s(each) - before[name]) / passed_s for name, each in processes.items()}


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    sys.exit(main())
