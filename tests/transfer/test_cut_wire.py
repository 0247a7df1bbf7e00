"""Two hosts, played by two network namespaces, and the wire between them is cut. Needs root, or else is skipped."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from common.config import TransferConfig, TransportName

Make = Callable[..., Any]
Config = Callable[..., TransferConfig]

HERE, THERE = [7, 8, 9, 2], [3, 4, 11, 20]
LIVENESS_S = 0.5
CUT_S = 7.0


class Wire(NamedTuple):
    """Names of the namespaces, of the hosts and of the switch between them; addresses of the hosts."""

    prefill: str
    decode: str
    switch: str
    prefill_address: str
    decode_address: str

    def set(self, state: str) -> None:
        ip("-n", self.switch, "link", "set", "prefill", state)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


@pytest.fixture
def wire() -> Iterator[Wire]:
    name = f"tandem{os.getpid()}"
    made = Wire(f"{name}p", f"{name}d", f"{name}s", "10.93.7.1", "10.93.7.2")
    try:
        for namespace in (made.prefill, made.decode, made.switch):
            ip("netns", "add", namespace)
        ip("-n", made.switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", made.switch, "link", "set", "bridge", "up")
        for port, namespace, address in (
            ("prefill", made.prefill, made.prefill_address),
            ("decode", made.decode, made.decode_address),
        ):
            ip("-n", namespace, "link", "add", "wire", "type", "veth", "peer", "name", port, "netns", made.switch)
            ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "wire")
            for device in ("wire", "lo"):
                ip("-n", namespace, "link", "set", device, "up")
            ip("-n", made.switch, "link", "set", port, "master", "bridge", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        remove(made)
        pytest.skip(f"no network namespaces here: {error}")
    yield made
    remove(made)


def remove(wire: Wire) -> None:
    for namespace in (wire.prefill, wire.decode, wire.switch):
        subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True, timeout=10)


def test_a_cut_wire_is_noticed_and_a_mended_one_is_used(
    wire: Wire, config: Config, process: Make, tmp_path: Path
) -> None:
    """Nobody is told that the other side is dead, so nothing is released before the wire is whole again."""
    key = tmp_path / "key"
    key.write_text("a key of at least sixteen bytes")
    settings = config(
        transport=TransportName.MOONCAKE,
        cluster_key_file=str(key),
        liveness_timeout_s=LIVENESS_S,
        bootstrap_timeout_s=1.0,
        transfer_timeout_s=30.0,
    )
    p = process("prefill", on(settings, wire.prefill_address), launcher=["ip", "netns", "exec", wire.prefill])
    d = process("decode", on(settings, wire.decode_address), launcher=["ip", "netns", "exec", wire.decode])
    room_at = {"host": wire.prefill_address, "port": p.port}

    def begin(room: int) -> None:
        p.say("expect", room, "r", 5)
        d.say("open", {**room_at, "room": room}, "r", THERE, 2)
        p.wait_for("RoomOpened", room)
        p.say("write_pages", room, 0, HERE)
        p.wait_for("written", room)  # what is on its way when the wire is cut is TCP's to bring

    def end(room: int) -> None:
        p.say("send_state", room, 1, None)
        p.say("metadata", room)
        d.wait_for("Committed", room)
        p.wait_for("Released", room)

    begin(1)
    end(1)
    begin(2)
    wire.set("down")
    cut = time.monotonic()
    for side in (p, d):
        assert side.wait_for("RoomFailed", 2, LIVENESS_S + 1)[2] == "peer_silent"
    d.say("open", {**room_at, "room": 3}, "r", THERE, 3)
    assert d.wait_for("RoomFailed", 3, 2.5)[2] in ("peer_silent", "bootstrap_timeout", "peer_unreachable")
    assert not any(event[:2] == ["Released", 2] for event in d.events), "the sender may be alive"
    time.sleep(max(0.0, cut + CUT_S - time.monotonic()))
    wire.set("up")
    d.wait_for("Released", 2, CUT_S / 2)  # TCP by itself would only try again when the wire has been cut twice as long
    p.wait_for("Released", 2)
    begin(4)
    end(4)


def on(settings: TransferConfig, host: str) -> TransferConfig:
    return msgspec.structs.replace(settings, host=host)
