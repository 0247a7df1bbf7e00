"""What a mixer is to the model, and what all of them share.

Legend: T packed tokens, D hidden size. Decode rows come first in a pack, then the tokens of prefills.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from engine.batch import DecodePart, ForwardBatch, PrefillPart
from engine.ops.chunks import ChunkPlan
from engine.ops.conv import ConvPlan
from engine.ops.linear import Projection

Shapes = dict[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What every layer of one forward pass shares: the batch, and where its prefill tokens lie for conv and scan.

    turn: what the rotary embedding turns each token by, None without one.
    """

    batch: ForwardBatch
    conv_plan: ConvPlan | None
    chunk_plan: ChunkPlan | None
    turn: tuple[Tensor, Tensor] | None


class Mixer(Protocol):
    """One layer's mixer."""

    def forward(self, normed: Tensor, residual: Tensor, step: Step) -> Tensor:
        """normed [T, D] -> residual [T, D] plus the mixer's output. Updates its state in the pools."""
        ...

    def matrices(self) -> Iterator[Tensor]:
        """The weights that take memory, in every layout that is kept of them."""
        ...


class RecurrentMixer(Mixer, Protocol):
    """A mixer whose past is a fixed amount of memory: the inputs that its convolution still sees, and a state.

    conv_state [slots, C, W - 1] and state [slots, *state_shape]: this layer's, strided views of the pools.
    """

    conv_state: Tensor
    state: Tensor

    def decode(self, part: DecodePart, *inputs: Tensor) -> Tensor:
        """One token a row: its conv window and state in the slots are advanced in place."""
        ...

    def prefill(self, part: PrefillPart, step: Step, *inputs: Tensor) -> Tensor:
        """Many tokens a sequence, each on the chunk grid of its own: begins with what its slot holds, or with zeros;
        leaves the state of its end there, and that of the positions to be kept in their slots."""
        ...


def advance(mixer: RecurrentMixer, step: Step, *inputs: Tensor) -> Tensor:
    """Decode rows and prefill rows of the inputs [T, ...], each their own way: [T, ...]."""
    batch = step.batch
    rows = batch.decode.rows if batch.decode else 0
    parts = []
    if batch.decode:
        parts.append(mixer.decode(batch.decode, *(each[:rows] for each in inputs)))
    if batch.prefill:
        parts.append(mixer.prefill(batch.prefill, step, *(each[rows:] for each in inputs)))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def project(weights: Mapping[str, Tensor], name: str) -> Projection:
    return Projection(weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def stack(weights: Mapping[str, Tensor], *names: str) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of projections that read the same input, as those of one."""
    biases = [weights[f"{name}.bias"] for name in names if f"{name}.bias" in weights]
    return torch.cat([weights[f"{name}.weight"] for name in names]), torch.cat(biases) if biases else None


def linear_shapes(name: str, out: int, inner: int, bias: bool) -> Shapes:
    return {f"{name}.weight": (out, inner)} | ({f"{name}.bias": (out,)} if bias else {})


def within(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The weights whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
