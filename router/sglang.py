"""What SGLang's own servers need to be asked otherwise than ours, found in 0.5.12 to 0.5.23.

Samples: all `n` samples of a prompt get the room of the prompt there, and meet in it. So each is asked for as a prompt
of its own, with a room of its own. Ids: an abort there has to name a sequence, whose id is made by the server where the
request has one id for several. So each sequence gets its id here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.errors import RequestError

_PROMPTS = ("text", "input_ids", "input_embeds", "prompt")
_EACH = ("sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "routing_key", "lora_path")


def one_by_one(fields: dict[str, Any], rids: tuple[str, ...], num_sequences: int, *, is_batch: bool) -> dict[str, Any]:
    """The same request as a batch of prompts with one sample each, in the order of the samples. is_batch: whether it is
    a list of prompts already. Raises RequestError where samples cannot be prompts."""
    prompts = [name for name in _PROMPTS if fields.get(name) is not None]
    if not prompts:
        raise RequestError("n: 1 is all that SGLang's servers make of a chat in disaggregated serving", param="n")
    counts = _counts(fields, len(fields[prompts[0]]) if is_batch else 1, num_sequences)
    values = {name: fields[name] if is_batch else [fields[name]] for name in prompts}
    changed: dict[str, Any] = {name: _repeated(value, counts) for name, value in values.items()}
    for name in _EACH:
        value = fields.get(name)
        if isinstance(value, list) and len(value) == len(counts):
            changed[name] = _repeated(value, counts)
    sampling = changed.get("sampling_params", fields.get("sampling_params"))
    if sampling is not None:
        changed["sampling_params"] = (
            [_once(each) for each in sampling] if isinstance(sampling, list) else _once(sampling)
        )
    if fields.get("n") is not None:
        changed["n"] = 1
    return fields | changed | {"rid": list(sequence_ids(rids, num_sequences))}


def sequence_ids(rids: tuple[str, ...], num_sequences: int) -> tuple[str, ...]:
    """Of each sequence, in order. num_sequences: of the request, whose ids are of as many sequences each."""
    if len(rids) == num_sequences:
        return rids
    sharers = -(-num_sequences // len(rids))
    return tuple(f"{rid}_{i}" for rid in rids for i in range(sharers))[:num_sequences]


def _counts(fields: dict[str, Any], num_prompts: int, num_sequences: int) -> list[int]:
    """Samples of each prompt."""
    sampling = fields.get("sampling_params")
    if isinstance(sampling, list) and len(sampling) == num_prompts:
        return [each.get("n") or 1 if isinstance(each, dict) else 1 for each in sampling]
    return [num_sequences // num_prompts] * num_prompts


def _repeated(values: Sequence[Any], counts: Sequence[int]) -> list[Any]:
    return [value for value, count in zip(values, counts, strict=True) for _ in range(count)]


def _once(sampling: Any) -> Any:
    return sampling | {"n": 1} if isinstance(sampling, dict) and "n" in sampling else sampling
