"""Decoding gives the probabilities that a prefill of the same tokens gives, cold and after hits on either side."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bench.kl import all_modes, bound, estimate, measure, random_prompts, sample
from common.config import DType
from tests.support.stack import Stack

NEW_TOKENS = 48


def test_the_estimate_is_zero_for_equals_and_grows_to_both_sides() -> None:
    logprobs = [-0.1, -2.0, -5.0]
    assert estimate(logprobs, logprobs) == 0.0
    assert estimate([-1.0], [-0.5]) == pytest.approx(math.exp(0.5) - 1.5)
    assert estimate([-1.0], [-1.5]) == pytest.approx(math.exp(-0.5) - 0.5)


def test_decoded_and_prefilled_probabilities_agree(shared_stack: Stack) -> None:
    seen = []
    for mode, case, found in all_modes(shared_stack, random_prompts(4, 150, 400), NEW_TOKENS):
        seen.append((mode, case))
        assert found.tokens == 4 * NEW_TOKENS
        assert found.unsure_tokens >= 10, "too few tokens that could differ"
        assert 0 <= max(found.kl, found.kl_unsure) <= bound(DType.FLOAT32, case), (mode, case, found)
    assert len(seen) == 6


def test_a_forgotten_prompt_is_seen(shared_stack: Stack) -> None:
    """The figure for the same answers after other prompts, as if their state had been lost, is far above the bound."""
    assert shared_stack.unified is not None
    url, prompts = shared_stack.unified.url, random_prompts(4, 150, 400)
    samples = sample(url, prompts, [NEW_TOKENS] * len(prompts), seed=0)
    others = [replace(s, prompt=p) for s, p in zip(samples, prompts[1:] + prompts[:1], strict=True)]
    assert measure(url, others).kl > 0.01
