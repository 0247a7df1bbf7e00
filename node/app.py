"""The HTTP front of a node: SGLang's endpoints over the node's ranks."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from common.config import NodeConfig, Role
from common.errors import RequestError, ServingError, WorkerError
from common.http_server import error_response, http_error_response
from common.json_body import decode_object
from common.keys import KeyRing
from common.sampling import LogprobOptions, SamplingParams
from common.tracing import TraceContext, Tracing
from node.chat_template import ChatTemplate
from node.exchange import Exchange
from node.fields import NumberRule, read_bool, read_number, read_string
from node.generate import Generator, json_response
from node.grammars import GrammarChecker
from node.guard import Guard
from node.info import model_info, served_name, server_info
from node.limits import ServingLimits
from node.messages import Submit
from node.metrics import CONTENT_TYPE, exposition
from node.openai.endpoints import OpenAIEndpoints
from node.rank_client import RankClient
from node.requests import GenerateRequest
from node.role import read_role
from node.tokenizer import Tokenizer

HEALTH_TIMEOUT_S = 20.0
FLUSH_RETRY_S = 0.05
ABORT_WAIT_S = 1.0
MAX_ABORTED_RIDS = 4096
MAX_RID_CHARACTERS = 1024

DEBUG_LIMIT = 1000

_DEBUG_LIMIT = NumberRule(integer=True, low=1, high=100_000)
_FLUSH_TIMEOUT = NumberRule(integer=False, low=0, high=600)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingNode:
    """What the endpoints work with, complete once the ranks are ready. bootstrap_port: of a prefill node.

    instance: another one at every start, so that a router notices a restart between two of its checks. change_role: to
    this one; raises ServingError when that cannot be.
    """

    config: NodeConfig
    limits: ServingLimits
    tokenizer: Tokenizer
    client: RankClient
    bootstrap_port: int | None
    grammars: GrammarChecker
    change_role: Callable[[Role], bool]
    chat_template: ChatTemplate | None = None
    tracing: Tracing | None = None
    keys: KeyRing = field(default_factory=KeyRing)
    instance: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def query_timeout_s(self) -> float:
        return self.config.transfer.liveness_timeout_s

    def check_serving(self) -> None:
        """Raises WorkerError: the node drains, or all of its ranks are dead or silent."""
        self.client.check_open()
        self.client.check_usable()

    async def query_all(self, what: str, *, limit: int = 0) -> list[dict[str, Any]]:
        """One answer of each rank that is not dead. Raises the first one's error."""
        asked = (
            self.client.query(rank, what, timeout_s=self.query_timeout_s, limit=limit) for rank in self.client.living()
        )
        return await asyncio.gather(*asked)


def create_app(node: ServingNode) -> FastAPI:
    app = FastAPI(title="tandem", openapi_url=None, redirect_slashes=False)
    generator = Generator(node.config, node.limits, node.tokenizer, node.client, node.grammars)
    openai = OpenAIEndpoints(
        generator,
        node.limits,
        node.tokenizer,
        served_name=served_name(node.config),
        chat_template=node.chat_template,
        reasoning=node.config.model.reasoning_parser,
    )
    # The token path goes past FastAPI's parameter machinery: the endpoint gets the raw request.
    app.add_route("/generate", generator.respond, methods=["POST"])
    openai.add_to(app)
    if (tracing := node.tracing) is not None:
        app.add_middleware(TraceContext, find=lambda _: tracing)
    app.add_middleware(Guard, keys=node.keys)
    _add_errors(app, node)
    _add_health(app, node)
    _add_info(app, node)
    _add_accounts(app, node, generator)
    _add_control(app, node, generator)
    return app


def _add_errors(app: FastAPI, node: ServingNode) -> None:
    @app.exception_handler(ServingError)
    async def serving_error(request: Request, error: ServingError) -> Response:
        node.client.meter.http_errors[error.code] += 1
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return http_error_response(request, error)

    @app.exception_handler(Exception)
    async def our_error(request: Request, error: Exception) -> Response:
        return error_response(ServingError(f"internal error: {type(error).__name__}"))


def _add_health(app: FastAPI, node: ServingNode) -> None:
    @app.get("/health")
    async def health() -> Response:
        node.check_serving()
        return json_response({"status": "ok", "instance": node.instance, "loads": node.client.loads()})

    @app.get("/health_generate")
    async def health_generate() -> Response:
        node.check_serving()
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await _probe(node)
        except TimeoutError:
            raise WorkerError(f"no token in {HEALTH_TIMEOUT_S:g} s", code="rank_silent") from None
        return json_response({"status": "ok"})


async def _probe(node: ServingNode) -> None:
    """Make one token at every rank that can be used; a prefill rank, which needs a room for that, answers a question
    instead."""
    if node.limits.role is Role.PREFILL:
        await node.query_all("state")
        return
    await asyncio.gather(*(_make_token(node, rank) for rank in node.client.usable()))


async def _make_token(node: ServingNode, rank: int) -> None:
    submit = Submit(
        rid=f"HEALTH_CHECK_{uuid.uuid4().hex}",
        token_ids=[node.limits.vocab_size - 1],
        sampling=SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),
        logprobs=LogprobOptions(),
        room=None,
        arrival_s=time.monotonic(),
    )
    request = GenerateRequest(
        submits=[submit], is_list=False, groups=[None], dp_rank=rank, stream=False, return_text=False
    )
    exchange = Exchange(node.client, node.tokenizer, request)
    await exchange.start()
    try:
        await exchange.result()
    finally:
        exchange.abandon(WorkerError("the health check has ended"))


def _add_info(app: FastAPI, node: ServingNode) -> None:
    @app.get("/get_load")
    async def get_load() -> Response:
        return json_response(node.client.loads())

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def get_model_info() -> Response:
        return json_response(model_info(node.config))

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def get_server_info() -> Response:
        info = server_info(
            node.config,
            node.limits,
            node.client.readies(),
            usable=node.client.usable(),
            bootstrap_port=node.bootstrap_port,
        )
        states = await _ask_each(node, "state")
        named = [{"dp_rank": rank, **_or_error(state)} for rank, state in enumerate(states)]
        return json_response({**info, "internal_states": named})


async def _ask_each(node: ServingNode, what: str, *, limit: int = 0) -> list[dict[str, Any] | ServingError]:
    """What each rank answers, or the error that it cannot answer for."""
    ranks = range(node.client.num_ranks)
    asked = (node.client.query(rank, what, timeout_s=node.query_timeout_s, limit=limit) for rank in ranks)
    return [_expected(found) for found in await asyncio.gather(*asked, return_exceptions=True)]


def _expected(found: dict[str, Any] | BaseException) -> dict[str, Any] | ServingError:
    if isinstance(found, dict | ServingError):
        return found
    raise found


def _or_error(found: dict[str, Any] | ServingError) -> dict[str, Any]:
    return found.record().body() if isinstance(found, ServingError) else found


def _add_accounts(app: FastAPI, node: ServingNode, generator: Generator) -> None:
    client = node.client

    @app.get("/metrics")
    async def get_metrics() -> Response:
        found = await _ask_each(node, "state")
        states = [None if isinstance(state, ServingError) else state for state in found]
        text = exposition(
            node.config.role,
            states,
            meter=client.meter,
            num_unanswered=client.num_unanswered,
            is_draining=client.is_draining,
        )
        return Response(text, media_type=CONTENT_TYPE)

    @app.get("/debug/cache")
    async def debug_cache(request: Request) -> Response:
        limit = _read_limit(request.query_params.get("limit"))
        ranks = await _ask_each(node, "prefixes", limit=limit)
        return json_response({"role": node.config.role.value, "ranks": [_or_error(rank) for rank in ranks]})

    @app.get("/debug/state")
    async def debug_state(request: Request) -> Response:
        limit = _read_limit(request.query_params.get("limit"))
        ranks = await _ask_each(node, "debug", limit=limit)
        body = {
            "role": node.config.role.value,
            "draining": client.is_draining,
            "requests": client.listing(limit),
            "omitted": {"requests": max(0, client.num_running - limit)},
            "ranks": [_or_error(rank) for rank in ranks],
        }
        return json_response(body)

    @app.get("/debug/states")
    async def debug_states() -> Response:
        return json_response({"role": node.config.role.value, "ranks": await node.query_all("states")})

    @app.post("/debug/states")
    async def record_states(request: Request) -> Response:
        raw = decode_object(await generator.read(request))
        await node.query_all("record", limit=int(read_bool("record", raw.get("record"))))
        return json_response({"success": True})


def _add_control(app: FastAPI, node: ServingNode, generator: Generator) -> None:
    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache(request: Request) -> Response:
        deadline = time.monotonic() + _read_timeout(request.query_params.get("timeout"))
        while True:
            try:
                await node.query_all("flush")
                return json_response({"success": True, "message": "Cache flushed."})
            except WorkerError:
                raise
            except ServingError as error:  # in use: the caller's fault here, whatever the rank calls it
                if time.monotonic() >= deadline:
                    message = f"the cache was not flushed: {error.message}"
                    raise RequestError(message, code="flush_refused") from error
            await asyncio.sleep(FLUSH_RETRY_S)

    @app.post("/role")
    async def post_role(request: Request) -> Response:
        role = read_role(decode_object(await generator.read(request)))
        changing = node.change_role(role)
        return json_response({"role": role.value, "changing": changing}, 202 if changing else 200)

    @app.post("/abort_request")
    async def abort_request(request: Request) -> Response:
        raw = decode_object(await generator.read(request))
        if read_bool("abort_all", raw.get("abort_all") or False):
            node.client.abort_all("aborted by request")
            return json_response({"success": True})
        if raw.get("rid") is None:
            raise RequestError("rid or abort_all: one of them must be given", param="rid")
        rids = node.client.rids_of(_read_rids(raw["rid"]))
        node.client.abort(rids, "aborted by request")
        return json_response({"success": True, "ended": await node.client.wait_ended(rids, ABORT_WAIT_S)})


def _read_rids(value: Any) -> list[str]:
    """Raises RequestError."""
    if not isinstance(value, list):
        return [read_string("rid", value, max_length=MAX_RID_CHARACTERS)]
    if len(value) > MAX_ABORTED_RIDS:
        raise RequestError(f"rid: a list of {len(value)}, at most {MAX_ABORTED_RIDS} are allowed", param="rid")
    return [read_string(f"rid[{i}]", rid, max_length=MAX_RID_CHARACTERS) for i, rid in enumerate(value)]


def _read_limit(text: str | None) -> int:
    """Raises RequestError."""
    if text is None:
        return DEBUG_LIMIT
    is_number = text.isascii() and text.isdigit() and len(text) < 10
    return int(read_number("limit", int(text) if is_number else text, _DEBUG_LIMIT))


def _read_timeout(text: str | None) -> float:
    try:
        value = float(text or 0)
    except ValueError:
        raise RequestError(f"timeout: {text} is not a number of seconds", param="timeout") from None
    return float(read_number("timeout", value, _FLUSH_TIMEOUT))
