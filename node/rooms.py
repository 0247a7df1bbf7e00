"""The rooms of a request: `bootstrap_room`, `bootstrap_host`, `bootstrap_port`, scalars or lists."""

from __future__ import annotations

from typing import Any

from common.config import Role
from common.errors import RequestError
from common.handoff import RoomAddress
from common.refusals import refuse
from node.fields import NumberRule, check_distinct, read_each, read_number, read_string
from node.limits import ServingLimits

MAX_ROOM = 2**63 - 1

_ROOM = NumberRule(integer=True, low=0, high=MAX_ROOM)
_PORT = NumberRule(integer=True, low=1, high=65535)


def read_rooms(raw: dict[str, Any], batch: int, total: int, limits: ServingLimits) -> list[RoomAddress | None]:
    """One a sequence; all None when the node serves alone."""
    value = raw.get("bootstrap_room")
    if value is None:
        if limits.role is Role.PREFILL:
            raise RequestError(
                "bootstrap_room: a prefill node needs one; send this to a router", param="bootstrap_room"
            )
        return [None] * total
    if limits.role is Role.UNIFIED:
        refuse("bootstrap_room", value, "left out: this node serves alone, it is neither a prefill nor a decode node")
    rooms = _read_room_numbers(value, batch, total)
    return [
        RoomAddress(host=host, port=port, room=room)
        for host, port, room in zip(*_read_endpoints(raw, batch, total, limits), rooms, strict=True)
    ]


def _read_room_numbers(value: Any, batch: int, total: int) -> list[int]:
    """One number for several sequences stands for itself and the numbers after it, as at SGLang."""
    rooms: list[int | None] = read_each("bootstrap_room", value, (batch, total), _read_room, None, total=total)
    sharers = total // len(value) if isinstance(value, list) else total
    numbers = []
    for i, room in enumerate(rooms):
        if room is None:
            refuse(f"bootstrap_room[{i}]", None, str(_ROOM))
        numbers.append(_read_room("bootstrap_room", room + i % sharers))
    check_distinct("bootstrap_room", numbers)
    return numbers


def _read_room(name: str, value: Any) -> int:
    return int(read_number(name, value, _ROOM))


def _read_endpoints(raw: dict[str, Any], batch: int, total: int, limits: ServingLimits) -> tuple[list[str], list[int]]:
    """(hosts, ports) of the prefill nodes. A prefill node knows its own."""
    lengths = (batch, total)
    host, port = raw.get("bootstrap_host"), raw.get("bootstrap_port")
    hosts = read_each("bootstrap_host", host, lengths, _read_host, limits.bootstrap_host, total=total)
    ports = read_each("bootstrap_port", port, lengths, _read_port, limits.bootstrap_port, total=total)
    if limits.role is Role.DECODE and (host is None or (isinstance(host, list) and None in host)):
        raise RequestError("bootstrap_host: a room needs the host of its prefill node", param="bootstrap_host")
    return hosts, ports


def _read_host(name: str, value: Any) -> str:
    return read_string(name, value, max_length=255)


def _read_port(name: str, value: Any) -> int:
    return int(read_number(name, value, _PORT))
