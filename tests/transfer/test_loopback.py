"""The loopback transport: faults that are switched while the process runs, and peers that come and go."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from common.config import LoopbackFaults
from common.errors import TransferError
from tests.support.stack import REPO
from transfer.loopback import LoopbackTransport
from transfer.transport import Block


class Link:
    """One transport writing into its own memory."""

    def __init__(self, faults: LoopbackFaults) -> None:
        self.transport = LoopbackTransport(faults)
        self.source, self.target = (ctypes.create_string_buffer(bytes([fill]) * 8, 8) for fill in (7, 1))
        self.transport.register(ctypes.addressof(self.target), 8)

    def write(self, part: str = "kv") -> bytes:
        """What lies at the target afterwards."""
        self.target.raw = b"\1" * 8
        block = Block(ctypes.addressof(self.source), ctypes.addressof(self.target), 8, part)
        self.transport.write(self.transport.session, [block])
        return self.target.raw


def test_the_file_holds_while_it_is_there(tmp_path: Path) -> None:
    file = tmp_path / "faults"
    link = Link(LoopbackFaults(file=str(file)))
    assert link.write() == b"\7" * 8
    for faults, expected in ((LoopbackFaults(zero="kv"), b"\0" * 8), (LoopbackFaults(drop="kv"), b"\1" * 8)):
        fresh = tmp_path / "fresh"
        fresh.write_bytes(msgspec.json.encode(faults))
        fresh.rename(file)
        assert link.write() == expected
        assert link.write("ssm") == b"\7" * 8
    file.unlink()
    assert link.write() == b"\7" * 8


def test_a_write_that_fails_writes_nothing() -> None:
    link = Link(LoopbackFaults(fail="kv"))
    with pytest.raises(TransferError, match="kv failed on purpose") as failure:
        link.write()
    assert failure.value.code == "write_failed" and link.target.raw == b"\1" * 8
    assert link.write("conv") == b"\7" * 8


@pytest.mark.parametrize("content", [b"", b"{", b'{"every": "x"}'])
def test_a_file_that_makes_no_sense_fails_the_write(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "faults").write_bytes(content)
    with pytest.raises(TransferError) as failure:
        Link(LoopbackFaults(file=str(tmp_path / "faults"))).write()
    assert failure.value.code == "bad_faults"


_PEER = """
import sys
from tests.support.stack import REPO
from transfer.loopback import LoopbackTransport
transport = LoopbackTransport()
memory = transport.host_buffer(1 << 20)
print(transport.session, flush=True)
sys.stdin.read()
"""


def test_the_memory_of_a_dead_peer_is_let_go() -> None:
    """It is when the next peer comes. A mapping that stays would keep it in use."""
    gc.collect()  # of other tests
    before = _num_mappings()
    transport = LoopbackTransport()
    source = ctypes.create_string_buffer(b"x", 8)
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", _PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPO
        ) as peer:
            assert peer.stdout is not None
            session = peer.stdout.readline().strip()
            address = int(session.split(":")[3].split("+")[1])
            transport.write(session, [Block(ctypes.addressof(source), address, 8, "kv")])
    assert _num_mappings() == before + 1
    transport.close()


def _num_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("tandem-state (deleted)")
