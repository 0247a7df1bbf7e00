"""A node tells its routers that it is there: when it is ready, then again and again, and that it leaves.

    ready ──► POST /workers ──► again every heartbeat ──► draining: DELETE /workers

A router that cannot be reached is asked again; it hears of the node when it comes. No error here ends the node.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from common.config import NodeConfig, Role, ServerConfig
from common.errors import ConfigError
from common.json_body import BAD_JSON
from common.keys import admin_key
from common.net import is_loopback
from common.tls import client_context
from common.urls import url_host, url_of

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

ASK_S = 5.0
LEAVE_S = 1.0
AGAIN_S = 1.0
"""Between two tries at a router that does not take the node."""
_ANYWHERE = ("0.0.0.0", "::", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Routers:
    """Where to register, and what to show there. authorization: the header's value."""

    urls: tuple[str, ...]
    interval_s: float
    authorization: str | None
    tls: ssl.SSLContext


def check_registration(role: Role, server: ServerConfig) -> Routers | None:
    """None for a node without routers. Raises ConfigError naming the setting."""
    _check_advertised(server)
    if not 0 < server.heartbeat_interval_s < float("inf"):
        raise ConfigError(
            f"--heartbeat-interval {server.heartbeat_interval_s}: a positive number of seconds",
            param="heartbeat_interval",
        )
    if not server.routers:
        return None
    for url in server.routers:
        if url_host(url) is None:
            raise ConfigError(f"--router {url}: a URL such as http://127.0.0.1:30000", param="router")
    if role is Role.UNIFIED:
        raise ConfigError(f"--router {server.routers[0]}: a unified node serves alone", param="router")
    path = server.router_api_key_file
    return Routers(
        urls=tuple(dict.fromkeys(url.rstrip("/") for url in server.routers)),
        interval_s=server.heartbeat_interval_s,
        authorization=None if path is None else admin_key(path, "--router-api-key-file").header,
        tls=client_context(server.router_ca_file, "--router-ca-file"),
    )


def _check_advertised(server: ServerConfig) -> None:
    url = server.advertise_url
    if url is not None and (url_host(url) is None or url_host(url) in _ANYWHERE):
        raise ConfigError(
            f"--advertise-url {url}: a URL that routers can reach, such as http://10.0.0.1:30001", param="advertise_url"
        )
    if url is None and server.routers and server.host in _ANYWHERE:
        raise ConfigError(
            f"--advertise-url: needed with --host {server.host or '(empty)'}, which routers cannot reach",
            param="advertise_url",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """Body of POST /workers. url: where routers reach the node. instance: as in its /health. fingerprint: of a server
    that does not publish one itself."""

    url: str
    role: str
    bootstrap_port: int | None
    instance: str
    fingerprint: str | None = None


def advertised_url(server: ServerConfig, port: int) -> str:
    """port: the one really bound."""
    scheme = "http" if server.ssl_certfile is None else "https"
    return server.advertise_url or url_of(scheme, server.host, port)


def peer_name(config: NodeConfig, rank: int) -> str:
    """What a rank is called towards peers, in logs and in /server_info: where its node is, and its number. A node that
    listens at all addresses is where routers or peers are told that it is, or else bears its host's name."""
    server, transfer_host = config.server, config.transfer.host
    if server.advertise_url is not None:
        return f"{urlsplit(server.advertise_url).netloc}/{rank}"
    told = (server.host, transfer_host, platform.node() if server.host in _ANYWHERE else server.host)
    host = next((host for host in told if host not in _ANYWHERE and not is_loopback(host)), told[-1] or transfer_host)
    return f"{urlsplit(url_of('http', host, server.port)).netloc}/{rank}"


@dataclass(kw_only=True)
class Registrar:
    """One loop a router, from `start` to `leave`. To be made inside a running event loop."""

    routers: Routers
    registration: Registration
    _said: dict[str, str] = field(default_factory=dict)  # by router, so that news alone is logged
    _loops: list[asyncio.Task[None]] = field(default_factory=list)
    _client: httpx.AsyncClient | None = None

    def start(self) -> None:
        import httpx  # of nodes that register only

        logging.getLogger("httpx").setLevel(logging.WARNING)
        headers = {} if self.routers.authorization is None else {"authorization": self.routers.authorization}
        self._client = httpx.AsyncClient(verify=self.routers.tls, headers=headers, timeout=ASK_S, trust_env=False)
        self._loops = [asyncio.create_task(self._stay_registered(url)) for url in self.routers.urls]

    async def leave(self) -> None:
        """Routers are told that the node leaves; not for long. Does nothing the second time."""
        loops, self._loops = self._loops, []
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        client, self._client = self._client, None
        if client is None:
            return
        try:
            async with asyncio.timeout(LEAVE_S):
                await asyncio.gather(*(self._take_leave(client, url) for url in self.routers.urls))
        except TimeoutError:
            log.warning("not all routers have heard in time that the node leaves")
        finally:
            await client.aclose()

    async def _stay_registered(self, router: str) -> None:
        body = {name: value for name, value in msgspec.to_builtins(self.registration).items() if value is not None}
        while True:
            is_in, news = await self._ask(self._client, "POST", f"{router}/workers", json=body)
            if news != self._said.get(router):
                self._said[router] = news
                log.log(logging.INFO if is_in else logging.WARNING, "registering at %s: %s", router, news)
            await asyncio.sleep(self.routers.interval_s if is_in else min(AGAIN_S, self.routers.interval_s))

    async def _take_leave(self, client: httpx.AsyncClient, router: str) -> None:
        params = {"url": self.registration.url, "instance": self.registration.instance}
        is_told, news = await self._ask(client, "DELETE", f"{router}/workers", params=params)
        log.log(
            logging.INFO if is_told else logging.WARNING, "router %s is told that the node leaves: %s", router, news
        )

    async def _ask(self, client: httpx.AsyncClient | None, method: str, url: str, **what: Any) -> tuple[bool, str]:
        """Whether it was done, and what there is to say of it."""
        import httpx

        assert client is not None, "only between start and leave"
        try:
            answer = await client.request(method, url, **what)
        except (httpx.HTTPError, OSError, RuntimeError) as error:  # the last two: no descriptors, or threads, left
            return False, f"it cannot be reached ({type(error).__name__})"
        return answer.is_success, _news(answer) if answer.is_success else _reason(answer)


class _Said(msgspec.Struct):
    """By a router. mismatches: of this node with others. state, reason: of this node as the router sees it."""

    error: dict[str, Any] = msgspec.field(default_factory=dict)
    state: str = ""
    reason: str = ""
    mismatches: list[str] = msgspec.field(default_factory=list)


def _said(answer: httpx.Response) -> _Said:
    try:
        return msgspec.json.decode(answer.content, type=_Said)
    except BAD_JSON:
        return _Said()


def _news(answer: httpx.Response) -> str:
    said = _said(answer)
    trouble = [f"but there it is dead: {said.reason}"] if said.state == "dead" else []
    return "; ".join(["it has taken that", *trouble, *said.mismatches])


def _reason(answer: httpx.Response) -> str:
    return f"{answer.status_code}: {_said(answer).error.get('message', 'no reason given')}"
