"""Many may write at the same time; one may have the transport for itself, when nobody does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class WriteGate:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._writers, self._closed = 0, False

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Waits while the gate is closed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._writers += 1
        try:
            yield
        finally:
            with self._changed:
                self._writers -= 1

    def close_if_idle(self) -> bool:
        """True: nobody writes, and nobody will before `open`. False: somebody does, or has closed it already."""
        with self._changed:
            if self._writers or self._closed:
                return False
            self._closed = True
            return True

    def open(self) -> None:
        with self._changed:
            assert self._closed, "the gate is open"
            self._closed = False
            self._changed.notify_all()
