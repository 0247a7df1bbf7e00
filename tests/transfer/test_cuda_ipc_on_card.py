"""Transports of a card's memory: copies inside a process and between two, digests, the whole hand-off with its faults.

Those over Mooncake are skipped where it is not installed or knows no CUDA.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton cannot be installed here: it exists for Linux on x86-64 and ARM")

from common.config import EngineConfig, TransferConfig, TransportName, Verify
from common.errors import ConfigError, TransferError
from common.layout import PoolPlacement
from node.transport_memory import pool_allocator
from tests.support.ranks import (
    Request,
    Snapshots,
    assert_bytes_crossed_unchanged,
    assert_equivalent,
    disaggregated_ranks,
    unified_ranks,
)
from tests.support.stack import generate, stack
from transfer.cuda_ipc import CudaIpcTransport
from transfer.device_digest import DeviceReader
from transfer.device_kernels import hash_items, hash_items_reference
from transfer.digest import StateDigests
from transfer.transport import Block, open_transport

sys.path.insert(0, str(Path(__file__).parent))
from transfer_rig import make_layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(240),
]
MIB = 1 << 20
WAYS = (TransportName.CUDA_IPC, TransportName.MOONCAKE, TransportName.AUTO)
WRITER = """
import sys, torch
from node.transport_memory import pool_allocator
from transfer.cuda_ipc import CudaIpcTransport
from transfer.transport import Block
transport = CudaIpcTransport(torch.device("cuda"))
mine = pool_allocator(transport)(1 << 20)
mine.fill_(7)
torch.cuda.synchronize()
session, target = sys.argv[1], int(sys.argv[2])
for line in sys.stdin:
    match line.split():
        case ["write", count]:
            size = (1 << 20) // int(count)
            spread = [Block(mine.data_ptr() + i * size, target + i * size, size - 4, "kv") for i in range(int(count))]
            transport.write(session, spread)
        case ["forget"]:
            transport.forget(session)
    print("done", flush=True)
"""


def on_card(way: TransportName) -> dict[str, Any]:
    """Settings of ranks that hand over in this way."""
    try:
        open_transport(TransferConfig(transport=way), "cuda").close()
    except ConfigError as error:
        pytest.skip(error.message)
    return {"transport": way, "device": "cuda"}


@pytest.fixture
def transport() -> Iterator[CudaIpcTransport]:
    made = CudaIpcTransport(torch.device("cuda"))
    yield made
    made.close()


class Writer:
    def __init__(self, transport: CudaIpcTransport, target: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, transport.session, str(target)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def do(self, line: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@pytest.fixture
def writer() -> Iterator[Callable[[CudaIpcTransport, int], Writer]]:
    made: list[Writer] = []

    def make(transport: CudaIpcTransport, target: int) -> Writer:
        made.append(Writer(transport, target))
        return made[-1]

    yield make
    for each in made:
        each.process.kill()
        each.process.communicate()


@pytest.mark.parametrize("count", [1, 5, 1000])
def test_copies_inside_a_process(transport: CudaIpcTransport, count: int) -> None:
    memory = pool_allocator(transport)(8 * MIB)
    assert memory.is_cuda and not memory.any()
    assert not transport.bursts(transport.session) and transport.bursts("cuda_ipc:boot:1:2:another:door:")
    memory[: 4 * MIB] = torch.randint(0, 256, (4 * MIB,), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    size = 4 * MIB // count // 4 * 4
    order = torch.randperm(count).tolist()
    base = memory.data_ptr()
    transport.write(
        transport.session, [Block(base + i * size, base + 4 * MIB + order[i] * size, size, "kv") for i in range(count)]
    )
    source = memory[: count * size].view(count, size)
    assert torch.equal(memory[4 * MIB :][: count * size].view(count, size)[order], source)


def test_writes_outside_are_refused(transport: CudaIpcTransport) -> None:
    memory = pool_allocator(transport)(4096)
    with pytest.raises(TransferError, match="no memory registered") as caught:
        transport.write(transport.session, [Block(memory.data_ptr(), memory.data_ptr() + 4090, 8, "kv")])
    assert caught.value.code == "bad_address"
    with pytest.raises(TransferError, match="words") as caught:
        transport.write(transport.session, [Block(memory.data_ptr(), memory.data_ptr() + 2, 8, "kv")])
    assert caught.value.code == "bad_address"
    for session in ("loopback:1:2:3", transport.session.replace(":", ":elsewhere", 1)):
        with pytest.raises(TransferError) as caught:
            transport.write(session, [Block(memory.data_ptr(), memory.data_ptr(), 8, "kv")])
        assert caught.value.code == "bad_session"


@pytest.mark.parametrize("count", [1, 1000])
def test_copies_between_processes_and_the_end_of_the_writer(
    transport: CudaIpcTransport, writer: Callable[..., Writer], count: int
) -> None:
    memory = pool_allocator(transport)(MIB)
    other = writer(transport, memory.data_ptr())
    other.do(f"write {count}")
    size = MIB // count
    expected = torch.zeros(MIB, dtype=torch.uint8)
    expected[: count * size].view(count, size)[:, : size - 4] = 7
    assert torch.equal(memory.cpu(), expected)
    (label,) = transport.inbound()
    assert label.startswith(f"{other.process.pid}:") and label not in transport.outbound()
    other.do("forget")
    assert transport.inbound() == frozenset()
    memory.zero_()
    torch.cuda.synchronize()
    other.do(f"write {count}")
    assert torch.equal(memory.cpu(), expected) and transport.inbound() == {label}
    other.process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while transport.inbound():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_dead_peer_is_let_go_of(transport: CudaIpcTransport) -> None:
    """A writer whose peer has died goes on; its memory is free again once it is forgotten."""
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, torch; from transfer.cuda_ipc import CudaIpcTransport as T; t = T(torch.device('cuda'));"
            "a = t.device_buffer(8 << 30); print(t.session, a, flush=True); sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert owner.stdout is not None
        session, address = owner.stdout.readline().split()
        mine = pool_allocator(transport)(4096)
        block = Block(mine.data_ptr(), int(address), 4096, "kv")
        transport.write(session, [block])
    finally:
        owner.kill()
        owner.communicate()
    transport.write(session, [block])
    held = torch.cuda.mem_get_info()[0]
    transport.forget(session)
    deadline = time.monotonic() + 30
    while torch.cuda.mem_get_info()[0] < held + (7 << 30):
        assert time.monotonic() < deadline, "its memory is still in use"
        time.sleep(0.01)
    with pytest.raises(TransferError) as caught:
        transport.write(session, [block])
    assert caught.value.code == "peer_unreachable"


def test_the_hash_on_the_card_is_its_twin() -> None:
    words = torch.randint(-(2**31), 2**31, (3, 40000), dtype=torch.int32)
    there = words.cuda()
    counts = np.array([40000, 16385, 5])

    def addresses(base: int) -> np.ndarray:
        return base + np.arange(3) * 160000

    found = hash_items(addresses(there.data_ptr()), counts, torch.device("cuda")).cpu()
    assert torch.equal(found, hash_items_reference(addresses(words.data_ptr()), counts))


def test_digests_name_the_part(transport: CudaIpcTransport) -> None:
    layout = make_layout()
    sizes = [8 * pool.item_bytes for pool in layout.pools]
    memory = pool_allocator(transport)(sum(sizes))
    memory.copy_(torch.randint(0, 256, (len(memory),), dtype=torch.uint8))
    places = [
        PoolPlacement(base=memory.data_ptr() + sum(sizes[:i]), stride_bytes=pool.item_bytes, count=8)
        for i, pool in enumerate(layout.pools)
    ]
    reader = DeviceReader(layout, places, 0)

    def digests() -> dict[str, bytes]:
        taken: StateDigests = reader.begin(Verify.DIGEST)
        for pages in ([1, 2], [7]):
            taken.pages(range(5), pages)
        taken.slot(range(5), 3, track=False)
        taken.slot(range(5), 4, track=True)
        return taken.digests()

    before = digests()
    assert sorted(before) == ["conv", "kv", "ssm", "track"] and digests() == before
    for pool, item, part in ((0, 7, "kv"), (3, 1, "kv"), (4, 3, "conv"), (5, 3, "ssm"), (9, 4, "track")):
        at = sum(sizes[:pool]) + item * layout.pools[pool].item_bytes + 5
        memory[at] ^= 1
        torch.cuda.synchronize()
        after = digests()
        assert [name for name in before if before[name] != after[name]] == [part]
        memory[at] ^= 1
        torch.cuda.synchronize()


def tasks(lengths: Sequence[int], new: int = 12) -> list[Request]:
    generator = torch.Generator().manual_seed(11)
    return [
        Request(prompt=torch.randint(3, 1024, (n,), generator=generator).tolist(), max_new_tokens=new) for n in lengths
    ]


ENGINE = EngineConfig(max_total_tokens=16384, max_state_slots=24, max_running_requests=8, chunked_prefill_size=512)
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500, 513, 1100)


@pytest.mark.parametrize("way", WAYS)
def test_disaggregated_is_unified_and_bytes_cross_unchanged(way: TransportName) -> None:
    settings = on_card(way)
    wanted = tasks(LENGTHS)
    with unified_ranks(engine=ENGINE, device="cuda") as ranks:
        alone = [ranks.run([task])[0] for task in wanted]
    with disaggregated_ranks(engine=ENGINE, **settings) as ranks:
        snapshots = Snapshots()
        snapshots.watch(ranks.prefill, ranks.decode)
        found = [ranks.run([task])[0] for task in wanted]
        again = [ranks.run([task])[0] for task in wanted if len(task.prompt) > 128]
        together = ranks.run(tasks(LENGTHS[::-1]))
        ranks.assert_all_free()
    assert [outcome.error for outcome in (*found, *again, *together)] == [None] * (2 * len(LENGTHS) + len(again))
    assert [outcome.ids for outcome in found] == [outcome.ids for outcome in alone]
    for got, reference in zip(found, alone, strict=True):
        assert_equivalent(got, reference, gap=0.0, logprob=1e-3)
    warm = [outcome for outcome in again if outcome.cached]
    assert len(warm) == len(again) > 0
    long = [outcome for outcome, task in zip(alone, wanted, strict=True) if len(task.prompt) > 128]
    assert [outcome.ids for outcome in again] == [outcome.ids for outcome in long]
    assert_bytes_crossed_unchanged(snapshots, len(snapshots.sent))


@pytest.mark.parametrize("way", [TransportName.CUDA_IPC, TransportName.MOONCAKE])
@pytest.mark.parametrize("part", ["kv", "conv", "ssm", "track"])
def test_a_part_that_arrives_as_zeros_is_noticed(part: str, way: TransportName) -> None:
    with disaggregated_ranks(engine=ENGINE, **on_card(way)) as ranks:
        sender: Any = ranks.prefill.transport
        zeros = sender.device_buffer(8 * MIB)
        begin = sender.begin

        def zeroed(session: str, blocks: Sequence[Block], nth_room: int = 0) -> Callable[[], None]:
            wrong = [block._replace(src=zeros) if block.part == part else block for block in blocks]
            return begin(session, wrong, nth_room)  # type: ignore[no-any-return]

        sender.begin = zeroed
        (outcome,) = ranks.run(tasks([100]))
        sender.begin = begin
        (after,) = ranks.run(tasks([101]))
        assert after.error is None
        ranks.assert_all_free()
    assert outcome.error is not None and outcome.error.code == "digest_mismatch"
    assert part in outcome.error.message


@pytest.mark.parametrize("way", [TransportName.AUTO, TransportName.MOONCAKE])
def test_two_processes_through_the_router(tmp_path: Path, way: TransportName) -> None:
    on_card(way)
    prompts = [[3 + (i * 37 + j * 11) % 1000 for j in range(n)] for i, n in enumerate((5, 64, 200, 300, 700, 1500))]
    extra = (
        "--device",
        "cuda",
        "--transport",
        way.value,
        "--max-total-tokens",
        "16384",
        "--max-mamba-cache-size",
        "32",
    )
    with stack(tmp_path, with_unified=True, extra=(*extra, "--max-running-requests", "8")) as running:
        assert running.unified is not None

        def ask(url: str, ids: list[int]) -> dict[str, Any]:
            body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}}
            answer = generate(url, body)
            assert answer.status_code == 200, answer.text
            return answer.json()  # type: ignore[no-any-return]

        for ids in prompts:
            expected, got = (ask(server.url, ids) for server in (running.unified, running.router))
            assert got["output_ids"] == expected["output_ids"]
        warm = ask(running.router.url, prompts[-1])
        assert warm["output_ids"] == ask(running.unified.url, prompts[-1])["output_ids"]
        assert warm["meta_info"]["cached_tokens"] >= 1024
        for server in (running.prefill, running.decode):
            info = httpx.get(f"{server.url}/server_info", timeout=10).json()
            assert info["disaggregation_transfer_backend"] == way.value
            assert info["transport"].startswith("cuda_ipc" if way is TransportName.AUTO else "mooncake-tcp")
            assert server.is_idle()
