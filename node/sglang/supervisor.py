"""A node whose engine is SGLang: this process starts its server, registers it, and starts it again when it fails.

    check settings, ports ──► start ──► /health, one token ──► /server_info ──► register … signal ──► leave ──► drain
                                │                                                │
                                └── it ends before it ever served: exit 1        └── it ends, or is silent: once more

Clients and routers talk to SGLang's own port. Nothing of ours lies on the way of a token; all that a router needs
besides, the fingerprint, travels with the registration.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from common.config import Role
from common.errors import ServingError, WorkerError
from common.logs import configure_logging
from common.urls import url_of
from common.waits import first_of
from node.front import bind
from node.registration import Registrar, Registration, Routers, advertised_url, check_registration
from node.sglang.child import SglangChild, start_child
from node.sglang.config import SglangConfig, check_sglang_config
from node.sglang.fingerprint import fingerprint, model_name
from node.sglang.flags import Launch, launch
from node.sglang.versions import installed_version, version_of

log = logging.getLogger(__name__)

EVERY_S = 0.5
HEALTH_LIMIT_S = 5.0
TOKEN_LIMIT_S = 120.0
RESTART_WAIT_S = 30.0
"""At most, before a server that does not live longer than this is started again."""
_ANY = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}


def serve(config: SglangConfig) -> None:
    """Serve until SIGTERM or SIGINT, then drain; the second one waits for nothing.

    Raises ConfigError for what cannot work, and WorkerError when SGLang ends, or is not ready in time, before it has
    ever served.
    """
    configure_logging(config.server.log_level, f"{config.role.value}/sglang")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    check_sglang_config(config)
    routers = check_registration(config.role, config.server)
    version = version_of(installed_version(config.python))
    flags = launch(config, version)
    _check_ports(config)
    log.info("sglang %s: %s -m sglang.launch_server %s", version.name, config.python, " ".join(flags.arguments))
    asyncio.run(_Supervisor(config, flags, routers).run())


def _check_ports(config: SglangConfig) -> None:
    """Raises ConfigError for one that is taken."""
    server = config.server
    bind(server.host, server.port, "port").close()
    if config.role is Role.PREFILL:
        bind(server.host, server.bootstrap_port, "bootstrap_port").close()


@dataclass(slots=True)
class _Supervisor:
    config: SglangConfig
    flags: Launch
    routers: Routers | None
    draining: asyncio.Event = field(default_factory=asyncio.Event)  # a signal came
    stopping: asyncio.Event = field(default_factory=asyncio.Event)  # a second one
    has_served: bool = False

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        wait_s = 0.0
        while not self.draining.is_set():
            began_s = time.monotonic()
            error = await self._one_life()
            if error is None:
                return
            if not self.has_served:
                raise error
            wait_s = 0.0 if time.monotonic() - began_s > RESTART_WAIT_S else min(2 * wait_s + 1.0, RESTART_WAIT_S)
            log.error("%s; it is started again in %g s", error.message, wait_s)
            await first_of(self.draining.wait(), timeout_s=wait_s)

    def _on_signal(self) -> None:
        (self.stopping if self.draining.is_set() else self.draining).set()

    async def _one_life(self) -> ServingError | None:
        """Of one server. Returns why it has ended, None when it was told to."""
        try:
            _check_ports(self.config)
        except ServingError as error:
            return error
        child = await start_child(self.config.python, self.flags, self.config.server.drain_timeout_s)
        lives = asyncio.create_task(self._serve(child))
        try:
            await first_of(lives, self.draining.wait())
            return lives.result() if lives.done() else None
        finally:
            lives.cancel()
            await asyncio.gather(lives, return_exceptions=True)  # it tells the routers first
            await child.stop(self._when_to_kill())

    def _when_to_kill(self) -> asyncio.Event:
        """One that was not told to end has nothing to drain."""
        if self.draining.is_set():
            return self.stopping
        now = asyncio.Event()
        now.set()
        return now

    async def _serve(self, child: SglangChild) -> WorkerError:
        """Returns why it serves no more."""
        dies = asyncio.create_task(child.wait())
        watch = asyncio.create_task(self._watch(child))
        try:
            done, _ = await asyncio.wait([dies, watch], return_when=asyncio.FIRST_COMPLETED)
            return dies.result() if dies in done else watch.result()
        finally:
            dies.cancel()
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _watch(self, child: SglangChild) -> WorkerError:
        """Until it is not ready in time, or silent for too long."""
        ours = self.config.server
        scheme = "http" if ours.ssl_certfile is None else "https"
        url = url_of(scheme, _ANY.get(ours.host, ours.host), ours.port)
        async with httpx.AsyncClient(base_url=url, verify=False, timeout=HEALTH_LIMIT_S, trust_env=False) as http:
            try:
                async with asyncio.timeout(self.config.start_timeout_s):
                    info = await _ready(http)
            except TimeoutError:
                return WorkerError(f"SGLang is not ready after {self.config.start_timeout_s:g} s", code="start_timeout")
            self.has_served = True
            print_ = fingerprint(info, model_name(self.config.node.model.path, info.get("revision")))
            log.info("%s node ready on %s (leash %d), fingerprint %s", self.config.role.value, url, child.pid, print_)
            async with self._registered(print_):
                await _silent(http, self.config.health_timeout_s)
        return WorkerError(f"SGLang does not answer for {self.config.health_timeout_s:g} s", code="engine_silent")

    @asynccontextmanager
    async def _registered(self, print_: str) -> AsyncIterator[None]:
        if self.routers is None:
            yield
            return
        server = self.config.server
        registration = Registration(
            url=advertised_url(server, server.port),
            role=self.config.role.value,
            bootstrap_port=server.bootstrap_port if self.config.role is Role.PREFILL else None,
            instance=uuid.uuid4().hex,
            fingerprint=print_,
        )
        registrar = Registrar(routers=self.routers, registration=registration)
        registrar.start()
        try:
            yield
        finally:
            await registrar.leave()


async def _ready(http: httpx.AsyncClient) -> dict[str, Any]:
    """Its /server_info, as soon as it can make a token."""
    while True:
        if await _answers(http, "/health") and await _answers(http, "/health_generate", TOKEN_LIMIT_S):
            info = await _info(http)
            if info is not None:
                return info
        await asyncio.sleep(EVERY_S)


async def _silent(http: httpx.AsyncClient, limit_s: float) -> None:
    """Return when it has not been healthy for so long."""
    heard_s = time.monotonic()
    while time.monotonic() - heard_s < limit_s:
        if await _answers(http, "/health", min(HEALTH_LIMIT_S, limit_s)):
            heard_s = time.monotonic()
        await asyncio.sleep(min(EVERY_S, limit_s / 4))


async def _answers(http: httpx.AsyncClient, path: str, limit_s: float = HEALTH_LIMIT_S) -> bool:
    try:
        return (await http.get(path, timeout=limit_s)).status_code == 200
    except httpx.HTTPError:
        return False


async def _info(http: httpx.AsyncClient) -> dict[str, Any] | None:
    try:
        answer = await http.get("/server_info", timeout=TOKEN_LIMIT_S)
        found = answer.json() if answer.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None
    return found if isinstance(found, dict) else None
