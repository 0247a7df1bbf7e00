"""POST /v1/completions: the body as a /generate body."""

from __future__ import annotations

from typing import Any

from common.errors import RequestError
from common.refusals import refuse
from common.response_format import read_response_format
from node.fields import NumberRule, read_bool, read_number
from node.openai.calls import Call
from node.openai.fields import (
    COMMON,
    MAX_TOP_LOGPROBS,
    check_unsupported,
    constrain,
    generate_fields,
    given,
    read_wishes,
)

DEFAULT_MAX_TOKENS = 16
_LOGPROBS = NumberRule(integer=True, low=0, high=MAX_TOP_LOGPROBS)
_UNSUPPORTED = frozenset(["suffix"])
_KNOWN = COMMON | _UNSUPPORTED | {"prompt", "max_tokens", "echo", "best_of"}
_NAMES = {"text": "prompt", "input_ids": "prompt", "top_logprobs_num": "logprobs"}


def read_completion(raw: dict[str, Any]) -> Call:
    """Raises RequestError. What /generate has to say of the fields it says itself."""
    fields = given(raw, _KNOWN)
    check_unsupported(fields, _UNSUPPORTED)
    _check_best_of(fields)
    echo = read_bool("echo", fields.get("echo", False))
    body = generate_fields(fields, fields.get("max_tokens", DEFAULT_MAX_TOKENS)) | _prompt(fields)
    schema = read_response_format(fields.get("response_format"))
    wanted = {} if schema is None else {"json_schema": schema}
    names = _NAMES | constrain(body["sampling_params"], wanted, "response_format")
    if "logprobs" in fields:
        top = read_number("logprobs", fields["logprobs"], _LOGPROBS)
        body |= {"return_logprob": True, "top_logprobs_num": top, "logprob_start_len": 0 if echo else -1}
    wishes = read_wishes(fields, logprobs="logprobs" in fields, echo=echo)
    return Call(body=body, wishes=wishes, names=names, special_tokens=True)


def _check_best_of(fields: dict[str, Any]) -> None:
    n = fields.get("n", 1)
    if fields.get("best_of", n) != n:
        refuse("best_of", fields["best_of"], f"left out, or {n} as n: all answers that are made are returned")


def _prompt(fields: dict[str, Any]) -> dict[str, Any]:
    """`text` or `input_ids` of /generate; the prompt's own type tells which."""
    prompt = fields.get("prompt")
    if prompt is None:
        raise RequestError("prompt: it must be given", param="prompt")
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    is_ids = isinstance(first, list) or (isinstance(first, int) and not isinstance(first, bool))
    return {"input_ids": prompt} if is_ids else {"text": prompt}
