"""A hybrid model: residual blocks of one mixer each behind an RMS norm, whatever the family.

Legend: T packed tokens, D hidden size, V vocabulary, R logit rows.
The model computes with what a `ForwardBatch` says and writes state into the pools; it does not know sequences, pages or
slots beyond that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch.nn.functional as F
from torch import Tensor

from engine.batch import ForwardBatch, OnLayer
from engine.mixers.attention import AttentionMixer
from engine.mixers.gated_delta import GatedDeltaMixer
from engine.mixers.mamba2 import Mamba2Mixer
from engine.mixers.mixer import Mixer, Step, project, within
from engine.mixers.mlp import MlpMixer
from engine.mixers.moe import MoeMixer
from engine.mixers.parallel import ParallelMixer
from engine.model_config import GatedDeltaConfig, HybridConfig, LayerKind, Mamba2Config
from engine.ops.chunks import plan_chunks
from engine.ops.conv import plan_conv
from engine.ops.norm import rms_norm
from engine.ops.rotary import Rotary
from engine.pools import StatePools


class HybridModel:
    """The model over its weights (the engine's names, see `load_weights`) and the pools its state lives in.

    A state to keep is written by the mixers themselves where a prompt passes it; where rows decode it is the new state,
    copied when the last layer is done.
    """

    def __init__(self, config: HybridConfig, weights: Mapping[str, Tensor], pools: StatePools) -> None:
        self.config = config
        self.pools = pools
        self.embeddings = weights["embeddings.weight"]  # [V, D]
        self.final_norm = weights["norm_f.weight"]
        self.head = project(weights, "lm_head")
        attention = config.attention
        self.rotary = (
            Rotary(attention.rotary_dim, attention.rope_theta, self.embeddings.device) if attention.rotary_dim else None
        )
        self.norms = [weights[f"layers.{layer}.norm.weight"] for layer in range(len(config.layers))]
        self.mixers = [self._mixer(weights, layer) for layer in range(len(config.layers))]

    def matrices(self) -> Iterator[Tensor]:
        """The weights that take memory, in every layout that is kept of them."""
        yield self.embeddings
        yield from self.head.matrices()
        for mixer in self.mixers:
            yield from mixer.matrices()

    def forward(self, batch: ForwardBatch, on_layer: OnLayer | None = None) -> Tensor:
        """Logits float32 [R, V] of the tokens the batch asks for. Advances every row, fills the track slots.

        on_layer: called after every layer, in order.
        """
        step = self._plan(batch)
        hidden = F.embedding(batch.token_ids, self.embeddings)  # [T, D]
        if self.config.embedding_multiplier != 1:
            hidden = hidden.mul_(self.config.embedding_multiplier)
        for layer, (norm, mixer) in enumerate(zip(self.norms, self.mixers, strict=True)):
            hidden = mixer.forward(rms_norm(hidden, norm, self.config.norm_eps), hidden, step)
            if on_layer is not None:
                on_layer(layer)
        if batch.decode and batch.decode.tracks:
            self.pools.copy_slots(*zip(*batch.decode.tracks, strict=True))
        hidden = hidden.index_select(0, batch.logit_tokens)  # [R, D]
        return self.head(rms_norm(hidden, self.final_norm, self.config.norm_eps)).float()

    def _plan(self, batch: ForwardBatch) -> Step:
        turn = None
        if self.rotary is not None:
            assert batch.positions is not None
            turn = self.rotary.at(batch.positions)
        part = batch.prefill
        if part is None:
            return Step(batch=batch, conv_plan=None, chunk_plan=None, turn=turn)
        device, recurrence = batch.token_ids.device, self.config.recurrence
        return Step(
            batch=batch,
            conv_plan=plan_conv(part.lengths, recurrence.conv_kernel, part.tracks, device),
            chunk_plan=plan_chunks(part.starts, part.lengths, recurrence.chunk_size, part.tracks, device),
            turn=turn,
        )

    def _mixer(self, weights: Mapping[str, Tensor], layer: int) -> Mixer:
        own, config = within(weights, f"layers.{layer}.mixer."), self.config
        match config.layers[layer]:
            case LayerKind.MAMBA:
                return self._mamba(own, layer)
            case LayerKind.GATED_DELTA:
                assert isinstance(config.recurrence, GatedDeltaConfig)
                return GatedDeltaMixer(config.recurrence, own, *self._state(layer), config.norm_eps)
            case LayerKind.ATTENTION:
                return self._attention(own, layer)
            case LayerKind.PARALLEL:
                return ParallelMixer(
                    self._mamba(within(own, "mamba."), layer), self._attention(within(own, "attention."), layer)
                )
            case LayerKind.MLP:
                assert config.mlp is not None
                return MlpMixer(config.mlp, own)
            case LayerKind.MOE:
                assert config.moe is not None
                return MoeMixer(config.moe, own)

    def _mamba(self, weights: Mapping[str, Tensor], layer: int) -> Mamba2Mixer:
        assert isinstance(self.config.recurrence, Mamba2Config)
        return Mamba2Mixer(self.config.recurrence, weights, *self._state(layer), self.config.norm_eps)

    def _attention(self, weights: Mapping[str, Tensor], layer: int) -> AttentionMixer:
        kv = self.pools.kv[self.pools.kv_layers.index(layer)]
        return AttentionMixer(self.config.attention, weights, kv, self.rotary, self.config.norm_eps)

    def _state(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's conv and recurrent states of all slots."""
        index = self.pools.state_layers.index(layer)
        return self.pools.conv[:, index], self.pools.ssm[:, index]
