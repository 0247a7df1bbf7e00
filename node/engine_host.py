"""The engine inside a rank: runner, pools, scheduler, and the translation of its steps into messages to the front."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from common.config import EngineConfig, NodeConfig
from common.errors import ConfigError, ErrorRecord, RequestError, ServingError
from common.sampling import TokenLogprob
from engine.allocator import PageAllocator, SlotAllocator
from engine.backend import make_engine
from engine.families import read_config
from engine.grammar import GrammarCompiler
from engine.memory import SequenceMemory
from engine.model_config import HybridConfig
from engine.radix_cache import RadixCache
from engine.scheduler import Limits, Scheduler, StepReport
from engine.sequence import Emission, Sequence
from engine.stopping import StopChecker
from engine.tracking import Strategy, Tracking, resolve_tracking
from node.accounting import Accounts, LeakDetector, Rooms
from node.messages import Failure, FromRank, Query, Ready, Reply, Submit, Timing, Update, Updates
from node.state_log import StateLog
from node.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

Allocate = Callable[[int], Tensor]


class EngineHost:
    """Owns the sequences of one rank by rid and the messages that wait for the front.

    allocate: memory for the pools (the transport's, where there is one), or None for plain memory.
    """

    def __init__(self, config: NodeConfig, *, allocate: Allocate | None, hold_after_prefill: bool) -> None:
        torch.set_num_threads(config.engine.threads)
        self.config = config
        hybrid = read_config(config.model.path)
        num_pages = config.engine.max_total_tokens // config.engine.page_size
        tracking = resolve_states(config.engine, hybrid, config.model.device)
        self.context_length = resolve_context_length(config.engine, hybrid)
        eos_ids, limits = frozenset(hybrid.eos_token_ids), resolve_limits(config.engine, tracking)
        self.runner, device = make_engine(
            config.model,
            config.engine,
            num_pages=num_pages,
            step_tokens=limits.prefill_budget + limits.max_running,
            context_length=self.context_length,
            eos_ids=eos_ids,
            overlap=tracking.overlap,
            allocate=allocate,
        )
        tokenizer = load_tokenizer(config.model.path)
        pages, slots = PageAllocator(num_pages), SlotAllocator(config.engine.max_state_slots)
        cache = None
        if tracking.cache_chunk is not None:
            cache = RadixCache(pages, slots, page_size=config.engine.page_size, cache_chunk=tracking.cache_chunk)
        self.scheduler = Scheduler(
            device=device,
            memory=SequenceMemory(
                pages=pages,
                slots=slots,
                cache=cache,
                copy_slots=self.runner.copy_slots,
                page_size=config.engine.page_size,
                num_row_slots=resolve_row_slots(config.engine, config.model.device),
            ),
            stopping=StopChecker(partial(tokenizer.decode, skip_special_tokens=False), eos_ids),
            limits=limits,
            overlap=tracking.overlap,
            hold_after_prefill=hold_after_prefill,
        )
        self.grammars = GrammarCompiler(config.model.path, hybrid.vocab_size, eos_ids)
        self.sequences: dict[str, Sequence] = {}
        self.accounts = Accounts(self.scheduler, self.sequences)
        self.leaks = LeakDetector()
        self.integrity_failures = 0
        self._local_prefill_max_tokens = config.engine.local_prefill_max_tokens
        self._num_ended_when_checked = 0
        self.states = StateLog(self.runner.pools)
        self.num_finished = self.num_failed = 0
        self.updates: list[Update] = []
        self.outbox: list[FromRank] = []
        self.layout = self.runner.pools.layout()

    # -- messages ---------------------------------------------------------------------------------------------------

    def new_sequence(self, message: Submit) -> Sequence:
        sequence = Sequence(
            rid=message.rid,
            prompt_ids=message.token_ids,
            sampling=message.sampling,
            logprobs=message.logprobs,
            arrival_s=message.arrival_s,
            extra_key=message.extra_key,
            output_ids=list(message.output_ids),
            grammar=None if message.sampling.grammar is None else self.grammars.start(message.sampling.grammar),
            num_resumed_tokens=len(message.output_ids),
        )
        self.sequences[message.rid] = sequence
        return sequence

    def lacks_little(self, sequence: Sequence) -> bool:
        """Whether so much of the prompt can be resumed here that a decode node rather computes the rest itself.

        The prompt's logprobs are the prefill leg's to report: such a request always takes both legs.
        """
        if sequence.first_logits_wanted is not None:
            return False
        start = self.scheduler.memory.resume_position(sequence)
        return start > 0 and sequence.num_tokens - start <= self._local_prefill_max_tokens

    def select(self, rid: str | None) -> list[Sequence]:
        """The sequence of this rid, or every one when rid is None; empty when there is none."""
        if rid is None:
            return list(self.sequences.values())
        return [self.sequences[rid]] if rid in self.sequences else []

    def fail(self, sequence: Sequence, error: ServingError) -> None:
        """Tell the front that the sequence ended with an error and forget it. Its memory is the caller's to release."""
        self._forget(sequence)
        self.num_failed += 1
        self.outbox.append(Failure(rid=sequence.rid, error=error.record()))

    def emit(self, emission: Emission, timing: Timing | None) -> None:
        """Tell the front of a token. timing: set when the emission ends the sequence, which is then forgotten."""
        sequence, token = emission.sequence, emission.token
        self.updates.append(
            Update(
                rid=sequence.rid,
                token_ids=[] if token is None else [token.token_id],
                logprobs=[token] if token is not None and sequence.logprobs.wanted else [],
                num_cached_tokens=sequence.num_cached_tokens,
                num_local_cached_tokens=sequence.num_local_cached_tokens,
                input_logprobs=self._input_logprobs(sequence),
                finish=emission.finish,
                timing=timing,
            )
        )
        if emission.finish is not None:
            self.num_finished += 1
            self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        if self.sequences.get(sequence.rid) is sequence:  # not a newer one that took over its rid
            del self.sequences[sequence.rid]

    def _input_logprobs(self, sequence: Sequence) -> list[TokenLogprob] | None:
        if not sequence.logprobs.wanted or sequence.reported_prompt_logprobs:
            return None
        sequence.reported_prompt_logprobs = True
        return sequence.prompt_logprobs

    def take_outbox(self) -> list[FromRank]:
        if self.updates:
            self.outbox.append(Updates(self.updates))
            self.updates = []
        messages, self.outbox = self.outbox, []
        return messages

    # -- what every role answers --------------------------------------------------------------------------------------

    def ready(self, *, rank: int, transport: str, control_address: tuple[str, int] | None) -> Ready:
        return Ready(
            pid=os.getpid(),
            fingerprint=self.layout.fingerprint(),
            transport=transport,
            control_address=control_address,
            context_length=self.context_length,
            max_total_tokens=self.max_request_tokens(),
            vocab_size=self.layout.vocab_size,
            info={"rank": rank, "chunk": self.layout.chunk, "page_size": self.layout.page_size},
            layout=self.layout,
        )

    def max_request_tokens(self) -> int:
        """The longest prompt and answer together that the pages can hold when nothing else runs."""
        return (self.scheduler.memory.pages.num_usable) * self.scheduler.limits.page_size

    def answer_query(self, message: Query, *, idle: bool, rooms: Rooms, extra_state: dict[str, object]) -> None:
        match message.what:
            case "state":
                reply = Reply(ticket=message.ticket, payload={**self.state(rooms), **extra_state})
            case "debug":
                reply = Reply(ticket=message.ticket, payload=self.debug(rooms, message.limit))
            case "flush":
                idle = idle and not self.scheduler.has_work()
                if idle:
                    self.scheduler.memory.flush()
                reply = Reply(ticket=message.ticket, payload={}, error=None if idle else _busy())
            case "prefixes":
                reply = Reply(ticket=message.ticket, payload=self.prefixes(message.limit))
            case "states":
                reply = Reply(ticket=message.ticket, payload={"states": self.states.listing()})
            case "record":
                self.states.switch(message.limit > 0)
                reply = Reply(ticket=message.ticket, payload={})
            case unknown:
                reply = Reply(
                    ticket=message.ticket, payload={}, error=RequestError(f"unknown query {unknown}").record()
                )
        self.outbox.append(reply)

    def watch(self, rooms: Rooms, now: float) -> None:
        """Look for leaks, and when nothing is there any more at everything. To be called about once a second; now: of
        the monotonic clock."""
        self.leaks.look(self.accounts.unowned(rooms), now)
        is_idle = not (self.sequences or rooms.views or rooms.strays or self.scheduler.has_work())
        ended = self.num_finished + self.num_failed
        if is_idle and ended != self._num_ended_when_checked:
            self._num_ended_when_checked = ended
            self._check_integrity()

    def _check_integrity(self) -> None:
        """A rank whose books do not balance goes on serving, but says so."""
        try:
            self.scheduler.memory.check_integrity(request_pages=[], request_slots=[])
        except AssertionError as error:
            self.integrity_failures += 1
            log.error("integrity of pages and slots: %s", error)

    def debug(self, rooms: Rooms, limit: int) -> dict[str, Any]:
        """Who owns what since when, as /debug/state shows it; at most `limit` entries of each kind."""
        now = time.monotonic()
        listing = {**self.accounts.listing(rooms, now), "leaks": self.leaks.listing(now)}
        return {
            **{name: entries[:limit] for name, entries in listing.items()},
            "omitted": {name: max(0, len(entries) - limit) for name, entries in listing.items()},
        }

    def prefixes(self, limit: int) -> dict[str, Any]:
        """What is cached, as /debug/cache shows it."""
        cache = self.scheduler.memory.cache
        families, omitted = ([], 0) if cache is None else cache.prefixes(limit)
        return {"prefixes": families, "omitted": omitted}

    def state(self, rooms: Rooms) -> dict[str, object]:
        """Counters and pools of this rank, as /server_info and /metrics show them."""
        scheduler, memory = self.scheduler, self.scheduler.memory
        return {
            **asdict(scheduler.counters),
            **asdict(memory.counters),
            "num_waiting": len(scheduler.waiting),
            "num_prefilling": len(scheduler.prefilling),
            "num_running": len(scheduler.running),
            "requests_finished": self.num_finished,
            "requests_failed": self.num_failed,
            "leaks": self.leaks.num_now,
            "leaks_total": self.leaks.total,
            "integrity_failures": self.integrity_failures,
            **self.accounts.sizes(rooms),
            "pages_total": memory.pages.num_usable,
            "pages_free": memory.pages.num_free,
            "pages_cached": 0 if memory.cache is None else memory.cache.num_cached_pages,
            "slots_total": memory.slots.num_usable,
            "slots_free": memory.slots.num_free,
            "slots_cached": 0 if memory.cache is None else memory.cache.num_cached_slots,
            "cache": None if memory.cache is None else memory.cache.state(),
        }


def resolve_states(engine: EngineConfig, hybrid: HybridConfig, device: str) -> Tracking:
    """Which states are saved and where. Raises ConfigError for settings that do not go together."""
    return resolve_tracking(
        strategy=engine.mamba_scheduler_strategy,
        radix_cache=not engine.disable_radix_cache,
        overlap=not (device == "cpu" if engine.disable_overlap_schedule is None else engine.disable_overlap_schedule),
        chunk=hybrid.chunk_size,
        page_size=engine.page_size,
        chunked_prefill_size=engine.chunked_prefill_size,
        track_interval=engine.mamba_track_interval,
    )


def resolve_row_slots(engine: EngineConfig, device: str) -> int:
    """How many slots are kept from saved states. Only the CPU gains by that, and only where there are enough."""
    has_enough = engine.max_state_slots > 2 * engine.max_running_requests
    return engine.max_running_requests if device == "cpu" and has_enough else 0


def resolve_limits(engine: EngineConfig, tracking: Tracking) -> Limits:
    """What the scheduler keeps to. Without pieces the budget is whatever the pages hold."""
    budget, grid = engine.chunked_prefill_size, tracking.prefill_grid
    return Limits(
        page_size=engine.page_size,
        prefill_budget=max(grid, engine.max_total_tokens if budget == -1 else budget - budget % grid),
        cache_chunk=grid,
        max_running=engine.max_running_requests,
        track_interval=tracking.track_interval if tracking.radix_cache else None,
        tracks_prefill=tracking.radix_cache and tracking.strategy is Strategy.EXTRA_BUFFER,
        caches_final_state=tracking.radix_cache and tracking.strategy is Strategy.NO_BUFFER,
        mixed=engine.enable_mixed_chunk,
    )


def resolve_context_length(engine: EngineConfig, hybrid: HybridConfig) -> int:
    own = hybrid.max_position_embeddings
    if engine.context_length is not None and engine.context_length > own:
        raise ConfigError(
            f"--context-length {engine.context_length}: the model's max_position_embeddings is {own}",
            param="context_length",
        )
    return engine.context_length or own


def _busy() -> ErrorRecord:
    return RequestError("requests are running", code="busy").record()


def room_in_use(room: int) -> RequestError:
    return RequestError(f"room {room} is in use", code="room_in_use", param="bootstrap_room")


def local_timing(sequence: Sequence) -> Timing:
    """The timing of a sequence that this rank both prefilled and decoded."""
    end = sequence.prefill_end_s or time.monotonic()
    return Timing(queue_s=sequence.queue_s, prefill_s=sequence.prefill_s, decode_s=time.monotonic() - end)


def finish_local(host: EngineHost, report: StepReport, timing_of: Callable[[Sequence], Timing] = local_timing) -> None:
    """Emit a step's results for sequences that end on this rank, and release those that ended."""
    for chunk in report.chunks:
        if chunk.end == chunk.sequence.num_prompt_tokens:
            host.states.record("prefill", chunk.sequence, chunk.sequence.tracked)
    for emission in report.emissions:
        ended = emission.finish is not None
        if ended:
            host.states.record("end", emission.sequence, None)
        host.emit(emission, timing_of(emission.sequence) if ended else None)
        if ended:
            host.scheduler.release(emission.sequence)
    for sequence, error in report.failures:
        host.scheduler.release(sequence)
        host.fail(sequence, error)
