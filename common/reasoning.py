"""What a model thinks and what it says: `<think>…</think>` taken out of an answer, as it comes.

    "<thi", "nk>Two and ", "two.</th", "ink>\\n\\nFour."   ──►   reasoning "Two and two.", content "Four."

A marker may be cut at any place between two pieces: an end that may still become one is held back. White space around
the markers belongs to neither side. After the first `</think>` everything is content, further markers included.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from common.markers import length_of_beginning

OPEN, CLOSE = "<think>", "</think>"


class ReasoningParser(enum.StrEnum):
    """none: answers are not split. think: `<think>…</think>`. auto: think where the chat template speaks of it."""

    NONE = "none"
    THINK = "think"
    AUTO = "auto"


def splits_reasoning(parser: ReasoningParser, template: str | None) -> bool:
    """Whether answers are split. template: the chat template's source, None where the model has none."""
    match parser:
        case ReasoningParser.NONE:
            return False
        case ReasoningParser.THINK:
            return True
        case ReasoningParser.AUTO:
            return template is not None and CLOSE in template


def opens_thinking(prompt: str) -> bool:
    """Whether a rendered prompt ends with an open `<think>`, so that the answer begins inside the thought."""
    return prompt.rstrip().endswith(OPEN)


class Split(NamedTuple):
    """A piece of what is thought and a piece of what is said; either may be empty."""

    reasoning: str
    content: str


NOTHING = Split("", "")


class ReasoningSplitter:
    """Fed an answer's text piece by piece. thinking: the prompt has opened the thought (`opens_thinking`).

    What is given out, put together, does not depend on where the text was cut. A `</think>` in an answer that opened no
    thought is left out; what came before it has been given out as content by then (`split_reasoning` knows better).
    """

    def __init__(self, *, thinking: bool) -> None:
        self._thinking = thinking
        self._read = self._read_opening
        self._has_thought = False
        self._held = ""

    def push(self, text: str) -> Split:
        """What the next piece of the answer adds."""
        return self._take(text, is_last=False)

    def finish(self) -> Split:
        """The answer has ended: what was held back. What was cut inside a thought is reasoning."""
        return self._take("", is_last=True)

    def _take(self, text: str, *, is_last: bool) -> Split:
        self._held += text
        reasoning = content = ""
        while True:
            read = self._read
            found = read(is_last)
            reasoning, content = reasoning + found.reasoning, content + found.content
            if self._read == read:
                return Split(reasoning, content)

    def _read_opening(self, is_last: bool) -> Split:
        """Wait until it is clear whether the answer begins with the marker. A prompt that opened it is not contradicted
        by a model that does so again."""
        text = self._held.lstrip()
        if text.startswith(OPEN):
            self._held, self._read = text[len(OPEN) :], self._read_thought
        elif is_last or not OPEN.startswith(text):
            self._read = self._read_thought if self._thinking else self._read_said
        return NOTHING

    def _read_thought(self, is_last: bool) -> Split:
        if not self._has_thought:
            self._held = self._held.lstrip()
        thought, marker, after = self._held.partition(CLOSE)
        if marker:
            self._held, self._read = after, self._read_gap
            return Split(thought.rstrip(), "")
        end = len(thought) - (0 if is_last else length_of_beginning(thought, CLOSE))
        shown = thought[:end].rstrip()
        self._held = "" if is_last else thought[len(shown) :]
        self._has_thought |= bool(shown)
        return Split(shown, "")

    def _read_gap(self, is_last: bool) -> Split:
        """Behind `</think>`: content begins with the first character that is no white space."""
        self._held = self._held.lstrip()
        if self._held:
            self._read = self._read_content
        return NOTHING

    def _read_said(self, is_last: bool) -> Split:
        """Content of an answer that opened no thought."""
        said, marker, after = self._held.partition(CLOSE)
        if marker:
            self._held, self._read = after, self._read_gap
            return Split("", said)
        end = len(said) - (0 if is_last else length_of_beginning(said, CLOSE))
        self._held = said[end:]
        return Split("", said[:end])

    def _read_content(self, is_last: bool) -> Split:
        content, self._held = self._held, ""
        return Split("", content)


def split_reasoning(text: str, *, thinking: bool) -> Split:
    """The whole of an answer at once. What stands before a `</think>` without an opening is reasoning."""
    splitter = ReasoningSplitter(thinking=thinking or _closes_only(text))
    begun, ended = splitter.push(text), splitter.finish()
    return Split(begun.reasoning + ended.reasoning, begun.content + ended.content)


def _closes_only(text: str) -> bool:
    return CLOSE in text and not text.lstrip().startswith(OPEN)
