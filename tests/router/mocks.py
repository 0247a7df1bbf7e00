"""A router on a real port, between real HTTP clients and workers that are scripted real HTTP servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import uvicorn
from aiohttp import web

from common.config import RouterConfig, WorkerAddress
from router.app import create_app, server_config

BOOTSTRAP_PORT = 8998


def answer_object(text: str = "ok", **meta: Any) -> dict[str, Any]:
    return {"text": text, "output_ids": [1], "meta_info": {"id": "x", "finish_reason": {"type": "stop"}, **meta}}


class MockWorker:
    """One node: answers /generate by `script(worker, request, body)`, counts what it was asked and what was cut off."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.port = 0
        self.fingerprint: str | None = "f0"
        self.handoff: str | None = None
        self.state_layout: str | None = None
        self.resumes = False
        self.loads: Any = []
        self.instance: str | None = None
        self.info: dict[str, Any] = {}  # more that /server_info says
        self.num_ranks = 1
        self.healthy = True
        self.key: str | None = None  # without it nothing but /health
        self.key_status = 401
        self.health_error: dict[str, Any] = {}
        self.stopped = False  # as by SIGSTOP: connections open, nothing is answered
        self.checks = 0
        self.checks_to_miss = 0
        self.abort_delay_s = 0.0
        self.abort_status = 200
        self.abort_ended: bool | None = None
        self.script: Callable[[MockWorker, web.Request, dict[str, Any]], Awaitable[web.StreamResponse]] = answer_at_once
        self.bodies: list[dict[str, Any]] = []
        self.raw: list[bytes] = []
        self.paths: list[str] = []
        self.aborts: list[dict[str, Any]] = []
        self.cut_off = 0
        self.probe_status = 200
        self.probes = 0
        self.flush_status = 200
        self.flushes = 0
        self.infos = 0
        self.info_delay_s = 0.0
        self.info_body: bytes | None = None
        self.health: Callable[[web.Request], Awaitable[web.Response]] | None = None
        self._runner: web.AppRunner | None = None
        self._stopping: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 28, middlewares=[self._guard])
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/v1/{endpoint:.*}", self._generate)
        app.router.add_post("/tokenize", self._generate)
        app.router.add_get("/v1/models", self._model_info)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/health", self._say_health)
        app.router.add_get("/health_generate", self._health_generate)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_post("/flush_cache", self._flush)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        is_known = self.key is None or request.headers.get("authorization") == f"Bearer {self.key}"
        if is_known or request.path == "/health":
            found: web.StreamResponse = await handler(request)
            return found
        error = {"type": "access_error", "code": "no_api_key", "message": "an API key is needed"}
        return web.json_response({"error": error}, status=self.key_status, headers={"www-authenticate": "Bearer"})

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def stop_soon(self) -> None:
        """From inside a script, which ends with the worker: as when the process is killed, nobody listens any more."""
        assert self._runner is not None
        for site in list(self._runner.sites):
            site._server.close()  # type: ignore[attr-defined]
        self._stopping = asyncio.create_task(self.stop())

    @property
    def stopping(self) -> bool:
        return self._stopping is not None

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        self.raw.append(raw)
        self.paths.append(request.path)
        self.bodies.append(json.loads(raw))
        try:
            return await self.script(self, request, self.bodies[-1])
        except (asyncio.CancelledError, ConnectionError):
            self.cut_off += 1
            raise

    async def _abort(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.abort_delay_s)
        self.aborts.append(await request.json())
        body = {"success": True} if self.abort_ended is None else {"success": True, "ended": self.abort_ended}
        return web.json_response(body, status=self.abort_status)

    async def _say_health(self, request: web.Request) -> web.Response:
        return await (self.health or self._health)(request)

    async def _health(self, _: web.Request) -> web.Response:
        if self.stopped or self.checks_to_miss > 0:
            self.checks_to_miss -= 1
            await asyncio.Event().wait()
        self.checks += 1
        if not self.healthy:
            return web.json_response({"error": self.health_error}, status=503)
        return web.json_response({"instance": self.instance, "loads": self.loads})

    async def _health_generate(self, _: web.Request) -> web.Response:
        self.probes += 1
        return web.json_response({}, status=self.probe_status)

    async def _server_info(self, _: web.Request) -> web.Response:
        self.infos += 1
        await asyncio.sleep(self.info_delay_s)
        if self.info_body is not None:
            return web.Response(body=self.info_body)
        info = {
            "fingerprint": self.fingerprint,
            "handoff": self.handoff,
            "state_layout": self.state_layout,
            "internal_states": [{"rank": 0, "of": self.role}],
        }
        info |= {"dp_size": self.num_ranks} | self.info
        return web.json_response(info | ({"resumes_answers": True} if self.resumes else {}))

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": "mini"})

    async def _flush(self, request: web.Request) -> web.Response:
        self.flushes += 1
        return web.json_response({"error": {"message": "busy"}, "q": request.query_string}, status=self.flush_status)


async def answer_at_once(worker: MockWorker, _: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response(answer_object(f"from {worker.role}"))


async def never(*_: Any) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


def fails(status: int, body: bytes, delay_s: float = 0.0) -> Callable[..., Awaitable[web.StreamResponse]]:
    async def script(*_: Any) -> web.StreamResponse:
        await asyncio.sleep(delay_s)
        return web.Response(status=status, body=body, content_type="application/json")

    return script


def streams(*chunks: bytes, gap_s: float = 0.002, then: Callable[[web.Request], None] | None = None) -> Any:
    """Sends the chunks apart from each other; `then` runs before the end, e.g. to break the connection."""

    async def script(_: MockWorker, request: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
            await asyncio.sleep(gap_s)
        if then is not None:
            then(request)
        return response

    return script


def break_connection(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.abort()


async def breaks(_: MockWorker, request: web.Request, __: dict[str, Any]) -> web.StreamResponse:
    break_connection(request)
    return web.Response()


def event(data: Any) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


class RunningRouter:
    """url: where it listens. client: an HTTP client on it. app: its application, for the state inside."""

    def __init__(self, app: Any, url: str, client: httpx.AsyncClient) -> None:
        self.app, self.url, self.client = app, url, client

    @property
    def state(self) -> Any:
        return self.app.state.router

    async def generate(self, **fields: Any) -> httpx.Response:
        return await self.client.post("/generate", json={"text": "hi"} | fields)

    async def until(self, condition: Callable[[], bool], limit_s: float = 3.0) -> None:
        async with asyncio.timeout(limit_s):
            while not condition():  # noqa: ASYNC110 - the mocks set plain fields
                await asyncio.sleep(0.005)

    async def until_alive(self) -> None:
        await self.until(lambda: all(worker.alive for worker in self.state.workers.all))


@contextlib.asynccontextmanager
async def run_router(config: RouterConfig) -> AsyncIterator[RunningRouter]:
    app = create_app(config)
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(server_config(app))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with asyncio.timeout(5):
            while not server.started:  # noqa: ASYNC110 - uvicorn offers no event
                await asyncio.sleep(0.005)
        async with httpx.AsyncClient(base_url=url, timeout=10) as client:
            yield RunningRouter(app, url, client)
    finally:
        server.should_exit = True
        await serving


def config_of(prefill: list[MockWorker], decode: list[MockWorker], **settings: Any) -> RouterConfig:
    return RouterConfig(
        prefill=tuple(WorkerAddress(url=worker.url, bootstrap_port=BOOTSTRAP_PORT) for worker in prefill),
        decode=tuple(WorkerAddress(url=worker.url) for worker in decode),
        **{"health_interval_s": 0.05} | settings,
    )
