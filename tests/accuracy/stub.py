"""A server with an answer to every question of a task, that can be told to misbehave."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Trouble = Literal["drop", "html", "hang", "error", "abort"]


@dataclass(frozen=True, slots=True)
class Says:
    """text: of the answer. finish: its reason."""

    text: str
    finish: str = "stop"


Behaviour = Callable[[int, str], Says | Trouble]
"""By the number of the request, from 0, and its prompt."""


class StubServer(ThreadingHTTPServer):
    """info: of /model_info, None: there is none. released: set to end what hangs. bodies: what was asked."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, behave: Behaviour, info: dict[str, Any] | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behave, self.info = behave, info
        self.lock, self.released = threading.Lock(), threading.Event()
        self.bodies: list[dict[str, Any]] = []
        self.flushes = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def prompts(self) -> list[str]:
        return [_prompt(body) for body in self.bodies]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no news."""


def _prompt(body: dict[str, Any]) -> str:
    return str(body.get("text") or body.get("prompt") or body["messages"][-1]["content"])


class _Handler(BaseHTTPRequestHandler):
    server: StubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        if self.path in ("/model_info", "/get_model_info") and self.server.info is not None:
            self._send(200, self.server.info)
        elif self.path == "/v1/models" and self.server.info is None:
            self._send(200, {"data": [{"id": "stub"}]})
        else:
            self._send(404, {})

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length") or 0))
        if "cache" in self.path:
            self.server.flushes += 1
            self._send(200 if self.path.startswith("/flush_cache") else 404, {})
            return
        body = json.loads(content)
        with self.server.lock:
            self.server.bodies.append(body)
            number = len(self.server.bodies) - 1
        self._answer(self.server.behave(number, _prompt(body)))

    def _answer(self, found: Says | Trouble) -> None:
        match found:
            case Says(text, finish):
                self._send(200, self._shape(text, finish))
            case "html":
                self._send_bytes(200, b"<html>\x07<body>welcome</body></html>", "text/html")
            case "error":
                self._send(503, {"error": {"message": "no room"}})
            case "abort":
                self._send(200, self._shape("", "abort"))
            case "drop":
                self.close_connection = True
            case "hang":
                self.server.released.wait(60)
                self.close_connection = True

    def _shape(self, text: str, finish: str) -> dict[str, Any]:
        ids = [ord(c) for c in text]
        usage = {"prompt_tokens": 100, "completion_tokens": len(ids), "prompt_tokens_details": {"cached_tokens": 25}}
        match self.path:
            case "/v1/completions":
                return {"choices": [{"text": text, "finish_reason": finish}], "usage": usage}
            case "/v1/chat/completions":
                message = {"role": "assistant", "content": text}
                return {"choices": [{"message": message, "finish_reason": finish}], "usage": usage}
            case _:
                counts = {"prompt_tokens": 100, "completion_tokens": len(ids), "cached_tokens": 25}
                return {"text": text, "output_ids": ids, "meta_info": {"finish_reason": {"type": finish}, **counts}}

    def _send(self, status: int, body: dict[str, Any]) -> None:
        self._send_bytes(status, json.dumps(body).encode(), "application/json")

    def _send_bytes(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def serving(behave: Behaviour, *, info: dict[str, Any] | None = None) -> Iterator[StubServer]:
    """info: as SGLang's /model_info; without it the stub is an OpenAI server."""
    server = StubServer(behave, info)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
