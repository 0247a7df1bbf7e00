"""Stacks of this machine's own for a gate: router, prefill and decode node, or a unified node, ended with the block."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cli.children import ChildEndedError, ChildPlan, Children
from cli.up import free_ports

_TANDEM = (sys.executable, "-m", "cli.main")
# A busy host may leave a node without an answer for seconds: answers count here, not how soon a death is seen.
_COMMON = ("--drain-timeout", "0", "--log-level", "warning", "--liveness-timeout", "30")
_PORT_TRIES = 3

Plan = Callable[[], tuple[list[ChildPlan], str]]
"""Processes on ports that are free at this moment, and the address to ask."""


@contextlib.contextmanager
def unified_node(options: Sequence[str], logs: Path, start_timeout_s: float = 300.0) -> Iterator[str]:
    """Its address. Raises WorkerError when it does not become healthy; logs has what it said."""

    def plan() -> tuple[list[ChildPlan], str]:
        [port] = free_ports(1)
        node = _node("unified", port, options)
        return [node], node.url

    with _running(plan, logs, start_timeout_s) as url:
        yield url


@contextlib.contextmanager
def disaggregated(options: Sequence[str], logs: Path, start_timeout_s: float = 300.0) -> Iterator[str]:
    """The router's address. options: of both nodes. Raises WorkerError likewise."""

    def plan() -> tuple[list[ChildPlan], str]:
        prefill_port, bootstrap_port, decode_port, router_port = free_ports(4)
        prefill = _node("prefill", prefill_port, ("--bootstrap-port", str(bootstrap_port), *options))
        decode = _node("decode", decode_port, options)
        router = _node("router", router_port, ("--prefill", prefill.url, str(bootstrap_port), "--decode", decode.url))
        return [prefill, decode, router], router.url

    with _running(plan, logs, start_timeout_s) as url:
        yield url


def _node(role: str, port: int, options: Sequence[str]) -> ChildPlan:
    return ChildPlan(role, (*_TANDEM, role, "--port", str(port), *_COMMON, *options), f"http://127.0.0.1:{port}")


@contextlib.contextmanager
def _running(plan: Plan, logs: Path, start_timeout_s: float) -> Iterator[str]:
    logs.mkdir(parents=True, exist_ok=True)
    children, url = _start(plan, logs, start_timeout_s)
    try:
        yield url
    finally:
        children.stop()


def _start(plan: Plan, logs: Path, start_timeout_s: float) -> tuple[Children, str]:
    """Again on other ports when somebody else was quicker to take one."""
    for left in reversed(range(_PORT_TRIES)):
        plans, url = plan()
        children = Children(lambda line: None, logs=logs)
        try:
            for one in plans:
                (logs / f"{one.name}.log").write_bytes(b"")
                children.start(one)
            children.wait_healthy(start_timeout_s)
            return children, url
        except BaseException as error:
            children.stop()
            if not (left and isinstance(error, ChildEndedError) and _port_taken(plans, logs)):
                raise
    raise AssertionError("the last try returns or raises")


def _port_taken(plans: Sequence[ChildPlan], logs: Path) -> bool:
    return any(b"already in use" in (logs / f"{one.name}.log").read_bytes() for one in plans)
