"""Mamba2 and attention side by side: both read the same normed input, both outputs are added (Falcon-H1)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from engine.mixers.attention import AttentionMixer
from engine.mixers.mamba2 import Mamba2Mixer
from engine.mixers.mixer import Step


class ParallelMixer:
    def __init__(self, mamba: Mamba2Mixer, attention: AttentionMixer) -> None:
        self.mamba, self.attention = mamba, attention

    def matrices(self) -> Iterator[Tensor]:
        yield from self.mamba.matrices()
        yield from self.attention.matrices()

    def forward(self, normed: Tensor, residual: Tensor, step: Step) -> Tensor:
        return self.attention.forward(normed, self.mamba.forward(normed, residual, step), step)
