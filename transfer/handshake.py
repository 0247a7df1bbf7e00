"""Who may talk, and whether the two ends fit: proof of the cluster key first, then protocol, layout and verify mode."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from common.config import Verify
from common.errors import ConfigError, ServingError, TransferError, from_record, why_unreadable
from common.layout import PoolPlacement, StateLayout
from common.net import is_loopback
from transfer.channel import Channel
from transfer.digest import digest_kind
from transfer.messages import PROTOCOL_VERSION, Answer, Challenge, Hello, Message, Proof, Refused
from transfer.seal import Seal, make_seal
from transfer.transport import Transport

_NONCE_BYTES = 32
M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Identity:
    """What a rank says of itself to every peer. instance: random, of this start of the process."""

    role: str
    node_id: str
    verify: Verify
    layout: StateLayout
    placements: tuple[PoolPlacement, ...]
    transport: Transport
    ssm_wire_dtype: str
    instance: str = field(default_factory=lambda: secrets.token_hex(8))

    def hello(self) -> Hello:
        """Call it after all memory is registered: the transport's session may name it."""
        return Hello(
            version=PROTOCOL_VERSION,
            role=self.role,
            node_id=self.node_id,
            instance=self.instance,
            verify=self.verify,
            layout=self.layout,
            ssm_wire_dtype=self.ssm_wire_dtype,
            transport=self.transport.name,
            digest=digest_kind(self.transport),
            session=self.transport.session,
            placements=self.placements,
        )


def read_key(path: str | None) -> bytes | None:
    """The shared secret of the cluster, without surrounding white space; None without a file. Raises ConfigError."""
    if path is None:
        return None
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"--cluster-key-file {path}: {why_unreadable(error)}", param="cluster_key_file") from error
    if len(key) < 16:
        raise ConfigError(f"--cluster-key-file {path}: {len(key)} bytes, at least 16", param="cluster_key_file")
    return key


async def welcome(channel: Channel, key: bytes | None, hello: Hello) -> Hello:
    """The server's half; the client's hello. Tells the client why before it raises (ConfigError, TransferError)."""
    try:
        await _check_client(channel, key)
        theirs = await expect(channel, Hello)
        check_fit(hello, theirs)
    except ConfigError as error:
        channel.send(Refused(error=error.record()))
        raise
    channel.send(hello)
    return theirs


async def introduce(channel: Channel, key: bytes | None, hello: Hello) -> Hello:
    """The client's half; the server's hello. Raises ConfigError, TransferError, WorkerError."""
    if key is None and not is_loopback(channel.peer_host):
        raise ConfigError(
            f"{channel.peer_host} is not this host: set --cluster-key-file on every node", code="unauthorized"
        )
    challenge = await expect(channel, Challenge)
    _check_version(challenge.version)
    if len(challenge.nonce) != _NONCE_BYTES:
        raise TransferError(f"a nonce of {len(challenge.nonce)} bytes", code="protocol_error")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    channel.send(Answer(nonce=nonce, proof=_proof(key, b"client", challenge.nonce, nonce)))
    proof = (await expect(channel, Proof)).proof
    if not hmac.compare_digest(proof, _proof(key, b"server", challenge.nonce, nonce)):
        raise ConfigError(f"the node at {channel.peer_host} has another cluster key", code="unauthorized")
    channel.trust(*_seals(key, challenge.nonce, nonce))
    channel.send(hello)
    theirs = await expect(channel, Hello)
    check_fit(hello, theirs)
    return theirs


async def expect(channel: Channel, kind: type[M]) -> M:
    """The next message, which must be a `kind`. Raises what a `Refused` carries, TransferError for anything else."""
    message: Message = await channel.receive()
    if isinstance(message, Refused):
        raise from_record(message.error)
    if not isinstance(message, kind):
        raise TransferError(
            f"{channel.peer_host} sent {type(message).__name__} in place of {kind.__name__}", code="protocol_error"
        )
    return message


def check_fit(mine: Hello, theirs: Hello) -> None:
    """Refuse, naming both values, what would have to be adapted. Raises ConfigError."""
    _check_version(theirs.version)
    differences = mine.layout.differences(theirs.layout)
    if differences:
        raise ConfigError(
            f"{mine.role} node {mine.node_id} and {theirs.role} node {theirs.node_id} differ: {'; '.join(differences)}",
            code="layout_mismatch",
        )
    if mine.verify is not theirs.verify:
        raise ConfigError(
            f"--verify: {mine.verify.value} here, {theirs.verify.value} there", code="layout_mismatch", param="verify"
        )
    ours, other = mine.ssm_wire_dtype, theirs.ssm_wire_dtype
    if ours and other and ours != other:
        raise ConfigError(
            f"--ssm-wire-dtype: {ours} here, {other} there", code="layout_mismatch", param="ssm_wire_dtype"
        )
    for what in ("transport", "digest"):
        ours, other = getattr(mine, what), getattr(theirs, what)
        if ours and other and ours != other:
            raise ConfigError(f"{what}: {ours} here, {other} there", code="layout_mismatch", param="transport")


async def _check_client(channel: Channel, key: bytes | None) -> None:
    """Let in who knows the key; without a key, who is on this host."""
    if key is None and not is_loopback(channel.peer_host):
        raise ConfigError("without --cluster-key-file only peers on the same host are accepted", code="unauthorized")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    channel.send(Challenge(version=PROTOCOL_VERSION, nonce=nonce, keyed=key is not None))
    answer = await expect(channel, Answer)
    if not hmac.compare_digest(answer.proof, _proof(key, b"client", nonce, answer.nonce)):
        reason = "the cluster keys differ" if key and answer.proof else "only one of the two nodes has a cluster key"
        raise ConfigError(f"refused: {reason}", code="unauthorized")
    if len(answer.nonce) != _NONCE_BYTES:
        raise TransferError(f"a nonce of {len(answer.nonce)} bytes", code="protocol_error")
    channel.send(Proof(proof=_proof(key, b"server", nonce, answer.nonce)))
    channel.trust(*reversed(_seals(key, nonce, answer.nonce)))


def _proof(key: bytes | None, side: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    if key is None:
        return b""
    return hmac.new(key, side + server_nonce + client_nonce, hashlib.sha256).digest()


def _seals(key: bytes | None, server_nonce: bytes, client_nonce: bytes) -> tuple[Seal | None, Seal | None]:
    """(the client's, the server's); without a key nothing is signed."""
    if key is None:
        return None, None
    return make_seal(key, b"client", server_nonce, client_nonce), make_seal(key, b"server", server_nonce, client_nonce)


def _check_version(theirs: int) -> None:
    if theirs != PROTOCOL_VERSION:
        raise ConfigError(f"hand-off protocol: {PROTOCOL_VERSION} here, {theirs} there", code="layout_mismatch")


def brief(error: BaseException) -> str:
    """An error as one line of a log."""
    return f"{error.code}: {error.message}" if isinstance(error, ServingError) else f"{type(error).__name__}: {error}"
