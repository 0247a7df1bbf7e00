"""The process that tries grammars out, so that one that is too complex costs a node nothing but a refusal.

    front ── {"kind", "text"} ──► check ── {"text"} or {"error"} ──► front          a line of JSON each

A grammar is brought into llguidance's form, compiled, and followed for some tokens. When that takes more processor time
than `CPU_S`, the kernel ends the process (the compiler cannot be interrupted); the front takes that for a refusal and
starts another one. `python -m node.grammar_check`; the settings are the first line of stdin.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import sys
from collections.abc import Callable

import msgspec
from llguidance import LLMatcher, LLTokenizer, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from common.constraints import WHITESPACE
from engine.grammar import GrammarError, compile_grammar, load_tokens
from node.grammars import CPU_S, Question, Settings, Verdict

MEMORY_BYTES = 8 * 2**30  # of addresses; what a second of processor time can fill is far less
NUM_TRIED_TOKENS = 64


def check(tokens: LLTokenizer, question: Question) -> Verdict:
    try:
        text = _FORMS[question.kind](question.text)
        _follow(compile_grammar(tokens, text), tokens.eos_tokens)
    except (GrammarError, ValueError, KeyError, TypeError, RecursionError) as error:
        return Verdict(error=_reason(error))
    return Verdict(text=text)


def _follow(matcher: LLMatcher, eos_ids: list[int]) -> None:
    """Make an answer of the first tokens at random. Raises GrammarError where that ends in nothing."""
    choice = random.Random(0)
    for _ in range(NUM_TRIED_TOKENS):
        mask = bytearray(matcher.compute_bitmask())
        if matcher.is_error():
            raise GrammarError(f"no answer follows it: {matcher.get_error()}")
        can_end = matcher.is_accepting()
        for eos_id in eos_ids:
            mask[eos_id // 8] &= ~(1 << eos_id % 8)
        token_id = _any_of(bytes(mask), choice)
        if token_id is None and can_end:
            return
        if token_id is None or not matcher.consume_token(token_id):
            raise GrammarError(f"no answer follows it: {matcher.get_error()}")


def _any_of(mask: bytes, choice: random.Random) -> int | None:
    """One of the tokens of a mask. As fast as bytes are searched: a vocabulary has a hundred thousand tokens or two."""
    start = choice.randrange(len(mask))
    for offset, part in ((start, mask[start:]), (0, mask)):
        if rest := part.lstrip(b"\0"):
            at = offset + len(part) - len(rest)
            return 8 * at + choice.choice([bit for bit in range(8) if rest[0] >> bit & 1])
    return None


def _from_schema(text: str) -> str:
    return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": WHITESPACE})


def _from_ebnf(text: str) -> str:
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    except Exception as error:  # the converter raises plain Exception
        raise ValueError(str(error)) from error


class _Structure(msgspec.Struct, frozen=True):
    begin: str
    end: str
    schema: dict[str, object] = {}


class _StructuralTag(msgspec.Struct, frozen=True):
    structures: list[_Structure]
    triggers: list[str]
    type: str = "structural_tag"


def _from_structural_tag(text: str) -> str:
    """Free text, but what begins with a trigger has to go on as one of the structures."""
    found = msgspec.json.decode(text, type=_StructuralTag)
    if not found.structures or "" in found.triggers:
        raise ValueError("structures must not be empty, nor may a trigger be")
    return LLMatcher.grammar_from_lark(StructTag.to_grammar([_tag(found, one) for one in found.structures]))


def _tag(found: _StructuralTag, one: _Structure) -> StructTag:
    trigger = next((trigger for trigger in found.triggers if one.begin.startswith(trigger)), None)
    if trigger is None:
        raise ValueError(f"no trigger begins {one.begin!r}")
    return StructTag(trigger=trigger, begin=one.begin, grammar=json.dumps(one.schema), end=one.end)


_FORMS: dict[str, Callable[[str], str]] = {
    "json_schema": _from_schema,
    "regex": LLMatcher.grammar_from_regex,
    "ebnf": _from_ebnf,
    "structural_tag": _from_structural_tag,
}


def _reason(error: Exception) -> str:
    """The library's reason without the place in its own code and without what is not for clients."""
    lines = [line for line in str(error).splitlines() if line.strip() and line.strip() != "<non-verbose/>"]
    return " ".join(lines)[:500] or type(error).__name__


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=Settings)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokens: LLTokenizer | GrammarError
    try:
        tokens = load_tokens(settings.model_path, settings.vocab_size, frozenset(settings.eos_ids))
    except GrammarError as error:
        tokens = error
    while line := sys.stdin.buffer.readline():
        question = msgspec.json.decode(line, type=Question)
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        verdict = check(tokens, question) if isinstance(tokens, LLTokenizer) else Verdict(error=tokens.message)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(msgspec.json.encode(verdict) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
