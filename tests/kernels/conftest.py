"""Kernels on the card when there is one, otherwise on the CPU through Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

pytest.importorskip("triton", reason="Triton cannot be installed here: it exists for Linux on x86-64 and ARM")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a machine with a card they are part of `make test-gpu`, and run there on the card."""
    for item in items:
        if torch.cuda.is_available() and "tests/kernels" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
