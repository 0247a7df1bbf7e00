"""All checks of a node, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Iterator

from cli.doctor import access, addresses, listeners, machine, model, servers, transport, versions
from cli.doctor.checks import Check, not_applicable, ok, refused
from cli.doctor.rdma import check_rdma
from common.config import NodeConfig, Role
from common.errors import ConfigError, ServingError


def node_checks(config: NodeConfig, *, quick: bool, peer: tuple[str, int] | None) -> Iterator[Check]:
    """config: but for its model folder and key file, checked."""
    on_card = config.model.device.startswith("cuda")
    yield versions.check_python()
    yield versions.check_tandem()
    yield versions.check_torch(on_card)
    yield versions.check_triton(on_card)
    yield versions.check_mooncake(config)
    yield machine.check_cores(config)
    yield machine.check_memory()
    yield machine.check_shm()
    yield machine.check_temporary_folder()
    yield machine.check_open_files()
    yield from _engine_checks(config, on_card)
    yield from listeners.check_listeners(listeners.node_listeners(config))
    yield from access.check_access(config.server)
    if config.role is not Role.UNIFIED:
        yield from addresses.check_addresses(config, None if peer is None else peer[0])
        yield from _router_checks(config)
    yield transport.check_self(config) if not quick else not_applicable("transport.self", "left out (--quick)")
    if peer is not None:
        yield from transport.check_peer(config, peer)


def _engine_checks(config: NodeConfig, on_card: bool) -> Iterator[Check]:
    """What needs torch; without it the versions have said why."""
    try:
        from node import preflight
    except ImportError as reason:
        yield not_applicable("model", f"not without torch ({reason})")
        return
    yield from machine.check_cuda(config, preflight.cuda)
    if not on_card:
        yield _check_device(config)
    yield from check_rdma(config)
    plan = model.find_capacity(config)
    pools = None if isinstance(plan, ServingError) else plan.plan.pages + plan.plan.slots
    yield machine.check_memlock(config, pools)
    yield from model.check_model(config)
    yield from model.check_memory_plan(config, plan, preflight.cuda() if on_card else None)


def _check_device(config: NodeConfig) -> Check:
    """Of what is no card."""
    from node.preflight import check_devices

    try:
        check_devices(config)
    except ConfigError as reason:
        return refused("device", reason, "--device cpu, cuda or cuda:N")
    return ok("device", config.model.device)


def _router_checks(config: NodeConfig) -> Iterator[Check]:
    if not config.server.routers:
        return
    try:
        asker = servers.router_asker(config)
    except ConfigError as reason:
        yield refused("router", reason, "correct the file that is named")
        return
    fingerprint = model.own_fingerprint(config)
    for url in dict.fromkeys(url.rstrip("/") for url in config.server.routers):
        yield from servers.check_router(url, asker, fingerprint)
