"""Two ranks' worth of pools and transfers for the tests: in this process, or (run as a script) in one of its own."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from common.config import TransferConfig
from common.errors import ServingError, TransferError
from common.handoff import HandoffMetadata, RoomAddress
from common.layout import PoolLayout, PoolPlacement, StateKind, StateLayout
from common.sampling import TokenLogprob
from transfer import BootstrapServer, DecodeTransfer, PrefillTransfer, open_transport, read_key
from transfer.loop import LoopThread

PAGES, SLOTS = 32, 8


def make_layout(**changes: Any) -> StateLayout:
    """Two attention layers and three Mamba layers, small."""
    kv = {"kind": StateKind.KV, "dtype": "float32", "item_shape": (4, 2, 8), "item_bytes": 256}
    conv = {"kind": StateKind.CONV, "part": "conv", "dtype": "float32", "item_shape": (12, 3), "item_bytes": 144}
    ssm = {"kind": StateKind.SSM, "part": "ssm", "dtype": "float32", "item_shape": (2, 8, 16), "item_bytes": 1024}
    pools = [PoolLayout(layer=layer, part=part, blocks=(), **kv) for layer in (1, 4) for part in ("k", "v")]
    pools += [PoolLayout(layer=layer, blocks=(), **each) for layer in (0, 2, 3) for each in (conv, ssm)]
    fields: dict[str, Any] = {
        "model": "tiny",
        "revision": "r1",
        "page_size": 4,
        "chunk": 8,
        "conv_width": 4,
        "vocab_size": 100,
        "pools": tuple(pools),
    }
    return StateLayout(**(fields | changes))


def wide_layout(ssm_bytes: int) -> StateLayout:
    """One Mamba layer with a slot of `ssm_bytes`, for transfers that take a while."""
    pools = (
        PoolLayout(kind=StateKind.KV, layer=0, part="k", dtype="uint8", item_shape=(256,), item_bytes=256, blocks=()),
        PoolLayout(
            kind=StateKind.CONV, layer=1, part="conv", dtype="uint8", item_shape=(144,), item_bytes=144, blocks=()
        ),
        PoolLayout(
            kind=StateKind.SSM,
            layer=1,
            part="ssm",
            dtype="uint8",
            item_shape=(ssm_bytes,),
            item_bytes=ssm_bytes,
            blocks=(),
        ),
    )
    return make_layout(pools=pools)


class Pools:
    """All pools of a rank in one registered buffer, filled from a seed."""

    def __init__(self, layout: StateLayout, transport: Any, seed: int) -> None:
        self.layout = layout
        counts = [PAGES if pool.kind is StateKind.KV else SLOTS for pool in layout.pools]
        sizes = [pool.item_bytes * count for pool, count in zip(layout.pools, counts, strict=True)]
        self.bytes = np.frombuffer(transport.host_buffer(sum(sizes)), np.uint8)
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, len(self.bytes), np.uint8)
        base = self.bytes.ctypes.data
        self.offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self.placements = tuple(
            PoolPlacement(base=base + offset, stride_bytes=pool.item_bytes, count=count)
            for offset, pool, count in zip(self.offsets, layout.pools, counts, strict=True)
        )

    def item(self, pool: int, index: int) -> np.ndarray:
        size = self.layout.pools[pool].item_bytes
        return self.bytes[self.offsets[pool] + index * size :][:size]

    def of(self, *kinds: StateKind) -> list[int]:
        return [i for i, pool in enumerate(self.layout.pools) if pool.kind in kinds]

    def state(self, pages: Sequence[int], slot: int) -> bytes:
        kv = [self.item(pool, page).tobytes() for pool in self.of(StateKind.KV) for page in pages]
        slots = [self.item(pool, slot).tobytes() for pool in self.of(StateKind.CONV, StateKind.SSM)]
        return b"".join(kv + slots)


def metadata(room: int, rid: str = "r", tracked_position: int = 8) -> HandoffMetadata:
    """Of a prompt of 11 tokens."""
    return HandoffMetadata(
        prompt_digest=b"",
        room=room,
        rid=rid,
        num_prompt_tokens=11,
        num_cached_tokens=0,
        tracked_position=tracked_position,
        first_token=TokenLogprob(-0.25, 7, ((-0.25, 7), (-1.5, 9))),
        sampling_seed=42,
        queue_s=0.0,
        prefill_s=0.1,
    )


class Side:
    """What both ranks have: a transport, pools, a transfer and everything it has told so far."""

    def __init__(self, config: TransferConfig, layout: StateLayout, seed: int, transport: Any = None) -> None:
        self.config, self.layout = config, layout
        self.transport = transport or open_transport(config)
        self.pools = Pools(layout, self.transport, seed)
        self.woken = threading.Event()
        self.events: list[Any] = []
        self.times: list[float] = []
        self.transfer: Any = None

    def pump(self) -> list[Any]:
        fresh = self.transfer.poll()
        self.events += fresh
        self.times += [time.monotonic()] * len(fresh)
        return fresh

    def wait(self, condition: Callable[[list[Any]], Any], timeout_s: float = 10.0) -> Any:
        """Collect events until `condition(events)` is true; its value."""
        deadline = time.monotonic() + timeout_s
        while not (found := condition(self.events)):
            left = deadline - time.monotonic()
            assert left > 0, f"only {self.events}"
            self.woken.wait(left)
            self.woken.clear()
            self.pump()
        return found

    def until(self, condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
        """Look until `condition()` is true."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def wait_for(self, kind: type, room: int, timeout_s: float = 10.0) -> Any:
        return self.wait(lambda events: self.of(kind, room), timeout_s)[0]

    def of(self, kind: type, room: int) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind) and event.room == room]

    def quiet(self, seconds: float) -> list[Any]:
        """What was told during `seconds`."""
        time.sleep(seconds)
        return self.pump()

    def close(self) -> None:
        self.transfer.close()
        self.transport.close()


class Prefill(Side):
    """bootstrap_port 0: any."""

    transfer: PrefillTransfer

    def __init__(
        self,
        config: TransferConfig,
        layout: StateLayout | None = None,
        seed: int = 1,
        bootstrap_port: int = 0,
        control_port: int = 0,
        transport: Any = None,
    ) -> None:
        super().__init__(config, layout or make_layout(), seed, transport)
        self.transfer = PrefillTransfer(
            self.layout, self.pools.placements, self.transport, config, self.woken.set, port=control_port
        )
        self.front = LoopThread("front")
        self.bootstrap = BootstrapServer(
            config.host,
            bootstrap_port,
            [self.transfer.control_address],
            self.layout,
            read_key(config.cluster_key_file),
            verify=config.verify,
        )
        try:
            self.front.run(self.bootstrap.start(), 5)
        except BaseException:
            self.close()
            raise

    def address(self, room: int) -> RoomAddress:
        return RoomAddress(host=self.config.host, port=self.bootstrap.port, room=room)

    def send(
        self,
        room: int,
        pages: Sequence[int],
        slot: int,
        track: int | None = None,
        first: int = 0,
        tracked_position: int = 8,
    ) -> None:
        """Pages in two chunks, then the state, then the commit. A state at the end of the prompt is not sent twice."""
        half = len(pages) // 2
        self.transfer.send_pages(room, first, pages[:half])
        self.transfer.send_pages(room, first + half, pages[half:])
        self.transfer.send_state(room, slot, track if 0 < tracked_position < 11 else None)
        self.transfer.commit(room, metadata(room, tracked_position=tracked_position))

    def close(self) -> None:
        self.front.run(self.bootstrap.close(), 5)
        self.front.stop()
        super().close()


class Decode(Side):
    transfer: DecodeTransfer

    def __init__(
        self,
        config: TransferConfig,
        layout: StateLayout | None = None,
        seed: int = 2,
        node_id: str = "decode-0",
        transport: Any = None,
    ) -> None:
        super().__init__(config, layout or make_layout(), seed, transport)
        self.transfer = DecodeTransfer(
            self.layout, self.pools.placements, self.transport, config, self.woken.set, node_id
        )


def main() -> None:
    """A rank in its own process. Commands come as lines of JSON, [method, arguments…]; events go out the same way."""
    role, config, layout, port = json.loads(sys.argv[1])
    config = msgspec.convert(config, TransferConfig)
    layout = msgspec.convert(layout, StateLayout)
    side: Side
    if role == "prefill":
        side = prefill = Prefill(config, layout, bootstrap_port=port)
        tell(["ready", prefill.bootstrap.port])
    else:
        side = Decode(config, layout)
        tell(["ready", 0])
    threading.Thread(target=report, args=(side,), daemon=True).start()
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        if method == "metadata":
            side.transfer.commit(arguments[0], metadata(*arguments))
        elif method in ("open", "decline"):
            getattr(side.transfer, method)(RoomAddress(**arguments[0]), *arguments[1:])
        elif method == "abort":
            side.transfer.abort(arguments[0], TransferError("told to"))
        elif method == "write_pages":
            before = side.transfer.stats()["seconds"]
            side.transfer.send_pages(*arguments)
            while side.transfer.stats()["seconds"] == before:
                time.sleep(0.005)
            tell(["written", arguments[0]])
        elif method == "state":
            tell(["state", side.pools.state(*arguments).hex()])
        elif method == "digest":
            tell(["digest", hashlib.sha256(side.pools.state(*arguments)).hexdigest()])
        else:
            getattr(side.transfer, method)(*arguments)
    side.close()


def report(side: Side) -> None:
    while True:
        side.woken.wait()
        side.woken.clear()
        for event in side.pump():
            error = getattr(event, "error", None)
            tell([type(event).__name__, event.room, error.code if isinstance(error, ServingError) else None])


def tell(what: list[Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
