"""What the two OpenAI endpoints have in common: names of a body, and what each of them is in a /generate body."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from common.constraints import GRAMMARS
from common.errors import RequestError
from common.refusals import check_known, refuse
from node.fields import read_bool

_SAMPLING = {  # of ours, by OpenAI's name or that of an SGLang server
    **{
        name: name
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
            "n",
            "stop",
            "stop_token_ids",
            "ignore_eos",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "no_stop_trim",
            "stream_interval",
            "logit_bias",
            "json_schema",
            "regex",
            "ebnf",
            "structural_tag",
            "stop_regex",
            "custom_params",
        )
    },
    "seed": "sampling_seed",
    "min_tokens": "min_new_tokens",
}
_REQUEST = frozenset(  # the same there; what /generate refuses is refused by it
    [
        "rid",
        "extra_key",
        "stream",
        "resume",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "routed_dp_rank",
        "data_parallel_rank",
        "priority",
        "lora_path",
        "session_params",
        "custom_logit_processor",
        "return_hidden_states",
        "return_routed_experts",
    ]
)
_READ = frozenset(["model", "stream_options", "logprobs", "response_format", "cache_salt", "return_token_ids"])
_IGNORED = frozenset(  # harmless: names and hints, what other servers' routers add
    [
        "user",
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "custom_labels",
        "disagg_prefill_dp_rank",
        "routed_experts_start_len",
        "return_cached_tokens_details",
        "session_id",
        "images_config",
        "routing_key",
        "bootstrap_pair_key",
    ]
)
COMMON = frozenset(_SAMPLING) | _REQUEST | _READ | _IGNORED

_PATH = re.compile(r"^(?:sampling_params\.)?(\w+)")
_OURS = {ours: theirs for theirs, ours in _SAMPLING.items()} | {"max_new_tokens": "max_tokens"}
MAX_MODEL_CHARACTERS = 1024
MAX_TOP_LOGPROBS = 20  # OpenAI's own, for chats


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """include_usage: a last chunk with the usage of the whole request. continuous_usage_stats: usage so far in each."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """How the client wants its answer. model: what it called the model, None for the served name.

    logprobs: of the answer's tokens. echo: the prompt in front of the text. return_token_ids: in every object.
    """

    model: str | None
    logprobs: bool
    echo: bool = False
    return_token_ids: bool = False
    stream_options: StreamOptions = StreamOptions()


def given(raw: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """The fields that are not null. Raises RequestError for a name nobody knows."""
    found = {name: value for name, value in raw.items() if value is not None}
    check_known("", found, known)
    return found


def check_unsupported(fields: Mapping[str, Any], names: frozenset[str]) -> None:
    """Raises RequestError for one of the names that has a value that is not empty."""
    for name in sorted(fields.keys() & names):
        if fields[name]:
            raise RequestError(f"{name}: not supported", code="unsupported_parameter", param=name)


def generate_fields(fields: Mapping[str, Any], max_tokens: object) -> dict[str, Any]:
    """The /generate body but for its prompt and log-probabilities. max_tokens None: as many as fit."""
    sampling = {ours: fields[name] for name, ours in _SAMPLING.items() if name in fields}
    body = {name: fields[name] for name in fields.keys() & _REQUEST}
    if "cache_salt" in fields:
        body.setdefault("extra_key", fields["cache_salt"])
    body["resume"] = _with_placeholders(fields.get("resume"), fields)
    return body | {"sampling_params": sampling | {"max_new_tokens": max_tokens}}


def _with_placeholders(resume: Any, fields: Mapping[str, Any]) -> Any:
    """A chunk tells only of its own tokens, so nobody asks again what was reported of those before."""
    if not isinstance(resume, dict) or not fields.get("logprobs") or not isinstance(resume.get("output_ids"), list):
        return resume
    return resume | {"output_token_logprobs": [[0.0, token_id, None] for token_id in resume["output_ids"]]}


def read_wishes(fields: Mapping[str, Any], *, logprobs: bool, echo: bool = False) -> Wishes:
    model = fields.get("model")
    if model is not None and (not isinstance(model, str) or len(model) > MAX_MODEL_CHARACTERS):
        refuse("model", model, f"a string of at most {MAX_MODEL_CHARACTERS} characters")
    return Wishes(
        model=model,
        logprobs=logprobs,
        echo=echo,
        return_token_ids=read_bool("return_token_ids", fields.get("return_token_ids", False)),
        stream_options=_read_stream_options(fields.get("stream_options", {})),
    )


def _read_stream_options(value: Any) -> StreamOptions:
    if not isinstance(value, dict):
        refuse("stream_options", value, "an object")
    found = {name: item for name, item in value.items() if item is not None and name != "include_obfuscation"}
    check_known("stream_options", found, frozenset(StreamOptions.__struct_fields__))
    return StreamOptions(**{name: read_bool(f"stream_options.{name}", item) for name, item in found.items()})


def constrain(sampling: dict[str, Any], fields: Mapping[str, Any], source: str) -> dict[str, str]:
    """Add what response format or tools (source) make to `sampling_params`. Returns what errors about it call it.

    Raises RequestError where the client has set one of these fields itself.
    """
    grammars = sorted(GRAMMARS & fields.keys())
    for name in grammars:
        if name in sampling:
            raise RequestError(f"{source}: {name} is given too, but only one of them may be", param=source)
    sampling |= fields
    return dict.fromkeys(grammars, source)


def in_openai_names(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The error of a /generate body in the words of the body that it was made from. names: beyond the common ones."""
    if error.param is None:
        return error
    words = _OURS | dict(names)

    def rename(path: str) -> str:
        return _PATH.sub(lambda found: words.get(found[1], found[1]), path)

    message = rename(error.message) if error.message.startswith(error.param) else error.message
    return RequestError(message, code=error.code, param=rename(error.param), status=error.http_status)
