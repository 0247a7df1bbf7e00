"""One router with one pair of scripted workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop

from tests.router.mocks import MockWorker, RunningRouter, config_of, run_router


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests of the router run on its own event loop."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def prefill() -> AsyncIterator[MockWorker]:
    worker = MockWorker("prefill")
    await worker.start()
    yield worker
    await worker.stop()


@pytest.fixture
async def decode() -> AsyncIterator[MockWorker]:
    worker = MockWorker("decode")
    await worker.start()
    yield worker
    await worker.stop()


@pytest.fixture
async def router(prefill: MockWorker, decode: MockWorker) -> AsyncIterator[RunningRouter]:
    """One pair, alive."""
    async with run_router(config_of([prefill], [decode], max_body_bytes=1 << 20)) as running:
        await running.until_alive()
        yield running


@pytest.fixture
async def four() -> AsyncIterator[list[MockWorker]]:
    """Two prefill workers, two decode workers."""
    workers = [MockWorker(role) for role in ("prefill", "prefill", "decode", "decode")]
    for worker in workers:
        await worker.start()
    yield workers
    for worker in workers:
        await worker.stop()
