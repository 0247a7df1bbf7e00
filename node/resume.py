"""The field `resume` of a request: the answer so far of a request whose decode node has died, to be continued here.

    "resume": {"output_ids": [...], "output_token_logprobs": [...], "output_top_logprobs": [...]}

The rank computes prompt and answer so far like a sequence that it had retracted: sampling, penalties and stop rules go
on with the next token of the answer. The front puts what was there before into its own answer, which is the whole one.
Written by the router, not by clients.
"""

from __future__ import annotations

from typing import Any

import msgspec

from common.errors import RequestError
from common.refusals import check_known, refuse
from node.fields import read_token_ids

_NAMES = frozenset({"output_ids", "output_token_logprobs", "output_top_logprobs"})


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """output_ids: the answer so far. token_logprobs, top_logprobs: what was reported of each of them, in the form of an
    answer object; empty when nothing was asked."""

    output_ids: list[int]
    token_logprobs: list[Any] = []
    top_logprobs: list[Any] = []


NOTHING = Resume(output_ids=[])


def read_resume(value: Any, vocab_size: int, num_sequences: int, *, logprobs: bool) -> Resume:
    """Raises RequestError. logprobs: the request wants those of its answer."""
    if value is None:
        return NOTHING
    if not isinstance(value, dict):
        refuse("resume", value, "an object with the output_ids of the answer so far")
    check_known("resume", value, _NAMES)
    if num_sequences != 1:
        raise RequestError(f"resume: only for one sequence, this request has {num_sequences}", param="resume")
    output_ids = read_token_ids("resume.output_ids", value.get("output_ids"), vocab_size)
    length = len(output_ids)
    return Resume(
        output_ids=output_ids,
        token_logprobs=_read_list("output_token_logprobs", value, length, needed=logprobs),
        top_logprobs=_read_list("output_top_logprobs", value, length, needed=False),
    )


def check_length(resume: Resume, num_prompt_tokens: int, max_new_tokens: int, max_total_tokens: int) -> None:
    """Raises RequestError when nothing is left to be made, or prompt and answer so far need more than all pages."""
    length = len(resume.output_ids)
    if length == 0:
        return
    if length >= max_new_tokens:
        raise RequestError(
            f"resume.output_ids: {length} tokens, but max_new_tokens is {max_new_tokens}", param="resume.output_ids"
        )
    if num_prompt_tokens + length > max_total_tokens:
        raise RequestError(
            f"resume.output_ids: {num_prompt_tokens} prompt tokens and {length} of the answer, but all pages together "
            f"hold {max_total_tokens}",
            code="too_many_tokens",
            param="resume.output_ids",
        )


def _read_list(name: str, value: dict[str, Any], length: int, *, needed: bool) -> list[Any]:
    found = value.get(name)
    if found is None and not needed:
        return []
    if not isinstance(found, list) or len(found) != length:
        refuse(f"resume.{name}", found, f"a list of {length}, as long as output_ids")
    return found
