"""A node for tests of the command line: answers like one, computes nothing. `python fake_node.py PORT [flags]`"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from cli.lifeline import die_with_parent

ANSWER = {
    "text": " 6*7 = <<6*7=42>>42\n#### 42",
    "output_ids": [1, 2, 3],
    "meta_info": {
        "id": "x",
        "finish_reason": {"type": "stop", "matched": "Question"},
        "prompt_tokens": 11,
        "completion_tokens": 3,
        "timing": {"queue_s": 0.001, "prefill_s": 0.02, "transfer_s": 0.003, "decode_s": 0.5},
        "transfer_bytes": {"kv": 1024, "conv": 20, "ssm": 3000, "track": 0},
    },
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(200, {"fingerprint": "f"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body.get("text") == "refuse":
            self._answer(400, {"error": {"message": "refused on purpose"}})
        elif body.get("stream"):
            self._stream(body)
        else:
            self._answer(200, ANSWER)

    def _answer(self, status: int, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, body: dict[str, object]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for text in ("one", "one two", "one two three"):
            self.wfile.write(b"data: " + json.dumps({"text": text}).encode() + b"\n\n")
        if body["text"] == "break":
            self.wfile.write(b'data: {"error": {"message": "broken on purpose"}}\n\n')
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--parent-pid", type=int)
    parser.add_argument("--stubborn", action="store_true", help="ignores SIGTERM")
    parser.add_argument("--mute", action="store_true", help="never listens")
    parser.add_argument("--with-rank", action="store_true", help="starts a process that ignores SIGTERM")
    options = parser.parse_args()
    die_with_parent(options.parent_pid)
    if options.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if options.with_rank:
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
        rank = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert rank.stdout is not None
        rank.stdout.readline()
    if options.mute:
        time.sleep(60)
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
