"""What a check says."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from common.errors import ServingError
from common.logs import one_line

_SHOWN_CHARACTERS = 200


class Status(enum.StrEnum):
    OK = "ok"
    WARNING = "warning"
    ERROR = "error"
    NOT_APPLICABLE = "not_applicable"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report. name: stable. fix: what to do, of warnings and errors. data: numbers for programs."""

    name: str
    status: Status
    found: str
    fix: str | None = None
    data: dict[str, Any] = {}


def ok(name: str, found: str, **data: Any) -> Check:
    return Check(name=name, status=Status.OK, found=found, data=data)


def not_applicable(name: str, found: str, **data: Any) -> Check:
    return Check(name=name, status=Status.NOT_APPLICABLE, found=found, data=data)


def warning(name: str, found: str, fix: str, **data: Any) -> Check:
    return Check(name=name, status=Status.WARNING, found=found, fix=fix, data=data)


def error(name: str, found: str, fix: str, **data: Any) -> Check:
    return Check(name=name, status=Status.ERROR, found=found, fix=fix, data=data)


def refused(name: str, reason: ServingError, fix: str) -> Check:
    """What a node would refuse to start with."""
    return error(name, reason.message, fix, code=reason.code)


def shown(value: object) -> str:
    """What others said, as a piece of one line."""
    text = value if isinstance(value, str) else repr(value)
    return one_line(text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…")


def gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.0f} MiB" if nbytes >= 1 << 20 else f"{nbytes / 2**10:,.0f} KiB"
