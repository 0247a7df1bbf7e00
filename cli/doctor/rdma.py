"""RDMA devices as the kernel lists them: ports, their state, and their addresses (GIDs)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from cli.doctor.checks import Check, error, not_applicable, ok, warning
from cli.doctor.machine import read
from common.config import NodeConfig, Protocol, Role

SYSFS = Path("/sys/class/infiniband")
_DEVICE_FILES = Path("/dev/infiniband")
_ZERO = {"", "0000:0000:0000:0000:0000:0000:0000:0000"}


class Gid(NamedTuple):
    """kind: "RoCE v2", "IB/RoCE v1" or empty."""

    number: int
    address: str
    kind: str


class Port(NamedTuple):
    """state: "ACTIVE" when it works. link: InfiniBand or Ethernet."""

    device: str
    number: str
    state: str
    link: str
    rate: str
    gids: tuple[Gid, ...]

    @property
    def name(self) -> str:
        return f"{self.device}/{self.number}"

    def describe(self) -> str:
        kinds = ", ".join(sorted({gid.kind for gid in self.gids if gid.kind}))
        return f"{self.link}, {self.state}, {self.rate}, {len(self.gids)} GIDs{f' ({kinds})' if kinds else ''}"


def ports(sysfs: Path = SYSFS) -> list[Port]:
    return [_port(folder) for folder in sorted(sysfs.glob("*/ports/*"))]


def _port(folder: Path) -> Port:
    return Port(
        device=folder.parent.parent.name,
        number=folder.name,
        state=read(folder / "state").rpartition(": ")[2] or "unknown",
        link=read(folder / "link_layer") or "unknown",
        rate=read(folder / "rate") or "unknown rate",
        gids=tuple(_gids(folder)),
    )


def _gids(folder: Path) -> list[Gid]:
    found = ((int(file.name), read(file), file.name) for file in (folder / "gids").glob("*") if file.name.isdecimal())
    return sorted(
        Gid(number, address, read(folder / "gid_attrs" / "types" / name))
        for number, address, name in found
        if address not in _ZERO
    )


def check_rdma(config: NodeConfig, sysfs: Path = SYSFS, device_files: Path = _DEVICE_FILES) -> list[Check]:
    """A line for each port; whether what --transfer-protocol rdma and --transfer-device ask for is there."""
    found = ports(sysfs)
    if config.role is Role.UNIFIED or config.transfer.protocol is not Protocol.RDMA:
        return [_not_asked(found, config)]
    if not found:
        fix = (
            "--transfer-protocol tcp works without; else load the adapter's driver (container: host network, "
            "--device /dev/infiniband)"
        )
        return [error("rdma", "no RDMA device here", fix)]
    asked = [name.strip() for name in config.transfer.device.split(",") if name.strip()]
    used = [port for port in found if not asked or port.device in asked]
    absent = [name for name in asked if name not in {port.device for port in found}]
    names = ", ".join(sorted({port.device for port in found}))
    checks = [error(f"rdma.{name}", "no such device", f"--transfer-device: {names} are there") for name in absent]
    if not any(device_files.glob("uverbs*")):
        fix = "modprobe ib_uverbs; in a container: --device /dev/infiniband"
        checks.append(error("rdma.verbs", f"no {device_files}/uverbs*", fix))
    return checks + [_check_port(port, bool(asked)) for port in used]


def _not_asked(found: list[Port], config: NodeConfig) -> Check:
    what = "; ".join(f"{port.name}: {port.describe()}" for port in found)
    if config.role is Role.UNIFIED:
        return not_applicable("rdma", f"{what or 'no device'}; a unified node hands nothing over")
    how = f"state crosses over {config.transfer.protocol.value}"
    if config.transfer.transport.value in ("loopback", "cuda_ipc"):
        how = f"--transport {config.transfer.transport.value}"
    if not found:
        return not_applicable("rdma", f"no RDMA device here: {how}, which costs CPU and is slower between hosts")
    return not_applicable("rdma", f"{what}; not used: {how} (--transfer-protocol rdma)")


def _check_port(port: Port, asked: bool) -> Check:
    name, found = f"rdma.{port.name}", port.describe()
    gids = [gid._asdict() for gid in port.gids]
    if port.state != "ACTIVE":
        fix = "bring the link up (ip link, ibstat; InfiniBand needs a subnet manager)"
        return (error if asked else warning)(name, found, fix, gids=gids)
    if not port.gids:
        return error(name, found, "give the port's network interface an address: it has no GID", gids=gids)
    wanted = os.environ.get("MC_GID_INDEX", "")
    if wanted and wanted not in {str(gid.number) for gid in port.gids}:
        return error(
            name, f"{found}; MC_GID_INDEX={wanted} is none", "set it to one of `show_gids`, or unset it", gids=gids
        )
    if port.link == "Ethernet" and not any(gid.kind == "RoCE v2" for gid in port.gids):
        return warning(name, found, "no RoCE v2 address: RoCE v1 does not cross routers", gids=gids)
    return ok(name, found, gids=gids)
