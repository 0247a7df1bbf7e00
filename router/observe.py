"""What the router tells of itself: /metrics, /debug/requests, /status.json and the status page."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from common.errors import RequestError
from router.metrics import CONTENT_TYPE, exposition
from router.record import MAX_RECENT
from router.state import Router


def _router(request: Request) -> Router:
    router: Router = request.app.state.router
    return router


async def metrics(request: Request) -> Response:
    return Response(exposition(_router(request).dispatcher), media_type=CONTENT_TYPE)


async def debug_requests(request: Request) -> Response:
    """The requests that run and the last ones that have ended, the newest first."""
    limit = _read_limit(request.query_params.get("limit"))
    recorder = _router(request).dispatcher.recorder
    body = {"requests": recorder.listing(time.monotonic(), limit), "kept": MAX_RECENT}
    return Response(msgspec.json.encode(body), media_type="application/json")


def _read_limit(text: str | None) -> int:
    """Raises RequestError."""
    if text is None:
        return MAX_RECENT
    if not (text.isascii() and text.isdigit() and len(text) < 6 and int(text) > 0):
        raise RequestError("limit: an integer from 1 to 99999", param="limit")
    return int(text)


ROUTES = (
    ("/metrics", ("GET",), metrics),
    ("/debug/requests", ("GET",), debug_requests),
)
