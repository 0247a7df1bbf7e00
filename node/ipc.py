"""The Unix sockets between a front and its ranks: the directory they lie in, and a rank's two ends of them."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from node.messages import FromRank, ToRank, from_rank_encoder, to_rank_decoder

MAX_IPC_PATH = 72

_NAME = re.compile(r"tandem-(\d+)-\w+")


@contextmanager
def ipc_directory() -> Iterator[Path]:
    """A new directory that only this user can enter, removed at the end. Its path fits into a Unix socket's address.

    Its name has this process's id, and this process holds a lock on it: so the next front can tell, and remove, what a
    killed one has left behind.
    """
    parent = tempfile.gettempdir()
    parent = parent if len(parent) <= MAX_IPC_PATH else "/tmp"
    remove_stale(Path(parent))
    path = Path(tempfile.mkdtemp(prefix=f"tandem-{os.getpid()}-", dir=parent))
    held = _lock(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if held is not None:
            os.close(held)


def remove_stale(parent: Path) -> None:
    """Remove this user's directories whose process has ended. If it lives in another container, it holds the lock."""
    for path in parent.glob("tandem-*-*"):
        found = _NAME.fullmatch(path.name)
        if found is None or _is_running(int(found[1])) or not _is_own(path):
            continue
        held = _lock(path)
        if held is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(held)


def _is_own(path: Path) -> bool:
    """False for one that somebody else has removed meanwhile."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # somebody else's
    return True


def _lock(path: Path) -> int | None:
    """A descriptor that holds the directory's lock until it is closed; None when somebody else holds it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None  # gone meanwhile
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


class RankSockets:
    """A rank's ends: `inbox` has what its front says to it, `send` answers."""

    def __init__(self, ipc_dir: Path, rank: int) -> None:
        self._context = zmq.Context()
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.connect(f"ipc://{ipc_dir}/from_ranks")
        self.inbox = self._context.socket(zmq.PULL)
        self.inbox.bind(f"ipc://{ipc_dir}/to_rank{rank}")

    def send(self, message: FromRank) -> None:
        self._outbox.send(from_rank_encoder.encode(message))

    def receive(self, wait_ms: int = 0) -> ToRank | None:
        """The next message, waiting so long for one to come; None when none has."""
        if wait_ms:
            self.inbox.poll(wait_ms)
        try:
            return to_rank_decoder.decode(self.inbox.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def close(self, *, linger_ms: int) -> None:
        """linger_ms: how long what was sent may still take to leave."""
        self._context.destroy(linger=linger_ms)
