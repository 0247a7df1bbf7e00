"""Thoughts told from content, however the text is cut."""

from __future__ import annotations

import itertools
import random

import pytest

from common.reasoning import (
    ReasoningParser,
    ReasoningSplitter,
    Split,
    opens_thinking,
    split_reasoning,
    splits_reasoning,
)

# text, whether the prompt has opened the thought, (reasoning, content)
CASES = [
    ("<think>\nTwo and two.\n</think>\n\nFour.", False, ("Two and two.", "Four.")),
    ("\nTwo and two.\n</think>\n\nFour.\n", True, ("Two and two.", "Four.\n")),
    ("<think>\nTwo.</think>Four.", True, ("Two.", "Four.")),
    ("Two and", True, ("Two and", "")),
    ("Two and </thi", True, ("Two and </thi", "")),
    ("<think>Two and two  ", False, ("Two and two", "")),
    ("<think>", False, ("", "")),
    ("<thi", False, ("", "<thi")),
    ("<think>  </think>Four", False, ("", "Four")),
    ("</think>\nFour", True, ("", "Four")),
    ("", True, ("", "")),
    ("", False, ("", "")),
    ("  Four.  ", False, ("", "  Four.  ")),
    ("a < b <thinking> c", False, ("", "a < b <thinking> c")),
    ("x</think>y</think><think>z</think>", True, ("x", "y</think><think>z</think>")),
    ("a </think </think> b", True, ("a </think", "b")),
    ("é\n\n😀 </think>\n日本", True, ("é\n\n😀", "日本")),
]


def streamed(text: str, cuts: list[int], *, thinking: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(thinking=thinking)
    pieces = [splitter.push(text[a:b]) for a, b in itertools.pairwise([0, *cuts, len(text)])]
    pieces.append(splitter.finish())
    return "".join(p.reasoning for p in pieces), "".join(p.content for p in pieces)


@pytest.mark.parametrize(("text", "thinking", "expected"), CASES)
def test_a_text_is_split_the_same_wherever_it_is_cut(text: str, thinking: bool, expected: tuple[str, str]) -> None:
    assert split_reasoning(text, thinking=thinking) == expected
    cuts = [[], list(range(len(text)))]
    cuts += [list(two) for two in itertools.combinations(range(len(text)), 2)]
    for each in cuts:
        assert streamed(text, each, thinking=thinking) == expected, each


def test_nothing_that_was_given_out_is_taken_back_or_held_longer_than_needed() -> None:
    splitter = ReasoningSplitter(thinking=False)
    assert splitter.push("<think>\nTwo") == Split("Two", "")
    assert splitter.push(" and ") == Split(" and", ""), "white space may be what stands before the marker"
    assert splitter.push("two.<") == Split(" two.", "")
    assert splitter.push("/b></thi") == Split("</b>", "")
    assert splitter.push("nk>\n") == Split("", "")
    assert splitter.push("\nFour <") == Split("", "Four <")
    assert splitter.push("/think>") == Split("", "/think>")


def test_a_closing_marker_without_an_opening() -> None:
    """At once it is known that what stands before it was a thought; in a stream that has been given out as content."""
    text = "Two and two.</think>\nFour."
    assert split_reasoning(text, thinking=False) == ("Two and two.", "Four.")
    for cut in range(len(text)):
        assert streamed(text, [cut], thinking=False) == ("", "Two and two.Four.")


def test_random_texts_of_markers() -> None:
    rng = random.Random(0)
    parts = ["<think>", "</think>", "<", "/", "think>", " ", "\n", "a", "é", "</", "<think"]
    for _ in range(300):
        text, thinking = "".join(rng.choices(parts, k=rng.randrange(9))), rng.random() < 0.5
        whole = streamed(text, [], thinking=thinking)
        for _ in range(5):
            cuts = sorted(rng.sample(range(len(text) + 1), k=min(3, len(text))))
            assert streamed(text, cuts, thinking=thinking) == whole, (text, cuts)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|assistant|>\n<think>\n", True),
        ("<|assistant|><think>", True),
        ("<|assistant|>\n<think></think>", False),
        ("<|assistant|>\n<think>\n\n</think>\n\n", False),
        ("<|assistant|>", False),
        ("What does <think> mean?<|assistant|>", False),
    ],
)
def test_a_prompt_that_ends_inside_a_thought(prompt: str, expected: bool) -> None:
    assert opens_thinking(prompt) is expected


def test_auto_looks_at_the_template() -> None:
    assert splits_reasoning(ReasoningParser.AUTO, "{{ '<think></think>' }}")
    assert not splits_reasoning(ReasoningParser.AUTO, "{{ messages }}")
    assert not splits_reasoning(ReasoningParser.AUTO, None)
    assert splits_reasoning(ReasoningParser.THINK, None)
    assert not splits_reasoning(ReasoningParser.NONE, "<think></think>")
