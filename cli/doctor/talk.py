"""How two doctors talk: JSON frames over one TCP connection, after both have proven that they know the cluster key.

    listener: {"doctor", "nonce", "keyed"}     caller: {"nonce", "proof"}     listener: {"proof"} or {"error"}

From then on every frame is signed. Without a key only this machine is talked to. What is said is not hidden.

The other end may be anybody. What it says is read in one place, `Talk.receive`, in a time that does not grow with what
it sends, and taken as values of the right kind by `number`, `address` and `text`.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from typing import Any, Self

from cli.doctor.checks import shown
from common.errors import ConfigError, RequestError, ServingError, TransferError, WorkerError
from common.json_body import decode_object
from common.net import is_loopback
from transfer.seal import Seal, make_seal

VERSION = 1
HELLO_S, ANSWER_S = 5.0, 20.0
"""For all of the greeting; for each frame afterwards."""
_MAX_FRAME_BYTES = 1 << 14
_LARGEST_NUMBER = 1e12
_PREFIX = struct.Struct(">I")
_CALLER, _LISTENER = b"doctor caller", b"doctor listener"


class Talk:
    """One end. Every method raises WorkerError when the other end is lost or silent, TransferError for nonsense."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._seal_out: Seal | None = None
        self._seal_in: Seal | None = None
        self._is_trusted = False
        self._deadline_s = time.monotonic() + HELLO_S
        self.peer = str(sock.getpeername()[0])
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def trust(self, seal_out: Seal | None, seal_in: Seal | None) -> None:
        self._seal_out, self._seal_in = seal_out, seal_in
        self._is_trusted = True

    def send(self, **words: Any) -> None:
        body = json.dumps(words).encode()
        if self._seal_out is not None:
            body = self._seal_out.sign(body)
        self._begin()
        try:
            self._sock.settimeout(self._left_s())
            self._sock.sendall(_PREFIX.pack(len(body)) + body)
        except OSError as reason:
            raise self._lost(reason) from reason

    def receive(self) -> dict[str, Any]:
        """Raises ConfigError for what the other end has refused."""
        self._begin()
        (size,) = _PREFIX.unpack(self._read(_PREFIX.size))
        if size > _MAX_FRAME_BYTES:
            raise TransferError(f"{self.peer} is no tandem doctor: a frame of {size} bytes", code="protocol_error")
        body = self._read(size)
        if self._seal_in is not None:
            body = self._seal_in.open(body)
        try:
            words = decode_object(body)
        except RequestError as reason:
            raise TransferError(f"{self.peer} is no tandem doctor: {reason.message}", code="protocol_error") from reason
        if "error" in words:
            raise ConfigError(shown(words["error"]), code=shown(words.get("code", "refused")))
        return words

    def ask(self, what: str, **words: Any) -> dict[str, Any]:
        self.send(ask=what, **words)
        return self.receive()

    def refuse(self, error: ServingError) -> None:
        self.send(error=error.message, code=error.code)

    def _begin(self) -> None:
        if self._is_trusted:
            self._deadline_s = time.monotonic() + ANSWER_S

    def _left_s(self) -> float:
        """Raises TimeoutError."""
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        return left_s

    def _read(self, nbytes: int) -> bytes:
        found = bytearray()
        while len(found) < nbytes:
            try:
                self._sock.settimeout(self._left_s())
                more = self._sock.recv(nbytes - len(found))
            except OSError as reason:
                raise self._lost(reason) from reason
            if not more:
                raise WorkerError(f"{self.peer} closed the connection", code="peer_lost")
            found += more
        return bytes(found)

    def _lost(self, reason: OSError) -> WorkerError:
        return WorkerError(f"{self.peer}: {reason}", code="peer_lost")


def call(host: str, port: int, key: bytes | None) -> Talk:
    """Raises WorkerError when nobody answers, ConfigError for another key."""
    try:
        sock = socket.create_connection((host, port), HELLO_S)
    except OSError as reason:
        raise WorkerError(f"{host}:{port}: {reason}", code="peer_unreachable") from reason
    talk = Talk(sock)
    try:
        _introduce(talk, key)
    except ServingError:
        sock.close()
        raise
    return talk


def _introduce(talk: Talk, key: bytes | None) -> None:
    if key is None and not is_loopback(talk.peer):
        raise ConfigError("without --cluster-key-file only a peer on this host can be asked", code="unauthorized")
    greeting = talk.receive()
    if greeting.get("doctor") != VERSION:
        raise TransferError(f"{talk.peer} speaks another version of this test", code="protocol_error")
    theirs, mine = _nonce(greeting), secrets.token_hex(32)
    talk.send(nonce=mine, proof=_proof(key, _CALLER, theirs, mine))
    if not _is_right(talk.receive(), _proof(key, _LISTENER, theirs, mine)):
        raise ConfigError(f"{talk.peer} has another cluster key", code="unauthorized")
    talk.trust(*_seals(key, theirs, mine))


def welcome(talk: Talk, key: bytes | None) -> None:
    """The listener's half. Tells the caller why before it raises ConfigError or TransferError."""
    try:
        if key is None and not is_loopback(talk.peer):
            raise ConfigError("without --cluster-key-file only callers on the same host are taken", code="unauthorized")
        mine = secrets.token_hex(32)
        talk.send(doctor=VERSION, nonce=mine, keyed=key is not None)
        answer = talk.receive()
        theirs = _nonce(answer)
        if not _is_right(answer, _proof(key, _CALLER, mine, theirs)):
            both = key is not None and answer.get("proof")
            reason = "the cluster keys differ" if both else "only one of the two has a cluster key"
            raise ConfigError(f"refused: {reason}", code="unauthorized")
    except (ConfigError, TransferError) as error:
        talk.refuse(error)
        raise
    talk.send(proof=_proof(key, _LISTENER, mine, theirs))
    talk.trust(*reversed(_seals(key, mine, theirs)))


def _nonce(words: dict[str, Any]) -> str:
    nonce = words.get("nonce")
    if not isinstance(nonce, str) or not (len(nonce) == 64 and nonce.isascii()):
        raise TransferError("a greeting without a nonce", code="protocol_error")
    return nonce


def _is_right(words: dict[str, Any], proof: str) -> bool:
    return hmac.compare_digest(str(words.get("proof")).encode(), proof.encode())


def _proof(key: bytes | None, side: bytes, listener_nonce: str, caller_nonce: str) -> str:
    if key is None:
        return ""
    return hmac.new(key, side + listener_nonce.encode() + caller_nonce.encode(), hashlib.sha256).hexdigest()


def _seals(key: bytes | None, listener_nonce: str, caller_nonce: str) -> tuple[Seal | None, Seal | None]:
    """(the caller's, the listener's)."""
    if key is None:
        return None, None
    nonces = listener_nonce.encode(), caller_nonce.encode()
    return make_seal(key, _CALLER, *nonces), make_seal(key, _LISTENER, *nonces)


# What the other end says


def number(words: dict[str, Any], name: str) -> float:
    """Raises TransferError."""
    value = words.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGEST_NUMBER:
        raise _no_such(name, value)
    return float(value)


def address(words: dict[str, Any], name: str) -> int:
    """Of memory. Raises TransferError."""
    value = words.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**63:
        raise _no_such(name, value)
    return value


def text(words: dict[str, Any], name: str) -> str:
    """One line of it. Raises TransferError."""
    value = words.get(name)
    if not isinstance(value, str):
        raise _no_such(name, value)
    return shown(value)


def _no_such(name: str, value: object) -> TransferError:
    return TransferError(f"{name}: {shown(value)} is no answer to that", code="protocol_error")
