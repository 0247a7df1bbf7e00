"""Answers that follow a grammar: which tokens may come next, and whether the answer is complete.

    common/constraints, node/grammars ──► text of a grammar (in llguidance's form), checked by node/grammar_checker
                      GrammarCompiler ──► compiled once for all sequences that use it, on a thread of its own
                              Grammar ──► one sequence's place in it: allowed tokens, end

A `Grammar` follows the answer by its token ids, so that a sequence that was handed over, retracted or resumed elsewhere
stands where its answer stands. Nothing else is state. No torch here.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from common.errors import RequestError

MAX_COMPILED = 64
TOKEN_CPU_S = 0.25  # of its thread, to take a token in or to say what may follow: more slows everybody down


def parser_limits() -> LLParserLimits:
    """What a grammar may cost: a row of the parser, a lexer and its states (1 to 2 kB each)."""
    return LLParserLimits(
        max_items_in_row=2000, max_lexer_states=50_000, max_grammar_size=100_000, verbose_errors=False
    )


class GrammarError(RequestError):
    """An answer cannot follow its grammar: it is too complex, or the answer so far does not follow it."""

    default_code = "grammar_failed"


def load_tokens(model_path: str, vocab_size: int, eos_ids: frozenset[int]) -> LLTokenizer:
    """What the tokens of a model folder stand for. vocab_size: the model's, which may be more than the tokenizer's.

    Raises GrammarError where llguidance does not know that kind of tokenizer.
    """
    try:
        text = (Path(model_path) / "tokenizer.json").read_text()
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=sorted(eos_ids) or None)
    except (ValueError, RuntimeError, OSError) as error:
        raise GrammarError(f"answers cannot be constrained with this model's tokenizer: {error}") from error


def compile_grammar(tokens: LLTokenizer, text: str) -> LLMatcher:
    """text: a grammar in llguidance's form. Takes as long as the grammar is complex. Raises GrammarError."""
    matcher = LLMatcher(tokens, text, log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
    return matcher


class Grammar:
    """One sequence's place in its grammar.

    The device's thread asks for `allowed`, the scheduler's for `is_over`; both name the whole answer so far. A lock
    lets only one of them move on at a time.
    """

    def __init__(self, compiled: Future[LLMatcher]) -> None:
        self._compiled = compiled
        self._matcher: LLMatcher | None = None
        self._num_taken = 0
        self._lock = threading.Lock()
        self._error: GrammarError | None = None

    def is_ready(self, timeout_s: float = 0.0) -> bool:
        """Whether it is compiled, or has failed to be, within this time."""
        return bool(wait([self._compiled], timeout_s).done) if timeout_s else self._compiled.done()

    def allowed(self, output_ids: Sequence[int]) -> bytes:
        """Which tokens may follow these: bit i % 8 of byte i // 8 is token i. Raises GrammarError."""
        with self._lock:
            matcher = self._at(output_ids)
            begin_s = time.thread_time()
            mask = matcher.compute_bitmask()
            self._check(matcher, begin_s, "the answer cannot follow its grammar")
            return mask

    def is_over(self, output_ids: Sequence[int]) -> bool:
        """Whether the answer is complete and nothing can follow. False after an error, which `allowed` raises."""
        with self._lock:
            try:
                return self._at(output_ids).is_stopped()
            except GrammarError:
                return False

    def _at(self, output_ids: Sequence[int]) -> LLMatcher:
        """The matcher behind these tokens. An answer only grows."""
        if self._error is not None:
            raise self._error
        if self._matcher is None:
            self._matcher = self._compiled.result().deep_copy()
        assert self._num_taken <= len(output_ids)
        begin_s = time.thread_time()
        new = list(output_ids[self._num_taken :])
        self._num_taken = len(output_ids)
        if new:
            self._matcher.consume_tokens(new)
            self._check(self._matcher, begin_s, "the answer does not follow its grammar", num_tokens=len(new))
        return self._matcher

    def _check(self, matcher: LLMatcher, begin_s: float, failure: str, num_tokens: int = 1) -> None:
        """Keep and raise what is wrong with the matcher, or with the time it takes."""
        seconds = (time.thread_time() - begin_s) / num_tokens
        if matcher.is_error():
            self._error = GrammarError(f"{failure}: {_first_line(matcher.get_error())}")
        elif seconds > TOKEN_CPU_S:
            self._error = GrammarError(f"the grammar is too complex: {seconds:.2f} s a token, at most {TOKEN_CPU_S:g}")
        if self._error is not None:
            raise self._error


class GrammarCompiler:
    """Compiles what sequences bring along, each text once while it is remembered, beside the steps of the engine."""

    def __init__(self, model_path: str, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._arguments = (model_path, vocab_size, eos_ids)
        self._tokens: LLTokenizer | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._known: OrderedDict[str, Future[LLMatcher]] = OrderedDict()

    def start(self, text: str) -> Grammar:
        """Does not wait. What is wrong with the text is raised by the first question to the `Grammar`."""
        compiled = self._known.get(text)
        if compiled is None:
            compiled = self._known[text] = self._thread.submit(self._compile, text)
        self._known.move_to_end(text)
        while len(self._known) > MAX_COMPILED:
            self._known.popitem(last=False)
        return Grammar(compiled)

    def _compile(self, text: str) -> LLMatcher:
        if self._tokens is None:
            self._tokens = load_tokens(*self._arguments)
        return compile_grammar(self._tokens, text)


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else "no reason given"
