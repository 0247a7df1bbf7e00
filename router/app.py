"""The router's HTTP side: the application, its endpoints, and the process that serves it."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import AsyncIterator

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from common.config import Role, RouterConfig
from common.errors import AbortedError, ConfigError, RequestError, ServingError
from router import control
from router.request import parse_generate
from router.state import Router
from router.workers import make_worker

log = logging.getLogger("tandem.router")

_PROBE = b'{"text": "Hello", "sampling_params": {"max_new_tokens": 1, "temperature": 0}}'


def create_app(config: RouterConfig) -> FastAPI:
    """The application; its `state.router` lives from start-up to shutdown. Raises ConfigError for unusable settings."""
    check_router_config(config)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        router = app.state.router = Router(config)
        router.start()
        try:
            yield
        finally:
            await router.stop()

    app = FastAPI(title="Tandem router", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    # First, and without the framework's request parsing: this one is on the path of every token.
    app.router.routes.insert(0, Route("/generate", Generate(config.max_body_bytes), methods=["POST"]))
    app.router.routes.append(Route("/health_generate", HealthGenerate(), methods=["GET"]))
    for path, methods, endpoint in control.ROUTES:
        app.router.routes.append(Route(path, endpoint, methods=methods))
    app.add_exception_handler(ServingError, _serving_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _our_error)
    return app


def check_router_config(config: RouterConfig) -> RouterConfig:
    """Raises ConfigError naming the setting."""
    for role, addresses in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode)):
        if not addresses:
            raise ConfigError(f"--{role.value}: at least one", param=role.value)
        for address in addresses:
            make_worker(role, address)
    for address in config.prefill:
        if address.bootstrap_port is None:
            raise ConfigError(f"--prefill {address.url}: give its bootstrap port too", param="prefill")
    for name in ("health_interval_s", "connect_timeout_s", "idle_timeout_s"):
        value = getattr(config, name)
        if not 0 < value < float("inf"):
            option = name.removesuffix("_s").replace("_", "-")
            raise ConfigError(f"--{option} {value}: a positive number of seconds", param=name)
    return config


def serve(config: RouterConfig) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigError when the port is taken."""
    app = create_app(config)
    listener = _listen(config.host, config.port)
    log.info("router listens on http://%s:%d", *listener.getsockname()[:2])
    settings = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(settings).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048
        )
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--port {port}: cannot listen on {host}:{port} ({reason})", param="port") from error


# /generate


class Generate:
    """POST /generate as a bare ASGI application."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        router: Router = scope["app"].state.router
        request = parse_generate(await self._body(scope, receive))
        await router.dispatcher.generate(request, receive, send)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        for name, value in scope["headers"]:
            if name == b"content-length":
                self._check(int(value))
        parts: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise AbortedError("the client left before its request was complete")
            parts.append(message["body"])
            self._check(sum(map(len, parts)))
            if not message["more_body"]:
                return b"".join(parts)

    def _check(self, nbytes: int) -> None:
        if nbytes > self._max_body_bytes:
            message = f"a body of {nbytes} bytes or more: at most {self._max_body_bytes}"
            raise RequestError(message, code="body_too_large", status=413)


class HealthGenerate:
    """GET /health_generate as a bare ASGI application: one token through a pair."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        router: Router = scope["app"].state.router
        await router.dispatcher.generate(parse_generate(_PROBE), receive, send)


# Errors


def _error_response(error: ServingError) -> Response:
    record = error.record()
    return Response(msgspec.json.encode(record.body()), record.status, media_type="application/json")


async def _serving_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ServingError)
    return _error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = _error_response(RequestError(message, code="no_such_endpoint", status=error.status_code))
    response.headers.update(error.headers or {})
    return response


async def _our_error(_: Request, error: Exception) -> Response:
    return _error_response(ServingError(f"a fault of the router: {type(error).__name__}"))
