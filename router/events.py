"""Cuts a byte stream into whole server-sent events, without reading them. A blank line (LF or CRLF) ends an event."""

from __future__ import annotations

_ENDS = (b"\n\n", b"\n\r\n")


class WholeEvents:
    """Holds back the beginning of an event until its end arrives, so that whatever the router must add (an error) never
    lands inside one. The bytes that come out are those that went in."""

    def __init__(self) -> None:
        self._begun = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        """Everything up to the last event's end, maybe nothing."""
        if not self._begun and chunk.endswith(_ENDS):
            return chunk
        # An end may lie across two chunks, but then it begins in the last two bytes of what was there before.
        seen = max(0, len(self._begun) - 2)
        self._begun += chunk
        cut = max(_after(self._begun, end, seen) for end in _ENDS)
        whole = bytes(self._begun[:cut])
        del self._begun[:cut]
        return whole

    def rest(self) -> bytes:
        """What never got its end, when the stream is over."""
        return bytes(self._begun)


def _after(text: bytearray, end: bytes, start: int) -> int:
    """Where the last `end` at or after `start` is over; 0 when there is none."""
    found = text.rfind(end, start)
    return found + len(end) if found >= 0 else 0


def split_events(whole: bytes) -> list[bytes]:
    """The events of what `WholeEvents.feed` gave, each without its final blank line, with LF for CRLF."""
    return [event for event in whole.replace(b"\r\n", b"\n").split(b"\n\n") if event]
