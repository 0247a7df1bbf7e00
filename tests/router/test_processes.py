"""`tandem router --workers 3`: real processes that share a port, in front of scripted workers."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import psutil

from tests.router.mocks import BOOTSTRAP_PORT, MockWorker, never
from tests.support.stack import Server, free_port, running

LIMIT_S = 60.0
COUNT = 3


@contextlib.asynccontextmanager
async def processes(prefill: MockWorker, decode: MockWorker, folder: Path, *extra: str) -> AsyncIterator[Server]:
    port = free_port()
    arguments = ["router", "--port", str(port), "--workers", str(COUNT), "--health-interval", "0.1", *extra]
    arguments += ["--prefill", prefill.url, str(BOOTSTRAP_PORT), "--decode", decode.url]
    with running("router", arguments, f"http://127.0.0.1:{port}", folder) as server:
        await until(lambda: server.text().count("decode worker http") >= COUNT)
        yield server


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - another process's doing
            await asyncio.sleep(0.05)


async def get(server: Server, path: str) -> httpx.Response:
    """Over a connection of its own, so that any of the processes may answer."""
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
        return await client.get(path)


async def generate(server: Server) -> httpx.Response:
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
        return await client.post("/generate", json={"text": "hi"})


async def served(server: Server) -> int:
    found = re.search(r'requests_total\{code="ok",endpoint="/generate"\} (\d+)', (await get(server, "/metrics")).text)
    return int(found.group(1)) if found else 0


async def test_processes_share_port_and_counts_and_one_that_is_killed_comes_back(
    prefill: MockWorker, decode: MockWorker, tmp_path: Path
) -> None:
    async with processes(prefill, decode, tmp_path) as server:
        answers = await asyncio.gather(*(generate(server) for _ in range(48)))
        assert [answer.status_code for answer in answers] == [200] * 48
        for _ in range(4):
            assert await served(server) == 48
            status = (await get(server, "/status.json")).json()
            assert (status["processes"], status["totals"]["ended"]) == (COUNT, {"ok": 48})
            assert len((await get(server, "/debug/requests?limit=99")).json()["requests"]) == 48

        victim = next(child for child in router_processes(server))
        victim.kill()
        answers = await asyncio.gather(*(generate(server) for _ in range(24)))
        assert sum(answer.status_code == 200 for answer in answers) == 24
        await until(lambda: server.text().count("decode worker http") >= COUNT + 1)
        assert victim.pid not in {child.pid for child in router_processes(server)}
        assert (await get(server, "/status.json")).json()["processes"] == COUNT


async def test_a_worker_that_one_process_is_told_of_is_known_to_all_and_so_is_its_leave(
    prefill: MockWorker, decode: MockWorker, tmp_path: Path
) -> None:
    more = MockWorker("decode")
    await more.start()
    try:
        async with processes(prefill, decode, tmp_path) as server:
            async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
                body = {"url": more.url, "role": "decode"}
                assert (await client.post("/workers", json=body)).status_code == 201
            await until(lambda: server.text().count(f"decode worker {more.url} is alive") >= COUNT)
            async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
                assert (await client.delete("/workers", params={"url": more.url})).status_code in (200, 202)
            for _ in range(12):
                await until_gone(server, more.url)
    finally:
        await more.stop()


async def test_a_user_ends_a_request_that_another_process_has_and_nobody_elses(
    prefill: MockWorker, decode: MockWorker, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("user ann ann-secret-key-0001\nuser bob bob-secret-key-0001\n")
    keys.chmod(0o600)
    decode.script = never
    async with processes(prefill, decode, tmp_path, "--api-key-file", str(keys)) as server:
        ann, bob = ({"authorization": f"Bearer {name}-secret-key-0001"} for name in ("ann", "bob"))
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            asked = {"text": "hi", "rid": "r1"}
            running = asyncio.create_task(client.post("/generate", json=asked, headers=ann))
            await until(lambda: len(decode.bodies) == 1)
            for _ in range(6):
                await post(server, "/abort_request", {"rid": "r1"}, bob)
            assert decode.aborts == []
            for _ in range(6):  # some of them at another process
                await post(server, "/abort_request", {"rid": "r1"}, ann)
            assert decode.aborts == [{"rid": ["r1"]}] * 6
            running.cancel()


async def post(server: Server, path: str, body: dict[str, str], headers: dict[str, str]) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
        assert (await client.post(path, json=body, headers=headers)).status_code == 200


async def test_a_signal_ends_all_after_what_runs_and_leaves_no_process(
    prefill: MockWorker, decode: MockWorker, tmp_path: Path
) -> None:
    async with processes(prefill, decode, tmp_path) as server:
        children = router_processes(server)
        server.process.terminate()
        await until(lambda: server.process.poll() is not None)
        assert server.process.returncode == 0
        assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        assert server.text().count("drained") == COUNT


def test_bounds_are_of_all_processes_together(tmp_path: Path) -> None:
    arguments = ["router", "--workers", "4", "--max-concurrent-requests", "3", "--port", str(free_port())]
    with running("router", arguments, "http://127.0.0.1:1", tmp_path) as server:
        assert server.process.wait(LIMIT_S) == 2
        assert "--max-concurrent-requests 3: at least one for each of --workers 4" in server.text()


async def until_gone(server: Server, url: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while url in (await get(server, "/workers")).text:  # noqa: ASYNC110 - another process's doing
            await asyncio.sleep(0.05)


def router_processes(server: Server) -> list[psutil.Process]:
    """The processes that serve, not the tracker of multiprocessing's resources."""
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]
