"""Signatures of frames between two ends that share the cluster key.

Each end signs what it sends with a key of its own, made from the cluster key and both nonces of the handshake, and
counts its frames. So whoever carries, listens to or has recorded a connection can neither change, add, repeat nor
reorder one. What is said is not hidden.
"""

from __future__ import annotations

import hashlib
import hmac

from common.errors import TransferError

TAG_BYTES = 16


class Seal:
    """One direction of a connection. key: 32 bytes, used for nothing else. Not to be used by two threads at once."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def sign(self, body: bytes) -> bytes:
        """The body with its signature in front."""
        return self._tag(body) + body

    def open(self, signed: bytes) -> bytes:
        """The body. Raises TransferError when it is not the peer's next one."""
        tag, body = signed[:TAG_BYTES], signed[TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(body)):
            raise TransferError("a frame that the peer has not signed", code="protocol_error")
        return body

    def _tag(self, body: bytes) -> bytes:
        number = self._count.to_bytes(8, "big")
        self._count += 1
        return hashlib.blake2b(number + body, key=self._key, digest_size=TAG_BYTES).digest()


def make_seal(cluster_key: bytes, side: bytes, server_nonce: bytes, client_nonce: bytes) -> Seal:
    """side: who signs, b"client" or b"server"."""
    return Seal(hmac.new(cluster_key, b"seal " + side + server_nonce + client_nonce, hashlib.sha256).digest())
