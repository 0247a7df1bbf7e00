"""Stacks of this machine's own for a gate: router, prefill and decode node, or a unified node, ended with the block."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cli.children import ChildPlan, Children
from cli.up import free_ports

_TANDEM = (sys.executable, "-m", "cli.main")
_COMMON = ("--drain-timeout", "0", "--log-level", "warning")


def _quiet(_: str) -> None:
    """Nothing of the processes' starting and stopping is said."""


@contextlib.contextmanager
def _running(plans: Sequence[ChildPlan], logs: Path, start_timeout_s: float) -> Iterator[None]:
    """Raises WorkerError when one does not become healthy; logs has what they said."""
    logs.mkdir(parents=True, exist_ok=True)
    children = Children(_quiet, logs=logs)
    try:
        for plan in plans:
            children.start(plan)
        children.wait_healthy(start_timeout_s)
        yield
    finally:
        if children.running:
            children.stop()


@contextlib.contextmanager
def unified_node(options: Sequence[str], logs: Path, start_timeout_s: float = 300.0) -> Iterator[str]:
    """Its address."""
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = (*_TANDEM, "unified", "--port", str(port), *_COMMON, *options)
    with _running([ChildPlan("unified", command, url)], logs, start_timeout_s):
        yield url


@contextlib.contextmanager
def disaggregated(
    options: Sequence[str], logs: Path, start_timeout_s: float = 300.0, *, decode_options: Sequence[str] = ()
) -> Iterator[str]:
    """The router's address. options: of both nodes."""
    prefill_port, bootstrap_port, decode_port, router_port = free_ports(4)
    prefill_url, decode_url, url = (f"http://127.0.0.1:{p}" for p in (prefill_port, decode_port, router_port))
    bootstrap = ("--bootstrap-port", str(bootstrap_port))
    prefill = (*_TANDEM, "prefill", "--port", str(prefill_port), *bootstrap, *_COMMON, *options)
    decode = (*_TANDEM, "decode", "--port", str(decode_port), *_COMMON, *options, *decode_options)
    pair = ("--prefill", prefill_url, str(bootstrap_port), "--decode", decode_url)
    router = (*_TANDEM, "router", "--port", str(router_port), *pair, *_COMMON)
    plans = [
        ChildPlan("prefill", prefill, prefill_url),
        ChildPlan("decode", decode, decode_url),
        ChildPlan("router", router, url),
    ]
    with _running(plans, logs, start_timeout_s):
        yield url
