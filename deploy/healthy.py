"""Exits 0 when the server of this container answers /health with 200, otherwise 1.

With --alive it exits 1 only for a server that is stuck: one that does not answer in time, or that says that it cannot
serve although it is not draining. One that loads, or drains, also to take another role, is alive.

TANDEM_PORT: where it listens, 30000 by default. TANDEM_HOST: its --host, 127.0.0.1 by default. TLS is noticed.

For HEALTHCHECK and Kubernetes: images have no curl, and this starts in a tenth of the time that urllib takes to import.
"""

import os
import socket
import sys

TIMEOUT_S = 3.0
MAX_BYTES = 65536
ANYWHERE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


def ask(host: str, port: int, tls: bool) -> bytes:
    """The beginning of the answer. Raises OSError."""
    with socket.create_connection((host, port), TIMEOUT_S) as plain, _wrapped(plain, tls) as server:
        server.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = b""
        while len(answer) < MAX_BYTES and (more := server.recv(MAX_BYTES)):
            answer += more
        return answer


def _wrapped(plain: socket.socket, tls: bool) -> socket.socket:
    if not tls:
        return plain
    import ssl

    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it asks how the server is, not who
    return context.wrap_socket(plain)


def answer_of(host: str, port: int) -> bytes:
    """Raises OSError."""
    try:
        answer = ask(host, port, tls=False)
    except ConnectionResetError:
        answer = b""
    return answer if answer.startswith(b"HTTP/") else ask(host, port, tls=True)


def judge(host: str, port: int, only_alive: bool) -> tuple[bool, str]:
    """Whether all is well, and the status line, or why there is none."""
    try:
        head, _, body = answer_of(host, port).partition(b"\r\n\r\n")
    except OSError as error:
        return only_alive and not isinstance(error, TimeoutError), str(error)
    line = head.partition(b"\r\n")[0].decode("ascii", "replace")
    is_well = line.split(" ")[1:2] == ["200"]
    return is_well or (only_alive and b'"draining"' in body), line


if __name__ == "__main__":
    asked_host = os.environ.get("TANDEM_HOST", "")
    is_well, said = judge(
        ANYWHERE.get(asked_host, asked_host), int(os.environ.get("TANDEM_PORT") or "30000"), "--alive" in sys.argv[1:]
    )
    print(said)
    sys.exit(0 if is_well else 1)
