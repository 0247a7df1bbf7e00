"""Causal attention over paged keys and values, with grouped query heads.

Legend: T packed tokens, B decode rows, Q query heads, J key/value heads, E head dim, Z page size.
A layer's cache is kv [2, pages, Z, J, E]: K, then V. A sequence's pages are a slice of the pool when they ascend by one
(then they are read in place), otherwise an index. Tables are padded with page 0, which is all zeros. Beyond the tokens
of a sequence its last page is zeros too; both are masked.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops.slots import SlotIndex


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillSpan:
    """One sequence of a prefill. [begin, end): its packed tokens. start: tokens already in the cache.

    pages: those that hold positions 0 .. start + end - begin - 1. mask: bool [n, start + n] of what each token may see,
    None when start is 0 (plainly causal).
    """

    begin: int
    end: int
    start: int
    pages: SlotIndex
    mask: Tensor | None


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeSpan:
    """Decode rows [begin, end) that are attended to together.

    pages: their pages one row behind the other, padded to equal counts. length: tokens of the longest, the new one
    included. mask: bool [rows, 1, 1, length], None when all rows have that length.
    """

    begin: int
    end: int
    pages: SlotIndex
    length: int
    mask: Tensor | None


def write_kv(kv: Tensor, locations: Tensor, keys_values: Tensor, begun_pages: Tensor | None) -> None:
    """Store K and V of T tokens. kv [2, pages, Z, J, E] (mutated), locations int64 [T] = page * Z + offset,
    keys_values [T, 2, J, E]. begun_pages: int64, emptied first, so that what a former owner left (it may be NaN) is
    never multiplied, not even by a weight of zero."""
    if begun_pages is not None:
        kv.index_fill_(1, begun_pages, 0)
    kv.view(2, -1, *kv.shape[3:]).index_copy_(1, locations, keys_values.transpose(0, 1))


def attend_decode(query: Tensor, kv: Tensor, spans: tuple[DecodeSpan, ...], scale: float) -> Tensor:
    """One query token a row. query [B, Q, E], kv [2, pages, Z, J, E] with the new tokens written. Returns [B, Q, E].

    scale: of the scores.
    """
    outputs = [_decode_span(query[span.begin : span.end], kv, span, scale) for span in spans]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _decode_span(query: Tensor, kv: Tensor, span: DecodeSpan, scale: float) -> Tensor:
    rows, heads, dim = query.shape
    kv_heads = kv.shape[3]
    keys, values = _read_pages(kv, span.pages, rows, span.length)  # [B, J, length, E]
    grouped = query.view(rows, kv_heads, heads // kv_heads, dim)  # query heads of one key head, as query positions
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=span.mask, scale=scale)
    return out.reshape(rows, heads, dim)


def attend_prefill(
    query: Tensor, keys_values: Tensor, kv: Tensor, spans: tuple[PrefillSpan, ...], scale: float
) -> Tensor:
    """Many query tokens a sequence.

    query [T, Q, E] and keys_values [T, 2, J, E] of the packed tokens, which are also written in kv already (it is read
    for sequences with a cached prefix only). scale: of the scores. Returns [T, Q, E].
    """
    outputs = [_prefill_span(query, keys_values, kv, span, scale) for span in spans]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _prefill_span(query: Tensor, keys_values: Tensor, kv: Tensor, span: PrefillSpan, scale: float) -> Tensor:
    packed = slice(span.begin, span.end)
    if span.start:
        keys, values = _read_pages(kv, span.pages, 1, span.start + span.end - span.begin)  # [1, J, start + n, E]
    else:
        keys, values = keys_values[packed].permute(1, 2, 0, 3).unsqueeze(1)  # [1, J, n, E]
    out = F.scaled_dot_product_attention(
        query[packed].transpose(0, 1).unsqueeze(0),  # [1, Q, n, E]
        keys,
        values,
        attn_mask=span.mask,
        is_causal=span.mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return out.squeeze(0).transpose(0, 1)  # [n, Q, E]


def _read_pages(kv: Tensor, pages: SlotIndex, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """K and V [rows, J, length, E] of rows that have equally many pages."""
    found = kv[:, pages] if isinstance(pages, slice) else kv.index_select(1, pages)
    tokens = found.view(2, rows, -1, *kv.shape[3:])[:, :, :length].transpose(2, 3)
    return tokens[0], tokens[1]


def attention_ref(query: Tensor, kv: Tensor, pages: list[int], start: int, scale: float) -> Tensor:
    """One sequence, query token by query token, in float64: query [n, Q, E] at positions start ... -> [n, Q, E]."""
    keys, values = kv[:, pages].flatten(1, 2).double()  # [tokens, J, E]
    share = query.shape[1] // keys.shape[1]
    outputs = []
    for offset, token in enumerate(query.double()):
        seen_keys = keys[: start + offset + 1].repeat_interleave(share, 1)  # [t, Q, E]
        seen_values = values[: start + offset + 1].repeat_interleave(share, 1)
        scores = (seen_keys * token).sum(-1) * scale  # [t, Q]
        outputs.append((torch.softmax(scores, 0)[..., None] * seen_values).sum(0))
    return torch.stack(outputs)
