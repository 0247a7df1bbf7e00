"""What there is to know about a hybrid model's architecture, whatever its family. Immutable; no tensors here.

Every family is told as one stack of residual blocks, `hidden += mixer(norm(hidden))`, which the engine calls layers.
Where a family's files count a token mixer and an MLP as one layer, that layer is two of these.
"""

from __future__ import annotations

import dataclasses
import enum


class LayerKind(enum.StrEnum):
    """The mixer of one layer. M, *, - and E are the letters of NemotronH's `hybrid_override_pattern`.

    PARALLEL: Mamba2 and attention read the same normed input, and both are added.
    """

    MAMBA = "M"
    GATED_DELTA = "G"
    ATTENTION = "*"
    PARALLEL = "H"
    MLP = "-"
    MOE = "E"

    @property
    def has_state(self) -> bool:
        """Whether such a layer keeps a convolution's window and a recurrent state, which lie in slots."""
        return self in (LayerKind.MAMBA, LayerKind.GATED_DELTA, LayerKind.PARALLEL)

    @property
    def has_kv(self) -> bool:
        return self in (LayerKind.ATTENTION, LayerKind.PARALLEL)


class GateNorm(enum.StrEnum):
    """How Mamba2's output meets its gate: gated, then normed by group; normed, then gated; or gated only."""

    GATE_FIRST = "gate_first"
    NORM_FIRST = "norm_first"
    NONE = "none"


class Activation(enum.StrEnum):
    """relu(up x)^2, or silu(gate x) * up x."""

    RELU2 = "relu2"
    GATED_SILU = "gated_silu"


class Router(enum.StrEnum):
    """How a token's experts are chosen and weighted, see `engine.ops.moe`."""

    SOFTMAX_OF_TOP_K = "softmax_of_top_k"
    TOP_K_OF_SOFTMAX = "top_k_of_softmax"
    TOP_K_OF_SIGMOID = "top_k_of_sigmoid"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config:
    """chunk_size: tokens in a chunk of the scan. time_step_limit: bounds of dt after softplus. in_bias, out_bias,
    conv_bias: whether the projections and the convolution have one."""

    num_heads: int
    head_dim: int
    d_state: int
    n_groups: int
    conv_kernel: int
    chunk_size: int
    time_step_limit: tuple[float, float]
    in_bias: bool
    out_bias: bool
    conv_bias: bool
    norm: GateNorm

    @property
    def d_inner(self) -> int:
        """Width of the mixer: heads x head_dim."""
        return self.num_heads * self.head_dim

    @property
    def conv_blocks(self) -> tuple[int, ...]:
        """Channels of the convolution's parts: x, B, C."""
        return self.d_inner, self.n_groups * self.d_state, self.n_groups * self.d_state

    @property
    def conv_dim(self) -> int:
        return sum(self.conv_blocks)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """[heads, head_dim, d_state]."""
        return self.num_heads, self.head_dim, self.d_state


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaConfig:
    """value_heads / key_heads value heads in a row share a key head. chunk_size: tokens in a chunk."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    chunk_size: int

    @property
    def d_inner(self) -> int:
        """Width of the mixer: value heads x value_dim."""
        return self.value_heads * self.value_dim

    @property
    def conv_blocks(self) -> tuple[int, ...]:
        """Channels of the convolution's parts: q, k, v."""
        return self.key_heads * self.key_dim, self.key_heads * self.key_dim, self.d_inner

    @property
    def conv_dim(self) -> int:
        return sum(self.conv_blocks)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """[value heads, key_dim, value_dim]."""
        return self.value_heads, self.key_dim, self.value_dim


Recurrence = Mamba2Config | GatedDeltaConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """scale: of the scores. rotary_dim: the first dimensions of a head, which are rotated; 0 without rotary embedding.
    qk_norm: an RMS norm of each query and key head. output_gate: the output is multiplied by a sigmoid."""

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool
    scale: float
    rotary_dim: int
    rope_theta: float
    qk_norm: bool
    output_gate: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MlpConfig:
    """fused: the files hold gate and up as one tensor."""

    intermediate_size: int
    activation: Activation
    bias: bool
    fused: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Routed experts beside one shared expert, which every token passes.

    normalise, groups, top_groups, scale: of the router, see `engine.ops.moe`. latent_size: width in which the routed
    experts work; None: the model's. shared_gate: the shared expert's output is multiplied by a sigmoid of the token.
    bias: of the shared expert and of the latent projections. fused: as `MlpConfig`, of all experts.
    """

    experts: int
    experts_per_token: int
    intermediate_size: int
    activation: Activation
    router: Router
    normalise: bool
    groups: int
    top_groups: int
    scale: float
    latent_size: int | None
    shared_size: int
    shared_gate: bool
    bias: bool
    fused: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Adjustment:
    """Weights that are not used as they are stored, but x factor + offset, in float32, before they get their dtype.

    pattern: a regular expression for the end of the name, from its start or a dot on. rows: (number, factor) of the
    first rows, the next ones and so on; empty: there are no such factors.
    """

    pattern: str
    factor: float
    rows: tuple[tuple[int, float], ...]
    offset: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig:
    """The architecture of a model, made by `engine.families.read_config`.

    model: `model_type` of its config.json. layers: one kind a layer. eos_token_ids: every id that ends an answer.
    recurrence: of all layers that have state. embedding_multiplier: of the embedded tokens. adjustments: of weights.
    """

    model: str
    layers: tuple[LayerKind, ...]
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    norm_eps: float
    tie_word_embeddings: bool
    embedding_multiplier: float
    recurrence: Recurrence
    attention: AttentionConfig
    mlp: MlpConfig | None
    moe: MoeConfig | None
    adjustments: tuple[Adjustment, ...]

    @property
    def chunk_size(self) -> int:
        return self.recurrence.chunk_size

    @property
    def state_layers(self) -> tuple[int, ...]:
        """Numbers of the layers whose state lies in slots, ascending."""
        return tuple(index for index, kind in enumerate(self.layers) if kind.has_state)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Numbers of the layers whose keys and values lie in pages, ascending."""
        return tuple(index for index, kind in enumerate(self.layers) if kind.has_kv)
