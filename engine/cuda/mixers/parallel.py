"""Mamba2 and attention side by side. Twin: `engine.mixers.parallel`."""

from __future__ import annotations

from torch import Tensor

from engine.cuda.batch import CudaBatch
from engine.cuda.mixers.mixer import TokenMixer


class ParallelMixer:
    def __init__(self, *mixers: TokenMixer) -> None:
        self.mixers = mixers

    def forward(self, hidden: Tensor, batch: CudaBatch) -> None:
        wide = [mixer.inner(hidden) for mixer in self.mixers]  # all of them before anything is added to what they read
        for mixer, own in zip(self.mixers, wide, strict=True):
            mixer.out.add_to(hidden, mixer.mix(own, batch))
