"""OpenAI's endpoints at the router: what it must know of their bodies, and what any worker can answer."""

from __future__ import annotations

import uuid
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from common.errors import RequestError, WorkerError
from router.request import (
    GenerateRequest,
    all_names,
    check_alternatives,
    check_count,
    read_fields,
    read_n,
    read_rids,
)
from router.state import router_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_LIMIT_S = 10.0


def parse_chat(body: bytes) -> GenerateRequest:
    """Raises RequestError naming the field."""
    fields = read_fields(body)
    return _request(fields, CHAT, None, prefix="chatcmpl-", merges_logprobs=False)


def parse_completion(body: bytes) -> GenerateRequest:
    """Raises RequestError naming the field. The prompt's log-probabilities are known to the prefill leg only."""
    fields = read_fields(body)
    merges_logprobs = fields.get("echo") is True and fields.get("logprobs") is not None
    return _request(fields, TEXT, _num_prompts(fields), prefix="cmpl-", merges_logprobs=merges_logprobs)


def _request(
    fields: dict[str, Any], path: str, batch: int | None, *, prefix: str, merges_logprobs: bool
) -> GenerateRequest:
    prompts = 1 if batch is None else batch
    num_sequences = check_count(prompts * read_n(fields.get("n"), "n"), "n")
    if fields.get("rid") is None:
        fields["rid"] = prefix + uuid.uuid4().hex
    rids = read_rids(fields, batch, num_sequences)
    if merges_logprobs:
        _check_alternatives(fields, num_sequences)
    return GenerateRequest(
        path=path,
        fields=fields,
        stream=fields.get("stream") is True,
        merges_logprobs=merges_logprobs,
        keeps_ids=fields.get("stream") is True and num_sequences == 1 and fields.get("echo") is not True,
        num_sequences=num_sequences,
        lists_rooms=batch is not None or num_sequences > 1,
        rids=rids,
        names=all_names(rids, num_sequences, one_for_batch=batch is not None and isinstance(fields["rid"], str)),
    )


def _num_prompts(fields: dict[str, Any]) -> int | None:
    """None for a single prompt (in whatever shape: the workers judge it)."""
    prompt = fields.get("prompt")
    if not isinstance(prompt, list) or (prompt and isinstance(prompt[0], int)):
        return None
    if not prompt:
        raise RequestError("prompt: an empty batch", param="prompt")
    return len(prompt)


def _check_alternatives(fields: dict[str, Any], num_sequences: int) -> None:
    asked = {
        "input_ids": fields.get("prompt"),
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": fields.get("logprobs"),
    }
    try:
        check_alternatives(asked, num_sequences)
    except RequestError as error:
        message = error.message.replace("top_logprobs_num", "logprobs", 1)
        raise RequestError(message, param="logprobs") from error


async def forward(request: Request) -> Response:
    """What every worker can answer: from the first live one that does."""
    router = router_of(request)
    path = _quoted(request.scope["path"])
    body = await router.read_body(request.scope, request.receive) if request.method == "POST" else None
    for worker in router.workers.all:
        if worker.alive:
            try:
                answer = await router.network.send(request.method, worker.url + path, body, limit_s=_LIMIT_S)
                return Response(await answer.read(), answer.status, media_type=answer.content_type)
            except WorkerError:
                continue  # the next one may answer
    raise WorkerError("no worker is alive that could answer")


def _quoted(path: str) -> str:
    """As it may stand in a request to a worker, which the router's own key goes with: no client leads it elsewhere.

    Raises RequestError (404).
    """
    if any(part in (".", "..") for part in path.split("/")):
        raise RequestError(f"no such path: {path}", code="not_found", status=404)
    return quote(path)


ROUTES = (
    ("/v1/models", ("GET",), forward),
    ("/v1/models/{name:path}", ("GET",), forward),
    ("/tokenize", ("POST",), forward),
    ("/detokenize", ("POST",), forward),
)
