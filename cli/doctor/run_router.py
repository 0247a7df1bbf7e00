"""All checks of a router, in the order in which they are shown. Its image has no torch, no numpy and no transport."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cli.doctor import access, listeners, machine, servers, versions
from cli.doctor.checks import Check, refused
from common.config import RouterConfig
from common.errors import ConfigError
from common.keys import Key


def router_checks(config: RouterConfig, keys: Sequence[Key]) -> Iterator[Check]:
    """keys: those that came without a file."""
    yield versions.check_python()
    yield versions.check_tandem()
    yield machine.check_cores(None)
    yield machine.check_memory()
    yield machine.check_temporary_folder()
    yield machine.check_open_files()
    yield from listeners.check_listeners(listeners.router_listeners(config))
    yield from access.check_access(config, keys)
    try:
        yield from servers.check_workers(config)
    except ConfigError as reason:
        yield refused("workers", reason, "correct the file that is named")
