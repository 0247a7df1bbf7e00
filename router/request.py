"""What the router must know of a request, and nothing more: everything else is the workers' to judge.

Here: what a request is, and how a /generate body is read. `router/openai.py` reads the others.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from common.errors import RequestError
from common.json_body import decode_object
from common.refusals import refuse
from router.sglang import one_by_one, sequence_ids
from router.worker import Worker
from router.workers import Pair

GENERATE = "/generate"
MAX_SEQUENCES = 65536
"""Of one request: rooms are minted for each, so this bounds what a small body can make the router do."""
MAX_RID_CHARACTERS = 256
MAX_PROMPT_ALTERNATIVES = 2**20
"""Of one request: prompt positions times top_logprobs_num, over all sequences. About 32 MiB of an answer, and of every
event of a stream."""

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """fields: the JSON object, with `rid` filled in. num_sequences: prompts times n, one room each.

    path: where both legs are posted. keeps_ids: its chunks tell only what is new, with the ids of these tokens
    (`return_token_ids`), which are kept for the case that the answer has to go on elsewhere.

    lists_rooms: more than one sequence can come of it, so rooms go as a list. rids: as given; they name every sequence.
    names: all ids that this request takes at the workers, those of the single sequences (`rid_0`, ...) included.
    """

    fields: dict[str, Any]
    stream: bool
    merges_logprobs: bool
    num_sequences: int
    lists_rooms: bool
    rids: tuple[str, ...]
    names: frozenset[str]
    path: str = GENERATE
    keeps_ids: bool = False

    def resumed(self, resume: dict[str, Any]) -> GenerateRequest:
        """The rest of a request of one sequence whose client has the beginning of the answer. The prompt's logprobs are
        known by then."""
        fields = self.fields | {"resume": resume}
        if fields.get("logprob_start_len") is not None:
            fields["logprob_start_len"] = -1
        return dataclasses.replace(self, fields=fields)

    def leg_bodies(self, pair: Pair, rooms: Sequence[int]) -> tuple[bytes, bytes]:
        """(prefill, decode) bodies: the same but for `stream`, which the prefill leg is never asked for, and ranks of
        workers that have several."""
        fields = self._asked_of_sglang() if pair.decode.is_sglang and self.lists_rooms else self.fields
        fields["bootstrap_host"] = pair.prefill.host
        fields["bootstrap_port"] = pair.prefill.bootstrap_port
        fields["bootstrap_room"] = list(rooms) if self.lists_rooms else rooms[0]
        prefill_only, decode_only = pair.rank_fields(fields)
        if self.keeps_ids:
            decode_only["return_token_ids"] = True
        if self.stream:
            prefill_only["stream"] = False
        decode_body = _encode(fields | decode_only)
        return _encode(fields | prefill_only) if prefill_only or decode_only else decode_body, decode_body

    def _asked_of_sglang(self) -> dict[str, Any]:
        prompts = self.fields.get("prompt") if self.path != GENERATE else None
        is_batch = _batch_size(self.fields) is not None or (
            isinstance(prompts, list) and not isinstance(prompts[0], int)
        )
        return one_by_one(self.fields, self.rids, self.num_sequences, is_batch=is_batch)

    def ids_at(self, worker: Worker) -> tuple[str, ...]:
        """What an abort has to name there."""
        return sequence_ids(self.rids, self.num_sequences) if worker.is_sglang and self.lists_rooms else self.rids

    @property
    def num_bytes(self) -> int:
        """Of its body, without what a leg adds."""
        return len(_encode(self.fields))


def parse_generate(body: bytes) -> GenerateRequest:
    """Raises RequestError naming the field."""
    fields = read_fields(body)
    batch = _batch_size(fields)
    if batch == 0:
        raise RequestError("text: an empty batch", param="text")
    num_sequences = _num_sequences(fields.get("sampling_params"), batch)
    rids = read_rids(fields, batch, num_sequences)
    check_alternatives(fields, num_sequences)
    return GenerateRequest(
        fields=fields,
        stream=fields.get("stream") is True,
        merges_logprobs=_any_true(fields.get("return_logprob")),
        num_sequences=num_sequences,
        lists_rooms=batch is not None or num_sequences > 1,
        rids=rids,
        names=all_names(rids, num_sequences, one_for_batch=batch is not None and isinstance(fields["rid"], str)),
    )


def read_fields(body: bytes) -> dict[str, Any]:
    """What any body must be. Raises RequestError naming the field."""
    fields = decode_object(body)
    for name in ("bootstrap_room", "resume"):
        if fields.get(name) is not None:
            raise RequestError(f"{name}: set by the router, not given by a client", param=name)
    if not isinstance(fields.get("stream"), bool | None):
        raise RequestError("stream: true or false", param="stream")
    return fields


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
    return check_count(total, "sampling_params.n")


def check_count(num_sequences: int, param: str) -> int:
    if num_sequences > MAX_SEQUENCES:  # a number that may be too long to be written
        raise RequestError(f"too many sequences in one request: at most {MAX_SEQUENCES}", param=param)
    return num_sequences


def _n(sampling: object) -> int:
    return read_n(sampling.get("n") if isinstance(sampling, dict) else None, "sampling_params.n")


def read_n(n: object, param: str) -> int:
    """How many answers of each prompt."""
    if n is None:
        return 1
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        refuse(param, n, "an integer from 1 to 128")
    return n


def read_rids(fields: dict[str, Any], batch: int | None, num_sequences: int) -> tuple[str, ...]:
    """Fill in what the client left open. Raises RequestError for what cannot name a request."""
    rid = fields.get("rid")
    if rid is None:
        rid = uuid.uuid4().hex if batch is None else [uuid.uuid4().hex for _ in range(batch)]
        fields["rid"] = rid
    rids = rid if isinstance(rid, list) else [rid]
    if not rids or not all(isinstance(item, str) and 0 < len(item) <= MAX_RID_CHARACTERS for item in rids):
        raise RequestError(f"rid: a string of 1 to {MAX_RID_CHARACTERS} characters, or a list of them", param="rid")
    if len(rids) > num_sequences:
        raise RequestError(f"rid: {len(rids)} of them for {num_sequences} sequences", param="rid")
    if len(set(rids)) != len(rids):
        raise RequestError("rid: the same one twice", param="rid")
    return tuple(rids)


def all_names(rids: tuple[str, ...], num_sequences: int, *, one_for_batch: bool) -> frozenset[str]:
    """The ids as given and those that the nodes make of one that stands for several sequences, or a batch of one."""
    sharers = num_sequences // len(rids)
    if sharers == 1 and not one_for_batch:
        return frozenset(rids)
    return frozenset(rids) | frozenset(f"{rid}_{i}" for rid in rids for i in range(sharers))


def check_alternatives(fields: dict[str, Any], num_sequences: int) -> None:
    """Raises RequestError when the prompts' log-probabilities are too many; of a text nobody knows yet."""
    ids = fields.get("input_ids")
    if not isinstance(ids, list):
        return
    prompts = ids if ids and isinstance(ids[0], list) else [ids]
    total = sum(_alternatives(fields, i, prompt) for i, prompt in enumerate(prompts)) * num_sequences // len(prompts)
    if total > MAX_PROMPT_ALTERNATIVES:
        raise RequestError(
            f"top_logprobs_num: times the prompts' positions at most {MAX_PROMPT_ALTERNATIVES}",
            param="top_logprobs_num",
        )


def _alternatives(fields: dict[str, Any], index: int, prompt: object) -> int:
    """Of one prompt, once; 0 for what makes no sense, which the workers refuse."""
    names = ("return_logprob", "logprob_start_len", "top_logprobs_num")
    wanted, start, top = (_at(fields.get(name), index) for name in names)
    if wanted is not True or not (isinstance(prompt, list) and isinstance(start, int) and isinstance(top, int)):
        return 0
    if start < 0:
        return 0
    return max(0, len(prompt) - start) * max(0, top)


def _at(value: object, index: int) -> object:
    """A prompt's own where a list is given; lists that are too short are the workers' to refuse."""
    if not isinstance(value, list):
        return value
    return value[index] if index < len(value) else None


def _any_true(value: object) -> bool:
    return any(item is True for item in value) if isinstance(value, list) else value is True
