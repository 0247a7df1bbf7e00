"""Routers and workers that this process will talk to: reachable, of the same layout, and of the same time."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

from cli.doctor.checks import Check, error, ok, shown, warning
from common.config import NodeConfig, RouterConfig
from common.errors import RequestError, WorkerError
from common.json_body import decode_object
from common.keys import admin_key
from common.tls import TlsConfig, client_context

ASK_S = 5.0
_MAX_ANSWER_BYTES = 16 << 20
_LARGEST_TIME_S = 1e12
MAX_SKEW_S = 0.5
SKEW_FIX = "let NTP (chrony, systemd-timesyncd) keep both: logs and traces cannot be put side by side; serving works"


class Asked(NamedTuple):
    """An answer's JSON object, and when it was asked for and came; of our clock."""

    status: int
    body: dict[str, Any]
    before_s: float
    after_s: float


class Asker(NamedTuple):
    """authorization: of the header; empty for none."""

    tls: ssl.SSLContext
    authorization: str
    key_option: str

    def get(self, url: str) -> Asked:
        """Raises httpx.HTTPError, and WorkerError for what is too long, too late, or no JSON object."""
        try:
            return asyncio.run(asyncio.wait_for(self._get(url), 2 * ASK_S))
        except TimeoutError:
            raise WorkerError(f"no whole answer in {2 * ASK_S:g} s", code="no_answer") from None

    async def _get(self, url: str) -> Asked:
        headers = {"accept-encoding": "identity"}
        if self.authorization:
            headers["authorization"] = self.authorization
        async with httpx.AsyncClient(verify=self.tls, headers=headers, timeout=ASK_S, trust_env=False) as client:
            await _read(client, url)  # opens the connection, so that the next one is timed alone
            before_s = time.time()
            status, content = await _read(client, url)
            after_s = time.time()
        try:
            body = decode_object(content) if status == 200 else {}
        except RequestError as reason:
            raise WorkerError(reason.message, code="no_answer") from reason
        return Asked(status, body, before_s, after_s)


async def _read(client: httpx.AsyncClient, url: str) -> tuple[int, bytes]:
    content = bytearray()
    async with client.stream("GET", url) as answer:
        async for part in answer.aiter_raw():
            content += part
            if len(content) > _MAX_ANSWER_BYTES:
                raise WorkerError(f"an answer of more than {_MAX_ANSWER_BYTES:,} bytes", code="no_answer")
    return answer.status_code, bytes(content)


def router_asker(config: NodeConfig) -> Asker:
    """How a node asks its routers. Raises ConfigError."""
    path = config.server.router_api_key_file
    authorization = "" if path is None else admin_key(path, "--router-api-key-file").header
    return Asker(
        client_context(config.server.router_ca_file, "--router-ca-file"), authorization, "--router-api-key-file"
    )


def worker_asker(config: RouterConfig) -> Asker:
    """How a router asks its workers. Raises ConfigError."""
    path = config.worker_api_key_file
    authorization = "" if path is None else admin_key(path, "--worker-api-key-file").header
    shown = TlsConfig(certfile=config.ssl_certfile, keyfile=config.ssl_keyfile)
    return Asker(
        client_context(config.worker_ca_file, "--worker-ca-file", shown), authorization, "--worker-api-key-file"
    )


def check_router(url: str, asker: Asker, fingerprint: str | None) -> Iterator[Check]:
    """fingerprint: this node's, None: not known."""
    name, base = f"router.{_place(url)}", url.rstrip("/")
    asked = _ask(name, f"{base}/status.json", asker, "start the router, or correct --router")
    if isinstance(asked, Check):
        yield asked
        return
    listed = asked.body.get("workers")
    if not isinstance(listed, list):
        yield error(name, f"{base}/status.json: it lists no workers, as Tandem's router does", "correct --router")
        return
    workers = [worker for worker in listed if isinstance(worker, dict)]
    alive = sum(bool(worker.get("alive")) for worker in workers)
    yield ok(name, f"answers; {len(workers)} workers, {alive} alive", workers=len(workers), alive=alive)
    if "now" in asked.body:
        yield _check_clock(f"{name}.clock", asked)
    yield _check_fingerprints(f"{name}.fingerprint", workers, fingerprint)


def _check_clock(name: str, asked: Asked) -> Check:
    now = asked.body["now"]
    if isinstance(now, bool) or not isinstance(now, int | float) or not abs(now) < _LARGEST_TIME_S:
        return warning(name, f"{shown(now)} is no time", "one version of Tandem on both sides")
    middle_s = (asked.before_s + asked.after_s) / 2
    return check_skew(name, now - middle_s, (asked.after_s - asked.before_s) / 2)


def _check_fingerprints(name: str, workers: list[dict[str, Any]], own: str | None) -> Check:
    there = sorted({shown(worker["fingerprint"]) for worker in workers if worker.get("fingerprint")})
    data = {"own": own, "there": there}
    if own is None:
        return ok(
            name, f"not compared (no weights, or too many to read); there: {', '.join(there) or 'none yet'}", **data
        )
    if not there:
        return ok(name, f"{own} here, none there yet", **data)
    if own not in there:
        fix = "the same model folder, --dtype, --mamba-ssm-dtype and --page-size on every node"
        return error(name, f"{own} here, {', '.join(there)} there: no pair with this node", fix, **data)
    return ok(name, f"{own}, as there", **data)


def check_worker(role: str, url: str, asker: Asker) -> tuple[Check, str | None]:
    """And its fingerprint."""
    name = f"worker.{role}.{_place(url)}"
    asked = _ask(name, f"{url.rstrip('/')}/server_info", asker, "start it, or correct the URL")
    if isinstance(asked, Check):
        return asked, None
    mode, found = shown(asked.body.get("disaggregation_mode")), shown(asked.body.get("fingerprint"))
    if mode != role:
        return error(
            name, f"it is a {mode} node", f"give it as --{mode}" if mode in ("prefill", "decode") else "start it as one"
        ), None
    version = shown(asked.body.get("version", "unknown version"))
    return ok(name, f"answers; {version}, {found}", fingerprint=found), found


def check_workers(config: RouterConfig) -> Iterator[Check]:
    asker = worker_asker(config)
    fingerprints: set[str] = set()
    named = [("prefill", each.url) for each in config.prefill] + [("decode", each.url) for each in config.decode]
    for role, url in named:
        check, fingerprint = check_worker(role, url, asker)
        yield check
        fingerprints |= {fingerprint} if fingerprint else set()
    if len(fingerprints) > 1:
        fix = "only workers of equal fingerprints are paired: the same model and dtypes on each"
        yield warning("workers.fingerprints", ", ".join(sorted(fingerprints)), fix)


def _ask(name: str, url: str, asker: Asker, fix: str) -> Asked | Check:
    try:
        asked = asker.get(url)
    except (httpx.HTTPError, WorkerError, OSError) as reason:
        return error(name, f"{url}: {shown(str(reason)) or type(reason).__name__}", fix)
    if asked.status in (401, 403):
        return error(
            name, f"{url}: {asked.status}, it asks for a key", f"{asker.key_option}: a file with an admin key of it"
        )
    if asked.status != 200:
        return error(name, f"{url}: status {asked.status}, in place of Tandem's answer", fix)
    return asked


def check_skew(name: str, skew_s: float, error_s: float) -> Check:
    """skew_s: how far the other clock is ahead."""
    found = f"{abs(skew_s) * 1000:,.1f} ms {'ahead of' if skew_s >= 0 else 'behind'} ours, ± {error_s * 1000:,.1f} ms"
    data = {"skew_s": round(skew_s, 6), "error_s": round(error_s, 6)}
    if abs(skew_s) - error_s > MAX_SKEW_S:
        return warning(name, found, SKEW_FIX, **data)
    return ok(name, found, **data)


def _place(url: str) -> str:
    return urlsplit(url).netloc or url
