"""The file in which a router keeps the workers that came at run time, so that they survive its restart.

Several routers may share one: each change is made under a lock on what the file holds then, and replaces the file as a
whole. Who sees that the file is another one (`has_changed`) reads it again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from common.config import Role
from common.errors import ConfigError
from common.json_body import BAD_JSON
from common.urls import url_host
from router.worker import MAX_WORKERS, Source, is_port

_VERSION = 1


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker. since: Unix time, seconds."""

    role: Role
    bootstrap_port: int | None = None
    source: Source = Source.ADDED
    since: float = 0.0


class Kept(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file says. workers: by URL. removed: those that an administrator has sent away, by URL, and as which
    process they ran: neither a flag nor their own registration brings them back."""

    version: int = _VERSION
    workers: dict[str, Entry] = msgspec.field(default_factory=dict)
    removed: dict[str, str | None] = msgspec.field(default_factory=dict)


class StateFile:
    """Raises ConfigError for a file that cannot be read or written."""

    def __init__(self, path: str) -> None:
        self._path = Path(path).resolve()  # a link stays one
        self._seen: tuple[int, ...] | None = None
        with self._locked():
            pass

    def read(self) -> Kept:
        """Nothing when there is no file yet, or an empty one. Raises ConfigError when it makes no sense."""
        self._seen = self._signature()
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return Kept()
        except OSError as error:
            raise self._error(error.strerror or str(error)) from error
        if not data:
            return Kept()
        try:
            kept = msgspec.json.decode(data, type=Kept)
        except BAD_JSON as error:
            raise self._error(f"it does not hold workers ({error}); remove it to begin anew") from error
        return self._checked(kept)

    def _checked(self, kept: Kept) -> Kept:
        if kept.version != _VERSION:
            raise self._error(f"it has version {kept.version}, this router reads {_VERSION}")
        if len(kept.workers) > MAX_WORKERS:
            raise self._error(f"it holds {len(kept.workers)} workers, {MAX_WORKERS} are all that a router takes")
        for url, entry in kept.workers.items():
            is_prefill = entry.role is Role.PREFILL
            port = entry.bootstrap_port
            has_port = port is not None and is_port(port)
            if url_host(url) is None or entry.role is Role.UNIFIED or is_prefill is not has_port:
                raise self._error(f"{url} in it is no prefill worker with a bootstrap port and no decode worker")
        return kept

    def change(self, make: Callable[[Kept], Kept]) -> Kept:
        """Replace what the file holds by what is made of it. Returns that. Raises ConfigError."""
        with self._locked():
            kept = self._checked(make(self.read()))
            self._write(msgspec.json.format(msgspec.json.encode(kept), indent=2) + b"\n")
            self._seen = self._signature()
        return kept

    def has_changed(self) -> bool:
        """Whether it is another file than the one read or written last."""
        return self._signature() != self._seen

    def _write(self, data: bytes) -> None:
        new = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            with new.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                new.unlink()
            raise self._error(error.strerror or str(error)) from error

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Beside the file, which is another one after each change."""
        try:
            if self._path.is_dir():
                raise self._error("it is a folder")
            lock = self._path.with_name(f".{self._path.name}.lock").open("a")
        except OSError as error:
            raise self._error(error.strerror or str(error)) from error
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _signature(self) -> tuple[int, ...] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _error(self, reason: str) -> ConfigError:
        return ConfigError(f"--state-file {self._path}: {reason}", param="state_file")
