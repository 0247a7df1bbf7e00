"""One line a request on stderr, when it has ended: what it was and where its time went, never what it said."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from functools import partial

import msgspec

from common.config import RouterConfig
from common.errors import ConfigError
from common.logs import QuickLog
from router.record import RequestRecord, Timing

_UNKNOWN = Timing()
_encode = msgspec.json.Encoder().encode
_CONTROLS = re.compile("[\x7f-\x9f\u2028\u2029]")

Write = Callable[[RequestRecord], None]


def request_log(config: RouterConfig) -> Write:
    """text: a line of the log, `name=value`; json: an object a line, without the log's prefix; or off.

    Raises ConfigError for anything else.
    """
    match config.request_log:
        case "text":
            number = None if config.siblings is None else config.siblings.number
            quick = QuickLog("router" if number is None else f"router-{number}", "tandem.request")
            return partial(_write_text, quick) if quick.is_enabled else _write_nothing
        case "json":
            return _write_json
        case "off":
            return _write_nothing
        case unknown:
            raise ConfigError(f"--request-log {unknown}: text, json or off", param="request_log")


def _write_text(log: QuickLog, record: RequestRecord) -> None:
    log.info(text_line(record))


def _write_json(record: RequestRecord) -> None:
    sys.stderr.write(json_line(record))


def _write_nothing(_: RequestRecord) -> None:
    """Nobody wants to know."""


def text_line(record: RequestRecord) -> str:
    timing = record.timing or _UNKNOWN
    times = (
        f"e2e={record.e2e_s or 0:.4f} wait={record.queue_s or 0:.4f} first_byte={record.ttft_s or 0:.4f} "
        f"queue={timing.queue_s:.4f} prefill={timing.prefill_s:.4f} transfer={timing.transfer_s:.4f} "
        f"decode={timing.decode_s:.4f}"
    )
    return (
        f"id={_plain(record.rid)} endpoint={record.endpoint} stream={record.stream:d} status={record.status} "
        f"code={_plain(record.code)} sequences={record.num_sequences} prompt_tokens={record.prompt_tokens} "
        f"cached_tokens={record.cached_tokens} completion_tokens={record.completion_tokens} {times} "
        f"transfer_bytes={sum(record.transfer_bytes.values())} retries={record.retries} resumes={record.resumes} "
        f"prefill_node={record.prefill or '-'} decode_node={record.decode or '-'} "
        f"prefill_rank={_number(record.prefill_rank)} decode_rank={_number(record.decode_rank)}"
    )


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def json_line(record: RequestRecord) -> str:
    return _escaped(_encode(record.describe(time.monotonic())).decode()) + "\n"


def _plain(value: str) -> str:
    """What others chose, as one word: with quotes and escapes unless it is one."""
    is_word = value.isascii() and value.isprintable() and " " not in value and '"' not in value
    return value if is_word else _escaped(_encode(value).decode()).replace(" ", "\\u0020")


def _escaped(json: str) -> str:
    """What ends a line, or steers a terminal, stands in no line: it can only lie inside a string there."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", json)
