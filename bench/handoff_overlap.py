"""What the hand-off adds after compute: layer by layer against after the step, over a link of 100 MB/s.

`python bench/handoff_overlap.py [--rounds N] [--bandwidth BYTES_S]`: a decode rank here, two prefill ranks in processes
of their own, one that sends each layer as it is done and one that sends what a step made when it is over; the bundled
model, loopback transport, prompts of 1,500 tokens without a common prefix. The two ways take turns. What is timed is
from the end of the prompt's last forward pass on prefill to the begin of decode's first one, so sampling, commit,
digests and adoption are in it. Where a prompt takes two steps, both ways send the first one's pages during the second.
"""

from __future__ import annotations

import json
import os
import queue
import random
import select
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.results import write_result
from common.config import EngineConfig, LoopbackFaults, ModelConfig, NodeConfig, Role, TransferConfig, TransportName
from common.handoff import RoomAddress
from common.sampling import LogprobOptions, SamplingParams
from decode_node.rank import DecodeRole
from node.messages import Failure, Submit, Updates
from node.rank import Role as RankRole
from node.rank import Waker
from prefill_node.rank import PrefillRole
from tests.support.stack import MODEL
from transfer.loop import LoopThread
from transfer.rendezvous import BootstrapServer
from transfer.transport import open_transport

PROMPT_TOKENS = 1500
TARGET_RATIO = 0.35
WARM_UP_ROUNDS = 2
BUDGETS = {"1 step": 2048, "2 steps": 1024}


def node_config(role: Role, *, layerwise: bool, budget: int, bandwidth: float) -> NodeConfig:
    return NodeConfig(
        role=role,
        model=ModelConfig(path=str(MODEL)),
        engine=EngineConfig(max_total_tokens=16384, max_state_slots=24, chunked_prefill_size=budget),
        transfer=TransferConfig(
            transport=TransportName.LOOPBACK,
            disable_layerwise_transfer=not layerwise,
            faults=LoopbackFaults(bandwidth_bytes_s=bandwidth),
        ),
    )


def submit(role: RankRole, room: int, port: int) -> None:
    """A request of random tokens that `room` fixes: both ranks make the same."""
    rng = random.Random(room)
    role.submit(
        Submit(
            rid=f"r{room}",
            token_ids=[rng.randrange(3, 1024) for _ in range(PROMPT_TOKENS)],
            sampling=SamplingParams(temperature=0.0, max_new_tokens=2, ignore_eos=True),
            logprobs=LogprobOptions(wanted=False, start_len=-1, top_num=0),
            room=RoomAddress(host="127.0.0.1", port=port, room=room),
            arrival_s=time.monotonic(),
        )
    )


class Forwards:
    """When each forward pass of a role began and ended, in the clock that all processes share."""

    def __init__(self, role: PrefillRole | DecodeRole) -> None:
        self.began_s: list[float] = []
        self.ended_s: list[float] = []
        forward = role.host.runner.forward

        def timed(*arguments: Any) -> Any:
            self.began_s.append(time.monotonic())
            logits = forward(*arguments)
            self.ended_s.append(time.monotonic())
            return logits

        role.host.runner.forward = timed  # type: ignore[method-assign]

    def clear(self) -> None:
        self.began_s.clear()
        self.ended_s.clear()


def serve(role: RankRole, waker: Waker) -> None:
    """Step the rank until a request of it has ended, as `RankLoop` does."""
    while True:
        select.select([waker.fd], [], [], 0.05)
        waker.clear()
        busy = True
        while busy:
            role.poll()
            busy = role.step()
            for message in role.take_outbox():
                assert not isinstance(message, Failure), message
                if isinstance(message, Updates) and any(update.finish for update in message.items):
                    return


# The prefill rank's process. Each line of its standard input is a room; it answers with two times.


def prefill(arguments: dict[str, Any]) -> None:
    config = node_config(Role.PREFILL, **arguments)
    waker = Waker()
    role = PrefillRole(config, 0, open_transport(config.transfer), waker)
    forwards = Forwards(role)
    address = role.ready().control_address
    assert address is not None
    front = LoopThread("front")
    endpoint = BootstrapServer("127.0.0.1", 0, [address], role.host.layout, None, verify=config.transfer.verify)
    front.run(endpoint.start(), 5)
    rooms: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    threading.Thread(target=read_rooms, args=(rooms,), daemon=True).start()
    print(json.dumps(endpoint.port), flush=True)
    while (room := rooms.get()) is not None:
        forwards.clear()
        submit(role, room, endpoint.port)
        serve(role, waker)
        print(json.dumps([forwards.began_s[0], forwards.ended_s[-1]]), flush=True)
    front.run(endpoint.close(), 5)
    front.stop()
    role.close()


def read_rooms(rooms: queue.SimpleQueue[int | None]) -> None:
    for line in sys.stdin:
        rooms.put(int(line))
    rooms.put(None)


class PrefillProcess:
    def __init__(self, arguments: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--prefill", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port: int = self.read()

    def start(self, room: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{room}\n")
        self._process.stdin.flush()

    def read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


class Bench:
    """One decode rank, and a prefill rank for each way."""

    def __init__(self, budget: int, bandwidth: float) -> None:
        common = {"budget": budget, "bandwidth": bandwidth}
        self.ways = {layerwise: PrefillProcess({"layerwise": layerwise, **common}) for layerwise in (True, False)}
        config = node_config(Role.DECODE, layerwise=True, **common)
        self.waker = Waker()
        self.role = DecodeRole(config, 0, open_transport(config.transfer), self.waker)
        self.forwards = Forwards(self.role)
        self.rooms = 0

    def one(self, layerwise: bool) -> tuple[float, float]:
        """Seconds that the hand-off adds, and that the forward passes take."""
        self.rooms += 1
        way = self.ways[layerwise]
        self.forwards.clear()
        submit(self.role, self.rooms, way.port)
        way.start(self.rooms)
        serve(self.role, self.waker)
        began_s, ended_s = way.read()
        return self.forwards.began_s[0] - ended_s, ended_s - began_s

    def close(self) -> None:
        for way in self.ways.values():
            way.close()
        self.role.close()


def compare(budget: int, bandwidth: float, rounds: int) -> dict[str, Any]:
    bench = Bench(budget, bandwidth)
    exposed: dict[bool, list[float]] = {True: [], False: []}
    compute: dict[bool, list[float]] = {True: [], False: []}
    try:
        for i in range(rounds + WARM_UP_ROUNDS):
            for layerwise in (True, False) if i % 2 else (False, True):
                exposed_s, compute_s = bench.one(layerwise)
                if i >= WARM_UP_ROUNDS:
                    exposed[layerwise].append(exposed_s)
                    compute[layerwise].append(compute_s)
    finally:
        bench.close()
    ratios = [ours / old for ours, old in zip(exposed[True], exposed[False], strict=True)]
    return {
        "layerwise_ms": summary(exposed[True]),
        "after_step_ms": summary(exposed[False]),
        "ratio": round(statistics.median(exposed[True]) / statistics.median(exposed[False]), 3),
        "ratio_of_pairs": round(statistics.median(ratios), 3),
        "ratio_best": round(min(exposed[True]) / min(exposed[False]), 3),
        "compute_layerwise_ms": summary(compute[True]),
        "compute_after_step_ms": summary(compute[False]),
    }


def summary(seconds: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(seconds, n=4)
    return {name: round(1e3 * value, 2) for name, value in
            (("best", min(seconds)), ("q1", low), ("median", middle), ("q3", high))}  # fmt: skip


@click.command()
@click.option("--rounds", default=30)
@click.option("--bandwidth", default=100e6, help="Bytes a second of the link")
@click.option("--prefill", "prefill_arguments", hidden=True)
def main(rounds: int, bandwidth: float, prefill_arguments: str | None) -> None:
    if prefill_arguments is not None:
        prefill(json.loads(prefill_arguments))
        return
    rows = {name: compare(budget, bandwidth, rounds) for name, budget in BUDGETS.items()}
    print(f"{PROMPT_TOKENS} tokens, {bandwidth / 1e6:g} MB/s, {os.cpu_count()} cores, target ratio {TARGET_RATIO}")
    for name, row in rows.items():
        print(name, "  ".join(f"{key} {value}" for key, value in row.items()))
    write_result("handoff_overlap", {"rounds": rounds, "bandwidth_mb_s": bandwidth / 1e6, "by_steps": rows})


if __name__ == "__main__":
    main()
