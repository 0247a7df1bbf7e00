"""Nodes register themselves, change roles, leave and come back behind a router that serves all the while."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support.stack import Server, free_port, generate, node, running, wait_healthy

LIMIT_S = 60.0
PROMPTS = [f"Tom has {n} apples and buys {n + 2} more. He" for n in range(3, 9)]


def until(condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {limit_s} s: {what}")


def body_of(prompt: str, *, stream: bool = False) -> dict[str, object]:
    return {"text": prompt, "stream": stream, "sampling_params": {"max_new_tokens": 16, "temperature": 0}}


class Load:
    """Clients that ask without a break. wrong: what was not the expected answer."""

    def __init__(self, url: str, expected: dict[str, str]) -> None:
        self.url, self.expected = url, expected
        self.num_answers = 0
        self.wrong: list[str] = []
        self._stop = threading.Event()

    @contextmanager
    def running(self) -> Iterator[Load]:
        threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def _ask(self, client: int) -> None:
        turn = client
        while not self._stop.is_set():
            prompt = PROMPTS[turn % len(PROMPTS)]
            turn += 1
            try:
                answer = generate(self.url, body_of(prompt, stream=client % 2 == 0))
            except httpx.HTTPError as error:
                self.wrong.append(repr(error))
                continue
            self.num_answers += 1
            is_right = answer.status_code == 200 and last_text(answer) == self.expected[prompt]
            if not is_right:
                self.wrong.append(f"{answer.status_code} {answer.text[-300:]}")

    def go_on(self, num_answers: int = 6) -> None:
        """Until so many more answers have come."""
        wanted = self.num_answers + num_answers
        until(lambda: self.num_answers >= wanted, f"{num_answers} more answers")


def last_text(answer: httpx.Response) -> str:
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return str(answer.json()["text"])
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return str(httpx.Response(200, text=events[-2]).json()["text"])


def workers(router: Server) -> dict[str, dict[str, Any]]:
    found = httpx.get(f"{router.url}/workers", timeout=10).json()["workers"]
    return {worker["url"]: worker for worker in found}


def lives_as(router: Server, url: str, role: str) -> bool:
    worker = workers(router).get(url)
    return worker is not None and worker["role"] == role and worker["state"] == "alive"


def test_nodes_come_go_and_change_roles_under_load(tmp_path: Path) -> None:
    state_file, port = tmp_path / "workers.json", free_port()
    arguments = ["router", "--port", str(port), "--state-file", str(state_file), "--health-interval", "0.3"]
    url = f"http://127.0.0.1:{port}"
    extra = ["--router", url, "--heartbeat-interval", "0.5", "--transport", "loopback"]
    with ExitStack() as exits:
        router = exits.enter_context(running("router", arguments, url, tmp_path))
        p1, p2, d1 = (
            exits.enter_context(node(role, _folder(tmp_path, name), extra, bootstrap_port=0))
            for role, name in (("prefill", "p1"), ("prefill", "p2"), ("decode", "d1"))
        )
        assert generate_when_up(url).status_code == 503, "no workers yet"
        for server in (p1, p2, d1):
            wait_healthy(server)
        for server, role in ((p1, "prefill"), (p2, "prefill"), (d1, "decode")):
            until(lambda s=server, r=role: lives_as(router, s.url, r), f"{server.url} has registered")
        assert {worker["source"] for worker in workers(router).values()} == {"self"}
        expected = {prompt: generate(url, body_of(prompt)).json()["text"] for prompt in PROMPTS}
        with Load(url, expected).running() as load:
            load.go_on()
            becomes_decode(router, p2, load)
            is_removed_and_added_again(router, d1, load)
            leaves_by_itself(router, p2, load)
        assert load.wrong == [] and load.num_answers > 30
        assert httpx.get(f"{url}/server_info", timeout=10).json()["counters"]["retries"] == 0, "nothing was refused"
        router = restarted(router, arguments, exits)
        wait_healthy(router, 10)
        assert generate(url, body_of(PROMPTS[0])).json()["text"] == expected[PROMPTS[0]]
        assert len(workers(router)) == 2
        refuses_what_cannot_be(d1)
        ends_although_it_was_about_to_change(d1)


def _folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name


def generate_when_up(url: str) -> httpx.Response:
    def ask() -> httpx.Response | None:
        try:
            return generate(url, body_of(PROMPTS[0]))
        except httpx.HTTPError:
            return None

    return until(ask, "the router answers")  # type: ignore[no-any-return]


def becomes_decode(router: Server, turned: Server, load: Load) -> None:
    """2 prefill + 1 decode become 1 + 2, in the same process, and the new decode node works."""
    children = {child.pid for child in turned.children()}
    answer = httpx.post(f"{turned.url}/role", json={"role": "decode"}, timeout=10)
    assert (answer.status_code, answer.json()) == (202, {"role": "decode", "changing": True})
    until(lambda: lives_as(router, turned.url, "decode"), "it has come back as a decode node")
    assert turned.process.poll() is None and not children & {child.pid for child in turned.children()}
    assert httpx.get(f"{turned.url}/server_info", timeout=10).json()["role"] == "decode"
    until(lambda: turned.state()["decode_tokens_computed"], "it gets requests")
    load.go_on()


def is_removed_and_added_again(router: Server, decode: Server, load: Load) -> None:
    """An administrator's word counts: it registers in vain until it is added again."""
    answer = httpx.delete(f"{router.url}/workers", params={"url": decode.url}, timeout=10)
    assert answer.status_code in (200, 202)
    until(lambda: decode.url not in workers(router), "it has drained")
    before = decode.state()["decode_tokens_computed"]
    until(lambda: "was removed by an administrator" in decode.text(), "its heartbeat is refused")
    load.go_on()
    assert decode.url not in workers(router)
    assert decode.state()["decode_tokens_computed"] == before, "it has nothing to do"
    answer = httpx.post(f"{router.url}/workers", json={"url": decode.url}, timeout=10)
    assert (answer.status_code, answer.json()["role"]) == (201, "decode")
    until(lambda: decode.state()["decode_tokens_computed"] != before, "it gets requests again")


def leaves_by_itself(router: Server, leaving: Server, load: Load) -> None:
    """It drains at SIGTERM, and has told the router so before it ends."""
    leaving.process.send_signal(signal.SIGTERM)
    assert leaving.process.wait(LIMIT_S) == 0
    assert leaving.url not in workers(router)
    load.go_on()


def restarted(router: Server, arguments: list[str], exits: ExitStack) -> Server:
    """Killed, so that it cannot say goodbye. It knows its workers although no node has had time to register again."""
    os.kill(router.process.pid, signal.SIGKILL)
    router.process.wait()
    return exits.enter_context(
        running("router-again", [*arguments, "--health-interval", "0.1"], router.url, router.log.parent)
    )


def refuses_what_cannot_be(decode: Server) -> None:
    for body, status, param in (
        ({"role": "queen"}, 400, "role"),
        ({"role": "unified"}, 400, "role"),
        ({}, 400, "role"),
        ({"role": "decode", "port": 1}, 400, "port"),
    ):
        answer = httpx.post(f"{decode.url}/role", json=body, timeout=10)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), body
    answer = httpx.post(f"{decode.url}/role", json={"role": "decode"}, timeout=10)
    assert (answer.status_code, answer.json()["changing"]) == (200, False)
    assert psutil.pid_exists(decode.process.pid)


def ends_although_it_was_about_to_change(decode: Server) -> None:
    """A signal while it drains for another role: it still drains, and then ends."""
    body = {"text": PROMPTS[0], "stream": True, "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}
    with httpx.stream("POST", f"{decode.url}/generate", json=body, timeout=LIMIT_S) as answer:
        lines = answer.iter_lines()
        next(lines)
        changing = httpx.post(f"{decode.url}/role", json={"role": "prefill"}, timeout=10)
        assert changing.status_code == 202
        for role in ("prefill", "decode"):  # the one that it takes, and the one that it still has
            again = httpx.post(f"{decode.url}/role", json={"role": role}, timeout=10)
            assert (again.status_code, again.json()["error"]["code"]) == (503, "draining")
        decode.process.send_signal(signal.SIGTERM)
        assert list(lines)[-2] == "data: [DONE]"
    assert decode.process.wait(LIMIT_S) == 0
    assert "starting again" not in decode.text()
