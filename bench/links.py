"""How fast bytes go from one device to another: by a transport between two processes, and by plain copies in one.

Used by `two_gpus.py` and `gpu.py`. `python bench/links.py TRANSPORT DEVICE MODEL_FOLDER DTYPE` is the receiving
process: it says where its memory lies, answers `check OFFSET NBYTES …` with a digest, and ends with its input.
"""

from __future__ import annotations

import hashlib
import json
import random
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from common.config import TransferConfig, TransportName
from engine.families import read_config
from engine.pools import StatePools
from node.transport_memory import pool_allocator
from transfer.mooncake import MooncakeTransport
from transfer.plan import all_layers, batches, plan_pages, plan_slot
from transfer.sender import MAX_WRITE_BYTES, WRITES_IN_FLIGHT
from transfer.transport import Block, Transport, open_transport

PAGE, SLOTS = 16, 3
SIZES = {"64 KiB": 1 << 16, "1 MiB": 1 << 20, "64 MiB": 1 << 26}
MOST_BYTES, MOST_BLOCKS = 1 << 28, 256
REPEATS, WARM_UPS = 12, 3
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """model: folder with a config. tokens: of the hand-offs whose pieces are moved."""

    model: Path
    dtype: torch.dtype
    tokens: tuple[int, ...]

    def pools(self, transport: Transport, device: str) -> StatePools:
        config = read_config(str(self.model))
        return StatePools(
            config,
            num_pages=2 * max(self.tokens) // PAGE + 2,
            num_slots=SLOTS,
            page_size=PAGE,
            dtype=self.dtype,
            ssm_dtype=torch.float32,
            device=device,
            revision="random",
            allocate=pool_allocator(transport),
        )


class Receiver:
    """The other process. session: what the transport writes to; base: where its pools begin."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        said = self._line()
        self.session, self.base = str(said["session"]), int(said["base"])

    def digest(self, blocks: Sequence[Block]) -> str:
        """sha256 of what lies in its memory where these blocks went."""
        assert self._process.stdin is not None
        places = [f"{block.dst - self.base} {block.nbytes}" for block in blocks]
        self._process.stdin.write(" ".join(["check", *places]) + "\n")
        self._process.stdin.flush()
        return str(self._line()["digest"])

    def _line(self) -> Figures:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the receiving process ended with {self._process.wait()}"
        found: Figures = json.loads(line)
        return found


@contextmanager
def receiver(transport: TransportName, device: str, shape: Shape) -> Iterator[Receiver]:
    arguments = [transport.value, device, str(shape.model), str(shape.dtype), *map(str, shape.tokens)]
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield Receiver(process)
    finally:
        process.kill()
        process.communicate()


def measure(name: TransportName, devices: tuple[str, str], shape: Shape, *, pinned: bool = True) -> Figures:
    """GB/s by kind of blocks: of the transport, of plain copies of the same blocks, and the ratio of the two.

    pinned: whether Mooncake over TCP reads from page-locked memory."""
    transport = open_transport(TransferConfig(transport=name), devices[0])
    if not pinned:
        assert isinstance(transport, MooncakeTransport)
        transport._slots = None
    pools = shape.pools(transport, devices[0])
    memory = pools.ranges()[0]
    source = _memory(pools)
    source.copy_(
        torch.randint(0, 256, (1 << 20,), dtype=torch.uint8).repeat(-(-memory.nbytes // (1 << 20)))[: memory.nbytes]
    )
    plain = torch.empty(memory.nbytes, dtype=torch.uint8, device=devices[1])
    figures: Figures = {"installed": transport.name}
    with receiver(name, devices[1], shape) as peer:
        for what, blocks in _cases(pools, peer.base - memory.address, shape).items():
            write_ms = median_ms(lambda blocks=blocks: _write(transport, peer.session, blocks))
            copy_ms = median_ms(lambda blocks=blocks: _copy(source, plain, blocks, memory.address, peer.base))
            nbytes = sum(block.nbytes for block in blocks)
            figures[what] = {
                "blocks": len(blocks),
                "mib": round(nbytes / 2**20, 2),
                "write_ms": round(write_ms, 3),
                "copy_ms": round(copy_ms, 3),
                "write_gb_s": round(nbytes / write_ms / 1e6, 2),
                "copy_gb_s": round(nbytes / copy_ms / 1e6, 2),
                "ratio": round(copy_ms / write_ms, 2),
                "intact": peer.digest(blocks) == _digest(source, [(b.src - memory.address, b.nbytes) for b in blocks]),
            }
        transport.forget(peer.session)
    transport.close()
    return figures


def _cases(pools: StatePools, shift: int, shape: Shape) -> dict[str, list[Block]]:
    """shift: from an address here to the same place there."""
    memory = pools.ranges()[0]
    cases: dict[str, list[Block]] = {}
    for what, size in SIZES.items():
        count = min(MOST_BLOCKS, MOST_BYTES // size, memory.nbytes // size)
        for blocks in {min(1, count), count} - {0}:
            starts = [memory.address + i * size for i in range(blocks)]
            cases[f"{blocks} x {what}"] = [Block(at, at + shift, size, "kv") for at in starts]
    layout, mine = pools.layout(), pools.placements()
    theirs = tuple(
        type(place)(base=place.base + shift, stride_bytes=place.stride_bytes, count=place.count) for place in mine
    )
    layers = all_layers(layout)
    for tokens in shape.tokens:
        pages = list(range(1, 1 + tokens // PAGE))
        for what, order in (
            ("", pages),
            (", scattered", random.Random(1).sample(range(1, pools.num_pages), len(pages))),
        ):
            pairs = list(zip(pages, order, strict=True))
            blocks = plan_slot(layout, mine, theirs, (1, 2), layers, track=False)
            cases[f"{tokens} tokens{what}"] = blocks + plan_pages(layout, mine, theirs, pairs, layers)
    return cases


def _write(transport: Transport, session: str, blocks: Sequence[Block]) -> None:
    """As the hand-off does."""
    waits: deque[Callable[[], None]] = deque()
    for batch in batches(blocks, MAX_WRITE_BYTES):
        if len(waits) == WRITES_IN_FLIGHT:
            waits.popleft()()
        waits.append(transport.begin(session, batch))
    while waits:
        waits.popleft()()


def _copy(source: torch.Tensor, target: torch.Tensor, blocks: Sequence[Block], mine: int, theirs: int) -> None:
    for block in blocks:
        from_, to = block.src - mine, block.dst - theirs
        target[to : to + block.nbytes].copy_(source[from_ : from_ + block.nbytes], non_blocking=True)
    for memory in (source, target):
        if memory.is_cuda:
            torch.cuda.synchronize(memory.device)


def median_ms(work: Callable[[], object]) -> float:
    walls = []
    for _ in range(WARM_UPS + REPEATS):
        begin = time.perf_counter()
        work()
        walls.append(time.perf_counter() - begin)
    return statistics.median(walls[WARM_UPS:]) * 1e3


def _memory(pools: StatePools) -> torch.Tensor:
    """All of the pools, uint8."""
    memory = pools._memory
    return memory if memory.dtype is torch.uint8 else memory.view(torch.uint8)


def _digest(memory: torch.Tensor, places: Sequence[tuple[int, int]]) -> str:
    found = hashlib.sha256()
    for begin, nbytes in places:
        found.update(memory[begin : begin + nbytes].cpu().numpy().tobytes())
    return found.hexdigest()


def receive(name: str, device: str, model: str, dtype: str, *tokens: str) -> None:
    transport = open_transport(TransferConfig(transport=TransportName(name)), device)
    kind = getattr(torch, dtype.removeprefix("torch."))
    pools = Shape(model=Path(model), dtype=kind, tokens=tuple(map(int, tokens))).pools(transport, device)
    print(json.dumps({"session": transport.session, "base": pools.ranges()[0].address}), flush=True)
    for line in sys.stdin:
        numbers = [int(word) for word in line.split()[1:]]
        places = list(zip(numbers[::2], numbers[1::2], strict=True))
        transport.settle()
        print(json.dumps({"digest": _digest(_memory(pools), places)}), flush=True)


if __name__ == "__main__":
    receive(*sys.argv[1:])
