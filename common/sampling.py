"""Sampling parameters as the engine takes them: complete, checked, immutable."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence's sampling rules. Field names and defaults are those of an SGLang server's `sampling_params`.

    temperature 0 means greedy. top_k -1 means the whole vocabulary. grammar: what the answer has to follow, a checked
    text in llguidance's form (`node/grammars.py`). `sampling_seed` is always set by the front: token i of the answer
    depends only on (seed, i), the logits and these rules, so that a hand-off needs no generator state.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    sampling_seed: int = 0
    stream_interval: int = 1
    grammar: str | None = None


class LogprobOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a request wants to know of probabilities.

    start_len: first prompt position whose logprob is reported; -1 means none of the prompt's.
    top_num: how many alternatives to report at each position.
    """

    wanted: bool = False
    start_len: int = -1
    top_num: int = 0


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """log p of one token at one position, and the `top_num` likeliest alternatives as (logprob, token id).

    logprob is None for the first prompt token, which nothing precedes.
    """

    logprob: float | None
    token_id: int
    top: tuple[tuple[float, int], ...] = ()


class FinishReason(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a sequence ended: `stop` (matched: a token id or a stop string) or `length` (length: tokens made)."""

    type: str
    matched: int | str | None = None
    length: int | None = None
