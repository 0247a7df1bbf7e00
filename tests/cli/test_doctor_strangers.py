"""`tandem doctor` among those who are no Tandem, or mean harm: a line each, and nothing waits for them."""

from __future__ import annotations

import json
import signal
import socket
import ssl
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from cli.doctor import servers, talk
from cli.doctor.checks import Check, Status
from cli.doctor.servers import Asker, check_router, check_worker
from common.errors import ConfigError, TransferError, WorkerError
from tests.support.stack import command
from transfer.handshake import read_key

Handler = Callable[[socket.socket], None]


@contextmanager
def at_a_port(handler: Handler) -> Iterator[int]:
    """Of a server that hands every connection to it, one after the other."""

    def run() -> None:
        while True:
            try:
                caller = listener.accept()[0]
            except OSError:
                return
            with caller:
                try:
                    handler(caller)
                except OSError:
                    continue

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=run, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def framed(words: dict[str, Any] | bytes) -> bytes:
    body = words if isinstance(words, bytes) else json.dumps(words).encode()
    return struct.pack(">I", len(body)) + body


def frame_of(sock: socket.socket) -> bytes:
    (size,) = struct.unpack(">I", sock.recv(4, socket.MSG_WAITALL))
    return sock.recv(size, socket.MSG_WAITALL)


def drip(sock: socket.socket) -> None:
    """For ever, until the other end has enough."""
    while True:
        sock.sendall(b" ")
        time.sleep(0.02)


# Callers of `tandem doctor --serve`

NONSENSE: dict[str, dict[str, Any] | bytes] = {
    "deep": b"[" * 10_000,
    "deep object": b'{"a":' * 2_000 + b"1" + b"}" * 2_000,
    "proof not ascii": {"nonce": "a" * 64, "proof": "é"},
    "nonce not ascii": {"nonce": "é" * 64, "proof": ""},
    "surrogate": {"nonce": "\ud800" * 64, "proof": "x"},
    "nonce a number": {"nonce": 5, "proof": "x"},
    "proof a list": {"nonce": "a" * 64, "proof": ["x"]},
    "no proof": {"nonce": "a" * 64, "proof": None},
    "not utf-8": b"\xff\xfe\x00" * 10,
    "long number": b'{"nonce":' + b"9" * 5000 + b"}",
    "empty": b"",
    "list": b"[]",
    "long frame": b"",
    "error of a stranger": {"error": "x\n2026 ERROR fake \x1b[2J", "code": None},
    "error that is none": {"error": {"a": 1}},
}
TOO_LONG = struct.pack(">I", 1 << 20)


@contextmanager
def served(tmp_path: Path) -> Iterator[tuple[int, bytes | None, Path]]:
    """A listener: its port, its key, its log."""
    key, log = tmp_path / "key", tmp_path / "log"
    key.write_text("0123456789abcdef0123456789")
    key.chmod(0o600)
    options = ["--role", "decode", "--transport", "loopback", "--cluster-key-file", str(key)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command("doctor", "--serve", "0", *options), stdout=subprocess.PIPE, stderr=output, bufsize=0
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        yield int(line.partition(" at ")[2].partition(";")[0].rpartition(":")[2]), read_key(str(key)), log
        assert process.poll() is None, log.read_text()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
        assert process.stdout is not None
        process.stdout.close()


def test_no_stranger_ends_a_listener_or_keeps_others_from_it(tmp_path: Path) -> None:
    with served(tmp_path) as (port, key, log), ExitStack() as stack:
        for name, words in NONSENSE.items():
            with socket.create_connection(("127.0.0.1", port), 10) as stranger:
                frame_of(stranger)
                stranger.sendall(framed(words) if name != "long frame" else TOO_LONG)
                refusal = json.loads(frame_of(stranger)) if "error" not in name else {"error": "", "code": ""}
                assert set(refusal) == {"error", "code"}, name
        for number in range(30):
            silent = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
            if number % 2:
                silent.sendall(struct.pack(">I", 1000) + b" ")
        callers = [stack.enter_context(talk.call("127.0.0.1", port, key)) for _ in range(2)]
        assert [caller.ask("hello")["transport"] for caller in callers[:1]] == ["loopback"]
        callers[0].__exit__()
        assert callers[1].ask("hello")["transport"] == "loopback", "its turn has come"
        said = log.read_text()
        assert "Traceback" not in said and "\x1b" not in said
        assert "x\\n2026 ERROR fake \\x1b[2J" in said and not any(line.startswith("2026") for line in said.splitlines())


# Peers that are called


def answers(*frames: dict[str, Any] | bytes) -> Handler:
    def run(sock: socket.socket) -> None:
        first, *others = frames
        sock.sendall(framed(first))
        for frame in others:
            frame_of(sock)
            sock.sendall(framed(frame))

    return run


GREETING = {"doctor": talk.VERSION, "nonce": "a" * 64, "keyed": False}


@pytest.mark.parametrize(
    "handler",
    [
        answers(b"[" * 10_000),
        answers({**GREETING, "nonce": "\ud800" * 64}),
        answers({**GREETING, "nonce": "é" * 64}),
        answers({**GREETING, "doctor": "x"}),
        answers(GREETING, {"proof": "é"}),
        answers(GREETING, b"\xff"),
        answers(GREETING, {"error": ["\x1b[2J\nok"], "code": {"a": 1}}),
        lambda sock: sock.sendall(struct.pack(">I", 1 << 30)),
    ],
)
def test_a_peer_that_is_none_is_a_typed_error(handler: Handler) -> None:
    with at_a_port(handler) as port, pytest.raises((ConfigError, TransferError)) as caught:
        talk.call("127.0.0.1", port, None)
    assert caught.value.message.isprintable() and caught.value.code.isprintable()


def test_a_peer_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(talk, "HELLO_S", 0.3)

    def slow(sock: socket.socket) -> None:
        sock.sendall(struct.pack(">I", 10_000))
        drip(sock)

    with at_a_port(slow) as port, pytest.raises(WorkerError, match="timed out"):
        talk.call("127.0.0.1", port, None)


@pytest.mark.parametrize("read", [talk.number, talk.address, talk.text])
@pytest.mark.parametrize("value", [None, True, 10**400, float("inf"), float("nan"), ["\x1b"], {"a": 1}, -(10**13)])
def test_an_answer_of_another_kind_is_a_typed_error(read: Callable[[Any, str], object], value: object) -> None:
    with pytest.raises(TransferError) as caught:
        read({"what": value}, "what")
    assert caught.value.message.startswith("what: ") and caught.value.message.isprintable()


# Routers and workers

ASKER = Asker(ssl.create_default_context(), "", "--router-api-key-file")


def http(body: bytes, *headers: bytes) -> Handler:
    def run(sock: socket.socket) -> None:
        while b"\r\n\r\n" in sock.recv(4096):
            head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n" % len(body)
            sock.sendall(head + b"".join(header + b"\r\n" for header in headers) + b"\r\n" + body)

    return run


def of_router(handler: Handler) -> list[Check]:
    with at_a_port(handler) as port:
        return list(check_router(f"http://127.0.0.1:{port}", ASKER, "ours"))


@pytest.mark.parametrize(
    ("body", "worst"),
    [
        (b'{"workers": null}', Status.ERROR),
        (b'{"workers": 5}', Status.ERROR),
        (b"[" * 300_000, Status.ERROR),
        (b'{"now": NaN, "workers": []}', Status.ERROR),
        (b'{"now": 1e999, "workers": []}', Status.ERROR),
        (b'{"workers": [{"fingerprint": "\\ud800", "alive": 1}]}', Status.ERROR),
        (b'{"workers": []}\xff', Status.ERROR),
        (b'{"now": 1%s, "workers": []}' % (b"0" * 300), Status.WARNING),
        (b'{"now": true, "workers": []}', Status.WARNING),
        (b'{"now": "\\u001b[2J", "workers": []}', Status.WARNING),
        (b'{"workers": [{"fingerprint": "\\u001b[2J\\nok       all: fine"}]}', Status.ERROR),
        (b'{"workers": [{"fingerprint": {"a": 1}}]}', Status.ERROR),
    ],
)
def test_a_router_that_is_none_is_a_line(body: bytes, worst: Status) -> None:
    checks = of_router(http(body))
    assert worst in {check.status for check in checks}
    assert all(check.found.isprintable() for check in checks)


def test_compressed_answers_are_not_asked_for() -> None:
    (check,) = of_router(http(b"xxxx", b"content-encoding: gzip"))
    assert check.status is Status.ERROR and "not JSON" in check.found


@pytest.mark.parametrize("part", ["head", "body"])
def test_a_router_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    monkeypatch.setattr(servers, "ASK_S", 0.2)

    def slow(sock: socket.socket) -> None:
        sock.sendall(b"HTTP/1.1 200 OK\r\n" + (b"x: " if part == "head" else b"content-length: 1000000\r\n\r\n"))
        drip(sock)

    (check,) = of_router(slow)
    assert check.status is Status.ERROR and "no whole answer in 0.4 s" in check.found


def test_an_endless_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_MAX_ANSWER_BYTES", 1 << 20)

    def endless(sock: socket.socket) -> None:
        sock.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100000000000\r\n\r\n")
        while True:
            sock.sendall(b" " * (1 << 16))

    (check,) = of_router(endless)
    assert check.status is Status.ERROR and "more than 1,048,576 bytes" in check.found


@pytest.mark.parametrize(
    "body",
    [
        b"[1]",
        b"[" * 300_000,
        b'{"disaggregation_mode": "decode", "fingerprint": "\\ud800"}',
        b'{"disaggregation_mode": "\\u001b[2J\\n"}',
        b'{"disaggregation_mode": ["decode"]}',
    ],
)
def test_a_worker_that_is_none_is_a_line(body: bytes) -> None:
    with at_a_port(http(body)) as port:
        check, fingerprint = check_worker("decode", f"http://127.0.0.1:{port}", ASKER)
    assert check.status is Status.ERROR and check.found.isprintable() and fingerprint is None


def test_what_a_worker_says_is_shown_escaped() -> None:
    body = b'{"disaggregation_mode": "decode", "fingerprint": "\\u001b[2J", "version": "a\\nb"}'
    with at_a_port(http(body)) as port:
        check, _ = check_worker("decode", f"http://127.0.0.1:{port}", ASKER)
    assert check.status is Status.OK and "a\\nb, \\x1b[2J" in check.found
