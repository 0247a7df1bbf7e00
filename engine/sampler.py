"""From logits to the next token of each sequence, and to the log-probabilities a request asks for.

Legend: B rows of a batch (one per sequence), R the rows of it that need more than an argmax, V vocabulary, n positions
of a prompt, K alternatives reported. Logits are float32; bias, penalties and filters are computed in float64.

Rules, in this order: logit_bias, penalties, min_new_tokens, the grammar's mask, then argmax at temperature 0, otherwise
temperature, top_k, top_p (of what top_k left), min_p and the draw. The draw for token i is a pure function of
(sampling_seed, i), the logits and the rules: filtered probabilities become integer weights, whose running sum is exact
in any order, so that neither the batch around a row nor the device changes what is drawn. Tokens are laid out by id,
not by rank, on the unit interval: a rounding error that swaps two likely tokens then moves a border by as much, not by
a token's whole share.
This file knows nothing of sequences, pools or tokenizers, and keeps no state.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from common.errors import ServingError
from common.sampling import LogprobOptions, SamplingParams, TokenLogprob

_WEIGHT_OF_LIKELIEST = 2**40
_ID_BITS = 22  # V is at most 2**22: a weight and an id fit one int64, and so does the sum of all weights
_ID_MASK = 2**_ID_BITS - 1
_MASK64 = 2**64 - 1
_GOLDEN64 = 0x9E3779B97F4A7C15


class NonFiniteLogits(ServingError):  # noqa: N818
    """The model computed no distribution: NaN, +inf or only -inf. rows: which rows of the logits, ascending."""

    default_code = "non_finite_logits"

    def __init__(self, rows: Sequence[int]):
        self.rows = list(rows)
        super().__init__(f"the model's logits are not finite in rows {self.rows}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """What the sampler must know of the sequence behind one row of logits. Only read, never kept.

    prompt_ids, output_ids: the tokens so far; the token to choose is number `len(output_ids)` of the answer. allowed:
    the tokens that may be chosen, bit i % 8 of byte i // 8 for token i; None: all.
    """

    params: SamplingParams
    logprobs: LogprobOptions
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    allowed: bytes | None = None


def sample(logits: Tensor, rows: Sequence[SampleRow], *, eos_ids: frozenset[int]) -> list[TokenLogprob]:
    """Choose one token for each row.

    logits: [B, V] float32, not changed. Returns B entries; `logprob` is None unless wanted, else log_softmax of the
    model's own logits (before bias, penalties, temperature and filters) at the chosen token; so are the `top`
    alternatives, likeliest first, the lower id first among equals. A logit_bias that leaves a row no token is ignored.

    Raises NonFiniteLogits, before anything is chosen, naming every row at fault.
    """
    assert logits.dtype == torch.float32 and logits.dim() == 2 and len(logits) == len(rows)
    if not rows:
        return []
    token_ids = _argmax(logits)
    special = [b for b, row in enumerate(rows) if row.params.temperature > 0 or _is_adjusted(row)]
    if special:
        chosen = _choose(_select(logits, special), [rows[b] for b in special], eos_ids)
        for b, token_id in zip(special, chosen, strict=True):
            token_ids[b] = token_id
    return _report(logits, rows, token_ids)


def prompt_logprobs(logits: Tensor, token_ids: Sequence[int], top_num: int) -> list[TokenLogprob]:
    """log p of given tokens: row i of logits [n, V] float32 predicts token_ids[i], the token at the next position.

    Returns n entries, each with the `top_num` (at most V) likeliest alternatives. Raises NonFiniteLogits.
    """
    assert logits.dim() == 2 and len(logits) == len(token_ids)
    if not token_ids:
        return []
    _argmax(logits)
    return _logprobs(logits, token_ids, top_num)


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1), a multiple of 2**-53, that decides token `index` of a sequence with this seed.

    Output `index` of a splitmix64 generator whose state is the mixed seed (Steele, Lea, Flood: Fast splittable
    pseudorandom number generators, 2014).
    """
    start = _mix64(seed + _GOLDEN64)
    return float(_mix64(start + (index + 1) * _GOLDEN64) >> 11) * 2.0**-53


def _mix64(value: int) -> int:
    value &= _MASK64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK64
    return value ^ (value >> 31)


def _argmax(logits: Tensor) -> list[int]:
    """The likeliest token of each row of [B, V], the lowest id among equals. Raises NonFiniteLogits."""
    best, token_ids = logits.max(dim=-1)  # [B] each; NaN wins
    values: list[float] = best.tolist()
    if not math.isfinite(sum(values)):
        raise NonFiniteLogits([b for b, value in enumerate(values) if not math.isfinite(value)])
    chosen: list[int] = token_ids.tolist()
    return chosen


def _select(logits: Tensor, indices: Sequence[int]) -> Tensor:
    return logits if len(indices) == len(logits) else logits[list(indices)]


def _choose(logits: Tensor, rows: Sequence[SampleRow], eos_ids: frozenset[int]) -> list[int]:
    """The tokens of rows [R, V] that have a temperature, a bias, a penalty or a minimal length."""
    scores = _adjusted(logits, rows, eos_ids)  # [R, V]
    chosen = scores.argmax(dim=-1)  # [R]
    drawn = [r for r, row in enumerate(rows) if row.params.temperature > 0]
    if drawn:
        chosen[drawn] = _draw(_select(scores, drawn), [rows[r] for r in drawn])
    token_ids: list[int] = chosen.tolist()
    return token_ids


# --- bias, penalties, minimal length ----------------------------------------------------------------------------------


def _is_adjusted(row: SampleRow) -> bool:
    params = row.params
    return bool(
        params.logit_bias
        or params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or params.min_new_tokens > len(row.output_ids)
        or row.allowed is not None
    )


def _adjusted(logits: Tensor, rows: Sequence[SampleRow], eos_ids: frozenset[int]) -> Tensor:
    """A float64 copy [R, V] of the logits after bias, penalties and the masks of min_new_tokens and grammar.

    A bias that leaves a row no token is ignored, and so is min_new_tokens where the grammar allows nothing but the end.
    """
    scores = logits.double()  # [R, V]
    adjusted = [r for r, row in enumerate(rows) if _is_adjusted(row)]
    for r in adjusted:
        _bias(scores[r], rows[r].params)
        _penalise(scores[r], rows[r], eos_ids)
        _forbid(scores[r], rows[r].allowed)
    for r in _without_token(scores) if adjusted else ():
        scores[r] = logits[r]
        _penalise(scores[r], rows[r], eos_ids)
        _forbid(scores[r], rows[r].allowed)
    for r in _without_token(scores) if any(row.allowed for row in rows) else ():
        scores[r] = logits[r]
        _forbid(scores[r], rows[r].allowed)
    return scores


def _without_token(scores: Tensor) -> list[int]:
    """Rows of [R, V] in which everything is forbidden."""
    rows: list[int] = (scores.amax(dim=-1) == -math.inf).nonzero().flatten().tolist()
    return rows


def _forbid(scores: Tensor, allowed: bytes | None) -> None:
    """Forbid in scores [V], in place, what the grammar does not allow."""
    if allowed is not None:
        bits = np.unpackbits(np.frombuffer(allowed, np.uint8), count=len(scores), bitorder="little")  # [V]
        scores.masked_fill_(torch.from_numpy(bits == 0).to(scores.device), -math.inf)


def _bias(scores: Tensor, params: SamplingParams) -> None:
    """Add logit_bias to scores [V] in place. An infinite bias replaces the score: inf - inf would be no number."""
    for token_id, bias in params.logit_bias:
        if token_id < len(scores):
            scores[token_id] = bias if math.isinf(bias) else scores[token_id] + bias


def _penalise(scores: Tensor, row: SampleRow, eos_ids: frozenset[int]) -> None:
    """Apply the three penalties and min_new_tokens to scores [V] in place.

    Repetition divides positive and multiplies negative scores of every token of prompt and output; frequency and
    presence are subtracted for tokens of the output only, once for each time and once.
    """
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = _ids([*row.prompt_ids, *row.output_ids], scores)
        old = scores[seen]
        scores[seen] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        counts = torch.bincount(_ids(row.output_ids, scores), minlength=len(scores))  # [V]
        scores -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    if len(row.output_ids) < params.min_new_tokens:
        stops = [token_id for token_id in eos_ids.union(params.stop_token_ids) if token_id < len(scores)]
        scores[_ids(stops, scores)] = -math.inf


def _ids(token_ids: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(token_ids, dtype=torch.int64, device=like.device)


# --- the draw ---------------------------------------------------------------------------------------------------------


def _draw(scores: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Draw a token [R] for each row of scores [R, V] float64 by inverting the cumulative filtered distribution."""
    params = [row.params for row in rows]
    weights = _weights(scores, params)  # [R, V]
    narrowed = [r for r, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0]
    if narrowed:
        weights[narrowed] = _keep_top(_select(weights, narrowed), [params[r] for r in narrowed])
    least = _column([p.min_p * _WEIGHT_OF_LIKELIEST for p in params], scores)  # [R, 1]
    weights = weights.masked_fill(weights < least, 0)
    reached = weights.cumsum(dim=-1)  # [R, V]
    total = reached[:, -1:]  # [R, 1]
    numbers = _column([uniform(row.params.sampling_seed, len(row.output_ids)) for row in rows], scores)
    target = torch.minimum((numbers * total).long(), total - 1)  # [R, 1]
    return torch.searchsorted(reached, target, right=True).squeeze(-1)  # [R]


def _weights(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """softmax(scores / temperature) as integers [R, V]: 2**40 for the likeliest token, 0 below 2**-41 of it."""
    best = scores.amax(dim=-1, keepdim=True)  # [R, 1]
    below = torch.where(scores == best, 0.0, scores - best)  # [R, V], also where best is +inf
    temperatures = _column([p.temperature for p in params], scores)
    return (torch.exp(below / temperatures) * _WEIGHT_OF_LIKELIEST).round().long()


def _keep_top(weights: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Weights [R, V] with 0 outside the top_k likeliest tokens, then outside the fewest of these that reach top_p.

    Equals are ranked by id, the lower first. The likeliest token always stays.
    """
    vocabulary = weights.shape[-1]
    assert vocabulary <= 2**_ID_BITS
    rank = torch.arange(vocabulary, device=weights.device)  # [V]
    keys = _descending((weights << _ID_BITS) | (_ID_MASK - rank))  # [R, V], of token ids 0, 1, …
    order, ranked = _ID_MASK - (keys & _ID_MASK), keys >> _ID_BITS
    top_k = _ids([p.top_k if p.top_k > 0 else vocabulary for p in params], weights).unsqueeze(-1)  # [R, 1]
    ranked = ranked.masked_fill(rank >= top_k, 0)
    before = ranked.cumsum(dim=-1) - ranked
    enough = _column([p.top_p for p in params], weights) * ranked.sum(dim=-1, keepdim=True)  # [R, 1]
    ranked = ranked.masked_fill((before >= enough) & (rank > 0), 0)
    return torch.zeros_like(weights).scatter_(-1, order, ranked)


def _descending(keys: Tensor) -> Tensor:
    """Each row of int64 keys [R, V] sorted. On the CPU by numpy: torch sorts an index along and is 20 times slower."""
    if keys.device.type == "cpu":
        return torch.from_numpy(np.sort(keys.numpy(), axis=-1)).flip(-1)
    return keys.sort(dim=-1, descending=True).values


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(-1)  # [R, 1]


# --- log-probabilities ------------------------------------------------------------------------------------------------


def _report(logits: Tensor, rows: Sequence[SampleRow], token_ids: Sequence[int]) -> list[TokenLogprob]:
    """The chosen tokens, with log-probabilities in the rows that want them."""
    report = [TokenLogprob(None, token_id) for token_id in token_ids]
    wanted = [b for b, row in enumerate(rows) if row.logprobs.wanted]
    if not wanted:
        return report
    top_num = max(rows[b].logprobs.top_num for b in wanted)
    found = _logprobs(_select(logits, wanted), [token_ids[b] for b in wanted], top_num)
    for b, entry in zip(wanted, found, strict=True):
        report[b] = TokenLogprob(entry.logprob, entry.token_id, entry.top[: rows[b].logprobs.top_num])
    return report


def _logprobs(logits: Tensor, token_ids: Sequence[int], top_num: int) -> list[TokenLogprob]:
    """log_softmax of logits [R, V] at one token a row and at the `top_num` likeliest ones."""
    logprobs = torch.log_softmax(logits, dim=-1)  # [R, V]
    own: list[float] = logprobs.gather(-1, _ids(token_ids, logits).unsqueeze(-1)).squeeze(-1).tolist()
    if top_num <= 0:
        return [TokenLogprob(logprob, token_id) for logprob, token_id in zip(own, token_ids, strict=True)]
    top_ids = _likeliest(logits, top_num)  # [R, K]
    tops = zip(logprobs.gather(-1, top_ids).tolist(), top_ids.tolist(), strict=True)
    return [
        TokenLogprob(logprob, token_id, tuple(zip(values, ids, strict=True)))
        for logprob, token_id, (values, ids) in zip(own, token_ids, tops, strict=True)
    ]


def _likeliest(logits: Tensor, top_num: int) -> Tensor:
    """Ids [R, K] of the K = min(top_num, V) greatest logits of [R, V], descending, the lower id first among equals.

    `topk` orders equals as it likes, so rows where a tie touches the answer are sorted in full.
    """
    vocabulary = logits.shape[-1]
    values, ids = logits.topk(min(top_num + 1, vocabulary), dim=-1)
    tied = (values[:, 1:] == values[:, :-1]).any(dim=-1)  # [R]
    if bool(tied.any()):
        ids[tied] = logits[tied].argsort(dim=-1, descending=True, stable=True)[:, : ids.shape[-1]]
    return ids[:, :top_num]
