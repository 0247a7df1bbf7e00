"""The router's HTTP side: the application, its endpoints, and the process that serves it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import msgspec
import uvicorn
import uvloop
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from common.config import RouterConfig
from common.errors import ConfigError, ServingError
from common.http_server import LimitedProtocol, error_response, http_error_response
from common.keys import Key, KeyRing
from common.net import is_loopback
from common.tracing import TraceContext, Tracing
from common.waits import first_of
from router import control, observe, openai, worker_routes
from router.affinity import take_routing_key
from router.guard import Door, Guard, refusal, terms_of
from router.openai import CHAT, TEXT, parse_chat, parse_completion
from router.request import GENERATE, GenerateRequest, parse_generate
from router.settings import check_files, check_router_config, listener_tls
from router.state import Router

log = logging.getLogger("tandem.router")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
PARSERS = {GENERATE: parse_generate, CHAT: parse_chat, TEXT: parse_completion}
_PROBE = b'{"text": "Hello", "sampling_params": {"max_new_tokens": 1, "temperature": 0}}'


def create_app(config: RouterConfig, keys: KeyRing | None = None) -> FastAPI:
    """The application; its `state.router` lives from start-up to shutdown. keys: by default those of the config's file.

    Raises ConfigError for unusable settings.
    """
    check_router_config(config)
    keys = keys or KeyRing(config.api_key_file)
    check_files(config, keys)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        router = app.state.router = Router(config)
        router.start()
        await router.siblings.start({**observe.answers(router), **control.answers(router)})
        try:
            yield
        finally:
            await router.stop()

    app = _App(title="Tandem router", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    for path, parse in PARSERS.items():
        app.router.routes.insert(0, Route(path, Generate(parse), methods=["POST"]))
    app.router.routes.append(Route("/health_generate", HealthGenerate(), methods=["GET"]))
    for path, methods, endpoint in (*control.ROUTES, *observe.ROUTES, *openai.ROUTES, *worker_routes.ROUTES):
        app.router.routes.append(Route(path, endpoint, methods=methods))
    administered_at = config.host if config.admin_port is None else config.admin_host
    door = Door(is_local=is_loopback(administered_at), admin_port=config.admin_port)
    app.add_middleware(Guard, keys=keys, door=door, timeout_s=config.request_timeout_s)
    if config.otlp_endpoint is not None:
        app.add_middleware(TraceContext, find=_tracing_of)
    else:
        for path, parse in PARSERS.items():
            app.direct[path] = Guard(
                _Answering(Generate(parse)), keys=keys, door=door, timeout_s=config.request_timeout_s
            )
    app.add_exception_handler(ServingError, _serving_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _our_error)
    return app


class _App(FastAPI):
    """direct: what a POST to a path goes to past the framework, whose layers cost more than passing a chunk on."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.direct: dict[str, ASGIApp] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct = self.direct.get(scope.get("path", "")) if scope.get("method") == "POST" else None
        if direct is None:
            return await super().__call__(scope, receive, send)
        scope["app"] = self
        return await direct(scope, receive, send)


class _Answering:
    """ASGI. Answers with the error that an endpoint raises before it has sent anything, as the framework does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except ServingError as error:
            await refusal(scope, error)(scope, receive, send)
        except Exception as error:
            log.exception("a fault of the router")
            await _our_fault(error)(scope, receive, send)


def _tracing_of(scope: Scope) -> Tracing:
    tracing: Tracing = scope["app"].state.router.tracing
    return tracing


def serve(config: RouterConfig, more_keys: Sequence[Key] = ()) -> None:
    """Serve until SIGINT or SIGTERM, then drain. more_keys: besides those of the config's file; SIGHUP reads it again.

    Raises ConfigError when a port, a host, a key or a certificate cannot be had.
    """
    serve_on(config, listen(config, more_keys), more_keys)


def listen(config: RouterConfig, more_keys: Sequence[Key] = ()) -> list[socket.socket]:
    """The sockets of `open_listeners`. Raises ConfigError, also for what would be refused only later."""
    keys = KeyRing(config.api_key_file, more_keys)
    create_app(config, keys)  # refuses what cannot work before a port is taken
    is_tls = listener_tls(config) is not None
    listeners = open_listeners(config)
    _tell_where(listeners, is_tls=is_tls, is_open=keys.is_open and not is_loopback(config.host))
    return listeners


def serve_on(config: RouterConfig, listeners: list[socket.socket], more_keys: Sequence[Key] = ()) -> None:
    """`serve` at sockets that listen already."""
    keys = KeyRing(config.api_key_file, more_keys)
    tls = listener_tls(config)
    if config.admin_port is not None:
        config = msgspec.structs.replace(config, admin_port=listeners[1].getsockname()[1])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(create_app(config, keys), listeners, keys, tls, config.drain_timeout_s))


def _tell_where(listeners: Sequence[socket.socket], *, is_tls: bool, is_open: bool) -> None:
    for listener, what in zip(listeners, ("router", "administration"), strict=False):
        log.info("%s listens on %s://%s:%d", what, "https" if is_tls else "http", *listener.getsockname()[:2])
    if is_open:
        log.warning("no API keys: whoever reaches this router may use it (--api-key-file)")


async def _serve(
    app: FastAPI,
    listeners: list[socket.socket],
    keys: KeyRing,
    tls: ssl.SSLContext | None,
    drain_timeout_s: float,
) -> None:
    """The first signal lets what runs end, for drain_timeout_s at most, and refuses the rest; the second one waits for
    nothing."""
    server = _Server(server_config(app, tls))
    signals = [asyncio.Event(), asyncio.Event()]
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, _set_next, signals)
    if keys.has_file:
        loop.add_signal_handler(signal.SIGHUP, keys.reload)
    serving = asyncio.create_task(server.serve(sockets=listeners))
    await first_of(serving, signals[0].wait())
    if server.started:
        router: Router = app.state.router
        await first_of(router.dispatcher.drain(drain_timeout_s), signals[1].wait())
        if left := router.dispatcher.num_running:
            log.warning("requests that did not end in time and are ended: %d", left)
        else:
            log.info("drained: the router ends")
        router.dispatcher.end_all()
    server.should_exit = True
    await serving


def _set_next(events: list[asyncio.Event]) -> None:
    for event in events:
        if not event.is_set():
            event.set()
            return


class _Server(uvicorn.Server):
    """Signals are ours to handle: uvicorn would stop at the first one."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def server_config(app: FastAPI, tls: ssl.SSLContext | None = None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        ssl_context_factory=None if tls is None else lambda *_: tls,
        forwarded_allow_ips=["127.0.0.1", "::1"],
        http=LimitedProtocol,
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )


def open_listeners(config: RouterConfig) -> list[socket.socket]:
    """The public one, and that of the administration if it has its own. Raises ConfigError."""
    with contextlib.ExitStack() as undo:
        listeners = [undo.enter_context(_listen(config.host, config.port))]
        if config.admin_port is not None:
            listeners.append(undo.enter_context(_listen(config.admin_host, config.admin_port, "admin-")))
        undo.pop_all()
    return listeners


def _listen(host: str, port: int, prefix: str = "") -> socket.socket:
    """prefix: of the settings' names."""
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048
        )
    except OSError as error:
        at_fault = "port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "host"
        value = port if at_fault == "port" else host
        reason = f"cannot listen on {host}:{port} ({os.strerror(error.errno) if error.errno else error})"
        setting = prefix + at_fault
        raise ConfigError(f"--{setting} {value}: {reason}", param=setting.replace("-", "_")) from error


# What goes to a pair of workers


class Generate:
    """POST /generate, or an OpenAI endpoint, as a bare ASGI application. parse: reads its bodies."""

    def __init__(self, parse: Callable[[bytes], GenerateRequest]) -> None:
        self._parse = parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        router: Router = scope["app"].state.router
        request = self._parse(await router.read_body(scope, receive))
        take_routing_key(request.fields, scope["headers"])
        await router.dispatcher.generate(request, receive, send, terms_of(scope))


class HealthGenerate:
    """GET /health_generate as a bare ASGI application: one token through a pair."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        router: Router = scope["app"].state.router
        request = parse_generate(_PROBE)
        await router.dispatcher.generate(request, receive, send, terms_of(scope), endpoint=scope["path"])


# Errors


async def _serving_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServingError)
    return refusal(request.scope, error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return http_error_response(request, error)


async def _our_error(_: Request, error: Exception) -> Response:
    return _our_fault(error)


def _our_fault(error: Exception) -> Response:
    return error_response(ServingError(f"a fault of the router: {type(error).__name__}"))
