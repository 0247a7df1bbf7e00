"""cuda_ipc without a card: who may write here, what is refused before there is one, digests taken on a card."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
pytest.importorskip("triton", reason="Triton cannot be installed here: it exists for Linux on x86-64 and ARM")

from common.config import DType, ModelConfig, NodeConfig, Role, TransferConfig, TransportName, Verify, check_node_config
from common.errors import ConfigError, TransferError
from tests.support.stack import MODEL
from transfer.cuda_ipc import Door, Opened, _enter, _leave, is_of_card, locate, open_cuda_ipc, own_label
from transfer.device_kernels import copy_blocks, cut, hash_items, hash_items_reference
from transfer.handshake import check_fit
from transfer.transport import Block, open_transport

GUEST = """
import sys
from transfer.cuda_ipc import _enter
visit = _enter(sys.argv[1], "0")
print("in", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def door() -> Any:
    made = Door(os.urandom(8).hex())
    yield made
    made.close()


def test_a_writer_counts_until_it_says_good_bye(door: Door) -> None:
    assert door.visitors() == frozenset()
    visit = _enter(door.name, "0")
    assert door.visitors() == {own_label()}
    assert door.visitors() == {own_label()}
    _leave(visit)
    assert door.visitors() == frozenset()


def test_a_lost_connection_alone_is_no_end(door: Door) -> None:
    """The sockets of a dying process are closed before the driver hears of it."""
    _enter(door.name, "0").close()
    assert door.visitors() == {own_label()}


def test_a_killed_writer_counts_until_it_has_exited(door: Door) -> None:
    guest = subprocess.Popen([sys.executable, "-c", GUEST, door.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert guest.stdout is not None and guest.stdout.readline() == b"in\n"
        (label,) = door.visitors()
        assert label.startswith(f"{guest.pid}:")
        os.kill(guest.pid, signal.SIGSTOP)
        assert door.visitors() == {label}
        os.kill(guest.pid, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while door.visitors():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert guest.poll() is not None or _is_zombie(guest.pid)
    finally:
        guest.kill()
        guest.communicate()


def _is_zombie(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
        return file.read().rpartition(")")[2].split()[0] == "Z"


def test_nobody_behind_the_door() -> None:
    with pytest.raises(TransferError, match="process 17 is not there") as caught:
        _enter("0" * 16, "17")
    assert caught.value.code == "peer_unreachable"


def test_destinations_outside_the_peers_memory_are_refused() -> None:
    ranges = [Opened(1000, 100, 50000), Opened(2000, 100, 70000)]
    assert locate(ranges, Block(0, 2010, 90, "kv")) == 70010
    for dst, nbytes in ((999, 10), (1010, 91), (1990, 20)):
        with pytest.raises(TransferError, match="no memory registered") as caught:
            locate(ranges, Block(0, dst, nbytes, "kv"))
        assert caught.value.code == "bad_address"


def test_a_session_tells_its_card() -> None:
    session = "cuda_ipc:boot:12:3456:a1b2:door:4096+64+00"
    assert is_of_card(session, "a1b2") and not is_of_card(session, "door") and not is_of_card("", "a1b2")


def test_only_a_cards_memory() -> None:
    with pytest.raises(ConfigError, match="not of cpu") as caught:
        open_cuda_ipc("cpu")
    assert caught.value.param == "transport"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card() -> None:
    with pytest.raises(ConfigError, match="--device cuda:0: there is none here"):
        open_cuda_ipc("cuda")


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transfer.cuda_ipc", "transfer.device_copy", "transfer.device_kernels"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigError, match=r"--transport cuda_ipc: .*triton.*; install the extra gpu") as caught:
        open_transport(TransferConfig(), "cuda")
    assert caught.value.param == "transport"


def node(device: str, role: Role = Role.DECODE, **transfer: Any) -> NodeConfig:
    return NodeConfig(role=role, model=ModelConfig(path=str(MODEL), device=device), transfer=TransferConfig(**transfer))


@pytest.mark.parametrize(
    ("device", "settings", "param", "words"),
    [
        ("cuda", {"transport": TransportName.LOOPBACK}, "transport", "--transport loopback: .* --device cuda"),
        ("cuda:1", {"transport": TransportName.LOOPBACK}, "transport", "--transport loopback: .* --device cuda:1"),
        ("cpu", {"transport": TransportName.CUDA_IPC}, "transport", "--transport cuda_ipc: .* --device cpu"),
        ("cuda", {"verify": Verify.FULL}, "verify", "--verify full: .* off, digest"),
        ("cuda", {"ssm_wire_dtype": DType.BFLOAT16}, "ssm_wire_dtype", "--ssm-wire-dtype bfloat16"),
    ],
)
def test_what_does_not_go_together_is_refused(device: str, settings: dict[str, Any], param: str, words: str) -> None:
    for role in (Role.PREFILL, Role.DECODE):
        with pytest.raises(ConfigError, match=words) as caught:
            check_node_config(node(device, role, **settings))
        assert caught.value.param == param
    check_node_config(node(device, Role.UNIFIED, **settings))


def test_auto_and_mooncake_go_with_any_device() -> None:
    for device in ("cpu", "cuda"):
        for transport in (TransportName.AUTO, TransportName.MOONCAKE):
            check_node_config(node(device, transport=transport))


def test_ends_that_write_or_hash_otherwise_are_refused(config: Callable[..., TransferConfig], decode: Any) -> None:
    hello = decode(config()).transfer._identity.hello()
    check_fit(hello, hello)
    check_fit(hello, msgspec.structs.replace(hello, transport="", digest=""))
    with pytest.raises(ConfigError, match="transport: loopback here, cuda_ipc there"):
        check_fit(hello, msgspec.structs.replace(hello, transport="cuda_ipc"))
    with pytest.raises(ConfigError, match="digest: xxh3 here, other there"):
        check_fit(hello, msgspec.structs.replace(hello, digest="other"))


CPU = torch.device("cpu")
SIZES = (1, 7, 16384, 16385, 40000)  # a few words, one piece, a word more, several pieces
on_host = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels read device memory there")


class Items:
    """Items of these numbers of words in host memory, some words apart."""

    def __init__(self, *words: int, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.memory = [random.integers(0, 2**32, count + 4, np.uint32) for count in words]
        self.addresses = np.array([item.ctypes.data for item in self.memory], np.int64)
        self.words = np.array(words, np.int64)

    def hash(self) -> list[list[int]]:
        found: list[list[int]] = hash_items_reference(self.addresses, self.words).tolist()
        return found


def test_things_are_cut_into_pieces() -> None:
    thing, first, count = cut(np.array([1, 16384, 16385, 40000]))
    assert thing.tolist() == [0, 1, 2, 2, 3, 3, 3]
    assert first.tolist() == [0, 0, 0, 16384, 0, 16384, 32768]
    assert count.tolist() == [1, 16384, 16384, 1, 16384, 16384, 7232]
    assert [len(part) for part in cut(np.array([], np.int64))] == [0, 0, 0]


@on_host
def test_the_kernel_that_hashes_is_its_twin() -> None:
    items = Items(*SIZES)
    found = hash_items(items.addresses, items.words, CPU).tolist()
    assert found == items.hash()
    assert len({tuple(sums) for sums in found}) == len(SIZES)


@on_host
def test_the_kernel_copies_the_blocks_and_nothing_else() -> None:
    sources, targets = Items(*SIZES), Items(*SIZES, seed=1)
    behind = [target[words:].copy() for target, words in zip(targets.memory, SIZES, strict=True)]
    copy_blocks(sources.addresses, targets.addresses, sources.words, CPU)
    for source, target, words, rest in zip(sources.memory, targets.memory, SIZES, behind, strict=True):
        assert (target[:words] == source[:words]).all() and (target[words:] == rest).all()


def test_the_hash_is_what_it_was() -> None:
    """Two ends of different releases must agree."""
    words = np.arange(1, 9, dtype=np.uint32)
    found = hash_items_reference(np.array([words.ctypes.data]), np.array([8]))
    assert found.tolist() == [[343943662, -2075005275]]


def test_what_is_wrong_shows() -> None:
    items = Items(20000)
    before = items.hash()
    changes: list[Callable[[Any], Any]] = [
        lambda item: np.roll(item, 1),
        lambda item: np.concatenate([item[1:2], item[:1], item[2:]]),
        lambda item: np.concatenate([item[16384:], item[:16384]]),
        np.zeros_like,
        lambda item: np.where(np.arange(len(item)) == 19999, item ^ np.uint32(1), item),
    ]
    (memory,) = items.memory
    item = memory[:20000].copy()
    found = {tuple(before[0])}
    for change in changes:
        memory[:20000] = change(item)
        found.add(tuple(items.hash()[0]))
    memory[:20000] = item
    memory[20000:] ^= 1  # behind the item
    assert items.hash() == before and len(found) == 1 + len(changes)
