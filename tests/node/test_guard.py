"""Which endpoints of a node need a key, and which an admin's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse

from common.keys import KeyRing
from node.guard import Guard

USER, ADMIN = "user-0123456789abcdef", "admin-0123456789abcdef"
OF_USERS = ("/generate", "/v1/chat/completions", "/v1/models", "/tokenize", "/health_generate", "/model_info")
OF_ADMINS = ("/abort_request", "/flush_cache", "/server_info", "/metrics", "/debug/state", "/role", "/get_load", "/new")


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    path = tmp_path / "keys"
    path.write_text(f"user ann {USER}\nadmin router {ADMIN}\n")
    async with asked(KeyRing(str(path))) as found:
        yield found


def asked(keys: KeyRing) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(Guard(PlainTextResponse("served"), keys=keys))
    return httpx.AsyncClient(transport=transport, base_url="http://node")


async def status(client: httpx.AsyncClient, path: str, key: str | None) -> int:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return (await client.post(path, headers=headers)).status_code


async def test_keys_of_a_node(client: httpx.AsyncClient) -> None:
    for key in (None, "wrong-0123456789abcdef", USER, ADMIN):
        assert await status(client, "/health", key) == 200
    for path in OF_USERS:
        assert [await status(client, path, key) for key in (None, ADMIN + "x", USER, ADMIN)] == [401, 401, 200, 200]
    for path in OF_ADMINS:
        assert [await status(client, path, key) for key in (None, ADMIN + "x", USER, ADMIN)] == [401, 401, 403, 200]


async def test_without_keys_a_node_is_open() -> None:
    async with asked(KeyRing()) as client:
        for path in ("/health", *OF_USERS, *OF_ADMINS):
            assert await status(client, path, None) == 200
