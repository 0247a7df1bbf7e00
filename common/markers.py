"""Finding a marker in a text that comes in pieces."""

from __future__ import annotations


def length_of_beginning(text: str, marker: str) -> int:
    """How many characters at the end of text may be the beginning of the marker, the whole marker excepted."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
