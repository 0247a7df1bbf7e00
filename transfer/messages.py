"""What the two ends of a hand-off say to each other: length-prefixed msgpack frames over TCP. Decode is the client.

client                      server
                 <─ Challenge          handshake (bootstrap endpoint and rank alike)
Answer           ─>
                 <─ Proof | Refused
Hello            ─>                    from here on every frame is signed, if there is a cluster key
                 <─ Hello | Refused
Lookup           ─>                    bootstrap endpoint only
                 <─ Ranks
Open | Decline   ─>                    rank only: one connection for all rooms of a pair of ranks
                                       Decline: decode serves alone, there is no answer
                 <─ Opened             both legs are here; writes may land from Open on
                 <─ Landed             this is in place (any number of times)
                 <─ Commit | Failed    Commit: every byte is in place
Accepted | Abort ─>                    Accepted: every digest was right
                 <─ Drained            after Failed or Abort: nothing more will be written
Ping, Pong       both ways
"""

from __future__ import annotations

import enum

import msgspec

from common.config import Verify
from common.errors import ErrorRecord
from common.layout import PoolPlacement, StateLayout

PROTOCOL_VERSION = 6


class TrackState(enum.StrEnum):
    """What decode has of the state at the tracked position, once a room is committed.

    NONE: nothing. RECEIVED: it lies in decode's track slot. SAME_AS_FINAL: the tracked position is the end of the
    prompt, so it is the final state; no byte of it was sent, and decode's track slot is as it was.
    """

    NONE = "none"
    RECEIVED = "received"
    SAME_AS_FINAL = "same_as_final"


class Challenge(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """keyed: whether the server has a cluster key."""

    version: int
    nonce: bytes
    keyed: bool


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """proof: HMAC-SHA256 of both nonces with the cluster key; empty without a key."""

    nonce: bytes
    proof: bytes


class Proof(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    proof: bytes


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Who this end is. instance: random, of this start of the process. ssm_wire_dtype: what SSM states cross as.
    transport, digest: what it writes with, how its parts are hashed. session, placements: where it can be written to.
    (The last five are empty on a bootstrap endpoint.)"""

    version: int
    role: str
    node_id: str
    instance: str
    verify: Verify
    layout: StateLayout
    ssm_wire_dtype: str = ""
    transport: str = ""
    digest: str = ""
    session: str = ""
    placements: tuple[PoolPlacement, ...] = ()


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    error: ErrorRecord


class Lookup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Where are the ranks of this node?"""


class Ranks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Control addresses; a room belongs to rank number room % len(addresses)."""

    addresses: tuple[tuple[str, int], ...]


class Open(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """pages: decode's page for each page of the prompt (more are no fault); the first num_cached_pages of them are held
    by decode already and stay as they are. track_slot None: decode has no use for it.

    lease: counts the leases of a decode rank; every later message about the room repeats it, so that what was said of
    an earlier use of a room's number is never taken for this one.
    """

    room: int
    lease: int
    rid: str
    pages: tuple[int, ...]
    slot: int
    track_slot: int | None
    num_cached_pages: int


class Decline(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decode holds so much of the prompt that it prefills the rest itself: nothing is to be computed or sent."""

    room: int
    rid: str


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    room: int
    lease: int


class Landing(msgspec.Struct, frozen=True, kw_only=True):
    """In layers first_layer … end_layer - 1: KV of the prompt's pages before num_pages (0: nothing new); with `state`,
    the final conv and SSM state; with `track`, what belongs in the track slot."""

    first_layer: int
    end_layer: int
    num_pages: int
    state: bool
    track: bool


class Landed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What is in place and will not be written again; decode may hash it now. More comes, or Commit follows."""

    room: int
    lease: int
    landings: tuple[Landing, ...]


class Commit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """num_pages: prompt pages from 0 that hold KV now. metadata: an encoded HandoffMetadata.

    track: RECEIVED if the track slot was written. digests: by part, empty when verify is off. seconds: from the end of
    compute to the end of the last write.
    """

    room: int
    lease: int
    num_pages: int
    metadata: bytes
    track: TrackState
    digests: dict[str, bytes]
    bytes_by_part: dict[str, int]
    seconds: float


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    room: int
    lease: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    room: int
    lease: int
    error: ErrorRecord


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    room: int
    lease: int
    error: ErrorRecord


class Drained(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nothing more is written for this lease. cut: a write of it failed and was ended by closing its connection; what
    is left in that may land until it is gone."""

    room: int
    lease: int
    cut: bool = False


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """lanes: tell me which connections are yours."""

    lanes: bool = False


class Pong(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """lanes: near ends ("address:port") of the sender's connections, when it was asked for them."""

    lanes: tuple[str, ...] | None = None


Message = (
    Challenge
    | Answer
    | Proof
    | Hello
    | Refused
    | Lookup
    | Ranks
    | Open
    | Decline
    | Opened
    | Landed
    | Commit
    | Accepted
    | Failed
    | Abort
    | Drained
    | Ping
    | Pong
)
