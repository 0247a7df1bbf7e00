"""Grammars for tests: from what a client writes to what a rank takes, without a front."""

from __future__ import annotations

from functools import cache

from llguidance import LLTokenizer

from engine.grammar import load_tokens
from node.grammar_check import check
from node.grammars import Question
from tests.support.stack import MODEL

VOCAB = 1024
EOS = 0


@cache
def tokens() -> LLTokenizer:
    """Of tandem-mini."""
    return load_tokens(str(MODEL), VOCAB, frozenset({EOS}))


def grammar(kind: str, text: str) -> str:
    """kind: json_schema, regex, ebnf or structural_tag."""
    verdict = check(tokens(), Question(kind=kind, text=text))
    assert verdict.error is None, verdict.error
    return verdict.text
