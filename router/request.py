"""What the router must know of a /generate request, and nothing more: everything else is the workers' to judge."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from common.errors import RequestError
from common.json_body import decode_object
from router.workers import Worker

MAX_SEQUENCES = 65536
"""Of one request: rooms are minted for each, so this bounds what a small body can make the router do."""

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """fields: the JSON object, with `rid` filled in. num_sequences: prompts times n, one room each.

    lists_rooms: more than one sequence can come of it, so rooms go as a list. rids: every id that an abort may name.
    """

    fields: dict[str, Any]
    stream: bool
    merges_logprobs: bool
    num_sequences: int
    lists_rooms: bool
    rids: tuple[str, ...]

    def resumed(self, resume: dict[str, Any]) -> GenerateRequest:
        """The rest of a request of one sequence whose client has the beginning of the answer. The prompt's logprobs are
        known by then."""
        fields = self.fields | {"resume": resume}
        if fields.get("logprob_start_len") is not None:
            fields["logprob_start_len"] = -1
        return dataclasses.replace(self, fields=fields)

    def leg_bodies(self, prefill: Worker, rooms: Sequence[int]) -> tuple[bytes, bytes]:
        """(prefill, decode) bodies: the same but for `stream`, which the prefill leg is never asked for."""
        fields = self.fields
        fields["bootstrap_host"] = prefill.host
        fields["bootstrap_port"] = prefill.bootstrap_port
        fields["bootstrap_room"] = list(rooms) if self.lists_rooms else rooms[0]
        decode_body = _encoder.encode(fields)
        if not self.stream:
            return decode_body, decode_body
        return _encoder.encode(fields | {"stream": False}), decode_body


def parse_generate(body: bytes) -> GenerateRequest:
    """Raises RequestError naming the field."""
    fields = decode_object(body)
    if fields.get("bootstrap_room") is not None:
        raise RequestError("bootstrap_room: minted by the router, not given by a client", param="bootstrap_room")
    stream = fields.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise RequestError(f"stream {stream!r}: true or false", param="stream")
    batch = _batch_size(fields)
    if batch == 0:
        raise RequestError("text: an empty batch", param="text")
    num_sequences = _num_sequences(fields.get("sampling_params"), batch)
    rids = _rids(fields, batch)
    return GenerateRequest(
        fields=fields,
        stream=bool(stream),
        merges_logprobs=_any_true(fields.get("return_logprob")),
        num_sequences=num_sequences,
        lists_rooms=batch is not None or num_sequences > 1,
        rids=rids,
    )


def _batch_size(fields: dict[str, Any]) -> int | None:
    """How many prompts a batch holds, None for a single prompt (in whatever shape: the workers judge it)."""
    text, ids = fields.get("text"), fields.get("input_ids")
    if isinstance(text, list):
        return len(text)
    if isinstance(ids, list) and ids and isinstance(ids[0], list):
        return len(ids)
    return None


def _num_sequences(sampling: object, batch: int | None) -> int:
    prompts = 1 if batch is None else batch
    if isinstance(sampling, list) and len(sampling) == prompts:
        total = sum(_n(item) for item in sampling)
    else:
        total = prompts * _n(sampling)
    if total > MAX_SEQUENCES:
        raise RequestError(f"{total} sequences in one request: at most {MAX_SEQUENCES}", param="sampling_params.n")
    return total


def _n(sampling: object) -> int:
    n = sampling.get("n") if isinstance(sampling, dict) else None
    if n is None:
        return 1
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise RequestError(f"sampling_params.n {n!r}: an integer of at least 1", param="sampling_params.n")
    return n


def _rids(fields: dict[str, Any], batch: int | None) -> tuple[str, ...]:
    """Fill in what the client left open. Raises RequestError for what cannot name a request."""
    rid = fields.get("rid")
    if rid is None:
        rid = uuid.uuid4().hex if batch is None else [uuid.uuid4().hex for _ in range(batch)]
        fields["rid"] = rid
    rids = rid if isinstance(rid, list) else [rid]
    if not rids or not all(isinstance(item, str) and item for item in rids):
        raise RequestError("rid: a string that is not empty, or a list of them", param="rid")
    if len(set(rids)) != len(rids):
        raise RequestError("rid: the same one twice", param="rid")
    return tuple(rids)


def _any_true(value: object) -> bool:
    return any(item is True for item in value) if isinstance(value, list) else value is True
