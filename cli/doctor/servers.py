"""Routers and workers that this process will talk to: reachable, of the same layout, and of the same time."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

from cli.doctor.checks import Check, error, ok, warning
from common.config import NodeConfig, RouterConfig
from common.keys import admin_key
from common.tls import TlsConfig, client_context

ASK_S = 5.0
MAX_SKEW_S = 0.5
SKEW_FIX = "let NTP (chrony, systemd-timesyncd) keep both: logs and traces cannot be put side by side; serving works"


class Asked(NamedTuple):
    """An answer's JSON object, and how far that machine's clock is ahead of ours, as well as it can be told."""

    status: int
    body: dict[str, Any]
    skew_s: float | None
    error_s: float


class Asker(NamedTuple):
    """authorization: of the header; empty for none."""

    tls: ssl.SSLContext
    authorization: str
    key_option: str

    def get(self, url: str) -> Asked:
        """Raises httpx.HTTPError."""
        headers = {"authorization": self.authorization} if self.authorization else {}
        with httpx.Client(verify=self.tls, headers=headers, timeout=ASK_S, trust_env=False) as client:
            client.get(url)  # opens the connection, so that the next one is timed alone
            before = time.time()
            answer = client.get(url)
            after = time.time()
        try:
            body = answer.json()
        except ValueError:
            body = {}
        body = body if isinstance(body, dict) else {}
        now = body.get("now")
        skew = now - (before + after) / 2 if isinstance(now, int | float) else None
        return Asked(answer.status_code, body, skew, (after - before) / 2)


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
    workers = [worker for worker in asked.body.get("workers", []) if isinstance(worker, dict)]
    alive = sum(bool(worker.get("alive")) for worker in workers)
    yield ok(name, f"answers; {len(workers)} workers, {alive} alive", workers=len(workers), alive=alive)
    if asked.skew_s is not None:
        yield check_skew(f"{name}.clock", asked.skew_s, asked.error_s)
    yield _check_fingerprints(f"{name}.fingerprint", workers, fingerprint)


def _check_fingerprints(name: str, workers: list[dict[str, Any]], own: str | None) -> Check:
    there = sorted({str(worker["fingerprint"]) for worker in workers if worker.get("fingerprint")})
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
    mode, found = asked.body.get("disaggregation_mode"), asked.body.get("fingerprint")
    if mode != role:
        return error(
            name, f"it is a {mode} node", f"give it as --{mode}" if mode in ("prefill", "decode") else "start it as one"
        ), None
    return ok(name, f"answers; {asked.body.get('version', 'unknown version')}, {found}", fingerprint=found), str(found)


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
    except httpx.HTTPError as reason:
        return error(name, f"{url}: {reason or type(reason).__name__}", fix)
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
