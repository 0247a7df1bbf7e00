"""For all tests: kernels are interpreted where there is no card, and what a test does to the logging of this process
ends with it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

if not Path("/proc/driver/nvidia").exists():  # torch would know better, and take seconds
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton, as transformers' models do


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A handler that is left behind writes to the capture of a test that is over, from any thread of a later one."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
    root.setLevel(level)
