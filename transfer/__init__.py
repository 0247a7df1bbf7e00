"""Moving the state of a request from a prefill rank to a decode rank: transports, rendezvous, plan, leases, digests."""

from transfer.events import Committed, DecodeEvent, Offer, PrefillEvent, Released, RoomFailed, RoomOpened, Sent
from transfer.handshake import read_key
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
    "RoomFailed",
    "RoomOpened",
    "Sent",
    "Transport",
    "open_transport",
    "read_key",
]
