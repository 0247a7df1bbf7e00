"""What the router tells of itself: /metrics, /debug/requests, /status.json, the status page and /openapi.json."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from common.errors import RequestError
from router.merge import merged_metrics, merged_requests, merged_status
from router.metrics import CONTENT_TYPE, exposition
from router.openapi import ADMIN_PATHS, USER_PATHS, document
from router.record import MAX_RECENT, MAX_REFUSED, SHOWN
from router.siblings import Answers
from router.state import Router, router_of

_NUM_SHOWN = 25
_KEPT = MAX_RECENT + MAX_REFUSED
_PAGE = Path(__file__).parent / "page"
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/page/waterfall.js": ("waterfall.js", "text/javascript; charset=utf-8"),
    "/page/style.css": ("style.css", "text/css; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
_PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def answers(router: Router) -> Answers:
    """What this process tells its siblings."""
    return {
        "metrics": lambda _: exposition(router.dispatcher),
        "requests": lambda limit: _json(_requests(router, int(limit))),
        "status": lambda shown: _json(_status(router, shown)),
    }


async def metrics(request: Request) -> Response:
    router = router_of(request)
    own, others = exposition(router.dispatcher), await router.siblings.ask("metrics")
    return Response(merged_metrics([own, *others]) if others else own, media_type=CONTENT_TYPE)


async def debug_requests(request: Request) -> Response:
    """The requests that run and the last ones that have ended, the newest first."""
    limit = _read_limit(request.query_params.get("limit"))
    router = router_of(request)
    said = [msgspec.json.decode(other) for other in await router.siblings.ask(f"requests {limit}")]
    body = {"requests": merged_requests([_requests(router, limit), *said], limit), "kept": _KEPT}
    return Response(_json(body), media_type="application/json")


def _requests(router: Router, limit: int) -> list[dict[str, Any]]:
    return router.dispatcher.recorder.listing(time.monotonic(), limit)


async def status(request: Request) -> Response:
    """All that the page shows, without any of what requests say."""
    shown = request.query_params.get("requests", "all")
    if shown not in SHOWN:
        raise RequestError(f"requests: one of {', '.join(SHOWN)}", param="requests")
    router = router_of(request)
    await router.node_states.refresh(router.workers.all)
    others = [msgspec.json.decode(other) for other in await router.siblings.ask(f"status {shown}")]
    body = _json(merged_status(_status(router, shown), others, _NUM_SHOWN))
    return Response(body, headers={"cache-control": "no-store"}, media_type="application/json")


def _json(content: Any) -> bytes:
    return msgspec.json.encode(content)


def _status(router: Router, shown: str) -> dict[str, Any]:
    dispatcher, now = router.dispatcher, time.monotonic()
    recorder, workers = dispatcher.recorder, router.workers
    return {
        "version": importlib.metadata.version("tandem-serve"),
        "now": round(time.time(), 3),
        "uptime_s": round(now - recorder.started_s, 1),
        "draining": dispatcher.is_draining,
        "serving": workers.has_pair() and not dispatcher.is_draining,
        "why_not": "" if workers.has_pair() else workers.why_no_pair(),
        "mismatches": workers.mismatches(),
        "totals": recorder.totals.describe() | {"in_flight": len(recorder.running), "waiting": recorder.num_waiting},
        "workers": [worker.details() | router.node_states.of(worker) for worker in workers.all],
        "requests": recorder.listing(now, _NUM_SHOWN, shown),
    }


async def openapi(_: Request) -> Response:
    return Response(_json(document(USER_PATHS | ADMIN_PATHS)), media_type="application/json")


def _file(name: str, content_type: str) -> Callable[[Request], Awaitable[Response]]:
    body = (_PAGE / name).read_bytes()

    async def endpoint(_: Request) -> Response:
        return Response(body, headers=_PAGE_HEADERS, media_type=content_type)

    return endpoint


def _read_limit(text: str | None) -> int:
    """Raises RequestError."""
    if text is None:
        return _KEPT
    if not (text.isascii() and text.isdigit() and len(text) < 6 and int(text) > 0):
        raise RequestError("limit: an integer from 1 to 99999", param="limit")
    return int(text)


ROUTES = (
    ("/metrics", ("GET",), metrics),
    ("/debug/requests", ("GET",), debug_requests),
    ("/status.json", ("GET",), status),
    ("/openapi.json", ("GET",), openapi),
    *((path, ("GET",), _file(*found)) for path, found in _FILES.items()),
)
