"""How workers come and go: by command line, by an administrator, by themselves, and by the state file.

    POST /workers ──► asked what it is ──► joins ──► checked ──► serves
    DELETE /workers ──► no new requests ──► what runs has ended ──► gone

A worker that registers itself repeats that as a heartbeat: a router that was started anew hears of it. It is forgotten
when it says it leaves, or when it neither registers nor lives. One that an administrator has removed does not come back
by itself: only as another process, or when an administrator adds it again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, TypeVar

import msgspec

from common.config import Role, RouterConfig, WorkerAddress
from common.errors import ConfigError, RequestError, WorkerError
from common.refusals import check_known, refuse
from common.urls import url_host
from router.health import Name, ServerInfo, why_refused
from router.state_file import Entry, Kept, StateFile
from router.worker import ASKED, MAX_WORKERS, Source, Worker, is_port, make_worker
from router.workers import Workers

log = logging.getLogger("tandem.router")

T = TypeVar("T")

MAX_FINGERPRINT = 1024
REMOVED = "worker_removed"
"""Code of the answer to a worker that registers itself although an administrator has removed it."""


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /workers. role, bootstrap_port: asked of the worker when left out. instance: of a worker that
    registers itself, the one in its /health. fingerprint: of its state layout, where it does not publish one."""

    url: str
    role: Role | None = None
    bootstrap_port: int | None = None
    instance: Name | None = None
    fingerprint: Name | None = None


_FIELDS = frozenset(Registration.__struct_fields__)
_ROLES = (Role.PREFILL.value, Role.DECODE.value)


def read_registration(fields: dict[str, Any]) -> Registration:
    """Raises RequestError naming the field."""
    check_known("", fields, _FIELDS)
    if fields.get("role") not in (None, *_ROLES):
        alone = "; a unified node serves alone" if fields["role"] == Role.UNIFIED.value else ""
        refuse("role", fields["role"], " or ".join(_ROLES) + alone)
    try:
        asked = msgspec.convert(fields, Registration)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`") or None
        raise RequestError(f"{name}: {message}" if name else message, param=name) from error
    if url_host(asked.url) is None:
        raise RequestError(f"url: {asked.url!r} is no URL such as http://127.0.0.1:30001", param="url")
    if asked.bootstrap_port is not None and not is_port(asked.bootstrap_port):
        refuse("bootstrap_port", asked.bootstrap_port, "an integer from 1 to 65535")
    layout = asked.fingerprint
    if layout is not None and not (0 < len(layout) <= MAX_FINGERPRINT and layout.isprintable()):
        refuse("fingerprint", layout, f"1 to {MAX_FINGERPRINT} printable characters")
    return msgspec.structs.replace(asked, url=asked.url.rstrip("/"))


class Membership:
    """Of one router. Raises ConfigError when the state file makes no sense."""

    def __init__(self, config: RouterConfig, workers: Workers) -> None:
        self._workers = workers
        self._required = config.require_fingerprint
        self._interval_s = config.health_interval_s
        self._file = StateFile(config.state_file) if config.state_file is not None else None
        self._kept = Kept()
        self._is_applying = False
        self._reader: asyncio.Task[None] | None = None
        if self._file is not None:
            self._apply(self._file.read())
        workers.on_change.append(self._save)

    def start(self) -> None:
        if self._file is not None:
            self._reader = asyncio.create_task(self._follow(self._file))

    async def stop(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    # Coming

    async def register(self, asked: Registration) -> tuple[Worker, bool]:
        """The worker, and whether it is new. Raises RequestError, or WorkerError when it cannot be asked what it is."""
        self._check_welcome(asked)
        known = self._find(asked.url)
        if known is not None and _says_nothing_new(asked, known):
            self._hear(known)
            return known, False
        info = await self._ask(asked)
        role, port = self._identity(asked, info)
        layout = info.fingerprint or asked.fingerprint
        if refusal := why_refused(layout, self._required) if layout is not None else "":
            raise RequestError(f"{asked.url}: {refusal}", code="fingerprint_mismatch", param="url", status=409)
        known = self._find(asked.url)  # the answer took its time
        worker = self._change(known, role, port) if known is not None else self._join(asked, role, port)
        if worker.declared != asked.fingerprint:
            worker.declared, worker.alive, worker.reason = asked.fingerprint, False, ASKED
        if not worker.alive:
            worker.fingerprint, worker.handoff = layout, info.handoff
        self._hear(worker)
        return worker, known is None

    def _check_welcome(self, asked: Registration) -> None:
        """Raises RequestError for a worker that registers itself although it was removed. An administrator forgives."""
        gone = self._kept.removed
        if asked.url not in gone:
            return
        if asked.instance is not None and gone[asked.url] in (None, asked.instance):
            message = f"{asked.url} was removed by an administrator, who has to add it again"
            raise RequestError(message, code=REMOVED, param="url", status=409)
        self._update(removed={url: process for url, process in gone.items() if url != asked.url})

    async def _ask(self, asked: Registration) -> ServerInfo:
        try:
            return await self._workers.health.ask(asked.url)
        except WorkerError as error:
            if asked.role is Role.DECODE or (asked.role is Role.PREFILL and asked.bootstrap_port is not None):
                return ServerInfo()
            message = f"{asked.url} cannot be asked for what was left out, role or bootstrap_port: {error.message}"
            raise WorkerError(message, code=error.code, param="url") from error

    def _identity(self, asked: Registration, info: ServerInfo) -> tuple[Role, int | None]:
        role = info.node_role
        if info.says is not None and (role is None or asked.role not in (None, role)):
            raise RequestError(f"role: {asked.url} says that it is {info.says}, not {_wanted(asked)}", param="role")
        role = role or asked.role
        if role is None:
            raise RequestError(f"role: {asked.url} does not tell it: prefill or decode", param="role")
        port = asked.bootstrap_port or info.bootstrap_port
        if role is Role.PREFILL and port is None:
            raise RequestError("bootstrap_port: it does not tell it; give it", param="bootstrap_port")
        return role, port if role is Role.PREFILL else None

    def _join(self, asked: Registration, role: Role, port: int | None) -> Worker:
        if len(self._workers.all) >= MAX_WORKERS:
            raise RequestError(f"url: {MAX_WORKERS} workers are all that a router takes", param="url", status=409)
        worker = make_worker(role, WorkerAddress(url=asked.url, bootstrap_port=port))
        worker.source = Source.ADDED if asked.instance is None else Source.SELF
        log.info("%s worker %s joins (%s)", role.value, worker.url, worker.source.value)
        self._workers.add(worker)
        return worker

    def _change(self, worker: Worker, role: Role, port: int | None) -> Worker:
        if (role, port) != (worker.role, worker.bootstrap_port):
            log.info("%s worker %s is a %s worker now", worker.role.value, worker.url, role.value)
            self._workers.move(worker, role, port)
        return worker

    def _hear(self, worker: Worker) -> None:
        """It is there, and meant to be."""
        worker.heard_s = time.monotonic()
        if worker.is_leaving:
            self._workers.stay(worker)
        if not worker.alive:
            worker.check_now.set()

    # Going

    def unregister(self, name: str, *, force: bool = False, instance: str | None = None) -> Worker:
        """name: its URL or its id. instance: of a worker that says so itself. Without force it serves what it has.

        Raises RequestError (404, or 409 when another process runs there by now).
        """
        worker = self._find(name.rstrip("/"))
        if worker is None:
            raise RequestError(f"no such worker: {name}", code="unknown_worker", param="url", status=404)
        if instance is not None and worker.instance not in (None, instance):
            raise RequestError(f"another process runs at {worker.url}", code="other_instance", status=409)
        if force:
            self._workers.remove(worker)
        else:
            self._workers.leave(worker)
        if instance is None:
            self._update(removed={**self._kept.removed, worker.url: worker.instance})
        return worker

    def _find(self, name: str) -> Worker | None:
        return next((worker for worker in self._workers.all if name in (worker.url, worker.id)), None)

    # The state file

    def _save(self) -> None:
        """The workers have changed."""
        if not self._is_applying:
            self._update(workers=self._entries())

    def _entries(self) -> dict[str, Entry]:
        """Of the workers that no flag names."""
        return {
            worker.url: Entry(
                role=worker.role,
                bootstrap_port=worker.bootstrap_port,
                source=worker.source,
                since=worker.since_unix_s,
            )
            for worker in self._workers.all
            if worker.source is not Source.FLAG and not worker.is_leaving
        }

    def _update(self, **changes: Any) -> None:
        """Also in the file, where other routers may have written meanwhile: what is ours to change, no more."""
        before = self._kept
        self._kept = msgspec.structs.replace(before, **changes)
        if self._file is None or self._kept == before:
            return
        after = self._kept
        try:
            self._apply(self._file.change(lambda held: _merged(held, before, after)))
        except ConfigError as error:
            log.error("workers that come or go are not kept: %s", error.message)

    async def _follow(self, file: StateFile) -> None:
        """See what others write into the file."""
        while True:
            await asyncio.sleep(self._interval_s)
            if not file.has_changed():
                continue
            try:
                self._apply(file.read())
            except ConfigError as error:
                log.error("the workers stay as they were: %s", error.message)
            except Exception:  # a fault of ours must not end this for good
                log.exception("the state file was not taken over")

    def _apply(self, kept: Kept) -> None:
        """Make the workers those that the file says, besides those of the flags."""
        self._kept, self._is_applying = kept, True
        try:
            for url, entry in kept.workers.items():
                self._restore(url, entry)
            for worker in self._workers.all:
                is_kept = worker.source is Source.FLAG or worker.url in kept.workers
                if not worker.is_leaving and (not is_kept or worker.url in kept.removed):
                    log.info("%s worker %s leaves: the state file says so", worker.role.value, worker.url)
                    self._workers.leave(worker)
        finally:
            self._is_applying = False

    def _restore(self, url: str, entry: Entry) -> None:
        known = self._find(url)
        if known is not None:
            self._change(known, entry.role, entry.bootstrap_port)
            if known.is_leaving and url not in self._kept.removed:
                self._workers.stay(known)
        elif url not in self._kept.removed:
            worker = make_worker(entry.role, WorkerAddress(url=url, bootstrap_port=entry.bootstrap_port))
            worker.source, worker.since_unix_s = entry.source, entry.since
            self._workers.add(worker)


def _wanted(asked: Registration) -> str:
    return "prefill or decode" if asked.role is None else asked.role.value


def _says_nothing_new(asked: Registration, known: Worker) -> bool:
    is_same = asked.role in (None, known.role) and asked.bootstrap_port in (None, known.bootstrap_port)
    return is_same and asked.fingerprint in (None, known.declared)


def _merged(held: Kept, before: Kept, after: Kept) -> Kept:
    """What the file holds, with what has changed from before to after."""
    return msgspec.structs.replace(
        held,
        workers=_merged_table(held.workers, before.workers, after.workers),
        removed=_merged_table(held.removed, before.removed, after.removed),
    )


def _merged_table(held: dict[str, T], before: dict[str, T], after: dict[str, T]) -> dict[str, T]:
    kept = {url: value for url, value in held.items() if url in after or url not in before}
    return kept | {url: value for url, value in after.items() if url not in before or before[url] != value}
