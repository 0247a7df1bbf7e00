"""The sampler against a slow twin that looks at one token of one row at a time, in Python's own floats."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.errors import ServingError, from_record
from common.sampling import LogprobOptions, SamplingParams, TokenLogprob
from engine.sampler import NonFiniteLogits, SampleRow, prompt_logprobs, sample, uniform

EOS = frozenset({3})


def row(
    *, prompt: list[int] | None = None, output: list[int] | None = None, top: int | None = None, **params: Any
) -> SampleRow:
    """top: wants logprobs with so many alternatives. Greedy unless a temperature is given."""
    return SampleRow(
        params=SamplingParams(**{"temperature": 0.0, **params}),
        logprobs=LogprobOptions() if top is None else LogprobOptions(wanted=True, top_num=top),
        prompt_ids=prompt or [],
        output_ids=output or [],
    )


def tokens(logits: Tensor, rows: list[SampleRow], eos_ids: frozenset[int] = EOS) -> list[int]:
    return [entry.token_id for entry in sample(logits, rows, eos_ids=eos_ids)]


def one(values: list[float], **options: Any) -> int:
    return tokens(torch.tensor([values]), [row(**options)])[0]


def drawn(values: list[float], **options: Any) -> set[int]:
    """Every token that 400 seeds draw."""
    rows = [row(**{"temperature": 1.0, **options}, sampling_seed=seed) for seed in range(400)]
    return set(tokens(torch.tensor([values]).expand(400, -1), rows))


# --- the twin ---------------------------------------------------------------------------------------------------------


def twin(logits: list[float], row: SampleRow, eos_ids: frozenset[int]) -> int:
    scores = twin_scores(logits, row, eos_ids, row.params.logit_bias)
    if max(scores) == -math.inf:
        scores = twin_scores(logits, row, eos_ids, ())
    best, params = max(scores), row.params
    if params.temperature == 0:
        return scores.index(best)
    weights = [1.0 if s == best else math.exp((s - best) / params.temperature) for s in scores]
    ranking = sorted(range(len(scores)), key=lambda t: (-scores[t], t))
    kept = twin_filter(weights, ranking, params)
    number, reached = twin_uniform(params.sampling_seed, len(row.output_ids)) * sum(weights[t] for t in kept), 0.0
    for token_id in sorted(kept):
        reached += weights[token_id]
        if reached > number:
            return token_id
    raise AssertionError("no token drawn")


def twin_scores(
    logits: list[float], row: SampleRow, eos_ids: frozenset[int], logit_bias: tuple[tuple[int, float], ...]
) -> list[float]:
    scores, params = list(logits), row.params
    for token_id, bias in logit_bias:
        scores[token_id] = bias if math.isinf(bias) else scores[token_id] + bias
    counts = Counter(row.output_ids)
    for token_id, score in enumerate(scores):
        if token_id in counts or token_id in row.prompt_ids:
            score = score / params.repetition_penalty if score > 0 else score * params.repetition_penalty
        score -= params.frequency_penalty * counts[token_id]
        score -= params.presence_penalty if counts[token_id] else 0.0
        if len(row.output_ids) < params.min_new_tokens and (token_id in eos_ids or token_id in params.stop_token_ids):
            score = -math.inf
        scores[token_id] = score
    return scores


def twin_filter(weights: list[float], ranking: list[int], params: SamplingParams) -> list[int]:
    kept = ranking[: params.top_k] if params.top_k > 0 else ranking
    total, before = sum(weights[t] for t in kept), 0.0
    nucleus: list[int] = []
    for token_id in kept:
        if nucleus and params.top_p < 1 and before >= params.top_p * total:
            break
        nucleus.append(token_id)
        before += weights[token_id]
    return [t for t in nucleus if weights[t] >= params.min_p * weights[ranking[0]]]


def splitmix(state: int) -> Iterator[int]:
    mask = 2**64 - 1
    while True:
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        yield z ^ (z >> 31)


def twin_uniform(seed: int, index: int) -> float:
    stream = splitmix(next(splitmix(seed % 2**64)))
    return (next(itertools.islice(stream, index, None)) // 2**11) / 2**53


def random_row(rng: random.Random, vocabulary: int) -> SampleRow:
    def some(high: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(rng.randint(0, high))]

    def maybe(default: float, *others: float) -> float:
        return default if rng.random() < 0.5 else rng.choice(others)

    params = SamplingParams(
        temperature=maybe(0.0, 1.0, 0.7, 1e-6, 3.0),
        top_k=int(maybe(-1, 1, 2, 5, 1000)),
        top_p=maybe(1.0, 0.9, 0.5, 0.1, 1e-9),
        min_p=maybe(0.0, 0.05, 0.3, 1.0),
        frequency_penalty=maybe(0.0, 0.5, -0.3, 2.0),
        presence_penalty=maybe(0.0, 0.7, -1.0),
        repetition_penalty=maybe(1.0, 1.3, 0.8, 2.0),
        min_new_tokens=int(maybe(0, 1, 3, 8)),
        stop_token_ids=tuple(some(2)),
        logit_bias=tuple((t, rng.choice([-100.0, 100.0, 0.5, -1.5, -math.inf, math.inf])) for t in set(some(3))),
        sampling_seed=rng.choice([0, 1, 2**63 - 1, rng.getrandbits(63)]),
    )
    return SampleRow(params=params, logprobs=LogprobOptions(), prompt_ids=some(6), output_ids=some(6))


def random_logits(rng: random.Random, count: int, vocabulary: int) -> Tensor:
    """Half the batches full of ties, some with masked tokens."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    logits = torch.randn(count, vocabulary, generator=generator) * 3
    if rng.random() < 0.5:
        logits = logits.round()
    if rng.random() < 0.3:
        logits[:, 1 : rng.randint(1, vocabulary)] = -math.inf
    return logits


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 60])
def test_random_batches_against_the_twin_and_alone(vocabulary: int) -> None:
    rng = random.Random(vocabulary)
    eos_ids = frozenset({0, 3, 5000})
    for _ in range(100):
        rows = [random_row(rng, vocabulary) for _ in range(rng.randint(1, 16))]
        logits = random_logits(rng, len(rows), vocabulary)
        before = logits.clone()
        batch = tokens(logits, rows, eos_ids)
        assert batch == [twin(logits[b].tolist(), row, eos_ids) for b, row in enumerate(rows)]
        assert batch == [tokens(logits[b : b + 1], [row], eos_ids)[0] for b, row in enumerate(rows)]
        assert torch.equal(logits, before)


def test_large_vocabulary_batch_is_alone_exactly_with_more_threads() -> None:
    logits = torch.randn(6, 131_072, generator=torch.Generator().manual_seed(1)) * 2
    rows = [
        row(temperature=1.0, sampling_seed=1, top=3),
        row(temperature=0.8, top_p=0.95, sampling_seed=2, top=0),
        row(temperature=1.5, top_k=50, sampling_seed=3),
        row(temperature=1.0, min_p=0.01, sampling_seed=4, top=1),
        row(top=5),
        row(temperature=2.0, top_k=10_000, top_p=0.7, sampling_seed=5, frequency_penalty=1.0, output=[5, 5, 7]),
    ]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        batch = sample(logits, rows, eos_ids=EOS)
        assert batch == [sample(logits[b : b + 1], [rows[b]], eos_ids=EOS)[0] for b in range(6)]
        torch.set_num_threads(1)
        assert batch == sample(logits, rows, eos_ids=EOS)
    finally:
        torch.set_num_threads(threads)


# --- greedy and bad logits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [5, 64, 1024, 40_000])
def test_greedy_takes_the_lowest_id_of_equals(vocabulary: int) -> None:
    logits = torch.zeros(3, vocabulary)
    logits[1, 2] = logits[1, -1] = 4.0
    logits[2, -2:] = 1.0
    assert tokens(logits, [row(), row(), row()]) == [0, 2, vocabulary - 2]


def test_no_rows() -> None:
    assert sample(torch.empty(0, 8), [], eos_ids=EOS) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_number_is_enough(bad: float) -> None:
    logits = torch.zeros(3, 9)
    logits[2, 8] = bad
    with pytest.raises(NonFiniteLogits, match=r"rows \[2\]"):
        tokens(logits, [row()] * 3)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"logit_bias": ((1, 5.0),)}, {"top": 2}])
def test_rows_without_a_distribution_are_named(options: dict[str, Any]) -> None:
    logits = torch.randn(6, 9)
    logits[1, 4] = math.nan
    logits[3, 0] = math.inf
    logits[4] = -math.inf
    logits[5, :8] = -math.inf
    with pytest.raises(NonFiniteLogits, match=r"rows \[1, 3, 4\]") as caught:
        sample(logits, [row(**options) for _ in range(6)], eos_ids=EOS)
    assert caught.value.rows == [1, 3, 4]
    record = caught.value.record()
    assert (record.code, record.status, record.retryable) == ("non_finite_logits", 500, False)
    assert type(from_record(record)) is ServingError
    with pytest.raises(NonFiniteLogits):
        prompt_logprobs(logits, [0] * 6, 0)


# --- one rule at a time -----------------------------------------------------------------------------------------------


def test_logit_bias() -> None:
    assert one([1.0, 2.0, 0.0], logit_bias=((0, 1.5),)) == 0
    assert one([1.0, 2.0, 0.0], logit_bias=((1, -100.0), (0, -100.0))) == 2
    assert one([1.0, 2.0, -math.inf], logit_bias=((2, math.inf),)) == 2
    assert one([1.0, 2.0, 0.0], logit_bias=((7, 100.0),)) == 1
    assert drawn([0.0, 0.0, 0.0], logit_bias=((0, -math.inf), (2, -100.0))) == {1}
    assert drawn([0.0, 0.0, 0.0], logit_bias=((0, math.inf), (2, math.inf))) == {0, 2}


def test_a_bias_that_leaves_no_token_is_ignored() -> None:
    everything = tuple((t, -math.inf) for t in range(4))
    assert one([1.0, 5.0, 2.0, 9.0], logit_bias=everything) == 3
    assert one([1.0, 5.0, 2.0, 9.0], logit_bias=everything, min_new_tokens=1) == 1
    assert one([1.0, 5.0, 2.0, 9.0], logit_bias=everything[:3], min_new_tokens=1) == 1
    assert drawn([0.0, 0.0, 0.0, 0.0], logit_bias=everything, min_new_tokens=1) == {0, 1, 2}
    assert one([1.0, 5.0, 2.0, 9.0], logit_bias=tuple((t, -100.0) for t in range(4))) == 3


def test_repetition_penalty_counts_prompt_and_output() -> None:
    assert one([2.0, 1.9, 0.0], repetition_penalty=1.2) == 0
    assert one([2.0, 1.9, 0.0], repetition_penalty=1.2, prompt=[0]) == 1
    assert one([2.0, 1.9, 0.0], repetition_penalty=1.2, output=[0, 0]) == 1
    assert one([-1.0, -1.1, -9.0], repetition_penalty=1.2, prompt=[0]) == 1


def test_frequency_and_presence_penalties_count_the_output_only() -> None:
    assert one([2.0, 1.5, 0.0], frequency_penalty=0.3, prompt=[0, 0, 0]) == 0
    assert one([2.0, 1.5, 0.0], frequency_penalty=0.3, output=[0]) == 0
    assert one([2.0, 1.5, 0.0], frequency_penalty=0.3, output=[0, 0]) == 1
    assert one([2.0, 1.5, 0.0], presence_penalty=0.3, output=[0, 0]) == 0
    assert one([2.0, 1.5, 0.0], presence_penalty=0.6, output=[0]) == 1
    assert one([2.0, 1.5, 0.0], frequency_penalty=-0.3, output=[1, 1]) == 1


def test_order_of_bias_and_penalties() -> None:
    """(1 + 1) / 2 - 0.5 = 0.5, where another order gives 1 + 1 / 2 - 0.5 = 1 or (1 + 1 - 0.5) / 2 = 0.75."""
    rules: dict[str, Any] = {
        "logit_bias": ((0, 1.0),),
        "repetition_penalty": 2.0,
        "presence_penalty": 0.5,
        "output": [0],
    }
    assert one([1.0, 0.49], **rules) == 0
    assert one([1.0, 0.51], **rules) == 1


def test_min_new_tokens_masks_eos_and_stop_tokens() -> None:
    logits = [0.0, 1.0, 2.0, 9.0, 8.0]
    assert one(logits) == 3
    assert one(logits, min_new_tokens=2) == 4
    assert one(logits, min_new_tokens=2, stop_token_ids=(4, 77)) == 2
    assert one(logits, min_new_tokens=2, stop_token_ids=(4,), output=[0]) == 2
    assert one(logits, min_new_tokens=2, stop_token_ids=(4,), output=[0, 0]) == 3
    assert one(logits, min_new_tokens=1, ignore_eos=True) == 4
    assert drawn(logits, min_new_tokens=1, temperature=2.0) == {0, 1, 2, 4}


def test_top_k() -> None:
    assert drawn([0.0, 0.2, 0.1, 0.3], top_k=2) == {1, 3}
    assert drawn([0.0, 0.2, 0.1, 0.3], top_k=9) == {0, 1, 2, 3}
    assert drawn([1.0, 1.0, 1.0, 1.0], top_k=3) == {0, 1, 2}
    assert drawn([0.0, 0.2, 0.1, 0.3], top_k=1) == {3}


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    logits = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]
    assert drawn(logits, top_p=0.39) == {1}
    assert drawn(logits, top_p=0.41) == {1, 3}
    assert drawn(logits, top_p=0.71) == {1, 2, 3}
    assert drawn(logits, top_p=0.91) == {0, 1, 2, 3}
    assert drawn([0.0] * 4, top_p=0.5) == {0, 1}
    assert drawn([0.0, 1.0, 0.0], top_p=0.0) == {1}


def test_top_p_is_of_what_top_k_left() -> None:
    """0.4 and 0.3 of the top two are 4/7 and 3/7: 0.5 is reached by the first, without top_k by both."""
    logits = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]
    assert drawn(logits, top_p=0.5) == {1, 3}
    assert drawn(logits, top_p=0.5, top_k=2) == {1}


def test_min_p_is_a_share_of_the_likeliest() -> None:
    logits = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]
    assert drawn(logits, min_p=0.24) == {0, 1, 2, 3}
    assert drawn(logits, min_p=0.26) == {1, 2, 3}
    assert drawn(logits, min_p=0.6) == {1, 3}
    assert drawn(logits, min_p=1.0) == {1}
    assert drawn(logits, min_p=0.26, top_k=2) == {1, 3}


def test_filters_come_after_temperature() -> None:
    logits = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]
    assert drawn(logits, min_p=0.26, temperature=2.0) == {0, 1, 2, 3}
    assert drawn(logits, top_p=0.41, temperature=0.1) == {1}


def test_filters_do_not_touch_their_neighbours() -> None:
    rules: list[dict[str, Any]] = [{}, {"top_k": 1}, {"min_p": 1.0}]
    logits = torch.zeros(300, 4)
    rows = [row(temperature=1.0, sampling_seed=s, **rules[s % 3]) for s in range(300)]
    rows[4] = row(temperature=1.0, sampling_seed=4, top_p=0.2, logit_bias=((2, 1.0),))
    chosen = tokens(logits, rows)
    assert set(chosen[0::3]) == {0, 1, 2, 3}
    assert set(chosen[1::3]) == {0, 2} and chosen[4] == 2
    assert set(chosen[2::3]) == {0, 1, 2, 3}


def test_low_temperature_nears_greedy_and_never_overflows() -> None:
    assert drawn([100.0, 200.0, 199.9, -300.0], temperature=1e-6) == {1}
    assert drawn([3e38, -3e38, 3e38, 0.0], temperature=1e-6) == {0, 2}


# --- the distribution and the seed ------------------------------------------------------------------------------------


BASE = [0.3, 0.05, 0.2, 0.15, 0.1, 0.08, 0.07, 0.05]


def chi_square(counts: list[int], probabilities: list[float]) -> float:
    total = sum(counts)
    return sum((count - total * p) ** 2 / (total * p) for count, p in zip(counts, probabilities, strict=True))


@pytest.mark.parametrize(
    ("options", "likely"),
    [
        ({}, BASE),
        ({"temperature": 0.5}, [p * p for p in BASE]),
        ({"top_k": 3}, [0.3, 0, 0.2, 0.15, 0, 0, 0, 0]),
        ({"top_p": 0.7}, [0.3, 0, 0.2, 0.15, 0.1, 0, 0, 0]),
        ({"min_p": 0.25}, [0.3, 0, 0.2, 0.15, 0.1, 0.08, 0, 0]),
        ({"presence_penalty": math.log(2), "output": [0]}, [0.15, 0.05, 0.2, 0.15, 0.1, 0.08, 0.07, 0.05]),
    ],
)
def test_20_000_draws_follow_the_distribution(options: dict[str, Any], likely: list[float]) -> None:
    check_distribution([row(**{"temperature": 1.0, **options}, sampling_seed=s) for s in range(20_000)], likely)


def test_20_000_tokens_of_one_answer_follow_the_distribution() -> None:
    rows = [row(temperature=1.0, sampling_seed=12, output=OnlyLength(i)) for i in range(20_000)]
    check_distribution(rows, BASE)


def check_distribution(rows: list[SampleRow], likely: list[float]) -> None:
    """likely: the expected probabilities up to a factor, 0 for a token that must never come."""
    counts = Counter(tokens(torch.tensor(BASE).log().expand(len(rows), -1), rows))
    kept = [t for t, p in enumerate(likely) if p > 0]
    assert set(counts) == set(kept)
    limit = {7: 24.3, 5: 20.5, 4: 18.5, 3: 16.3, 2: 13.8}[len(kept) - 1]  # exceeded by one in a thousand
    assert chi_square([counts[t] for t in kept], [likely[t] / sum(likely) for t in kept]) < limit


class OnlyLength(list[int]):
    """Stands in for an answer so far, of which the draw reads the length only."""

    def __init__(self, length: int):
        super().__init__()
        self.length = length

    def __len__(self) -> int:
        return self.length


def test_uniform_is_splitmix64() -> None:
    stream = splitmix(0)
    assert [next(stream) for _ in range(3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    for seed in (0, 1, 77, 2**63 - 1, 2**64 + 5, -3):
        assert [uniform(seed, i) for i in range(20)] == [twin_uniform(seed, i) for i in range(20)]


def test_uniform_is_flat_and_streams_are_unrelated() -> None:
    grid = np.array([[uniform(seed, i) for i in range(100)] for seed in range(200)])  # [seeds, tokens]
    assert grid.min() >= 0.0 and grid.max() < 1.0
    counts = np.bincount((grid * 100).astype(int).ravel(), minlength=100).tolist()
    assert chi_square(counts, [0.01] * 100) < 148.2  # one in a thousand, 99 degrees of freedom
    for a, b in [(grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1]), (grid[1:, :-1], grid[:-1, 1:])]:
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.025  # 3.5 standard deviations


def test_the_draw_depends_on_seed_and_index_only() -> None:
    logits = torch.zeros(1, 1000)
    base = tokens(logits, [row(temperature=1.0, sampling_seed=5, output=[1, 2])])
    assert base == tokens(logits, [row(temperature=1.0, sampling_seed=5, output=[8, 9], prompt=[4] * 50)])
    assert base != tokens(logits, [row(temperature=1.0, sampling_seed=6, output=[1, 2])])
    assert base != tokens(logits, [row(temperature=1.0, sampling_seed=5, output=[1, 2, 3])])
    assert base == [int(uniform(5, 2) * 1000)]


@pytest.mark.parametrize(("number", "expected"), [(0.0, 1), (0.5 - 2**-53, 1), (0.5, 3), (1 - 2**-53, 3)])
def test_a_draw_on_the_border_never_hits_a_masked_token(
    number: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.sampler.uniform", lambda seed, index: number)
    assert one([-math.inf, 1.0, -math.inf, 1.0, -math.inf], temperature=1.0) == expected


_CHILD = """
import json, torch
from tests.engine.test_sampler import many_draws
torch.set_num_threads(2)
print(json.dumps(many_draws()))
"""


def many_draws() -> list[list[Any]]:
    logits = torch.linspace(-3, 3, 40 * 500).reshape(40, 500).sin() * 4
    rows = [
        row(
            temperature=0.5 + s / 20,
            top_p=1.0 - (s % 3) / 10,
            top_k=[-1, 40][s % 2],
            output=[s] * s,
            sampling_seed=s // 4,
            top=2,
        )
        for s in range(40)
    ]
    return [[entry.token_id, entry.logprob] for entry in sample(logits, rows, eos_ids=EOS)]


def test_another_process_draws_the_same() -> None:
    result = subprocess.run(
        [sys.executable, "-c", _CHILD],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert json.loads(result.stdout) == many_draws()


# --- log-probabilities ------------------------------------------------------------------------------------------------


def log_softmax(logits: Tensor) -> Any:
    x = logits.numpy().astype(np.float64)
    return x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)


def assert_entry(entry: TokenLogprob, expected: Any, top_num: int) -> None:
    """expected: log p of each token [V]."""
    assert entry.logprob == pytest.approx(expected[entry.token_id], abs=1e-5)
    ranking = sorted(range(len(expected)), key=lambda t: (-expected[t], t))[:top_num]
    assert [token_id for _, token_id in entry.top] == ranking
    assert [value for value, _ in entry.top] == pytest.approx([expected[t] for t in ranking], abs=1e-5)


def test_logprobs_are_those_of_the_model_whatever_the_rules() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0)) * 3
    rows = [
        row(top=0),
        row(top=4, temperature=0.3, sampling_seed=3),
        row(temperature=2.0, sampling_seed=4),
        row(top=2, logit_bias=((9, 100.0),)),
        row(top=99, repetition_penalty=2.0, prompt=list(range(30)), min_new_tokens=5),
    ]
    entries = sample(logits, rows, eos_ids=EOS)
    expected = log_softmax(logits)
    assert entries[2] == TokenLogprob(None, entries[2].token_id)
    assert entries[3].token_id == 9
    for b in (0, 1, 3, 4):
        assert_entry(entries[b], expected[b], rows[b].logprobs.top_num)
    assert len(entries[4].top) == 50


def test_alternatives_that_are_equal_come_in_order_of_id() -> None:
    for vocabulary in (6, 300):
        logits = torch.randint(0, 3, (40, vocabulary), generator=torch.Generator().manual_seed(0)).float()
        for top_num in (1, 2, 5, vocabulary):
            entries = sample(logits, [row(top=top_num)] * 40, eos_ids=EOS)
            for entry, expected in zip(entries, log_softmax(logits).round(9), strict=True):
                assert_entry(entry, expected, top_num)
                assert entry.top[0] == (entry.logprob, entry.token_id)


def test_top_num_counts_only_when_logprobs_are_wanted() -> None:
    silent = SampleRow(
        params=SamplingParams(temperature=0), logprobs=LogprobOptions(top_num=3), prompt_ids=[], output_ids=[]
    )
    assert sample(torch.tensor([[0.0, 1.0]]), [silent], eos_ids=EOS) == [TokenLogprob(None, 1)]


def test_masked_tokens_have_no_probability() -> None:
    (entry,) = sample(torch.tensor([[0.0, -math.inf, 0.0]]), [row(top=3)], eos_ids=EOS)
    assert [token_id for _, token_id in entry.top] == [0, 2, 1]
    assert [value for value, _ in entry.top] == pytest.approx([-math.log(2), -math.log(2), -math.inf])


@pytest.mark.parametrize("top_num", [0, 1, 7, 100])
def test_prompt_logprobs(top_num: int) -> None:
    logits = torch.randn(30, 80, generator=torch.Generator().manual_seed(2)) * 4
    token_ids = [(7 * i) % 80 for i in range(30)]
    entries = prompt_logprobs(logits, token_ids, top_num)
    assert [entry.token_id for entry in entries] == token_ids
    for entry, expected in zip(entries, log_softmax(logits), strict=True):
        assert_entry(entry, expected, top_num)
    assert prompt_logprobs(torch.empty(0, 80), [], top_num) == []


def test_a_prompt_scores_as_its_tokens_were_sampled() -> None:
    logits = torch.randn(12, 64, generator=torch.Generator().manual_seed(3))
    entries = sample(logits, [row(temperature=1.0, sampling_seed=s, top=3) for s in range(12)], eos_ids=EOS)
    assert prompt_logprobs(logits, [entry.token_id for entry in entries], 3) == entries
