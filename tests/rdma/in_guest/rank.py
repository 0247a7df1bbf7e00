"""One rank in the guest: a prefill or a decode rank with the real transfer, or only its transport.

    python rank.py prefill|decode|open '{"protocol": …, "device": …, "host": …, "without": [protections]}'

Writes a line of JSON: what was installed and what was seen, or how it was refused. The ranks know each other's pools
by their seeds: only the hand-off joins them. Decode stays for as long as prefill does.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transfer_rig import Decode, Pools, Prefill, make_layout, metadata

from common.config import Protocol, TransferConfig
from common.errors import ConfigError
from common.handoff import RoomAddress
from common.layout import PoolLayout, StateKind
from transfer import Committed, Released, RoomFailed, RoomOpened, Sent, Transport, mooncake, open_transport
from transfer.posting import Piece
from transfer.sockets import open_files

BOOTSTRAP = ("10.77.0.1", 8998)
KEY_FILE = "/tmp/cluster-key"
PREFILL_SEED, DECODE_SEED = 1, 2
PATIENCE_S = 120.0
NUM_LAYERS = 5
KV_BYTES, CONV_BYTES, SSM_BYTES = 16 << 10, 12 << 10, 256 << 10
AT_THE_END = metadata(0).num_prompt_tokens


class Case(NamedTuple):
    """One room: pages, slot and track slot of prefill, those of decode, and how many of its pages decode has filled."""

    room: int
    pages: list[int]
    slot: int
    track: int | None
    their_pages: list[int]
    their_slot: int
    their_track: int | None
    cached: int
    tracked_position: int


CASES = [
    Case(1, [7, 8, 9, 2], 1, None, [3, 4, 11, 20], 2, None, 0, -1),
    Case(2, [10, 11, 12, 13], 2, 3, [21, 22, 23, 24], 1, 5, 0, 8),
    Case(3, [14, 15, 1, 16], 4, 5, [5, 7, 9, 10], 3, 6, 0, AT_THE_END),
    Case(4, [17, 18, 19, 20, 21, 22], 6, 7, [25, 26, 27, 12, 13, 14], 7, 4, 3, 8),
]


def main() -> None:
    role, settings = sys.argv[1], json.loads(sys.argv[2])
    for protection in settings["without"]:
        REMOVE[protection]()
    config = TransferConfig(
        protocol=Protocol(settings["protocol"]),
        device=settings["device"],
        host=settings["host"],
        cluster_key_file=KEY_FILE,
        bootstrap_timeout_s=PATIENCE_S,
        transfer_timeout_s=PATIENCE_S,
        liveness_timeout_s=PATIENCE_S,
    )
    try:
        {"prefill": prefill, "decode": decode, "open": only_open}[role](config)
    except ConfigError as error:
        tell({"refused": error.message, "param": error.param})


def only_open(config: TransferConfig) -> None:
    transport = open_transport(config)
    tell(installed(transport))
    transport.close()


def prefill(config: TransferConfig) -> None:
    side = Prefill(config, layout(), PREFILL_SEED, BOOTSTRAP[1])
    for case in CASES:
        side.transfer.expect(case.room, "r", PATIENCE_S)
    for case in CASES:
        side.wait_for(RoomOpened, case.room, PATIENCE_S)
        send(side, case)
    for case in CASES:
        side.wait_for(Released, case.room, PATIENCE_S)
    sent = {event.room: event.bytes_by_part for event in side.events if isinstance(event, Sent)}
    tell(installed(side.transport) | {"sent": sent, "failed": failures(side.events)})
    side.close()


def send(side: Prefill, case: Case) -> None:
    """As a prefill rank does: in two chunks, and of each what a layer leaves as soon as that layer is done."""
    half = len(case.pages) // 2
    tracked = case.track if case.tracked_position < AT_THE_END else None
    for piece in (
        Piece(0, tuple(case.pages[:half])),
        Piece(half, tuple(case.pages[half:]), case.slot, tracked),
    ):
        outgoing = side.transfer.announce(case.room, piece)
        for layer in range(NUM_LAYERS):
            outgoing.layer_done(layer)
    side.transfer.commit(case.room, metadata(case.room, tracked_position=case.tracked_position))


def decode(config: TransferConfig) -> None:
    side = Decode(config, layout(), DECODE_SEED)
    side.until(prefill_is_there, PATIENCE_S)
    for case in CASES:
        address = RoomAddress(host=BOOTSTRAP[0], port=BOOTSTRAP[1], room=case.room)
        side.transfer.open(address, "r", case.their_pages, case.their_slot, case.their_track, case.cached)
    side.wait(lambda events: len({event.room for event in events}) == len(CASES), PATIENCE_S)
    tracks = {event.room: event.track.value for event in side.events if isinstance(event, Committed)}
    wrong = differences(side.pools)
    tell(installed(side.transport) | {"tracks": tracks, "failed": failures(side.events), "wrong_items": wrong})
    side.until(lambda: not prefill_is_there(), PATIENCE_S)
    side.close()


def prefill_is_there() -> bool:
    try:
        socket.create_connection(BOOTSTRAP, timeout=5).close()
    except OSError:
        time.sleep(0.2)
        return False
    return True


def layout() -> Any:
    """Two attention layers and three Mamba layers with items large enough to be worth writing."""
    items = [(StateKind.KV, layer, part, KV_BYTES) for layer in (1, 4) for part in ("k", "v")]
    for layer in (0, 2, 3):
        items += [(StateKind.CONV, layer, "conv", CONV_BYTES), (StateKind.SSM, layer, "ssm", SSM_BYTES)]
    pools = [
        PoolLayout(kind=kind, layer=layer, part=part, dtype="uint8", item_shape=(nbytes,), item_bytes=nbytes, blocks=())
        for kind, layer, part, nbytes in items
    ]
    return make_layout(pools=tuple(pools))


class PlainMemory:
    def host_buffer(self, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))


def differences(got: Pools) -> list[list[int]]:
    """[pool, item] of decode's memory that is not what the cases make of it; page 0 and slot 0 are nobody's."""
    source, wanted = (Pools(layout(), PlainMemory(), seed) for seed in (PREFILL_SEED, DECODE_SEED))
    kv, state = wanted.of(StateKind.KV), wanted.of(StateKind.CONV, StateKind.SSM)
    for case in CASES:
        pages = list(zip(case.pages, case.their_pages, strict=True))[case.cached :]
        moves = [(pool, *pair) for pool in kv for pair in pages]
        moves += [(pool, case.slot, case.their_slot) for pool in state]
        if case.track is not None and case.their_track is not None and 0 < case.tracked_position < AT_THE_END:
            moves += [(pool, case.track, case.their_track) for pool in state]
        for pool, mine, theirs in moves:
            wanted.item(pool, theirs)[:] = source.item(pool, mine)
    return [
        [pool, item]
        for pool, place in enumerate(got.placements)
        for item in range(1, place.count)
        if not np.array_equal(got.item(pool, item), wanted.item(pool, item))
    ]


def failures(events: Sequence[Any]) -> list[str]:
    return [f"room {event.room}: {event.error.message}" for event in events if isinstance(event, RoomFailed)]


def installed(transport: Transport) -> dict[str, Any]:
    """Which RDMA devices this process has open, and its queue pairs as the kernel lists them."""
    verbs = {Path(target).name for target in open_files() if "/infiniband/uverbs" in target}
    listed = subprocess.run(["rdma", "-j", "resource", "show", "qp"], capture_output=True, check=True, timeout=30)
    threads = {int(entry.name) for entry in Path("/proc/self/task").iterdir()}  # the kernel notes who made it
    return {
        "transport": transport.name,
        "devices": sorted(Path(f"/sys/class/infiniband_verbs/{name}/ibdev").read_text().strip() for name in verbs),
        "queue_pairs": [pair for pair in json.loads(listed.stdout) if pair.get("pid") in threads],
    }


def remove_forced_hca() -> None:
    set_environment = mooncake._set_environment

    def without(config: TransferConfig) -> None:
        set_environment(config)
        del os.environ["MC_FORCE_HCA"]

    mooncake._set_environment = without


def remove_look_at_what_was_installed() -> None:
    for check in ("_check_installed", "_check_devices"):
        assert hasattr(mooncake, check)
        setattr(mooncake, check, lambda *_: None)


REMOVE = {"forced_hca": remove_forced_hca, "look": remove_look_at_what_was_installed}


def tell(what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
