"""Every endpoint but /generate: health, what the router and its workers are, and orders that go to all workers."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from common.errors import AccessError, RequestError, WorkerError
from common.http_server import json_response
from common.json_body import BAD_JSON, decode_object
from router.guard import terms_of
from router.siblings import Answers
from router.state import Router, router_of
from router.workers import Worker

_LIMIT_S = 5.0
_FLUSH_LIMIT_S = 60.0
_MAX_RIDS = 4096
"""That one abort may name."""


@dataclass(frozen=True, slots=True)
class Said:
    """What one worker answered to an order. status 0: nothing (body: why)."""

    worker: Worker
    status: int
    body: bytes

    def text(self) -> str:
        """The worker's own message where it has one."""
        payload = self.payload()
        error = payload.get("error")
        if isinstance(error, dict) and isinstance(error.get("message"), str):
            return str(error["message"])
        return self.body.decode("utf-8", "replace")[:500] or f"status {self.status}"

    def payload(self) -> dict[str, Any]:
        try:
            found = msgspec.json.decode(self.body)
        except BAD_JSON:
            return {}
        return found if isinstance(found, dict) else {}


async def _order(router: Router, worker: Worker, method: str, path: str, body: bytes | None, limit_s: float) -> Said:
    try:
        answer = await router.network.send(method, worker.url + path, body, limit_s=limit_s)
        return Said(worker, answer.status, await answer.read())
    except WorkerError as error:
        return Said(worker, 0, error.message.encode())


async def _order_all(
    router: Router,
    workers: Iterable[Worker],
    method: str,
    path: str,
    body: bytes | None = None,
    limit_s: float = _LIMIT_S,
) -> list[Said]:
    return await asyncio.gather(*(_order(router, worker, method, path, body, limit_s) for worker in workers))


async def health(request: Request) -> Response:
    """200 when a pair can serve."""
    router = router_of(request)
    router.dispatcher.check_open()
    workers = router.workers
    if not workers.has_pair():
        raise WorkerError(workers.why_no_pair())
    return json_response({"status": "ok"})


async def server_info(request: Request) -> Response:
    """The router's settings flat, its workers as it sees them, and what each live one says of itself."""
    router = router_of(request)
    alive = [worker for worker in router.workers.all if worker.alive]
    infos = {said.worker.url: said.payload() for said in await _order_all(router, alive, "GET", "/server_info")}
    decode = [infos[worker.url] for worker in router.workers.decode if worker.url in infos]
    return json_response(
        msgspec.to_builtins(router.config)
        | {
            "version": importlib.metadata.version("tandem-serve"),
            "role": "router",
            "workers": [worker.describe() for worker in router.workers.all],
            "mismatches": router.workers.mismatches(),
            "requests_in_flight": router.dispatcher.num_running,
            "counters": msgspec.to_builtins(router.dispatcher.counters),
            "internal_states": [state for info in decode for state in info.get("internal_states", [])],
            "prefill": [infos[worker.url] for worker in router.workers.prefill if worker.url in infos],
            "decode": decode,
        }
    )


async def model_info(request: Request) -> Response:
    """From the first live worker."""
    router = router_of(request)
    for worker in router.workers.all:
        if worker.alive:
            said = await _order(router, worker, "GET", "/model_info", None, _LIMIT_S)
            if said.status == 200:
                return Response(said.body, media_type="application/json")
    raise WorkerError("no worker is alive that could tell its model")


async def flush_cache(request: Request) -> Response:
    """Every worker drops its caches. 400 when one refuses (it is busy), 503 when one fails or cannot be reached."""
    router = router_of(request)
    query = f"?{request.url.query}" if request.url.query else ""
    said = await _order_all(router, router.workers.all, "POST", f"/flush_cache{query}", limit_s=_FLUSH_LIMIT_S)
    for one in said:
        if one.status == 200:
            one.worker.forget_prefixes()
    _raise_first_refusal(said, "flush_cache")
    return json_response({"success": True, "message": f"{len(said)} workers flushed their caches"})


async def abort_request(request: Request) -> Response:
    """End one request (`rid`) or all of them (`abort_all`) on both roles."""
    router = router_of(request)
    body = await router.read_body(request.scope, request.receive)
    fields, terms = decode_object(body), terms_of(request.scope)
    rids = None if fields.get("abort_all") is True else _rids(fields.get("rid"))
    if rids is None and not terms.is_admin:
        raise AccessError("abort_all needs an admin key", code="forbidden", status=403, param="abort_all")
    order = _Abort(rids, caller=None if terms.is_admin else terms.caller, is_admin=terms.is_admin)
    single = None if rids is None else router.dispatcher.sequences_of(rids)
    own = _end_here(router, order)
    for said in await router.siblings.ask(f"abort {msgspec.json.encode(order).decode()}"):
        own |= msgspec.json.decode(said, type=frozenset[str])
    if not terms.is_admin:
        body = msgspec.json.encode({"rid": sorted(own)})
        if not own:
            return json_response({"success": True})
    alive = [worker for worker in router.workers.all if worker.alive]
    ours = [worker for worker in alive if not worker.is_sglang]
    heard = await _order_all(router, ours, "POST", "/abort_request", body)
    for one in _abort_bodies(single, rids if terms.is_admin else own):
        heard += await _order_all(router, (w for w in alive if w.is_sglang), "POST", "/abort_request", one)
    _raise_first_refusal(heard, "abort_request")
    return json_response({"success": True})


def _abort_bodies(single: frozenset[str] | None, allowed: frozenset[str] | None) -> list[bytes]:
    """For SGLang's own servers, which take one id of one sequence each. single: ids of requests and of sequences, None:
    all. allowed: of these requests only."""
    if single is None or allowed is None:
        return [msgspec.json.encode({"rid": "", "abort_all": True})]
    named = (name for name in sorted(single) if name in allowed or name.rpartition("_")[0] in allowed)
    return [msgspec.json.encode({"rid": name, "abort_all": False}) for name in named]


class _Abort(msgspec.Struct):
    """rids: None for all."""

    rids: frozenset[str] | None
    caller: str | None
    is_admin: bool


def _end_here(router: Router, order: _Abort) -> frozenset[str]:
    """What this process is not to try again. Returns what of it is the caller's, who does not learn whether other
    requests exist; of an administrator nothing."""
    rids = order.rids
    if not order.is_admin:
        rids = router.dispatcher.rids_of(order.caller, rids or frozenset())
    router.dispatcher.on_abort(rids)
    return frozenset() if order.is_admin else rids or frozenset()


def answers(router: Router) -> Answers:
    """What this process tells its siblings."""
    return {"abort": lambda order: msgspec.json.encode(_end_here(router, msgspec.json.decode(order, type=_Abort)))}


def _rids(rid: object) -> frozenset[str]:
    """Those that an abort names. Raises RequestError."""
    rids = rid if isinstance(rid, list) else [rid]
    if len(rids) > _MAX_RIDS:
        raise RequestError(f"rid: {len(rids)} in one abort, at most {_MAX_RIDS}", param="rid")
    if not rids or not all(isinstance(item, str) and item for item in rids):
        raise RequestError("rid: name a request, or set abort_all", param="rid")
    return frozenset(rids)


def _raise_first_refusal(said: list[Said], order: str) -> None:
    """RequestError for the first worker that would not, WorkerError for one that did not answer or could not."""
    for one in said:
        name = f"{one.worker.role.value} worker {one.worker.url}"
        if one.status == 0 or one.status >= 500:
            raise WorkerError(f"{order}: {name}: {one.text()}")
        if one.status != 200:
            raise RequestError(f"{order}: refused by {name}: {one.text()}", code="refused")


ROUTES = (
    ("/health", ("GET",), health),
    ("/server_info", ("GET",), server_info),
    ("/get_server_info", ("GET",), server_info),
    ("/model_info", ("GET",), model_info),
    ("/get_model_info", ("GET",), model_info),
    ("/flush_cache", ("GET", "POST"), flush_cache),
    ("/abort_request", ("POST",), abort_request),
)
