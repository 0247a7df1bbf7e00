"""A hybrid model over the CUDA kernels. The twin is `engine.model.HybridModel`: same weights, pools and results.

Legend: T packed tokens, D hidden size, V vocabulary, L logit rows. Decode rows come first in a pack.
The hidden states [T, D] are one tensor that every mixer adds its output to.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from engine.batch import OnLayer
from engine.cuda.batch import CudaBatch
from engine.cuda.linear import Linear, tiling, workspace
from engine.cuda.mixers.attention import AttentionMixer
from engine.cuda.mixers.gated_delta import GatedDeltaMixer
from engine.cuda.mixers.mamba2 import Mamba2Mixer
from engine.cuda.mixers.mixer import MakeLinear, Mixer
from engine.cuda.mixers.mlp import MlpMixer
from engine.cuda.mixers.moe import MoeMixer
from engine.cuda.mixers.parallel import ParallelMixer
from engine.kernels.tokens import embed
from engine.mixers.mixer import within
from engine.model_config import GatedDeltaConfig, HybridConfig, LayerKind, Mamba2Config
from engine.ops.rotary import Rotary
from engine.pools import StatePools


class CudaModel:
    """weights: the engine's names, see `load_weights`; emptied, so that what is fused is not in memory twice for longer
    than a layer takes. few_rows: see `Linear`."""

    def __init__(
        self,
        config: HybridConfig,
        weights: dict[str, Tensor],
        pools: StatePools,
        *,
        few_rows: int,
    ) -> None:
        self.config, self.pools = config, pools
        self._make = _linears(config, weights, few_rows)
        self.embeddings = weights.pop("embeddings.weight")  # [V, D]
        self.head = self._make(weights.pop("lm_head.weight"), None, weights.pop("norm_f.weight"))
        attention, device = config.attention, self.embeddings.device
        rotary = Rotary(attention.rotary_dim, attention.rope_theta, device) if attention.rotary_dim else None
        self._frequencies = None if rotary is None else rotary.frequencies
        self.mixers = [self._mixer(_take(weights, f"layers.{i}."), i) for i in range(len(config.layers))]

    @property
    def can_be_captured(self) -> bool:
        """Whether no layer asks the device how many tokens an expert has, see `Experts`."""
        return all(mixer.experts.grouped for mixer in self.mixers if isinstance(mixer, MoeMixer))

    def forward(self, batch: CudaBatch, last_tokens: Tensor, on_queued: OnLayer | None = None) -> Tensor:
        """Logits [L, V], in the dtype of the weights, of the tokens that the batch asks for. Advances every row and
        fills the track slots of prefill rows; those of decode rows are the caller's to fill.

        on_queued: called when a layer has been queued, in order.
        """
        rows = batch.decode or batch.prefill
        assert rows is not None
        multiplier = self.config.embedding_multiplier
        hidden = embed(batch.token_ids, last_tokens, rows, self.embeddings, multiplier=multiplier)
        for layer, mixer in enumerate(self.mixers):
            mixer.forward(hidden, batch)
            if on_queued is not None:
                on_queued(layer)
        if batch.logit_tokens is not None:
            hidden = hidden.index_select(0, batch.logit_tokens)
        return self.head(hidden)

    def _mixer(self, weights: Mapping[str, Tensor], layer: int) -> Mixer:
        own, norm, config = within(weights, "mixer."), weights["norm.weight"], self.config
        match config.layers[layer]:
            case LayerKind.MAMBA:
                return self._mamba(own, norm, layer)
            case LayerKind.GATED_DELTA:
                assert isinstance(config.recurrence, GatedDeltaConfig)
                state = self._state(layer)
                return GatedDeltaMixer(config.recurrence, own, norm, *state, config.norm_eps, self._make)
            case LayerKind.ATTENTION:
                return self._attention(own, norm, layer)
            case LayerKind.PARALLEL:
                mamba, attention = within(own, "mamba."), within(own, "attention.")
                return ParallelMixer(self._mamba(mamba, norm, layer), self._attention(attention, norm, layer))
            case LayerKind.MLP:
                assert config.mlp is not None
                return MlpMixer(config.mlp, own, norm, self._make)
            case LayerKind.MOE:
                assert config.moe is not None
                return MoeMixer(config.moe, own, norm, config.norm_eps, self._make)

    def _mamba(self, weights: Mapping[str, Tensor], norm: Tensor, layer: int) -> Mamba2Mixer:
        config = self.config
        assert isinstance(config.recurrence, Mamba2Config)
        return Mamba2Mixer(config.recurrence, weights, norm, *self._state(layer), config.norm_eps, self._make)

    def _attention(self, weights: Mapping[str, Tensor], norm: Tensor, layer: int) -> AttentionMixer:
        kv, config = self.pools.kv[self.pools.kv_layers.index(layer)], self.config
        return AttentionMixer(config.attention, weights, norm, kv, self._frequencies, config.norm_eps, self._make)

    def _state(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's conv and recurrent states of all slots."""
        index = self.pools.state_layers.index(layer)
        return self.pools.conv[:, index], self.pools.ssm[:, index]


def _take(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """`within`, and they are no longer in weights."""
    taken = within(weights, prefix)
    for name in taken:
        del weights[prefix + name]
    return taken


def _linears(config: HybridConfig, weights: Mapping[str, Tensor], few_rows: int) -> MakeLinear:
    """Makes the products of the model, which share a workspace."""
    device = weights["embeddings.weight"].device
    cut = tiling(device)
    layers = [within(weights, f"layers.{i}.") for i in range(len(config.layers))]
    outputs = [sum(weight.shape[0] for weight in layer.values() if weight.dim() == 2) for layer in layers]  # at most
    room = workspace(cut, max(config.vocab_size, *outputs), few_rows, device)
    return partial(Linear, eps=config.norm_eps, few_rows=few_rows, tiling=cut, workspace=room)
