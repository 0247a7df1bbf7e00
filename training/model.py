"""A NemotronH language model in plain torch, made to be trained and to be decoded in batches.

Legend
    B sequences, L tokens a sequence, V vocabulary, E hidden size
    H Mamba heads, P Mamba head dim, G groups, N SSM state size, W conv width, Q chunk size, K chunks
    A attention heads, R key/value heads, D attention head dim

Parameter names equal those of the checkpoint (`backbone.layers.N.mixer...`), so a state_dict is the export.
Sources: Mamba-2 (arXiv 2405.21060, section 6: the chunked scan) and Nemotron-H (arXiv 2504.03624).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of one model; the field comments name the Hugging Face config key where it differs."""

    vocab_size: int = 1024
    hidden_size: int = 256
    pattern: str = "M-M*-M-M*-M-"  # hybrid_override_pattern: M Mamba-2, * attention, - MLP
    mamba_heads: int = 8  # mamba_num_heads
    mamba_head_dim: int = 64
    groups: int = 2  # n_groups
    state_size: int = 64  # ssm_state_size
    conv_width: int = 4  # conv_kernel
    chunk_size: int = 64
    attention_heads: int = 4  # num_attention_heads
    kv_heads: int = 2  # num_key_value_heads
    head_dim: int = 64
    mlp_size: int = 640  # intermediate_size
    norm_eps: float = 1e-5  # layer_norm_epsilon

    @property
    def inner_size(self) -> int:
        """Width of x and of the gate in a Mamba layer: H * P."""
        return self.mamba_heads * self.mamba_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution, [x, B, C]: H * P + 2 * G * N."""
        return self.inner_size + 2 * self.groups * self.state_size


@dataclass(slots=True)
class MambaState:
    """What one Mamba layer remembers of each sequence."""

    conv: Tensor  # [B, W - 1, H * P + 2 * G * N], the newest inputs of the convolution, oldest first
    ssm: Tensor  # [B, H, P, N], float32


@dataclass(slots=True)
class AttentionState:
    """Keys and values of one attention layer, with room for tokens to come."""

    keys: Tensor  # [B, R, capacity, D]
    values: Tensor  # [B, R, capacity, D]


LayerState = MambaState | AttentionState | None


def chunk_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, *, chunk_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Run h_t = exp(dt_t a) h_{t-1} + dt_t x_t b_t, y_t = h_t c_t over whole sequences, chunk by chunk.

    x [B, L, H, P], dt [B, L, H] float32, a [H] float32 (negative), b and c [B, L, G, N]; products run in `dtype`,
    decays in float32. A token with dt = 0 leaves the state as it was. Returns y [B, L, H, P] in `dtype` and the
    state after the last token [B, H, P, N] float32.
    """
    length, heads, groups = x.shape[1], x.shape[2], b.shape[2]
    padding = -length % chunk_size
    if padding:
        x, b, c = (F.pad(t, (0, 0, 0, 0, 0, padding)) for t in (x, b, c))
        dt = F.pad(dt, (0, 0, 0, padding))
    batch, padded = x.shape[:2]
    chunks = padded // chunk_size

    x = (x * dt[..., None]).to(dtype).view(batch, chunks, chunk_size, heads, -1).transpose(2, 3)  # [B, K, H, Q, P]
    b, c = (t.to(dtype).view(batch, chunks, chunk_size, groups, -1).transpose(2, 3) for t in (b, c))  # [B, K, G, Q, N]
    decay = (dt * a).view(batch, chunks, chunk_size, heads).transpose(2, 3).cumsum(-1)  # [B, K, H, Q], log, inclusive

    # Inside a chunk: attention with the decay from s to t as its mask.
    causal = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=x.device).tril()
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(~causal, -math.inf).exp()  # [B, K, H, Q, Q]
    scores = (c @ b.transpose(-1, -2)).repeat_interleave(heads // groups, 2)  # [B, K, H, Q, Q]
    inside = (scores * between.to(dtype)) @ x  # [B, K, H, Q, P]

    # What each chunk adds to the state by its end, then the state with which each chunk begins.
    b_heads, c_heads = (t.repeat_interleave(heads // groups, 2) for t in (b, c))  # [B, K, H, Q, N]
    to_end = (decay[..., -1:] - decay).exp()[..., None]  # [B, K, H, Q, 1]
    added = x.transpose(-1, -2) @ (b_heads * to_end.to(dtype))  # [B, K, H, P, N]
    begins, final = _carry(added, decay[..., -1])

    from_start = decay.exp()[..., None].to(dtype)  # [B, K, H, Q, 1]
    across = (c_heads * from_start) @ begins.to(dtype).transpose(-1, -2)  # [B, K, H, Q, P]
    y = (inside + across).transpose(2, 3).reshape(batch, padded, heads, -1)  # [B, L, H, P]
    return y[:, :length], final


def _carry(added: Tensor, chunk_decay: Tensor) -> tuple[Tensor, Tensor]:
    """Pass states from chunk to chunk.

    added [B, K, H, P, N], chunk_decay [B, K, H] (log) -> the state before each chunk [B, K, H, P, N] and the state
    after the last one [B, H, P, N] float32.
    """
    batch, chunks, heads, width, size = added.shape
    total = F.pad(chunk_decay.transpose(1, 2).cumsum(-1), (1, 0))  # [B, H, K + 1]
    # weight[k, j]: decay from the end of chunk j to the beginning of chunk k, for j < k.
    earlier = torch.ones(chunks + 1, chunks, dtype=torch.bool, device=added.device).tril(-1)
    weight = (total[..., :, None] - total[..., None, 1:]).masked_fill(~earlier, -math.inf).exp()  # [B, H, K + 1, K]
    flat = added.transpose(1, 2).reshape(batch, heads, chunks, width * size)  # [B, H, K, P * N]
    states = (weight.to(flat.dtype) @ flat).view(batch, heads, chunks + 1, width, size)
    return states[:, :, :-1].transpose(1, 2), states[:, :, -1].float()


def rms_norm(x: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
    """Root-mean-square norm of the last dimension, apart in each of `groups` equal parts, computed in float32."""
    y = x.float().unflatten(-1, (groups, -1))
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y.flatten(-2) * weight.float()).to(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with a learned weight [width]."""

    def __init__(self, width: int, eps: float, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.groups = eps, groups

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.groups)


class CausalConv(nn.Module):
    """Depthwise causal convolution with bias; weight [C, 1, W] as torch's Conv1d keeps it."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width).uniform_(-(width**-0.5), width**-0.5))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, W - 1 + L, C], history first -> [B, L, C]."""
        weight = self.weight.squeeze(1).to(x.dtype)
        width, length = weight.shape[1], x.shape[1] - weight.shape[1] + 1
        y = self.bias.to(x.dtype).expand(x.shape[0], length, -1)
        for tap in range(width):
            y = y + x[:, tap : tap + length] * weight[:, tap]
        return y


class MambaMixer(nn.Module):
    """Mamba-2 with grouped B and C and a gated norm by group."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        heads, inner = config.mamba_heads, config.inner_size
        self.in_proj = nn.Linear(config.hidden_size, inner + config.conv_dim + heads, bias=False)
        self.conv1d = CausalConv(config.conv_dim, config.conv_width)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(heads))
        dt = torch.empty(heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(dt + (-torch.expm1(-dt)).log())  # softplus(dt_bias) = dt
        self.norm = RMSNorm(inner, config.norm_eps, config.groups)
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def _project(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """u [B, L, E] -> gate [B, L, H * P], convolution input [B, L, C], dt [B, L, H] float32."""
        config = self.config
        gate, xbc, dt = self.in_proj(u).split([config.inner_size, config.conv_dim, config.mamba_heads], -1)
        return gate, xbc, F.softplus(dt.float() + self.dt_bias.float())

    def _split(self, xbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, L, C] -> x [B, L, H, P], b and c [B, L, G, N]."""
        config = self.config
        x, b, c = xbc.split([config.inner_size, *[config.groups * config.state_size] * 2], -1)
        return (
            x.unflatten(-1, (config.mamba_heads, config.mamba_head_dim)),
            b.unflatten(-1, (config.groups, config.state_size)),
            c.unflatten(-1, (config.groups, config.state_size)),
        )

    def _output(self, y: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        """y and x [B, L, H, P], gate [B, L, H * P] -> [B, L, E]."""
        y = (y.float() + x.float() * self.D.float()[:, None]).flatten(-2)
        return self.out_proj(self.norm((y * F.silu(gate.float())).to(gate.dtype)))

    def forward(self, u: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, MambaState | None]:
        """u [B, L, E] -> [B, L, E]; with lengths [B] also the state after that many tokens of each sequence."""
        gate, xbc, dt = self._project(u)
        history = F.pad(xbc, (0, 0, self.config.conv_width - 1, 0))  # [B, W - 1 + L, C]
        if lengths is not None:
            valid = torch.arange(u.shape[1], device=u.device) < lengths[:, None]
            dt = dt * valid[..., None]
        x, b, c = self._split(F.silu(self.conv1d(history)))
        a = -self.A_log.float().exp()
        y, ssm = chunk_scan(x, dt, a, b, c, chunk_size=self.config.chunk_size, dtype=x.dtype)
        out = self._output(y, x, gate)
        if lengths is None:
            return out, None
        newest = lengths[:, None] + torch.arange(self.config.conv_width - 1, device=u.device)  # [B, W - 1]
        conv = history.gather(1, newest[..., None].expand(-1, -1, history.shape[-1]))
        return out, MambaState(conv, ssm)

    def step(self, u: Tensor, state: MambaState) -> Tensor:
        """One token each: u [B, 1, E] -> [B, 1, E]. Changes `state`."""
        gate, xbc, dt = self._project(u)
        window = torch.cat([state.conv, xbc], 1)  # [B, W, C]
        state.conv = window[:, 1:]
        x, b, c = self._split(F.silu(self.conv1d(window)))
        dt, per_group = dt[:, 0], self.config.mamba_heads // self.config.groups
        b, c = (t[:, 0].float().repeat_interleave(per_group, 1) for t in (b, c))  # [B, H, N]
        decay = (dt * -self.A_log.float().exp()).exp()  # [B, H]
        drive = (dt[..., None] * x[:, 0].float())[..., None] * b[:, :, None]  # [B, H, P, N]
        state.ssm = state.ssm * decay[..., None, None] + drive
        y = (state.ssm @ c[..., None])[:, None, :, :, 0]  # [B, 1, H, P]
        return self._output(y, x, gate)


class AttentionMixer(nn.Module):
    """Causal grouped-query attention without positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.q_proj = nn.Linear(config.hidden_size, config.attention_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.attention_heads * config.head_dim, config.hidden_size, bias=False)

    def _project(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """u [B, L, E] -> q [B, A, L, D], k and v [B, R, L, D]."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(u).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2) for p in projections)
        return q, k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention over k and v [B, R, S, D]; mask [B, 1, 1, S] (True: seen), or causal where it is None."""
        repeat = self.config.attention_heads // self.config.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(y.transpose(1, 2).flatten(-2))

    def forward(self, u: Tensor, room: int | None = None) -> tuple[Tensor, AttentionState | None]:
        """u [B, L, E] -> [B, L, E]; with `room` also keys and values with that many free places at the end."""
        q, k, v = self._project(u)
        out = self._attend(q, k, v, None)
        if room is None:
            return out, None
        return out, AttentionState(F.pad(k, (0, 0, 0, room)), F.pad(v, (0, 0, 0, room)))

    def step(self, u: Tensor, state: AttentionState, position: Tensor) -> Tensor:
        """One token each, at position [B]: u [B, 1, E] -> [B, 1, E]. Changes `state`."""
        q, k, v = self._project(u)
        rows = torch.arange(u.shape[0], device=u.device)
        state.keys[rows, :, position] = k[:, :, 0]
        state.values[rows, :, position] = v[:, :, 0]
        seen = torch.arange(state.keys.shape[2], device=u.device) <= position[:, None]
        return self._attend(q, state.keys, state.values, seen[:, None, None])


class MlpMixer(nn.Module):
    """down(relu(up(x)) ** 2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.mlp_size, bias=False)
        self.down_proj = nn.Linear(config.mlp_size, config.hidden_size, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(u)).square())


MIXERS: dict[str, type[MambaMixer] | type[AttentionMixer] | type[MlpMixer]] = {
    "M": MambaMixer,
    "*": AttentionMixer,
    "-": MlpMixer,
}


class Block(nn.Module):
    """x + mixer(norm(x))."""

    def __init__(self, config: ModelConfig, kind: str) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = MIXERS[kind](config)

    def forward(self, x: Tensor, lengths: Tensor | None = None, room: int | None = None) -> tuple[Tensor, LayerState]:
        mixer, u = self.mixer, self.norm(x)
        state: LayerState = None
        if isinstance(mixer, MambaMixer):
            y, state = mixer(u, lengths)
        elif isinstance(mixer, AttentionMixer):
            y, state = mixer(u, room)
        else:
            y = mixer(u)
        return x + y, state

    def step(self, x: Tensor, state: LayerState, position: Tensor) -> Tensor:
        mixer, u = self.mixer, self.norm(x)
        match mixer, state:
            case MambaMixer(), MambaState():
                return x + mixer.step(u, state)
            case AttentionMixer(), AttentionState():
                return x + mixer.step(u, state, position)
            case _:
                return x + mixer(u)


class Backbone(nn.Module):
    """Embedding, blocks and last norm: tokens [B, L] -> hidden states [B, L, E]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, kind) for kind in config.pattern)
        self.norm_f = RMSNorm(config.hidden_size, config.norm_eps)


class NemotronH(nn.Module):
    """The whole model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        """Fan-in scaled projections; those that write to the residual stream smaller by sqrt(layers)."""
        writers = ("out_proj", "o_proj", "down_proj")
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                scale = len(self.config.pattern) ** -0.5 if name.endswith(writers) else 1.0
                nn.init.normal_(module.weight, std=scale * module.in_features**-0.5)
        nn.init.normal_(self.backbone.embeddings.weight, std=0.3)
        nn.init.normal_(self.lm_head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, L] -> logits [B, L, V]."""
        x = self.backbone.embeddings(tokens)
        for layer in self.backbone.layers:
            x, _ = layer(x)
        return self.lm_head(self.backbone.norm_f(x))

    def prefill(self, tokens: Tensor, lengths: Tensor, room: int) -> tuple[Tensor, list[LayerState]]:
        """Read prompts padded on the right: tokens [B, L], lengths [B].

        Returns the logits after each prompt [B, V] and the layers' states, with space for `room` more tokens.
        """
        x, states = self.backbone.embeddings(tokens), []
        for layer in self.backbone.layers:
            x, state = layer(x, lengths, room)
            states.append(state)
        last = x[torch.arange(len(x), device=x.device), lengths - 1]  # [B, E]
        return self.lm_head(self.backbone.norm_f(last)), states

    def step(self, tokens: Tensor, states: list[LayerState], position: Tensor) -> Tensor:
        """One token each: tokens [B] at position [B] -> logits [B, V]. Changes `states`."""
        x = self.backbone.embeddings(tokens)[:, None]
        for layer, state in zip(self.backbone.layers, states, strict=True):
            x = layer.step(x, state, position)
        return self.lm_head(self.backbone.norm_f(x))[:, 0]

    def num_parameters(self) -> int:
        """Count of all parameters."""
        return sum(p.numel() for p in self.parameters())
