"""A process of its own for the write test, so that a library that hangs or crashes ends the test and not the doctor.

Its job comes as JSON on stdin, its findings go as JSON lines to stdout; whatever libraries print goes to stderr.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import msgspec

from cli.doctor import wire
from cli.doctor.fit import Settings
from cli.doctor.talk import call, text
from cli.lifeline import die_with_parent
from common.config import TransferConfig
from common.errors import ErrorRecord, ServingError


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """peer: whom to call; None: listen, on this machine, for the other process of a test. key: hexadecimal."""

    config: TransferConfig
    device: str
    peer: tuple[str, int] | None
    key: str | None
    parent_pid: int
    settings: Settings = {}


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was tried: open, listen, connect, fit, clock, write, read."""

    name: str
    error: ErrorRecord | None = None
    data: dict[str, Any] = {}


def main() -> None:
    results = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    die_with_parent(job.parent_pid)

    def tell(name: str, **data: Any) -> None:
        results.write(msgspec.json.encode(Step(name=name, data=data)) + b"\n")

    doing = ["open"]
    try:
        _run(job, doing, tell)
    except ServingError as error:
        results.write(msgspec.json.encode(Step(name=doing[0], error=error.record())) + b"\n")
    os._exit(0)  # not through the destructors of libraries whose peer may be gone


def _run(job: Job, doing: list[str], tell: Any) -> None:
    key = None if job.key is None else bytes.fromhex(job.key)
    if job.peer is None:
        site = wire.Site(job.config, job.device)
        listener = socket.create_server(("127.0.0.1", 0))
        tell("listen", port=listener.getsockname()[1], transport=site.transport.name)
        wire.serve(listener, site, key)
    else:
        _ask(job, job.peer, key, doing, tell)


def _ask(job: Job, peer: tuple[str, int], key: bytes | None, doing: list[str], tell: Any) -> None:
    doing[0] = "connect"
    with call(*peer, key) as talk:
        theirs = talk.ask("hello")
        tell("connect", **{name: text(theirs, name) for name in ("host", "tandem", "transport")})
        doing[0] = "clock"
        skew_s, error_s = wire.clock(talk)
        tell("clock", skew_s=skew_s, error_s=error_s)
        doing[0] = "open"
        site = wire.Site(job.config, job.device, settings=job.settings)
        tell("open", transport=site.transport.name)
        doing[0] = "fit"
        wire.compare(site.hello(), theirs)
        tell("fit")
        doing[0] = "write"
        tell("write", seconds=wire.write_there(talk, site, theirs), nbytes=site.nbytes)
        doing[0] = "read"
        tell("read", seconds=wire.write_here(talk, site), nbytes=site.nbytes)


if __name__ == "__main__":
    main()
