"""Hand-off of a 1,500-token prompt of the bundled model against a raw Mooncake TCP batch of the same blocks.

`python bench/transfer_goodput.py [--rounds N] [--verify off|digest|full]`. Compute is finished and the room is open.
What is timed is, for Tandem, from `send_pages` until decode's transfer wakes its scheduler with `Committed` (writes,
digests at both ends, commit; `seen_ms` is when a waiting thread has it), and for the raw batch from the call to its
return. Sender and receiver are processes of their own; the two ways
alternate, so that both meet the same machine. `pages`: how the page tables lie: one run at both ends, or runs of a few
pages. `ratio`: median of the rounds' raw ÷ Tandem; `ratio_best`: of the two ways' best tenths, which a busy machine
disturbs least. `cpu`: of both processes with all their threads, which is what a busy machine does not change; Tandem's
has the room's opening and end in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from results import write_result

from common.config import TransferConfig, Verify
from common.handoff import HandoffMetadata, RoomAddress
from common.layout import PoolLayout, PoolPlacement, StateKind, StateLayout
from common.sampling import TokenLogprob
from transfer import BootstrapServer, Committed, DecodeTransfer, PrefillTransfer, Released, RoomOpened, open_transport
from transfer.loop import LoopThread
from transfer.plan import all_layers, plan_pages, plan_slot
from transfer.transport import Block, Transport

PROMPT_TOKENS, PAGE_SIZE = 1500, 16
NUM_PAGES = -(-PROMPT_TOKENS // PAGE_SIZE)
PAGES, SLOTS = 512, 16
TARGET_RATIO = 0.9
WARM_UP_ROUNDS = 5


def bundled_layout() -> StateLayout:
    """Two attention layers of 2 KV heads × 64, five Mamba layers of 8 heads × 64 × 64, all float32."""
    kv: dict[str, Any] = {
        "kind": StateKind.KV,
        "dtype": "float32",
        "item_shape": (PAGE_SIZE, 2, 64),
        "item_bytes": PAGE_SIZE * 512,
    }
    conv: dict[str, Any] = {
        "kind": StateKind.CONV,
        "part": "conv",
        "dtype": "float32",
        "item_shape": (768, 3),
        "item_bytes": 9216,
    }
    ssm: dict[str, Any] = {
        "kind": StateKind.SSM,
        "part": "ssm",
        "dtype": "float32",
        "item_shape": (8, 64, 64),
        "item_bytes": 131072,
    }
    pools = [PoolLayout(layer=layer, part=part, blocks=(), **kv) for layer in (3, 8) for part in ("k", "v")]
    pools += [PoolLayout(layer=layer, blocks=(), **each) for layer in (0, 2, 4, 6, 9) for each in (conv, ssm)]
    return StateLayout(
        model="bundled",
        revision="bench",
        page_size=PAGE_SIZE,
        chunk=64,
        conv_width=4,
        vocab_size=2048,
        pools=tuple(pools),
    )


def allocate(layout: StateLayout, transport: Transport) -> tuple[np.ndarray, tuple[PoolPlacement, ...]]:
    """All pools of a rank, one after the other in one buffer."""
    counts = [PAGES if pool.kind is StateKind.KV else SLOTS for pool in layout.pools]
    sizes = [pool.item_bytes * count for pool, count in zip(layout.pools, counts, strict=True)]
    memory = np.frombuffer(transport.host_buffer(sum(sizes)), np.uint8)
    base = memory.ctypes.data
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    places = [
        PoolPlacement(base=base + start, stride_bytes=pool.item_bytes, count=count)
        for start, pool, count in zip(starts, layout.pools, counts, strict=True)
    ]
    return memory, tuple(places)


def page_table(run: int, seed: int) -> list[int]:
    """NUM_PAGES pages in runs of `run`, the runs in random order; one run from page 1 when `run` is 0."""
    if not run:
        return list(range(1, NUM_PAGES + 1))
    starts = np.random.default_rng(seed).permutation(np.arange(1, PAGES - run, run + 1))
    return [int(start) + i for start in starts for i in range(run)][:NUM_PAGES]


class Waker:
    """Turns a transfer's events into waits. woken_s: when the last event was queued."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.woken_s = 0.0

    def wake(self) -> None:
        self.woken_s = time.monotonic()
        self._event.set()

    def wait(self, transfer: Any, kind: type) -> None:
        while True:
            self._event.wait(10)
            self._event.clear()
            if any(isinstance(event, kind) for event in transfer.poll()):
                return


# The sender's process. It answers each line of its standard input with one line.


def sender(config: TransferConfig) -> None:
    layout, transport, waker = bundled_layout(), open_transport(config), Waker()
    memory, places = allocate(layout, transport)
    memory[:] = np.random.default_rng(1).integers(0, 256, len(memory), np.uint8)
    transfer = PrefillTransfer(layout, places, transport, config, waker.wake)
    front = LoopThread("front")
    endpoint = BootstrapServer("127.0.0.1", 0, [transfer.control_address], layout, None, verify=config.verify)
    front.run(endpoint.start(), 5)
    print(json.dumps(endpoint.port), flush=True)
    for line in sys.stdin:
        what, room, pages, argument = json.loads(line)
        if what == "raw":
            session, theirs, their_pages = argument
            where = tuple(PoolPlacement(base=base, stride_bytes=s, count=c) for base, s, c in theirs)
            print(raw(layout, transport, places, where, session, pages, their_pages), flush=True)
        elif what == "expect":
            transfer.expect(room, "r", 5)
            waker.wait(transfer, RoomOpened)
            print(0, flush=True)
        else:
            started = time.monotonic()
            transfer.send_pages(room, 0, pages)
            transfer.send_state(room, 1)
            transfer.commit(room, metadata(room))
            waker.wait(transfer, Released)
            print(started, flush=True)
    front.run(endpoint.close(), 5)
    front.stop()
    transfer.close()


def blocks_of(
    layout: StateLayout,
    mine: Sequence[PoolPlacement],
    theirs: Sequence[PoolPlacement],
    pages: Sequence[int],
    their_pages: Sequence[int],
) -> list[Block]:
    """What a hand-off of these pages and of slot 1, into slot 2, writes."""
    everywhere = all_layers(layout)
    pairs = list(zip(pages, their_pages, strict=True))
    blocks = plan_pages(layout, mine, theirs, pairs, everywhere)
    return blocks + plan_slot(layout, mine, theirs, (1, 2), everywhere, track=False)


def raw(
    layout: StateLayout,
    transport: Transport,
    mine: Sequence[PoolPlacement],
    theirs: Sequence[PoolPlacement],
    session: str,
    pages: Sequence[int],
    their_pages: Sequence[int],
) -> float:
    """Seconds that one batch of the same blocks takes; making the list is not counted."""
    blocks = blocks_of(layout, mine, theirs, pages, their_pages)
    sources, targets, sizes, _ = (list(column) for column in zip(*blocks, strict=True))
    engine = transport._engine  # type: ignore[attr-defined]
    started = time.monotonic()
    code = engine.batch_transfer_sync_write(session, sources, targets, sizes)
    assert code == 0, code
    return time.monotonic() - started


def metadata(room: int) -> HandoffMetadata:
    return HandoffMetadata(
        prompt_digest=b"",
        room=room,
        rid="r",
        num_prompt_tokens=PROMPT_TOKENS,
        num_cached_tokens=0,
        tracked_position=-1,
        first_token=TokenLogprob(-0.1, 1),
        sampling_seed=0,
        queue_s=0.0,
        prefill_s=0.0,
    )


# The receiver's process, which also drives the rounds.


class Receiver:
    def __init__(self, config: TransferConfig) -> None:
        self.layout, self.transport, self.waker = bundled_layout(), open_transport(config), Waker()
        self.memory, self.places = allocate(self.layout, self.transport)
        self.memory[:] = 0
        self.transfer = DecodeTransfer(
            self.layout, self.places, self.transport, config, self.waker.wake, node_id="decode"
        )
        self.child = subprocess.Popen(
            [sys.executable, __file__, "--sender", "--verify", config.verify.value],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(self.read())
        self.rooms = 0

    def tell(self, *what: Any) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(what) + "\n")
        self.child.stdin.flush()

    def read(self) -> float:
        assert self.child.stdout is not None
        return float(self.child.stdout.readline())

    def cpu_s(self) -> float:
        """CPU time of both processes so far, all threads."""
        return time.process_time() + time.clock_gettime(~self.child.pid << 3 | 2)  # the other process' clock: its id

    def raw(self, mine: list[int], theirs: list[int]) -> float:
        places = [(place.base, place.stride_bytes, place.count) for place in self.places]
        self.tell("raw", 0, theirs, (self.transport.session, places, mine))
        return self.read()

    def tandem(self, mine: list[int], theirs: list[int]) -> tuple[float, float]:
        """Seconds until the event was queued and until it was seen. Both processes read the same monotonic clock."""
        self.rooms += 1
        self.tell("expect", self.rooms, [], None)
        address = RoomAddress(host="127.0.0.1", port=self.port, room=self.rooms)
        self.transfer.open(address, "r", mine, 2)
        self.read()
        self.tell("send", self.rooms, theirs, None)
        self.waker.wait(self.transfer, Committed)
        seen_s = time.monotonic()
        started_s = self.read()
        return self.waker.woken_s - started_s, seen_s - started_s

    def close(self) -> None:
        assert self.child.stdin is not None and self.child.stdout is not None
        self.child.stdin.close()
        self.child.wait(10)
        self.child.stdout.close()
        self.transfer.close()
        self.transport.close()


def compare(receiver: Receiver, run: int, rounds: int) -> dict[str, Any]:
    """Paired rounds; the median of the rounds' ratios decides."""
    mine, theirs = page_table(run, 1), page_table(run, 2)
    raws, queued, seen, raw_cpu, tandem_cpu = [], [], [], [], []
    for i in range(rounds + WARM_UP_ROUNDS):
        for way in ("raw", "tandem") if i % 2 else ("tandem", "raw"):
            before_s = receiver.cpu_s()
            timed = receiver.raw(mine, theirs) if way == "raw" else receiver.tandem(mine, theirs)
            cpu_s = receiver.cpu_s() - before_s
            if i < WARM_UP_ROUNDS:
                continue
            if isinstance(timed, float):
                raws.append(timed)
                raw_cpu.append(cpu_s)
            else:
                queued.append(timed[0])
                seen.append(timed[1])
                tandem_cpu.append(cpu_s)
    blocks = blocks_of(receiver.layout, receiver.places, receiver.places, theirs, mine)
    return {
        "pages": f"runs of {run}" if run else "one run",
        "blocks": len(blocks),
        "megabytes": round(sum(block.nbytes for block in blocks) / 1e6, 2),
        "raw_ms": round(1e3 * statistics.median(raws), 3),
        "tandem_ms": round(1e3 * statistics.median(queued), 3),
        "seen_ms": round(1e3 * statistics.median(seen), 3),
        "ratio": round(statistics.median(raw / ours for raw, ours in zip(raws, queued, strict=True)), 3),
        "raw_best_ms": round(1e3 * best(raws), 3),
        "tandem_best_ms": round(1e3 * best(queued), 3),
        "ratio_best": round(best(raws) / best(queued), 3),
        "raw_cpu_ms": round(1e3 * statistics.median(raw_cpu), 3),
        "tandem_cpu_ms": round(1e3 * statistics.median(tandem_cpu), 3),
    }


def best(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=10)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--verify", type=Verify, default=Verify.DIGEST)
    parser.add_argument("--sender", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    config = TransferConfig(verify=arguments.verify)
    if arguments.sender:
        sender(config)
        return
    receiver = Receiver(config)
    try:
        rows = [compare(receiver, run, arguments.rounds) for run in (0, 16, 4)]
    finally:
        receiver.close()
    print(f"{PROMPT_TOKENS} tokens, verify {arguments.verify.value}, {os.cpu_count()} cores, target {TARGET_RATIO}")
    print("\n".join("  ".join(f"{name} {value}" for name, value in row.items()) for row in rows))
    write_result("transfer_goodput", {"verify": arguments.verify.value, "rounds": arguments.rounds, "rows": rows})


if __name__ == "__main__":
    main()
