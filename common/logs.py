"""Logging of every process: one line a record, on stderr, with the process's name."""

from __future__ import annotations

import logging


def configure_logging(level: str, process: str) -> None:
    """level: a `logging` level name in any case. process: e.g. "prefill/rank0"."""
    logging.basicConfig(
        level=level.upper(),
        format=f"%(asctime)s {process} %(levelname)s %(name)s: %(message)s",
        force=True,
    )
