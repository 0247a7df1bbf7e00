"""Waiting for one of several things."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def first_of(*waits: Coroutine[Any, Any, Any] | asyncio.Task[Any], timeout_s: float | None = None) -> None:
    """Return when one of them has ended, or after timeout_s. What was given as a coroutine ends here too."""
    tasks = [wait if isinstance(wait, asyncio.Task) else asyncio.create_task(wait) for wait in waits]
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task, wait in zip(tasks, waits, strict=True):
        if task is not wait:
            task.cancel()
