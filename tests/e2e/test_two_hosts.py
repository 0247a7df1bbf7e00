"""Prefill, decode and router on three hosts, played by network namespaces; the wire is cut in mid-transfer.

Needs root and `ip` and `tc`, or else is skipped.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from tests.support import stack
from tests.support.stack import MODEL, Server

T = TypeVar("T")

pytestmark = pytest.mark.slow

LIVENESS_S = 2.0
ADDRESSES = {"prefill": "10.94.7.1", "decode": "10.94.7.2", "router": "10.94.7.3"}
PORT, BOOTSTRAP_PORT = 30000, 8998
SLOW_WIRE = ("tbf", "rate", "16mbit", "burst", "64kb", "latency", "400ms")  # a prompt of 1,500 tokens takes two seconds
_CLONE_NEWNET = 0x40000000


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


class Hosts:
    """Each a namespace with one wire, `wire`, to a switch, whose ends are called as the hosts are."""

    def __init__(self, name: str) -> None:
        self.switch = f"{name}-switch"
        self.names = {host: f"{name}-{host}" for host in ADDRESSES}

    def make(self) -> None:
        for namespace in (self.switch, *self.names.values()):
            ip("netns", "add", namespace)
        ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.switch, "link", "set", "bridge", "up")
        for host, namespace in self.names.items():
            ip("-n", namespace, "link", "add", "wire", "type", "veth", "peer", "name", host, "netns", self.switch)
            ip("-n", namespace, "addr", "add", f"{ADDRESSES[host]}/24", "dev", "wire")
            for device in ("wire", "lo"):
                ip("-n", namespace, "link", "set", device, "up")
            ip("-n", self.switch, "link", "set", host, "master", "bridge", "up")
        slow = ["tc", "qdisc", "add", "dev", "wire", "root", *SLOW_WIRE]
        ip("netns", "exec", self.names["prefill"], *slow)

    def set(self, host: str, state: str) -> None:
        ip("-n", self.switch, "link", "set", host, state)

    def remove(self) -> None:
        for namespace in (self.switch, *self.names.values()):
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True, timeout=10)

    @contextmanager
    def serve(self, host: str, arguments: Sequence[str], folder: Path) -> Iterator[Server]:
        """`tandem HOST ...` on the host of that name, listening there."""
        address = ADDRESSES[host]
        own = [host, "--host", address, "--port", str(PORT), "--liveness-timeout", str(LIVENESS_S), *arguments]
        log = folder / f"{host}.log"
        command = ["ip", "netns", "exec", self.names[host], *stack.command(*own)]  # `ip` becomes that process
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=stack.REPO, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            yield Server(name=host, process=process, url=f"http://{address}:{PORT}", log=log)
        finally:
            stack.stop(process)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts(f"tandem{os.getpid()}")
    try:
        made.make()
    except (OSError, subprocess.CalledProcessError) as error:
        made.remove()
        pytest.skip(f"no network namespaces with a slow wire here: {error}")
    yield made
    made.remove()


class Client:
    """On the router's host: its threads live in that namespace."""

    def __init__(self, hosts: Hosts) -> None:
        self._threads = ThreadPoolExecutor(8, initializer=enter, initargs=(hosts.names["router"],))

    def begin(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        return self._threads.submit(work, *arguments)

    def do(self, work: Callable[..., T], *arguments: Any) -> T:
        return self.begin(work, *arguments).result(120)

    def close(self) -> None:
        self._threads.shutdown()


def enter(namespace: str) -> None:
    """This thread, and nobody else."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{namespace}").open() as file:
        assert libc.setns(file.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())


def request(place: int, num_tokens: int, max_new_tokens: int) -> dict[str, Any]:
    ids = [(11 * i + 7 * place) % 400 + 100 for i in range(num_tokens)]
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": sampling}


def ask(url: str, body: dict[str, Any]) -> tuple[int, Any, float]:
    """(status, answer, seconds)."""
    began = time.monotonic()
    answer = httpx.post(f"{url}/generate", json=body, timeout=100)
    return answer.status_code, answer.json(), time.monotonic() - began


def stream(url: str, body: dict[str, Any], seen: list[int]) -> list[int]:
    """The tokens; how many there are so far goes to `seen`. AssertionError for an error in it."""
    ids: list[int] = []
    with httpx.stream("POST", f"{url}/generate", json=body | {"stream": True}, timeout=100) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                ids = event["output_ids"]
                seen.append(len(ids))
    return ids


def internal_state(url: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{url}/server_info", timeout=20).json()["internal_states"][0]
    return found


def is_free(url: str) -> bool:
    state = internal_state(url)
    counts = [state[f"{kind}_free"] + state[f"{kind}_cached"] == state[f"{kind}_total"] for kind in ("pages", "slots")]
    return all(counts) and not state["transfer"].get("quarantined")


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def until(client: Client, condition: Callable[..., bool], *arguments: Any, within_s: float = 90.0) -> None:
    deadline = time.monotonic() + within_s
    while not client.do(condition, *arguments):
        assert time.monotonic() < deadline, f"it did not happen in {within_s} s"
        time.sleep(0.1)


def test_the_wire_is_cut_in_mid_transfer_and_mended(hosts: Hosts, tmp_path: Path) -> None:
    """What decodes goes on, what is being handed over ends in time with a typed error, nothing that may still be
    written to is given away; when the wire is whole again, everything is served and free."""
    key = tmp_path / "key"
    key.write_text("a key of at least sixteen bytes")
    node = ["--model-path", str(MODEL), "--transport", "mooncake", "--cluster-key-file", str(key)]
    node += ["--bootstrap-timeout", "2"]
    with ExitStack() as exits:
        prefill_at = ["--transfer-host", ADDRESSES["prefill"], "--bootstrap-host", ADDRESSES["prefill"]]
        prefill = exits.enter_context(hosts.serve("prefill", [*node, *prefill_at], tmp_path))
        decode = exits.enter_context(hosts.serve("decode", [*node, "--transfer-host", ADDRESSES["decode"]], tmp_path))
        pair = ["--prefill", prefill.url, str(BOOTSTRAP_PORT), "--decode", decode.url, "--health-interval", "0.2"]
        router = exits.enter_context(hosts.serve("router", [*pair, "--max-retries", "0"], tmp_path))
        client = Client(hosts)
        exits.callback(client.close)
        for server in (prefill, decode, router):
            until(client, is_healthy, server.url)

        assert client.do(ask, router.url, request(0, 100, 4))[0] == 200
        seen: list[int] = []
        decoding = client.begin(stream, router.url, request(1, 100, 1500), seen)
        until(client, lambda: len(seen) > 5)
        handed_over = client.begin(ask, router.url, request(2, 1500, 4))
        until(client, lambda: internal_state(decode.url)["num_receiving"] == 1)
        hosts.set("prefill", "down")
        cut = time.monotonic()
        status, answer, _ = handed_over.result(60)
        assert status >= 500 and answer["error"]["code"] in ("peer_silent", "worker_silent"), answer
        assert time.monotonic() - cut < LIVENESS_S + 3
        assert not decoding.done() or len(seen) == 1500
        assert not client.do(is_free, decode.url), "the sender may be alive: nothing of that room is free yet"
        status, answer, took_s = client.do(ask, router.url, request(3, 50, 4))
        assert status == 503 and took_s < LIVENESS_S + 3, answer
        assert len(decoding.result(100)) == 1500, "what decoded went on"

        hosts.set("prefill", "up")
        until(client, is_healthy, router.url)
        until(client, lambda: client_is_served(router.url))
        status, answer, _ = client.do(ask, router.url, request(2, 1500, 4))
        assert status == 200
        alone = client.do(ask, decode.url, request(2, 1500, 4))[1]
        assert answer["output_ids"] == alone["output_ids"]
        for server in (prefill, decode):
            until(client, is_free, server.url, within_s=30)
            assert "Traceback" not in server.text()


def client_is_served(url: str) -> bool:
    return ask(url, request(4, 60, 2))[0] == 200
