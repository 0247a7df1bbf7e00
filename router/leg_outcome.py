"""How a leg ended, as `Workers.on_leg_end` is told once for each leg that `Workers.on_leg_begin` was told of."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from common.errors import AbortedError, RequestError


class LegEnd(enum.StrEnum):
    """OK: a whole answer. CLIENT_ERROR: the worker refused the request (4xx). WORKER_ERROR: it failed (5xx, or an error
    in its stream). LOST: it could not be reached, the connection broke, or it is silent. ABORTED: ended on purpose: the
    client left or aborted, a deadline passed, or the other leg failed."""

    OK = "ok"
    CLIENT_ERROR = "client_error"
    WORKER_ERROR = "worker_error"
    LOST = "lost"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class LegOutcome:
    """code, kind: the error's code and type, None when there is none. seconds: from the opening to the end.

    first_byte_s: from the opening to the first byte of a good answer's body, None when none came. gap_s: mean gap
    between two chunks of a stream, None for fewer than two.
    """

    end: LegEnd
    code: str | None
    seconds: float
    first_byte_s: float | None
    gap_s: float | None
    kind: str | None = None


def end_of(status: int, kind: str | None = None) -> LegEnd:
    """What an error of a worker says, in a head or in a stream. Its kind counts, where it has one of ours, and its
    status otherwise. 499: the request was ended on purpose."""
    if status == 499 or kind == AbortedError.type:
        return LegEnd.ABORTED
    if kind == RequestError.type:
        return LegEnd.CLIENT_ERROR
    return LegEnd.CLIENT_ERROR if status < 500 else LegEnd.WORKER_ERROR
