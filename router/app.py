"""The router's HTTP side: the application, its endpoints, and the process that serves it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from common.config import Role, RouterConfig
from common.errors import ConfigError, ServingError
from common.http_server import LimitedProtocol, error_response, http_error_response
from router import control
from router.request import parse_generate
from router.state import Router
from router.workers import make_worker

log = logging.getLogger("tandem.router")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_TIMES = ("health_interval_s", "connect_timeout_s", "idle_timeout_s", "liveness_timeout_s", "upload_timeout_s")
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
    app.router.routes.insert(0, Route("/generate", Generate(), methods=["POST"]))
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
        workers = [make_worker(role, address) for address in addresses]
        twice = [url for url, count in Counter(worker.url for worker in workers).items() if count > 1]
        if twice:
            raise ConfigError(f"--{role.value} {twice[0]}: given more than once", param=role.value)
    for address in config.prefill:
        if address.bootstrap_port is None:
            raise ConfigError(f"--prefill {address.url}: give its bootstrap port too", param="prefill")
    for name in _TIMES:
        value = getattr(config, name)
        if not 0 < value < float("inf"):
            option = name.removesuffix("_s").replace("_", "-")
            raise ConfigError(f"--{option} {value}: a positive number of seconds", param=name)
    if not 0 <= config.drain_timeout_s < float("inf"):
        raise ConfigError(
            f"--drain-timeout {config.drain_timeout_s}: a finite number of seconds, 0 or more", param="drain_timeout_s"
        )
    if not 0 <= config.port <= 65535:
        raise ConfigError(f"--port {config.port}: 0 to 65535", param="port")
    if config.max_retries < 0:
        raise ConfigError(f"--max-retries {config.max_retries}: 0 or more", param="max_retries")
    if config.max_body_bytes < 1:
        raise ConfigError(f"--max-body-bytes {config.max_body_bytes}: at least 1", param="max_body_bytes")
    return config


def serve(config: RouterConfig) -> None:
    """Serve until SIGINT or SIGTERM, then drain. Raises ConfigError when the port or the host cannot be had."""
    app = create_app(config)
    listener = _listen(config.host, config.port)
    log.info("router listens on http://%s:%d", *listener.getsockname()[:2])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(app, listener, config.drain_timeout_s))


async def _serve(app: FastAPI, listener: socket.socket, drain_timeout_s: float) -> None:
    """The first signal lets what runs end, for drain_timeout_s at most, and refuses the rest; the second one waits for
    nothing."""
    server = _Server(server_config(app))
    signals = [asyncio.Event(), asyncio.Event()]
    for number in _SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, _set_next, signals)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await _first_of(serving, signals[0].wait())
    if server.started:
        router: Router = app.state.router
        await _first_of(router.dispatcher.drain(drain_timeout_s), signals[1].wait())
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


async def _first_of(*waits: Coroutine[Any, Any, Any] | asyncio.Task[None]) -> None:
    """Return when one of them has ended. What was given as a coroutine ends here too."""
    tasks = [wait if isinstance(wait, asyncio.Task) else asyncio.create_task(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task, wait in zip(tasks, waits, strict=True):
        if task is not wait:
            task.cancel()


class _Server(uvicorn.Server):
    """Signals are ours to handle: uvicorn would stop at the first one."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def server_config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=LimitedProtocol,
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048
        )
    except OSError as error:
        at_fault = "port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "host"
        value = port if at_fault == "port" else host
        reason = f"cannot listen on {host}:{port} ({error.strerror or error})"
        raise ConfigError(f"--{at_fault} {value}: {reason}", param=at_fault) from error


# /generate


class Generate:
    """POST /generate as a bare ASGI application."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        router: Router = scope["app"].state.router
        request = parse_generate(await router.read_body(scope, receive))
        await router.dispatcher.generate(request, receive, send)


class HealthGenerate:
    """GET /health_generate as a bare ASGI application: one token through a pair."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        router: Router = scope["app"].state.router
        await router.dispatcher.generate(parse_generate(_PROBE), receive, send)


# Errors


async def _serving_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ServingError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return http_error_response(request, error)


async def _our_error(_: Request, error: Exception) -> Response:
    return error_response(ServingError(f"a fault of the router: {type(error).__name__}"))
