"""The errors a user can meet. Each carries a code, an HTTP status and whether the same request may be sent again."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import msgspec


class ErrorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A `ServingError` in the form in which it crosses processes."""

    type: str
    code: str
    message: str
    status: int
    retryable: bool
    param: str | None = None

    def body(self) -> dict[str, Any]:
        """The JSON object of an HTTP answer or of a `data:` line: OpenAI's shape, and whether it may be sent again."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
            "retryable": self.retryable,
        }
        return {"error": error}


class ServingError(Exception):
    """Base of every typed error.

    message: one sentence for the user. code: a stable identifier. param: the field or setting at fault.
    retry_after_s: when it makes sense to ask again, of an error that is answered here; a peer is not told.
    """

    type: ClassVar[str] = "serving_error"
    default_code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        status: int | None = None,
        retry_after_s: float | None = None,
    ):
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.param = param
        self.http_status = status or self.status
        self.retry_after_s = retry_after_s

    def record(self) -> ErrorRecord:
        return ErrorRecord(
            type=self.type,
            code=self.code,
            message=self.message,
            status=self.http_status,
            retryable=self.retryable,
            param=self.param,
        )


class ConfigError(ServingError):
    """A setting that cannot work: raised at start-up, names the setting, its value and what is allowed."""

    type, default_code = "config_error", "invalid_config"


class RequestError(ServingError):
    """The request itself is wrong; sending it again changes nothing."""

    type, default_code, status = "invalid_request_error", "invalid_request", 400


class CapacityError(ServingError):
    """The request is right but there is no room for it now."""

    type, default_code, status, retryable = "capacity_error", "no_capacity", 503, True


class WorkerError(ServingError):
    """A process that the request needs is dead, unreachable or broken."""

    type, default_code, status, retryable = "worker_error", "worker_unavailable", 503, True


class TransferError(ServingError):
    """The state of the request did not arrive, or did not arrive intact."""

    type, default_code, status, retryable = "transfer_error", "transfer_failed", 502, True


class AbortedError(ServingError):
    """The request was ended on purpose: by its client, by rid or by its other leg."""

    type, default_code, status = "aborted_error", "aborted", 499


class AccessError(ServingError):
    """The caller has no key, a wrong one, or one that does not allow this (403)."""

    type, default_code, status = "access_error", "invalid_api_key", 401


_KINDS = (ConfigError, RequestError, CapacityError, WorkerError, TransferError, AbortedError, AccessError, ServingError)
_BY_TYPE: dict[str, type[ServingError]] = {cls.type: cls for cls in _KINDS}


def status_of(type_: str | None) -> int | None:
    """The HTTP status of errors of this type, unless they say another; None for a type that is not ours."""
    cls = _BY_TYPE.get(type_ or "")
    return None if cls is None else cls.status


def from_record(record: ErrorRecord) -> ServingError:
    """The exception that `ServingError.record` was made from. A peer's status that is no HTTP error's becomes 500."""
    cls = _BY_TYPE.get(record.type, ServingError)
    status = record.status if 400 <= record.status <= 599 else ServingError.status
    return cls(record.message, code=record.code, param=record.param, status=status)


def why_unreadable(error: OSError) -> str:
    """Of a file that a setting names: why, and when it is a matter of permission, whose."""
    reason = error.strerror or str(error)
    if isinstance(error, PermissionError):
        return f"{reason}: user {os.geteuid()}, as which this process runs, must be able to read it"
    return reason
