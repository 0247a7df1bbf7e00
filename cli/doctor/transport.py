"""Whether the transport really carries bytes: between two processes here, and to a peer and back."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from cli.doctor.checks import Check, error, not_applicable, ok
from cli.doctor.fit import Settings, settings_of
from cli.doctor.model import own_fingerprint
from cli.doctor.probe import Job, Step
from cli.doctor.servers import check_skew
from common.config import NodeConfig, Protocol, Role, rank_devices
from common.errors import ErrorRecord, ServingError
from transfer.handshake import read_key

LIMIT_S = 18.0
"""Of a whole test, with the start of its processes."""
_SHOWN_STDERR_CHARACTERS = 200


def check_self(config: NodeConfig) -> Check:
    """64 MiB from one process to another of this machine."""
    if config.role is Role.UNIFIED:
        return not_applicable("transport.self", "a unified node hands nothing over")
    key, deadline_s = secrets.token_hex(32), time.monotonic() + LIMIT_S
    with _probe(config, None, key, deadline_s) as listening:
        first = next(listening, None)
        if first is None or first.error is not None:
            return _failed("transport.self", config, _error_of(first))
        with _probe(config, ("127.0.0.1", first.data["port"]), key, deadline_s) as asking:
            steps = {step.name: step for step in asking}
    failed = next((step for step in steps.values() if step.error is not None), None)
    if failed is not None or "write" not in steps:
        return _failed("transport.self", config, _error_of(failed))
    rate, text = _rate(steps["write"])
    return ok(
        "transport.self",
        f"{steps['open'].data['transport']}: {text} between two processes here, digest right",
        gb_per_s=rate,
        transport=steps["open"].data["transport"],
    )


def check_peer(config: NodeConfig, peer: tuple[str, int]) -> Iterator[Check]:
    """What `tandem doctor --serve` at the peer answers."""
    try:
        key = read_key(config.transfer.cluster_key_file)
    except ServingError as reason:
        yield not_applicable("peer.connect", f"not without the cluster key: {reason.message}")
        return
    where = f"{peer[0]}:{peer[1]}"
    settings = settings_of(config, own_fingerprint(config))
    with _probe(config, peer, None if key is None else key.hex(), time.monotonic() + LIMIT_S, settings) as steps:
        done = set()
        for step in steps:
            done.add(step.name)
            if (check := _peer_check(step, where, config)) is not None:
                yield check
            if step.error is not None:
                return
    if "read" not in done:
        yield _failed("peer.write", config, _error_of(None))


def _peer_check(step: Step, where: str, config: NodeConfig) -> Check | None:
    data = step.data
    if step.error is not None:
        name = f"peer.{'write' if step.name == 'open' else step.name}"
        fix = _PEER_FIXES.get(step.error.code, _PEER_FIXES.get(step.name, ""))
        return error(name, _said(where, step.error.message), fix or _advice(config), code=step.error.code)
    match step.name:
        case "connect":
            return ok(
                "peer.connect", f"{where} is {data['host']}, Tandem {data['tandem']}, {data['transport']}", **data
            )
        case "fit":
            return ok("peer.fit", "transport, dtypes, page size and --verify are as there")
        case "clock":
            return check_skew("peer.clock", data["skew_s"], data["error_s"])
        case "write" | "read":
            rate, text = _rate(step)
            way = "to" if step.name == "write" else "from"
            return ok(f"peer.{step.name}", f"{text} {way} {where}, digest right", gb_per_s=rate)
        case _:
            return None


def _said(where: str, message: str) -> str:
    """With the peer's address once: many messages begin with it, or with its host."""
    host = where.rpartition(":")[0]
    if message.startswith(where):
        return message
    return f"{where}{message.removeprefix(host)}" if message.startswith(host) else f"{where}: {message}"


_NO_DOCTOR = "is it `tandem doctor --serve` that listens there? Give the port that it printed"
_PEER_FIXES = {
    "connect": _NO_DOCTOR,
    "peer_unreachable": "run `tandem doctor --serve PORT` there with that node's options; open its port in firewalls",
    "unauthorized": "the same --cluster-key-file on both sides (compare sha256sum)",
    "protocol_error": f"{_NO_DOCTOR}, and use one version of Tandem on both sides",
    "layout_mismatch": "the same value on both sides, and one version of Tandem: nodes that differ refuse each other",
}


@contextmanager
def _probe(
    config: NodeConfig,
    peer: tuple[str, int] | None,
    key: str | None,
    deadline_s: float,
    settings: Settings | None = None,
) -> Iterator[Iterator[Step]]:
    """The steps of a process, as they come; it is killed at deadline_s, of the monotonic clock, and on leaving."""
    device = rank_devices(config)[0]
    job = Job(
        config=config.transfer, device=device, peer=peer, key=key, parent_pid=os.getpid(), settings=settings or {}
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.doctor.probe"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    late = threading.Event()

    def give_up() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(max(0.0, deadline_s - time.monotonic()), give_up)
    timer.start()
    try:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(job))
        process.stdin.close()
        yield _steps(process, late)
    finally:
        timer.cancel()
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def _steps(process: subprocess.Popen[bytes], late: threading.Event) -> Iterator[Step]:
    """One that failed is the last; a process that ends without a word is one more, which says how."""
    assert process.stdout is not None and process.stderr is not None
    last = ""
    for line in process.stdout:
        step = msgspec.json.decode(line, type=Step)
        last = step.name
        yield step
        if step.error is not None:
            return
    if last == "read":
        return
    if late.is_set():
        message = f"no end after {LIMIT_S:g} s"
    else:
        said = process.stderr.read().decode(errors="replace").strip()[-_SHOWN_STDERR_CHARACTERS:]
        message = f"the test's process ended with status {process.wait()}: {said.rpartition(chr(10))[2] or 'no word'}"
    after = {
        "": "open",
        "listen": "open",
        "connect": "clock",
        "clock": "open",
        "open": "fit",
        "fit": "write",
        "write": "read",
    }
    yield Step(name=after.get(last, "write"), error=_record(message))


def _record(message: str) -> ErrorRecord:
    return ErrorRecord(type="transfer_error", code="write_failed", message=message, status=502, retryable=False)


def _error_of(step: Step | None) -> ErrorRecord:
    return _record("the test ended without a word") if step is None or step.error is None else step.error


def _failed(name: str, config: NodeConfig, reason: ErrorRecord) -> Check:
    return error(name, reason.message, _advice(config), code=reason.code)


def _advice(config: NodeConfig) -> str:
    match config.transfer.protocol:
        case Protocol.RDMA:
            return "see the rdma and memlock lines, or --transfer-protocol tcp"
        case Protocol.NVLINK:
            return "needs cards of one NVLink domain and a Mooncake with it, or --transfer-protocol tcp"
        case Protocol.TCP:
            return (
                "see the mooncake and address lines; Mooncake's ports must be open between nodes "
                "(MC_MIN_RPC_PORT, MC_MAX_RPC_PORT)"
            )


def _rate(step: Step) -> tuple[float, str]:
    seconds, nbytes = float(step.data["seconds"]), int(step.data["nbytes"])
    rate = nbytes / max(seconds, 1e-9) / 1e9
    return round(rate, 3), f"{nbytes >> 20} MiB in {seconds * 1000:,.0f} ms, {rate:.2f} GB/s"
