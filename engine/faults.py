"""Faults that have happened in public, to be switched on in a rank on purpose: for tests and for `tandem gate mutate`.

Each replaces something of the engine for as long as the process lives, which serves nobody else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

import engine.batch
import engine.model
import engine.ops.conv
import engine.ops.gated_delta
import engine.ops.ssd
from common.errors import ConfigError
from common.sampling import TokenLogprob
from engine.batch import OnLayer, Row, Track
from engine.pools import StatePools
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.sequence import Emission
from engine.sequence import Sequence as EngineSequence

Spoil = Callable[[StatePools, EngineSequence], None]


def switch_on(name: str) -> None:
    """Break this process. Raises ConfigError for a name that is none."""
    if name not in ENGINE_FAULTS:
        raise ConfigError(f"--fault-engine {name}: one of {', '.join(sorted(ENGINE_FAULTS))}", param="fault_engine")
    ENGINE_FAULTS[name]()


def _put(owner: object, name: str, replacement: object) -> None:
    assert hasattr(owner, name), f"{owner} has no {name} any more"
    setattr(owner, name, replacement)


# -- what is saved on the way --------------------------------------------------------------------------------------


def track_not_written() -> None:
    """The copy into the track slot is skipped: the slot keeps what it had."""
    for module in (engine.ops.conv, engine.ops.ssd, engine.ops.gated_delta):
        _put(module, "save_states", lambda pool, states: None)


def track_of_the_chunk_before() -> None:
    """The state is saved a chunk early and recorded under the position where it should have been."""
    original = ModelRunner.forward

    def early(row: Row, chunk: int) -> Row:
        if row.track is None or len(row.token_ids) == 1 or row.track.position - chunk <= row.start:
            return row
        return dataclasses.replace(row, track=Track(row.track.position - chunk, row.track.slot))

    def forward(self: ModelRunner, rows: Sequence[Row], on_layer: OnLayer | None = None) -> Tensor:
        return original(self, [early(row, self.config.chunk_size) for row in rows], on_layer)

    _put(ModelRunner, "forward", forward)


def track_conv_off_by_one() -> None:
    """The convolution's window is saved a token early."""
    original = engine.ops.conv.plan_conv

    def shifted(*args: Any) -> Any:
        plan = original(*args)
        return dataclasses.replace(plan, tracks=tuple((slot, begin - 1) for slot, begin in plan.tracks))

    _put(engine.model, "plan_conv", shifted)


# -- what is read of it --------------------------------------------------------------------------------------------


def saved_state_not_read() -> None:
    """A prefix hit begins from zeros."""
    original = engine.batch._prefill_part

    def fresh(*args: Any) -> Any:
        part = original(*args)
        return dataclasses.replace(part, fresh=torch.ones_like(part.fresh))

    _put(engine.batch, "_prefill_part", fresh)


def saved_conv_not_read() -> None:
    """A prefix hit begins with the SSM state and an empty convolution."""

    def copy_slots(self: StatePools, sources: Sequence[int], targets: Sequence[int]) -> None:
        for source, target in zip(sources, targets, strict=True):
            self.ssm[target], self.conv[target] = self.ssm[source], 0

    _put(StatePools, "copy_slots", copy_slots)


# -- what has arrived ----------------------------------------------------------------------------------------------


def _on_arrival(spoil: Spoil) -> Callable[[], None]:
    """Spoil the state of every request that another rank has computed, after its digests were compared."""

    def switch() -> None:
        original = Scheduler.adopt

        def adopt(self: Scheduler, sequence: EngineSequence, first_token: TokenLogprob) -> Emission:
            runner = self.device.runner
            assert isinstance(runner, ModelRunner)
            with torch.inference_mode():
                spoil(runner.pools, sequence)
            return original(self, sequence, first_token)

        _put(Scheduler, "adopt", adopt)

    return switch


def _clear(pools: StatePools, sequence: EngineSequence) -> None:
    pools.conv[_slot(sequence)], pools.ssm[_slot(sequence)] = 0, 0


def _round(pools: StatePools, sequence: EngineSequence) -> None:
    pools.ssm[_slot(sequence)] = pools.ssm[_slot(sequence)].to(torch.bfloat16).to(pools.ssm.dtype)


def _lose_page(pools: StatePools, sequence: EngineSequence) -> None:
    """The last full page, where the question is."""
    full = sequence.num_computed_tokens // pools.page_size
    if full:
        pools.kv[:, :, sequence.page_table[full - 1]] = 0


def _swap_slot(pools: StatePools, sequence: EngineSequence) -> None:
    """The state of the slot beside it, whoever had that last."""
    slot = _slot(sequence)
    other = slot - 1 if slot > 1 else slot + 1
    pools.conv[slot], pools.ssm[slot] = pools.conv[other].clone(), pools.ssm[other].clone()


def _slot(sequence: EngineSequence) -> int:
    assert sequence.slot is not None
    return sequence.slot


# -- decoding ------------------------------------------------------------------------------------------------------


def position_off_by_one() -> None:
    """Decode takes a sequence for a token shorter than it is: each token's KV overwrites the one before."""
    original = ModelRunner.forward

    def shifted(row: Row) -> Row:
        if len(row.token_ids) != 1 or row.start < 2 or row.track is not None:
            return row
        return dataclasses.replace(row, start=row.start - 1)

    def forward(self: ModelRunner, rows: Sequence[Row], on_layer: OnLayer | None = None) -> Tensor:
        return original(self, [shifted(row) for row in rows], on_layer)

    _put(ModelRunner, "forward", forward)


ENGINE_FAULTS: Mapping[str, Callable[[], None]] = MappingProxyType(
    {
        "track-not-written": track_not_written,
        "track-of-the-chunk-before": track_of_the_chunk_before,
        "track-conv-off-by-one": track_conv_off_by_one,
        "saved-state-not-read": saved_state_not_read,
        "saved-conv-not-read": saved_conv_not_read,
        "received-state-cleared": _on_arrival(_clear),
        "received-ssm-rounded": _on_arrival(_round),
        "received-page-lost": _on_arrival(_lose_page),
        "wrong-slot": _on_arrival(_swap_slot),
        "position-off-by-one": position_off_by_one,
    }
)
