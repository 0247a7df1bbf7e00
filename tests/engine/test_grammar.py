"""A sequence's place in its grammar, and what its mask does to a row of logits."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest
import torch
from llguidance import LLMatcher

from common.sampling import LogprobOptions, SamplingParams
from engine.grammar import MAX_COMPILED, Grammar, GrammarCompiler, GrammarError, compile_grammar, load_tokens
from engine.sampler import SampleRow, sample
from tests.support.grammars import EOS, VOCAB, tokens
from tests.support.stack import MODEL


def start(regex: str) -> Grammar:
    compiled: Future[LLMatcher] = Future()
    compiled.set_result(compile_grammar(tokens(), LLMatcher.grammar_from_regex(regex)))
    return Grammar(compiled)


def ids(text: str) -> list[int]:
    return tokens().tokenize_str(text)


def allowed_ids(mask: bytes) -> set[int]:
    return {i for i in range(VOCAB) if mask[i // 8] >> i % 8 & 1}


# -- the place in the grammar ------------------------------------------------------------------------------------------


def test_the_mask_is_of_what_may_follow() -> None:
    grammar = start("[0-9]{2}x")
    digits = {ids(str(n))[0] for n in range(10)}
    assert allowed_ids(grammar.allowed([])) >= digits
    assert allowed_ids(grammar.allowed(ids("12"))) == {ids("x")[0]}
    assert not grammar.is_over(ids("12")) and grammar.is_over(ids("12x"))
    assert allowed_ids(grammar.allowed(ids("12x"))) == {EOS}


def test_the_end_token_is_allowed_where_the_answer_may_end() -> None:
    grammar = start("[0-9]+")
    assert EOS not in allowed_ids(grammar.allowed([])) and EOS in allowed_ids(grammar.allowed(ids("1")))
    assert not grammar.is_over(ids("1")) and grammar.is_over([*ids("1"), EOS])


def test_it_follows_an_answer_that_is_named_whole_however_much_of_it_is_new() -> None:
    answer = ids("aabbaabb")
    at_once, one_by_one = start("[ab]+"), start("[ab]+")
    for n in range(len(answer)):
        one_by_one.allowed(answer[:n])
    assert at_once.allowed(answer) == one_by_one.allowed(answer)


def test_an_answer_outside_its_grammar_is_an_error_and_no_end() -> None:
    grammar = start("[0-9]+")
    assert not grammar.is_over(ids("a"))
    with pytest.raises(GrammarError, match="does not follow"):
        grammar.allowed(ids("a"))


def test_an_error_stays() -> None:
    grammar = start("[0-9]+")
    assert not grammar.is_over(ids("a")) and not grammar.is_over(ids("a1"))
    for answer in (ids("a"), ids("a1")):
        with pytest.raises(GrammarError, match="does not follow"):
            grammar.allowed(answer)


@pytest.mark.parametrize("answer", [[], [1]], ids=["mask", "token"])
def test_a_grammar_that_takes_too_long_for_a_token_fails(answer: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = start("(.|\n)*")
    monkeypatch.setattr("engine.grammar.TOKEN_CPU_S", -1.0)
    with pytest.raises(GrammarError, match="too complex"):
        grammar.allowed(answer)
    assert not grammar.is_over(answer)


def test_two_threads_may_ask() -> None:
    """As the device's and the scheduler's do with overlap: they name the same answer at the same time."""
    grammar, answer = start("[a-z ]{60,}"), ids("the quick brown fox jumps over the lazy dog " * 4)
    failures: list[BaseException] = []

    def ask(is_device: bool) -> None:
        try:
            for n in range(len(answer)):
                gate.wait()
                if is_device:
                    grammar.allowed(answer[:n])
                else:
                    assert not grammar.is_over(answer[:n])
        except BaseException as error:
            failures.append(error)
            gate.abort()

    gate = threading.Barrier(2, timeout=20)
    threads = [threading.Thread(target=ask, args=(device,)) for device in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# -- compiling ---------------------------------------------------------------------------------------------------------


def test_a_grammar_is_compiled_once_and_sequences_do_not_share_their_place() -> None:
    compiler = GrammarCompiler(str(MODEL), VOCAB, frozenset({EOS}))
    text = LLMatcher.grammar_from_regex("[ab]{3}")
    first, second = compiler.start(text), compiler.start(text)
    assert first._compiled is second._compiled
    assert first.is_over(ids("aba")) and not second.is_over(ids("a")) and first.is_over(ids("aba"))
    assert allowed_ids(second.allowed(ids("a"))) == allowed_ids(compiler.start(text).allowed(ids("a"))) != {EOS}


def test_what_is_remembered_is_bounded_and_the_oldest_goes() -> None:
    compiler = GrammarCompiler(str(MODEL), VOCAB, frozenset({EOS}))
    kept = LLMatcher.grammar_from_regex("kept")
    first = compiler.start(kept)
    for n in range(MAX_COMPILED + 10):
        compiler.start(LLMatcher.grammar_from_regex(f"a{n}"))
        assert compiler.start(kept)._compiled is first._compiled
    assert len(compiler._known) == MAX_COMPILED
    assert first.is_over(ids("kept"))


def test_a_broken_grammar_is_an_error_of_the_first_question() -> None:
    compiler = GrammarCompiler(str(MODEL), VOCAB, frozenset({EOS}))
    grammar = compiler.start(LLMatcher.grammar_from_regex("[0-9"))
    for _ in range(2):
        with pytest.raises(GrammarError, match="unclosed"):
            grammar.allowed([])
    assert not grammar.is_over([])


def test_a_tokenizer_that_does_not_fit_is_named() -> None:
    with pytest.raises(GrammarError, match="tokenizer"):
        load_tokens(str(MODEL), VOCAB // 2, frozenset({EOS}))


# -- the mask ----------------------------------------------------------------------------------------------------------


def mask_of(*token_ids: int) -> bytes:
    bits = bytearray(8)  # 64 tokens
    for token_id in token_ids:
        bits[token_id // 8] |= 1 << token_id % 8
    return bytes(bits)


def row(allowed: bytes | None, **params: object) -> SampleRow:
    params = {"temperature": 0.0, "sampling_seed": 5, **params}
    return SampleRow(
        params=SamplingParams(**params),  # type: ignore[arg-type]
        logprobs=LogprobOptions(wanted=True, top_num=2),
        prompt_ids=[1, 2],
        output_ids=[],
        allowed=allowed,
    )


def choose(rows: list[SampleRow], logits: torch.Tensor) -> list[int]:
    return [token.token_id for token in sample(logits, rows, eos_ids=frozenset({EOS}))]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_only_allowed_tokens_are_chosen_and_rows_do_not_touch_each_other(temperature: float) -> None:
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(0)) * 4
    sets = [None if i % 3 == 0 else {i % 50, (7 * i) % 50, 49} for i in range(40)]
    rows = [
        row(None if s is None else mask_of(*s), temperature=temperature, sampling_seed=i) for i, s in enumerate(sets)
    ]
    together = choose(rows, logits)
    for i, (chosen, allowed) in enumerate(zip(together, sets, strict=True)):
        assert allowed is None or chosen in allowed
        assert choose([rows[i]], logits[i : i + 1]) == [chosen]


def test_the_mask_comes_before_top_k_and_top_p() -> None:
    logits = torch.arange(50, dtype=torch.float32).unsqueeze(0)
    for params in ({"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}):
        assert choose([row(mask_of(3, 9, 4), temperature=1.0, **params)], logits) == [9]


def test_a_mask_shorter_than_the_vocabulary_forbids_the_rest() -> None:
    logits = torch.arange(80, dtype=torch.float32).unsqueeze(0)
    assert choose([row(mask_of(3, 63))], logits) == [63]


def test_a_bias_and_a_minimal_length_cannot_leave_a_grammar_without_a_token() -> None:
    logits = torch.zeros(1, 50)
    assert choose([row(mask_of(7), logit_bias=((7, float("-inf")),))], logits) == [7]
    assert choose([row(mask_of(EOS), min_new_tokens=5)], logits) == [EOS]
    assert choose([row(mask_of(9), min_new_tokens=5, stop_token_ids=(9,))], logits) == [9]
    assert choose([row(mask_of(EOS, 8), min_new_tokens=5)], logits) == [8], "where there is another, it holds"


def test_logprobs_do_not_know_the_mask() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    (token,) = sample(logits, [row(mask_of(1))], eos_ids=frozenset({EOS}))
    expected = torch.log_softmax(logits, dim=-1)[0]
    assert token.token_id == 1 and token.logprob == pytest.approx(float(expected[1]))
    assert [i for _, i in token.top] == [3, 2]
