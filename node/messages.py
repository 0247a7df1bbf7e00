"""What a front process and its rank processes say to each other (msgpack over local ZMQ)."""

from __future__ import annotations

from typing import Any

import msgspec

from common.errors import ErrorRecord
from common.handoff import RoomAddress
from common.layout import StateLayout
from common.sampling import FinishReason, LogprobOptions, SamplingParams, TokenLogprob


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A new sequence. room: set on both legs of a disaggregated request, None when this node serves alone.

    extra_key: prefixes are shared only among requests with the same one.

    output_ids: tokens of the answer that another decode node has made; this rank goes on after them.

    arrival_s: `time.monotonic()` of the front when the request came in.
    """

    rid: str
    token_ids: list[int]
    sampling: SamplingParams
    logprobs: LogprobOptions
    room: RoomAddress | None
    arrival_s: float
    extra_key: str | None = None
    output_ids: list[int] = []


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End one sequence, or all of them when rid is None. The rank answers with a `Failure` for each that it ended."""

    rid: str | None
    message: str = "aborted"


class Query(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask for something that is no sequence. what: "state" (counters and pools), "flush" (drop caches), "debug" (who
    owns what, at most `limit` entries of each kind), "prefixes" (what is cached, at most `limit` entries), "states"
    (what requests' states looked like) or "record" (whether that is recorded: limit 1 or 0)."""

    ticket: int
    what: str
    limit: int = 0


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Are you there? The loop of the rank answers between two steps, whatever its role. ticket: comes back."""

    ticket: int


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Finish nothing, close everything, exit 0."""


ToRank = Submit | Abort | Query | Ping | Shutdown


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a sequence went, seconds; bytes that crossed the wire by part (kv, conv, ssm, track)."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0
    transfer_bytes: dict[str, int] = {}


class Update(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """New tokens of one sequence. `finish` and `timing` are set on its last update only.

    token_ids: only the new ones. logprobs: one for each of them when asked for, otherwise empty.
    num_cached_tokens: prompt tokens that the rank which computed the rest did not compute. num_local_cached_tokens:
    those that this rank held; on a decode rank that had the rest sent, those whose pages were not sent.
    input_logprobs: the prompt's, on the first update, when asked for (positions start_len .. n - 1).
    """

    rid: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    num_cached_tokens: int
    num_local_cached_tokens: int = 0
    input_logprobs: list[TokenLogprob] | None = None
    finish: FinishReason | None = None
    timing: Timing | None = None


class Updates(msgspec.Struct, frozen=True, tag=True):
    """All updates of one engine step in one message."""

    items: list[Update]


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The sequence ended with an error; nothing more comes for this rid."""

    rid: str
    error: ErrorRecord


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to a `Query`. error: why it was not done, e.g. flush while requests run."""

    ticket: int
    payload: dict[str, Any]
    error: ErrorRecord | None = None


class Pong(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to a `Ping`."""

    ticket: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The rank can serve. The limits are what the front checks before it submits.

    layout: of the rank's pools, what the bootstrap endpoint compares with a peer's.
    """

    pid: int
    fingerprint: str
    transport: str
    control_address: tuple[str, int] | None
    context_length: int
    max_total_tokens: int
    vocab_size: int
    info: dict[str, Any]
    layout: StateLayout | None = None


class StartFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The rank, process pid, cannot serve and is about to exit with this reason."""

    pid: int
    error: ErrorRecord


FromRank = Updates | Failure | Reply | Pong | Ready | StartFailed

to_rank_encoder = msgspec.msgpack.Encoder()
to_rank_decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
from_rank_encoder = msgspec.msgpack.Encoder()
from_rank_decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
