"""What the router knows of each request: one `RequestRecord`, from which log line, metrics, page and trace are made.

    begin (arrived) ──► admitted ──► legs opened (again after a failure) ──► first byte ──► end
                                                                             └── the answer's last object is read, once

Nothing here ever holds a prompt, an answer or a key.
"""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from itertools import chain, islice
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import msgspec

from common.errors import ServingError
from common.histogram import TOKENS, Histogram
from common.json_body import BAD_JSON
from common.tracing import Tracing
from router.events import split_events
from router.trace import RequestTrace

if TYPE_CHECKING:
    from router.reply import Reply, Sent
    from router.request import GenerateRequest
    from router.workers import Pair

MAX_RECENT = 200
MAX_REFUSED = 50
SHOWN = ("all", "running", "failed")
"""Which records a list can be of."""
ENDPOINTS = frozenset(["/generate", "/v1/completions", "/v1/chat/completions"])
"""Whose requests are counted."""
_OK = "ok"
_OTHER = "other"
_MAX_CODES = 100
_CODE = re.compile(r"[a-z][a-z_0-9]{0,39}")
_FINAL = b'"timing":'
"""In the last object of a sequence, and in no string: there, quotes are escaped."""
_TIMES = ("queue_s", "prefill_s", "transfer_s", "decode_s")


# What an answer says of itself


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Of a node, seconds; all 0 when it told none."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """/generate's `meta_info`, or the field `tandem` of an OpenAI object."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    timing: Timing | None = None
    transfer_bytes: dict[str, int] = {}
    dp_rank: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Object(msgspec.Struct, frozen=True):
    meta_info: Meta | None = None
    tandem: Meta | None = None
    usage: _Usage | None = None


_MAX_READ_BYTES = 8 * 1024 * 1024
"""Of an answer: reading more would hold up the others for longer than 10 ms."""
_decode = msgspec.json.Decoder(_Object | list[_Object]).decode


def read_answer(body: bytes) -> list[Meta]:
    """Of each sequence of a JSON answer, as far as it tells; empty for what has another shape or is too long."""
    if len(body) > _MAX_READ_BYTES:
        return []
    try:
        found = _decode(body)
    except BAD_JSON:
        return []
    return [meta for each in (found if isinstance(found, list) else [found]) if (meta := _meta(each)) is not None]


def read_events(whole: bytes) -> list[Meta]:
    """Of the objects in these events of a stream that say anything."""
    datas = (event.removeprefix(b"data:").strip() for event in split_events(whole))
    return [meta for data in datas if data.startswith(b"{") for meta in read_answer(data)]


def read_finals(whole: bytes) -> list[Meta]:
    """Of the objects in these events that are the last ones of their sequences; the others are not read."""
    return [meta for meta in read_events(whole) if meta.timing is not None] if _FINAL in whole else []


def _meta(found: _Object) -> Meta | None:
    meta, usage = found.meta_info or found.tandem, found.usage
    if meta is None:
        return None if usage is None else _of_usage(Meta(), usage)
    return _of_usage(meta, usage) if usage is not None and not meta.completion_tokens else meta


def _of_usage(meta: Meta, usage: _Usage) -> Meta:
    return msgspec.structs.replace(meta, prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens)


# Records


class RequestRecord(msgspec.Struct, kw_only=True, eq=False):
    """Times are of the monotonic clock, None while they have not come; began_at: of the wall clock, at `arrived_s`.

    admitted_s: when it stopped to wait at the router. opened_s: of the latest try's legs. status, code: what the client
    was told; a stream that failed on the way has status 200 and the code of the failure. num_sequences: 0 when it was
    refused unread. transfer_bytes: by part. prefill_rank, decode_rank: None when its sequences went to several.
    """

    rid: str
    endpoint: str
    stream: bool
    num_sequences: int
    arrived_s: float = msgspec.field(default_factory=time.monotonic)
    began_at: float = msgspec.field(default_factory=time.time)
    admitted_s: float | None = None
    opened_s: float | None = None
    first_byte_s: float | None = None
    last_byte_s: float | None = None
    prefill: str | None = None
    decode: str | None = None
    prefill_rank: int | None = None
    decode_rank: int | None = None
    retries: int = 0
    resumes: int = 0
    status: int = 0
    code: str = _OK
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    timing: Timing | None = None
    transfer_bytes: dict[str, int] = {}
    trace: RequestTrace | None = None

    def on_open(self, pair: Pair) -> None:
        """The legs of a try open."""
        self.opened_s = time.monotonic()
        if self.admitted_s is None:
            self.admitted_s = self.opened_s
        self.prefill, self.decode = pair.prefill.url, pair.decode.url
        if not pair.is_spread:
            self.prefill_rank, self.decode_rank = pair.prefill_target.rank, pair.decode_target.rank
        else:
            self.prefill_rank = self.decode_rank = None

    def on_error(self, code: str | None, status: int) -> None:
        self.code, self.status = code or _OTHER, status

    def on_move(self, *, resumes: bool) -> None:
        """It goes on at other workers, in mid-answer (resumes) or from its start."""
        self.resumes += resumes
        self.retries += not resumes

    def on_end(self, reply: Reply, sent: Sent) -> None:
        """Nothing more goes to the client."""
        if reply.started_s is not None:
            self.first_byte_s, self.status = reply.started_s, reply.status
        if sent.last:
            self._read(sent)

    def _read(self, sent: Sent) -> None:
        """The end of what was sent, also when that is not all; of several sequences the sums, and the longest times."""
        if self.stream:
            found = sent.finals or (read_events(sent.last) or read_events(sent.before))[-1:]
        else:
            found = read_answer(sent.last)
        for meta in found:
            self.prompt_tokens += meta.prompt_tokens
            self.completion_tokens += meta.completion_tokens
            self.cached_tokens += meta.cached_tokens
            for part, count in meta.transfer_bytes.items():
                self.transfer_bytes[part] = self.transfer_bytes.get(part, 0) + count
        if not self.completion_tokens:  # a stream that was cut, whose chunks do not count them
            self.completion_tokens = sent.num_tokens
        if self.num_sequences == 1 and found and found[0].dp_rank is not None:
            self.decode_rank = found[0].dp_rank  # which the node chooses, when the one that was meant cannot be used
        timings = [meta.timing for meta in found if meta.timing is not None]
        if timings:
            self.timing = timings[0] if len(timings) == 1 else _longest(timings)

    @property
    def has_failed(self) -> bool:
        """Whether the service failed: with a status of 500 or more, or in mid-stream. What a client did wrong, or ended
        itself, is no failure."""
        if self.code in (_OK, "aborted", "client_disconnected"):
            return False
        return self.status >= 500 or self.status == 200

    @property
    def queue_s(self) -> float | None:
        """What it waited at the router."""
        return None if self.admitted_s is None else self.admitted_s - self.arrived_s

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_byte_s is None else self.first_byte_s - self.arrived_s

    @property
    def e2e_s(self) -> float | None:
        return None if self.last_byte_s is None else self.last_byte_s - self.arrived_s

    def describe(self, now: float) -> dict[str, Any]:
        """For page, /debug/requests and log. now: of the monotonic clock; what has not ended is as old as that."""
        end_s = self.last_byte_s
        return {
            "id": self.rid,
            "endpoint": self.endpoint,
            "stream": self.stream,
            "sequences": self.num_sequences,
            "began_at": round(self.began_at, 3),
            "running": end_s is None,
            "status": self.status,
            "code": self.code if end_s is not None else "running",
            "prefill": self.prefill,
            "decode": self.decode,
            "prefill_rank": self.prefill_rank,
            "decode_rank": self.decode_rank,
            "retries": self.retries,
            "resumes": self.resumes,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "e2e_s": round((now if end_s is None else end_s) - self.arrived_s, 4),
            "wait_s": _rounded(self.queue_s),
            "opened_s": None if self.opened_s is None else round(self.opened_s - self.arrived_s, 4),
            "ttft_s": _rounded(self.ttft_s),
            "timing": None if self.timing is None else {name: round(getattr(self.timing, name), 4) for name in _TIMES},
            "transfer_bytes": self.transfer_bytes,
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _longest(timings: list[Timing]) -> Timing:
    return Timing(**{name: max(getattr(timing, name) for timing in timings) for name in _TIMES})


# All of them


class Totals:
    """Since the start, of requests that have ended."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        """By endpoint and code."""
        self.rejected: Counter[str] = Counter()
        """By code: answered with an error before any leg was opened."""
        self.failed: Counter[str] = Counter()
        """By code: no answer, or half of one, for no fault of the client."""
        self.retries = 0
        self.resumes = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.transfer_bytes: Counter[str] = Counter()
        self.wait_s = Histogram()
        self.ttft_s = Histogram()
        self.itl_s = Histogram()
        self.e2e_s = Histogram()
        self.timing_s = {name: Histogram() for name in _TIMES}
        self.prompt_length = Histogram(TOKENS)
        self.completion_length = Histogram(TOKENS)

    def describe(self) -> dict[str, Any]:
        """For the page. ended: by code."""
        ended: Counter[str] = Counter()
        for (_, code), count in self.requests.items():
            ended[code] += count
        return {
            "ended": ended,
            "rejected": self.rejected.total(),
            "retries": self.retries,
            "resumes": self.resumes,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "transfer_bytes": self.transfer_bytes,
        }

    def add(self, record: RequestRecord, code: str) -> None:
        self.requests[record.endpoint, code] += 1
        if record.has_failed:
            self.failed[code] += 1
        self.retries += record.retries
        self.resumes += record.resumes
        if record.queue_s is not None:
            self.wait_s.observe(record.queue_s)
        self.prompt_tokens += record.prompt_tokens
        self.completion_tokens += record.completion_tokens
        self.cached_tokens += record.cached_tokens
        if record.code == _OK:
            self._add_answer(record)

    def _add_answer(self, record: RequestRecord) -> None:
        assert record.last_byte_s is not None
        self.e2e_s.observe(record.last_byte_s - record.arrived_s)
        if record.stream and record.first_byte_s is not None:
            self.ttft_s.observe(record.first_byte_s - record.arrived_s)
            if record.num_sequences == 1 and record.completion_tokens > 1:
                self.itl_s.observe((record.last_byte_s - record.first_byte_s) / (record.completion_tokens - 1))
        for part, count in record.transfer_bytes.items():
            self.transfer_bytes[part] += count
        if record.timing is not None:
            for name, histogram in self.timing_s.items():
                histogram.observe(getattr(record.timing, name))
            self.prompt_length.observe(record.prompt_tokens)
            self.completion_length.observe(record.completion_tokens)


def _ignore(_: RequestRecord) -> None:
    """Told to nobody."""


class Recorder:
    """Owns the records of one router: those that run, the last `MAX_RECENT` that have ended, and beside these the last
    `MAX_REFUSED` that went to no worker, so that a flood of them leaves the others to be seen.

    on_end: told of each that has ended. tracing: where its spans go, None: nowhere.
    """

    def __init__(self, on_end: Callable[[RequestRecord], None] = _ignore) -> None:
        self._on_end = on_end
        self.totals = Totals()
        self.started_s = time.monotonic()
        self.running: set[RequestRecord] = set()
        self.recent: deque[RequestRecord] = deque(maxlen=MAX_RECENT)
        self.unserved: deque[RequestRecord] = deque(maxlen=MAX_REFUSED)
        self._codes = {_OK, _OTHER}
        self.tracing: Tracing | None = None
        self._recorded: WeakKeyDictionary[ServingError, str] = WeakKeyDictionary()

    @contextlib.contextmanager
    def following(self, request: GenerateRequest, endpoint: str | None = None) -> Iterator[RequestRecord]:
        """The record of a request while it is served. What leaves the block as an error was its answer. endpoint: by
        default where its legs are posted."""
        record = RequestRecord(
            rid=request.rids[0],
            endpoint=endpoint or request.path,
            stream=request.stream,
            num_sequences=request.num_sequences,
        )
        self.running.add(record)
        if self.tracing is not None:
            record.trace = RequestTrace(self.tracing, record)
        try:
            yield record
        except ServingError as error:
            record.on_error(error.code, error.http_status)
            self._recorded[error] = record.rid
            raise
        except BaseException:
            record.on_error("internal", 500)
            raise
        finally:
            self._end(record)

    def refused(self, endpoint: str, error: ServingError) -> str | None:
        """The id of a request that is answered with this error. It gets a record here when it has none: its body, key
        or size was refused. None when it asked for no answer of a model."""
        if error not in self._recorded and endpoint in ENDPOINTS:
            record = RequestRecord(rid=uuid.uuid4().hex, endpoint=endpoint, stream=False, num_sequences=0)
            record.on_error(error.code, error.http_status)
            self._recorded[error] = record.rid
            self._end(record)
        return self._recorded.get(error)

    @property
    def num_waiting(self) -> int:
        """Requests that have no legs yet."""
        return sum(record.opened_s is None for record in self.running)

    def listing(self, now: float, limit: int, shown: str = "all") -> list[dict[str, Any]]:
        """At most `limit` records, the newest first; those that run are before those that have ended, and at most half
        went to no worker. shown: one of `SHOWN`."""
        running = sorted(self.running, key=lambda record: record.arrived_s, reverse=True)
        match shown:
            case "all":
                found = chain(running, self._ended(limit))
            case "running":
                found = chain(running)
            case "failed":
                found = chain(record for record in self._ended(limit) if record.code != _OK)
            case unknown:
                raise AssertionError(f"unknown choice of requests: {unknown}")
        return [record.describe(now) for record in islice(found, limit)]

    def _ended(self, limit: int) -> Iterable[RequestRecord]:
        unserved = islice(reversed(self.unserved), (limit + 1) // 2)
        return merge(reversed(self.recent), unserved, key=lambda record: record.last_byte_s or 0.0, reverse=True)

    def _end(self, record: RequestRecord) -> None:
        record.last_byte_s = time.monotonic()
        self.running.discard(record)
        (self.unserved if record.opened_s is None else self.recent).append(record)
        code = self._known(record.code)
        self.totals.add(record, code)
        if record.opened_s is None:
            self.totals.rejected[code] += 1
        self._on_end(record)
        if record.trace is not None:
            record.trace.end(record)

    def _known(self, code: str) -> str:
        """A code fit for a label: workers of others may say anything, and each new label is kept for ever."""
        if code in self._codes:
            return code
        if len(self._codes) >= _MAX_CODES or not _CODE.fullmatch(code):
            return _OTHER
        self._codes.add(code)
        return code
