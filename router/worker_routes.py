"""The endpoints of membership: who is there, who comes, who goes. For administrators and for nodes that register."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from common.errors import RequestError
from common.http_server import json_response
from common.json_body import decode_object
from router.membership import Registration, read_registration
from router.state import Router, router_of
from router.worker import Worker

_FLAGS = {"true": True, "1": True, "false": False, "0": False}


async def list_workers(request: Request) -> Response:
    """Every worker as the router sees it, and who of them does not fit together."""
    workers = router_of(request).workers
    return json_response({"workers": [worker.details() for worker in workers.all], "mismatches": workers.mismatches()})


async def add_worker(request: Request) -> Response:
    """201 for a new one, 200 for one that is there already: its registration is repeated."""
    router = router_of(request)
    fields = decode_object(await router.read_body(request.scope, request.receive))
    return await _register(router, read_registration(fields))


async def remove_worker(request: Request) -> Response:
    """202 while it has requests that it ends, 200 when it is gone."""
    query = request.query_params
    name = request.path_params.get("id") or query.get("url")
    if name is None:
        raise RequestError("url: which worker?", param="url")
    force = _FLAGS.get(query.get("force", "false"))
    if force is None:
        raise RequestError(f"force: {query['force']} is not true or false", param="force")
    router = router_of(request)
    worker = router.membership.unregister(name, force=force, instance=query.get("instance"))
    if worker in router.workers.all:
        return json_response(worker.details(), 202)
    return json_response(worker.details() | {"alive": False, "state": "gone", "reason": "it was removed"})


async def _register(router: Router, asked: Registration) -> Response:
    worker, is_new = await router.membership.register(asked)
    return json_response(worker.details() | {"mismatches": _mismatches(router, worker)}, 201 if is_new else 200)


def _mismatches(router: Router, worker: Worker) -> tuple[str, ...]:
    """None while nobody knows what it is."""
    return () if worker.fingerprint is None else router.workers.mismatches(worker)


# As the SGLang router of old calls them


async def list_urls(request: Request) -> Response:
    return json_response({"urls": [worker.url for worker in router_of(request).workers.all]})


async def add_url(request: Request) -> Response:
    return await _register(router_of(request), read_registration({"url": request.query_params.get("url")}))


ROUTES = (
    ("/workers", ("GET",), list_workers),
    ("/workers", ("POST",), add_worker),
    ("/workers", ("DELETE",), remove_worker),
    ("/workers/{id}", ("DELETE",), remove_worker),
    ("/list_workers", ("GET",), list_urls),
    ("/add_worker", ("POST",), add_url),
    ("/remove_worker", ("POST",), remove_worker),
)
