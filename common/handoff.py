"""What prefill tells decode about a request besides its state: the metadata part of a hand-off."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import msgspec

from common.sampling import TokenLogprob


class RoomAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where decode opens a room: the prefill node's bootstrap endpoint and the room's number, 0 .. 2**63 - 1."""

    host: str
    port: int
    room: int


class HandoffMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Filled by the prefill rank after the last chunk, read by the decode rank at commit.

    num_prompt_tokens: how many tokens the state stands for; of an answer that is resumed those made before count too.
    prompt_digest: of their ids, so that two legs with different prompts are not taken for one request.
    tracked_position: the position t of the track slot, or -1 when none was saved.
    num_cached_tokens: prompt tokens the prefill rank did not compute. Times are seconds.
    """

    room: int
    rid: str
    num_prompt_tokens: int
    prompt_digest: bytes
    num_cached_tokens: int
    tracked_position: int
    first_token: TokenLogprob
    sampling_seed: int
    queue_s: float
    prefill_s: float


def prompt_digest(token_ids: Sequence[int]) -> bytes:
    """8 bytes that tell one prompt from another."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=8).digest()
