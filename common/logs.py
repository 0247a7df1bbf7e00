"""Logging of every process: one line a record, on stderr, with the process's name."""

from __future__ import annotations

import logging
import sys
import time


def configure_logging(level: str, process: str) -> None:
    """level: a `logging` level name in any case. process: e.g. "prefill/rank0"."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine(f"%(asctime)s {process} %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class _OneLine(logging.Formatter):
    """Messages quote what clients and peers say, an rid for example: no line break of theirs begins a line here."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = one_line(record.message)
        return super().formatMessage(record)


def one_line(message: str) -> str:
    """The same, with everything escaped that does not print."""
    if message.isprintable():
        return message
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in message)


def in_a_row(message: str) -> str:
    """A message of several lines of our own, such as one with the last words of a process, for one line of the log."""
    return " | ".join(line.strip() for line in message.split("\n"))


class QuickLog:
    """Lines like those of `configure_logging`, for what is logged so often that `logging` costs too much (a third of
    its time). One thread writes. name: of the logger whose level counts, and which stands in the line."""

    def __init__(self, process: str, name: str) -> None:
        self._logger = logging.getLogger(name)
        self._head = f" {process} INFO {name}: "
        self._second = 0
        self._time = ""

    @property
    def is_enabled(self) -> bool:
        return self._logger.isEnabledFor(logging.INFO)

    def info(self, message: str) -> None:
        """message: without line breaks."""
        now = time.time()
        second = int(now)
        if second != self._second:
            self._second, self._time = second, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
        sys.stderr.write(f"{self._time},{int((now - second) * 1000):03d}{self._head}{message}\n")
