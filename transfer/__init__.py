"""Moving the state of a request from a prefill rank to a decode rank: transports, rendezvous, plan, leases, digests."""

from transfer.events import (
    Committed,
    DecodeEvent,
    Offer,
    PrefillEvent,
    Released,
    RoomDeclined,
    RoomFailed,
    RoomOpened,
    Sent,
)
from transfer.handshake import read_key
from transfer.messages import TrackState
from transfer.receiver import DecodeTransfer
from transfer.rendezvous import BootstrapServer
from transfer.sender import PrefillTransfer
from transfer.transport import Block, Transport, open_transport

__all__ = [
    "Block",
    "BootstrapServer",
    "Committed",
    "DecodeEvent",
    "DecodeTransfer",
    "Offer",
    "PrefillEvent",
    "PrefillTransfer",
    "Released",
    "RoomDeclined",
    "RoomFailed",
    "RoomOpened",
    "Sent",
    "TrackState",
    "Transport",
    "open_transport",
    "read_key",
]
