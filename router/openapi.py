"""The OpenAPI document of the router (`/openapi.json`): what clients and administrators may ask, field by field.

It describes; it does not check. Bodies are judged by the nodes (node/), and tests compare both.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

_Schema = dict[str, Any]


def _number(kind: str, about: str, low: float | None = None, high: float | None = None, **more: Any) -> _Schema:
    found: _Schema = {"type": [kind, "null"], "description": about} | more
    if low is not None:
        found["minimum"] = low
    if high is not None:
        found["maximum"] = high
    return found


def _bool(about: str) -> _Schema:
    return {"type": ["boolean", "null"], "description": about}


def _string(about: str, limit: int | None = None) -> _Schema:
    return {"type": ["string", "null"], "description": about} | ({} if limit is None else {"maxLength": limit})


def _object(properties: _Schema, required: tuple[str, ...] = (), *, is_closed: bool = True) -> _Schema:
    found: _Schema = {"type": "object", "properties": properties, "additionalProperties": not is_closed}
    return found | ({"required": list(required)} if required else {})


def _ref(name: str) -> _Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _one_or_many(item: _Schema) -> _Schema:
    return {"anyOf": [item, {"type": "array", "items": item, "minItems": 1, "maxItems": 512}]}


_TEXT: _Schema = {"type": "string", "minLength": 1}
_IDS: _Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_ID_LISTS: _Schema = {"type": "array", "items": _IDS, "minItems": 1, "maxItems": 512}
_COUNT = 2**31 - 1
_STOP = {"description": "cut off the text", "anyOf": [{"type": "null"}, *_one_or_many({"type": "string"})["anyOf"]]}
_BIAS = {
    "type": ["object", "null"],
    "description": "from token id to −100 … 100",
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}
_SAMPLING: _Schema = {
    "temperature": _number("number", "below 1e-6: greedy", 0, 100),
    "top_p": _number("number", "", 0, 1),
    "top_k": _number("integer", "−1: the whole vocabulary", -1, _COUNT),
    "min_p": _number("number", "", 0, 1),
    "frequency_penalty": _number("number", "", -2, 2),
    "presence_penalty": _number("number", "", -2, 2),
    "repetition_penalty": _number("number", "", 0, 2),
    "n": _number("integer", "answers of each prompt", 1, 128),
    "stop": _STOP,
    "stop_token_ids": {"type": ["array", "null"], "items": {"type": "integer", "minimum": 0}},
    "ignore_eos": _bool("go on past the end token"),
    "logit_bias": _BIAS,
    "skip_special_tokens": _bool("leave special tokens out of the text"),
    "no_stop_trim": _bool("keep what ended the answer in the text"),
    "stream_interval": _number("integer", "tokens between two events", 1, _COUNT),
    "json_schema": _string("the answer follows this JSON schema", 65_536),
    "regex": _string("the answer matches this", 65_536),
    "ebnf": _string("the answer follows this grammar", 65_536),
}
_SAMPLING_PARAMS = _SAMPLING | {
    "max_new_tokens": _number("integer", "null: as many as fit", 0, _COUNT),
    "min_new_tokens": _number("integer", "", 0, _COUNT),
    "sampling_seed": _number("integer", "sample i uses seed + i", 0, 2**63 - 1),
}
_OPENAI_COMMON = _SAMPLING | {
    "model": _string("any name", 1024),
    "seed": _number("integer", "", 0, 2**63 - 1),
    "min_tokens": _number("integer", "", 0, _COUNT),
    "stream": _bool("server-sent events"),
    "stream_options": {
        "type": ["object", "null"],
        "properties": {"include_usage": {"type": "boolean"}, "continuous_usage_stats": {"type": "boolean"}},
        "additionalProperties": False,
    },
    "response_format": {
        "type": ["object", "null"],
        "properties": {
            "type": {"enum": ["text", "json_object", "json_schema"]},
            "json_schema": {"type": "object"},
        },
        "required": ["type"],
    },
    "return_token_ids": _bool("token ids in every object"),
    "cache_salt": _string("cached prefixes are shared only among requests with the same one", 1024),
    "user": _string("no effect"),
}
_MESSAGE: _Schema = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": _object({"type": {"const": "text"}, "text": {"type": "string"}}, ("type", "text")),
                },
            ]
        },
        "tool_calls": {"type": "array", "items": {"type": "object"}},
        "tool_call_id": {"type": "string"},
    },
    "required": ["role"],
    "description": "content may be missing only beside tool_calls",
}
_SCHEMAS: _Schema = {
    "Error": _object(
        {
            "error": _object(
                {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "code": {"type": ["string", "null"]},
                    "param": {"type": ["string", "null"]},
                    "retryable": {"type": "boolean"},
                },
                ("message", "type", "code", "param", "retryable"),
            )
        },
        ("error",),
    ),
    "SamplingParams": _object(_SAMPLING_PARAMS),
    "GenerateRequest": _object(
        {
            "text": _one_or_many(_TEXT),
            "input_ids": {"anyOf": [_IDS, _ID_LISTS]},
            "sampling_params": _one_or_many(_ref("SamplingParams")),
            "stream": _bool("server-sent events in place of one JSON answer"),
            "rid": _one_or_many({"type": "string", "minLength": 1, "maxLength": 256}),
            "extra_key": {"anyOf": [{"type": "null"}, {"type": "string", "minLength": 1, "maxLength": 1024}]},
            "return_logprob": _bool("log-probabilities of the answer's tokens"),
            "logprob_start_len": _number("integer", "from which prompt position on; −1: none", -1, _COUNT),
            "top_logprobs_num": _number("integer", "alternatives at each position", 0, 1024),
            "return_text_in_logprobs": _bool("text beside each token id"),
            "routing_key": {
                "type": ["string", "null"],
                "minLength": 1,
                "maxLength": 1024,
                "description": "for the policy sticky",
            },
        }
    ),
    "ChatRequest": _object(
        _OPENAI_COMMON
        | {
            "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
            "max_tokens": _number("integer", "null: as many as fit", 0, _COUNT),
            "max_completion_tokens": _number("integer", "the same", 0, _COUNT),
            "logprobs": _bool("of the answer's tokens"),
            "top_logprobs": _number("integer", "", 0, 20),
            "tools": {"type": ["array", "null"], "items": {"type": "object"}},
            "tool_choice": {
                "anyOf": [{"enum": ["none", "auto", "required", None]}, {"type": "object", "required": ["function"]}]
            },
            "parallel_tool_calls": _bool("more than one call"),
            "chat_template_kwargs": {"type": ["object", "null"]},
            "separate_reasoning": _bool("thoughts as reasoning_content"),
        },
        ("messages",),
    ),
    "CompletionRequest": _object(
        _OPENAI_COMMON
        | {
            "prompt": {"anyOf": [*_one_or_many(_TEXT)["anyOf"], _IDS, _ID_LISTS]},
            "max_tokens": _number("integer", "16 by default", 0, _COUNT),
            "echo": _bool("the prompt in front of the text"),
            "logprobs": _number("integer", "alternatives at each position", 0, 20),
            "best_of": _number("integer", "as n", 1, 128),
        },
        ("prompt",),
    ),
    "TokenizeRequest": _object(
        {
            "model": _string("any name", 1024),
            "prompt": _one_or_many(_TEXT),
            "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
            "add_special_tokens": _bool("as the model's prompts have them"),
            "return_token_strs": _bool("the tokens' texts too"),
        }
    ),
    "DetokenizeRequest": _object(
        {
            "model": _string("any name", 1024),
            "tokens": {"anyOf": [_IDS, _ID_LISTS]},
            "skip_special_tokens": _bool("leave them out"),
        },
        ("tokens",),
    ),
    "AbortRequest": _object(
        {
            "rid": {
                "anyOf": [
                    {"type": "string", "minLength": 1},
                    {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": 4096},
                ]
            },
            "abort_all": {"type": "boolean"},
        }
    ),
    "Registration": _object(
        {
            "url": {"type": "string"},
            "role": {"enum": ["prefill", "decode", None]},
            "bootstrap_port": _number("integer", "of a prefill node", 1, 65535),
            "instance": _string("of the process, in its /health"),
            "fingerprint": _string("of its state layout, where it does not publish one (SGLang's servers)"),
        },
        ("url",),
    ),
}
_EVENTS: _Schema = {"text/event-stream": {"schema": {"type": "string"}}}
_JSON: _Schema = {"application/json": {"schema": {}}}
_ERROR = {"description": "an error", "content": {"application/json": {"schema": _ref("Error")}}}


def _operation(
    about: str, body: str | None = None, *, parameters: tuple[_Schema, ...] = (), content: Any = _JSON
) -> _Schema:
    found: _Schema = {
        "summary": about,
        "responses": {"2XX": {"description": "the answer", "content": content}, "4XX": _ERROR, "5XX": _ERROR},
    }
    if body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(body)}}}
    return found | ({"parameters": list(parameters)} if parameters else {})


def _part(name: str) -> _Schema:
    """Of a path."""
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _query(name: str, schema: _Schema) -> _Schema:
    return {"name": name, "in": "query", "schema": schema}


_PLAIN: _Schema = {"text/plain": {"schema": {"type": "string"}}}
_WORKER_URL = _query("url", {"type": "string"})
_FORCE = _query("force", {"type": "string", "enum": ["true", "1", "false", "0"]})
_TIMEOUT = _query("timeout", {"type": "number", "minimum": 0, "maximum": 600})
USER_PATHS: _Schema = {
    "/generate": {"post": _operation("Continue prompts", "GenerateRequest", content=_JSON | _EVENTS)},
    "/v1/chat/completions": {"post": _operation("OpenAI: a chat", "ChatRequest", content=_JSON | _EVENTS)},
    "/v1/completions": {"post": _operation("OpenAI: continue prompts", "CompletionRequest", content=_JSON | _EVENTS)},
    "/v1/models": {"get": _operation("OpenAI: the model")},
    "/v1/models/{name}": {"get": _operation("OpenAI: the model of this name", parameters=(_part("name"),))},
    "/tokenize": {"post": _operation("Token ids of texts", "TokenizeRequest")},
    "/detokenize": {"post": _operation("Text of token ids", "DetokenizeRequest")},
    "/abort_request": {"post": _operation("End requests", "AbortRequest")},
    "/model_info": {"get": _operation("The model's path and type")},
    "/get_model_info": {"get": _operation("The same")},
    "/health": {"get": _operation("Whether a pair of workers can serve")},
    "/health_generate": {"get": _operation("One token through a pair of workers")},
}
ADMIN_PATHS: _Schema = {
    "/workers": {
        "get": _operation("The workers as the router sees them"),
        "post": _operation("A worker comes", "Registration"),
        "delete": _operation("A worker goes", parameters=(_WORKER_URL, _FORCE)),
    },
    "/workers/{id}": {"delete": _operation("A worker goes", parameters=(_part("id"), _FORCE))},
    "/list_workers": {"get": _operation("The workers' URLs")},
    "/add_worker": {"post": _operation("A worker comes", parameters=(_WORKER_URL,))},
    "/remove_worker": {"post": _operation("A worker goes", parameters=(_WORKER_URL, _FORCE))},
    "/flush_cache": {
        method: _operation("Every worker drops what it has cached", parameters=(_TIMEOUT,))
        for method in ("get", "post")
    },
    "/server_info": {"get": _operation("Settings, workers and counters")},
    "/get_server_info": {"get": _operation("The same")},
    "/metrics": {"get": _operation("For Prometheus", content=_PLAIN)},
    "/status.json": {"get": _operation("What the status page shows")},
    "/debug/requests": {
        "get": _operation("The last requests", parameters=(_query("limit", {"type": "integer", "minimum": 1}),))
    },
}


def document(paths: _Schema) -> _Schema:
    """paths: USER_PATHS, ADMIN_PATHS or both."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tandem router", "version": importlib.metadata.version("tandem-serve")},
        "paths": paths,
        "components": {"schemas": _SCHEMAS, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }
