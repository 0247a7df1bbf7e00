"""A unified rank, or a prefill and a decode rank with a real hand-off between them, stepped by hand in this process.

The engine, the scheduler, the transfer with its threads and its control connection are the real ones; only the front
processes are left out, so that a test can look into the pools at any moment.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from common.config import (
    DType,
    EngineConfig,
    LoopbackFaults,
    ModelConfig,
    NodeConfig,
    Role,
    TransferConfig,
    TransportName,
    Verify,
)
from common.errors import ErrorRecord
from common.handoff import RoomAddress
from common.sampling import FinishReason, LogprobOptions, SamplingParams, TokenLogprob
from decode_node.rank import DecodeRole, DecodeRoom
from engine.batch import OnLayer
from engine.device import PlannedRow, StepResult
from engine.scheduler import Scheduler
from engine.sequence import Emission
from engine.sequence import Sequence as EngineSequence
from node.accounting import NO_ROOMS
from node.messages import Abort, Failure, Query, Reply, Submit, Timing, Updates
from node.rank import Role as RankRole
from node.rank import Waker
from node.unified import UnifiedRole
from prefill_node.rank import PrefillRole
from tests.support.stack import MODEL
from transfer.rendezvous import BootstrapServer
from transfer.transport import Transport, open_transport

WITH_LOGPROBS = LogprobOptions(wanted=True, start_len=-1, top_num=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt, greedy unless told otherwise."""

    prompt: list[int]
    max_new_tokens: int = 8
    sampling: SamplingParams | None = None
    logprobs: LogprobOptions = WITH_LOGPROBS
    extra_key: str | None = None

    def params(self) -> SamplingParams:
        return self.sampling or SamplingParams(temperature=0.0, max_new_tokens=self.max_new_tokens, ignore_eos=True)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of a request. tokens: with logprob and the two likeliest alternatives.

    cached, local: the answer's num_cached_tokens and num_local_cached_tokens. prompt_logprobs: None when not asked.
    """

    rid: str = ""
    tokens: list[TokenLogprob] = field(default_factory=list)
    cached: int = 0
    local: int = 0
    prompt_logprobs: list[TokenLogprob] | None = None
    finish: FinishReason | None = None
    timing: Timing | None = None
    error: ErrorRecord | None = None

    @property
    def ids(self) -> list[int]:
        return [t.token_id for t in self.tokens]

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.error is not None


def node_config(
    role: Role,
    *,
    model: Path = MODEL,
    engine: EngineConfig | None = None,
    faults: LoopbackFaults | None = None,
    verify: Verify = Verify.DIGEST,
    transport: TransportName = TransportName.LOOPBACK,
    device: str = "cpu",
    dtype: DType = DType.FLOAT32,
    **transfer: float,
) -> NodeConfig:
    return NodeConfig(
        role=role,
        model=ModelConfig(path=str(model), device=device, dtype=dtype),
        engine=engine or EngineConfig(max_total_tokens=16384, max_state_slots=24, max_running_requests=20),
        transfer=TransferConfig(transport=transport, verify=verify, faults=faults or LoopbackFaults(), **transfer),
    )


class Snapshots:
    """The bytes of every room as prefill had them when it committed and as decode had them when it adopted."""

    def __init__(self) -> None:
        self.sent: dict[int, tuple[Tensor, ...]] = {}
        self.received: dict[int, tuple[Tensor, ...]] = {}

    def watch(self, prefill: PrefillRole, decode: DecodeRole) -> None:
        commit, adopt = prefill._commit, decode._adopt

        def watched_commit(emission: Emission) -> None:
            room = prefill.room_of[emission.sequence].room
            self.sent[room] = state_bytes(prefill, emission.sequence)
            commit(emission)

        def watched_adopt(room: DecodeRoom, event: object) -> None:
            self.received[room.address.room] = state_bytes(decode, room.sequence)
            adopt(room, event)  # type: ignore[arg-type]

        prefill._commit = watched_commit  # type: ignore[method-assign]
        decode._adopt = watched_adopt  # type: ignore[method-assign]


def state_bytes(role: PrefillRole | DecodeRole, sequence: EngineSequence) -> tuple[Tensor, ...]:
    """Clones of (KV pages of the prompt, conv state, SSM state) of a sequence, all layers."""
    pools = role.host.runner.pools
    num_pages = role.host.scheduler.memory.pages_for(sequence.num_prompt_tokens)
    assert sequence.slot is not None
    conv, ssm = pools.slot_state(sequence.slot)
    return pools.kv[:, :, sequence.page_table[:num_pages]].clone(), conv, ssm


class Ranks:
    """roles: one unified role, or prefill and decode. `submit` takes a request; `run` steps until all have ended.

    outcomes: what the last role answers to the client, by rid. legs: what the prefill role answers.
    """

    def __init__(self, roles: Sequence[RankRole], bootstrap_port: int | None) -> None:
        self.roles = list(roles)
        self.bootstrap_port = bootstrap_port
        self.outcomes: dict[str, Outcome] = {}
        self.legs: dict[str, Outcome] = {}
        self._numbers = itertools.count(1)

    @property
    def prefill(self) -> PrefillRole:
        assert isinstance(self.roles[0], PrefillRole)
        return self.roles[0]

    @property
    def decode(self) -> DecodeRole:
        assert isinstance(self.roles[-1], DecodeRole)
        return self.roles[-1]

    def submit(self, request: Request, *, alone: bool = False) -> Outcome:
        """Give the request to every role; the outcome is filled by the last one, which answers the client.

        alone: to that one only, without a room.
        """
        number = next(self._numbers)
        room = None
        if self.bootstrap_port is not None and not alone:
            room = RoomAddress(host="127.0.0.1", port=self.bootstrap_port, room=number)
        for role in self.roles[-1:] if alone else reversed(self.roles):
            role.submit(
                Submit(
                    rid=f"r{number}",
                    token_ids=request.prompt,
                    sampling=request.params(),
                    logprobs=request.logprobs,
                    room=room,
                    arrival_s=time.monotonic(),
                    extra_key=request.extra_key,
                )
            )
        if room is not None:
            self.legs[f"r{number}"] = Outcome(rid=f"r{number}")
        return self.outcomes.setdefault(f"r{number}", Outcome(rid=f"r{number}"))

    def abort(self, outcome: Outcome) -> None:
        """As a router does when its client has gone: on both legs."""
        for role in self.roles:
            role.abort(Abort(rid=outcome.rid))

    def flush(self) -> list[ErrorRecord | None]:
        """What each role answers to /flush_cache."""
        replies = []
        for role in self.roles:
            role.query(Query(ticket=1, what="flush"))
            (reply,) = role.take_outbox()
            assert isinstance(reply, Reply)
            replies.append(reply.error)
        return replies

    def step(self) -> bool:
        busy = False
        for role in self.roles:
            role.poll()
            busy |= role.step()
            for message in role.take_outbox():
                _take(message, self.outcomes if role is self.roles[-1] else self.legs)
        return busy

    def run_until(self, done: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < deadline, "the ranks did not get there in time"
            if not self.step():
                time.sleep(0.0005)

    def run(self, requests: Sequence[Request], timeout_s: float = 120.0) -> list[Outcome]:
        outcomes = [self.submit(r) for r in requests]
        self.run_until(lambda: all(o.ended for o in outcomes), timeout_s)
        return outcomes

    def assert_all_free(self, timeout_s: float = 5.0) -> None:
        """Every page and slot comes back, at once or with the cached prefixes."""
        schedulers = [role.host.scheduler for role in self.roles]  # type: ignore[attr-defined]
        self.run_until(lambda: all(is_unowned(s) for s in schedulers), timeout_s)
        for scheduler in schedulers:
            memory = scheduler.memory
            if memory.cache is not None:
                memory.cache.check_integrity(request_pages=[], request_slots=[])
            memory.flush()
            assert memory.pages.num_free == memory.pages.num_usable
            assert memory.slots.num_free == memory.slots.num_usable


PLAIN = EngineConfig(
    page_size=1,
    max_total_tokens=4096,
    max_state_slots=8,
    chunked_prefill_size=-1,
    mamba_scheduler_strategy="no_buffer",
    disable_radix_cache=True,
    disable_overlap_schedule=True,
)


class ColdRuns:
    """Each request alone, without cache and overlap, on ranks with the settings `PLAIN`; run once and remembered."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._known: dict[tuple[object, ...], Outcome] = {}

    def of(self, request: Request) -> Outcome:
        key = (tuple(request.prompt), request.params(), request.logprobs)
        if key not in self._known:
            (self._known[key],) = self._ranks.run([request])
        return self._known[key]


def _take(message: object, outcomes: dict[str, Outcome]) -> None:
    match message:
        case Updates(items=items):
            for update in items:
                outcome = outcomes[update.rid]
                outcome.tokens += update.logprobs or [TokenLogprob(None, token_id) for token_id in update.token_ids]
                outcome.cached, outcome.local = update.num_cached_tokens, update.num_local_cached_tokens
                if update.input_logprobs is not None:
                    outcome.prompt_logprobs = list(update.input_logprobs)
                outcome.finish, outcome.timing = update.finish, update.timing
        case Failure(rid=rid, error=error):
            outcomes[rid].error = error


class LateThread:
    """In the place of a device's thread: a step runs when its result is asked for, the latest moment that is allowed.

    Whatever the scheduler frees or hands on while a step is in flight has then changed before the step reads it.
    """

    def __init__(self) -> None:
        self._waiting: list[_LateStep] = []

    def submit(
        self, run: Callable[..., StepResult], rows: Sequence[PlannedRow], on_layer: OnLayer | None
    ) -> Future[StepResult]:
        step = _LateStep(self, lambda: run(rows, on_layer))
        self._waiting.append(step)
        return step

    def run_up_to(self, last: _LateStep) -> None:
        while not last.done():
            step = self._waiting.pop(0)
            step.set_result(step.work())

    def shutdown(self) -> None:
        """There is no thread."""


class _LateStep(Future[StepResult]):
    def __init__(self, thread: LateThread, work: Callable[[], StepResult]) -> None:
        super().__init__()
        self.thread, self.work = thread, work

    def result(self, timeout: float | None = None) -> StepResult:
        self.thread.run_up_to(self)
        return super().result(timeout)


def run_late(ranks: Ranks) -> None:
    """Make every step of ranks with overlap scheduling a late one. Call it before the first step."""
    for role in ranks.roles:
        device = role.host.scheduler.device  # type: ignore[attr-defined]
        assert device._thread is not None, "without overlap a step runs at once"
        device._thread.shutdown()
        device._thread = LateThread()


def assert_all_owned(role: RankRole) -> None:
    """There is nothing that the rank would call a leak if it stayed so. (That a room is over for the transfer alone is
    normal: its event waits.)"""
    rooms = role._rooms_seen() if isinstance(role, PrefillRole | DecodeRole) else NO_ROOMS
    unowned = role.host.accounts.unowned(rooms)  # type: ignore[attr-defined]
    assert not [item for item in unowned if item.kind not in ("room", "lease")]


def check_integrity(role: RankRole) -> None:
    """AssertionError unless free + owned + cached = all, for pages and slots, whatever is running or in flight."""
    assert_all_owned(role)
    host = role.host  # type: ignore[attr-defined]
    memory, launched = host.scheduler.memory, host.scheduler._in_flight
    shares = launched.shares if launched else []
    rooms = list(getattr(role, "rooms", {}).values())
    owners = {id(s): s for s in (*host.sequences.values(), *(r.sequence for r in rooms), *(s.sequence for s in shares))}
    pages = [page for s in owners.values() for page in s.own_pages]
    tracks = [share.track.slot for share in shares if share.track] + [getattr(r, "track_slot", None) for r in rooms]
    spare = [slot for s in owners.values() for slot in s.spare_slots]
    slots = [slot for slot in (*(s.slot for s in owners.values()), *tracks, *spare) if slot is not None]
    memory.check_integrity(request_pages=pages, request_slots=slots)


def is_unowned(scheduler: Scheduler) -> bool:
    """Nothing runs, and what is not free is cached."""
    memory = scheduler.memory
    pages = slots = 0
    if memory.cache is not None:
        pages, slots = memory.cache.num_cached_pages, memory.cache.num_cached_slots
    all_pages = memory.pages.num_free + pages == memory.pages.num_usable
    return not scheduler.has_work() and all_pages and memory.slots.num_free + slots == memory.slots.num_usable


@contextmanager
def unified_ranks(**settings: object) -> Iterator[Ranks]:
    role = UnifiedRole(node_config(Role.UNIFIED, **settings), 0)  # type: ignore[arg-type]
    yield Ranks([role], None)
    role.close()


def transport_of(config: NodeConfig) -> Transport:
    return open_transport(config.transfer, config.model.device)


@contextmanager
def disaggregated_ranks(decode_model: Path | None = None, **settings: object) -> Iterator[Ranks]:
    """decode_model: where decode's differs, which must not work."""
    prefill_config = node_config(Role.PREFILL, **settings)  # type: ignore[arg-type]
    theirs = settings if decode_model is None else settings | {"model": decode_model}
    decode_config = node_config(Role.DECODE, **theirs)  # type: ignore[arg-type]
    prefill = PrefillRole(prefill_config, 0, transport_of(prefill_config), Waker())
    try:
        decode = DecodeRole(decode_config, 0, transport_of(decode_config), Waker())
        try:
            with bootstrap(prefill) as port:
                yield Ranks([prefill, decode], port)
        finally:
            decode.close()
    finally:
        prefill.close()


@contextmanager
def bootstrap(prefill: PrefillRole) -> Iterator[int]:
    """The prefill node's bootstrap endpoint on a thread of its own; yields its port."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="bootstrap")
    thread.start()
    address = prefill.ready().control_address
    assert address is not None
    server = BootstrapServer("127.0.0.1", 0, [address], prefill.host.layout, None, verify=prefill.config.verify)
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
        yield server.port
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def assert_equivalent(got: Outcome, reference: Outcome, *, gap: float = 1e-4, logprob: float = 1e-4) -> None:
    """Identical greedy tokens, except from where the reference's two likeliest tokens are closer than `gap`."""
    assert got.error is None and reference.error is None, (got.error, reference.error)
    assert got.finish == reference.finish and len(got.tokens) == len(reference.tokens)
    for position, (ours, theirs) in enumerate(zip(got.tokens, reference.tokens, strict=True)):
        if ours.token_id != theirs.token_id:
            difference = theirs.top[0][0] - theirs.top[1][0]
            assert difference < gap, f"token {position}: {ours} instead of {theirs}"
            return
        assert ours.logprob is not None and theirs.logprob is not None
        assert abs(ours.logprob - theirs.logprob) <= logprob, f"logprob {position}: {ours} instead of {theirs}"


def assert_bytes_crossed_unchanged(snapshots: Snapshots, expected_rooms: int) -> None:
    assert snapshots.sent.keys() == snapshots.received.keys() and len(snapshots.sent) == expected_rooms
    for room, sent in snapshots.sent.items():
        for part, ours, theirs in zip(("kv", "conv", "ssm"), snapshots.received[room], sent, strict=True):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), f"room {room}: {part} changed"
