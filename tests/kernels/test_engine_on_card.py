"""The whole engine on the card: scheduler, prefix cache, tracking, overlap, sampling, graphs, memory."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from accuracy.gsm_mini import extract_answer, few_shot, problems, prompt
from common.config import DType, EngineConfig, TransportName
from common.errors import ConfigError
from common.sampling import LogprobOptions, SamplingParams
from engine.batch import Row
from engine.model_config import HybridConfig, LayerKind, Mamba2Config
from engine.ops.attention import attention_ref
from engine.ops.conv import conv_ref
from engine.ops.norm import gated_rms_norm_ref, rms_norm_ref
from engine.ops.ssd import ssd_sequential_ref
from engine.pools import StatePools
from engine.weights import expected_shapes, load_weights, random_weights
from node.tokenizer import load_tokenizer
from tests.e2e.conftest import models  # noqa: F401
from tests.e2e.test_state_tracking import Case, References, cases, run
from tests.support.models import Models
from tests.support.ranks import MODEL, Outcome, Ranks, Request, assert_equivalent, unified_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.timeout(400),
]
SILENT = LogprobOptions()
SHARES = 4  # of the sweep, for several processes


@pytest.fixture(scope="module")
def card() -> Iterator[Ranks]:
    """tandem-mini in float32 on the card, with overlap, prefix cache and graphs."""
    engine = EngineConfig(max_total_tokens=65536, max_state_slots=128, max_running_requests=48)
    with unified_ranks(device="cuda", engine=engine) as ranks:
        yield ranks


def greedy(count: int, *, stop: tuple[str, ...] = (), **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True, stop=stop, **more)


def texts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 1000) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def assert_same_tokens(found: Outcome, expected: Outcome, gap: float = 1e-4) -> None:
    """expected has log-probabilities, found may have none."""
    assert found.error is None and len(found.tokens) == len(expected.tokens)
    for ours, theirs in zip(found.tokens, expected.tokens, strict=True):
        if ours.token_id != theirs.token_id:
            assert theirs.top[0][0] - theirs.top[1][0] < gap
            return


class OnCardReferences(References):
    """Cold runs alone, on the card too."""

    def of(self, case: Case, prompts: list[list[int]]) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            import tests.e2e.test_state_tracking as sweep

            patch.setattr(sweep, "unified_ranks", lambda **settings: unified_ranks(device="cuda", **settings))
            return super().of(case, prompts)


def test_the_extra_buffer_sweep(models: Models) -> None:  # noqa: F811
    """Every kind of prefix, suffix, batch, piece, mixed step and strategy against cold runs on the card and the CPU."""
    on_card, on_cpu = OnCardReferences(models), References(models)
    failures = []
    for seed, case in enumerate(case for case in cases(150, seed=1) if not case.disaggregated and case.local == 0):
        try:
            found = run(case, seed, models, device="cuda")
            _compare(found, case, on_card, states=True)
            _compare(found, case, on_cpu, states=False)
        except AssertionError as error:
            failures.append(f"{case} seed {seed}: {str(error).splitlines()[0]}")
    assert not failures, f"{len(failures)} cases differ:\n" + "\n".join(failures[:20])


@pytest.mark.parametrize("share", range(SHARES))
def test_the_sweep_handed_over(models: Models, share: int) -> None:  # noqa: F811
    """The same where the prompt is computed by another rank of the card, or its end by the decode rank."""
    on_card = OnCardReferences(models)
    failures = []
    handed_over = [(i, case) for i, case in enumerate(cases(150, seed=1)) if case.disaggregated]
    assert any(case.local for _, case in handed_over[share::SHARES])
    for seed, case in handed_over[share::SHARES]:
        try:
            found = run(case, seed, models, device="cuda", transport=TransportName.CUDA_IPC)
            _compare(found, case, on_card, states=True)
        except AssertionError as error:
            failures.append(f"{case} seed {seed}: {str(error).splitlines()[0]}")
    assert not failures, f"{len(failures)} cases differ:\n" + "\n".join(failures[:20])


def _compare(found: Any, case: Case, references: References, *, states: bool) -> None:
    expected = references.of(case, found.prompts)
    for outcome, ours, (cold, theirs, _) in zip(found.outcomes, found.states, expected, strict=True):
        assert_equivalent(outcome, cold)
        if states and outcome.ids == cold.ids:
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


def test_queued_steps_give_the_tokens_of_steps_that_are_waited_for(card: Ranks) -> None:
    """Without log-probabilities tokens stay on the card and the host is a step behind; with them it waits each time."""
    prompts = texts(24, 300)
    plain = [Request(prompt=p, sampling=greedy(40 + i), logprobs=SILENT) for i, p in enumerate(prompts)]
    waited = [Request(prompt=p, sampling=greedy(40 + i)) for i, p in enumerate(prompts)]
    cold, warm, slow = card.run(plain), card.run(plain), card.run(waited)
    for one, two, expected in zip(cold, warm, slow, strict=True):
        assert_same_tokens(one, expected)
        assert_same_tokens(two, expected)
    # Both kinds in one step, and rows that are sampled.
    mixed = card.run(
        [
            *plain[:5],
            *waited[5:10],
            *(Request(prompt=p, sampling=SamplingParams(sampling_seed=i)) for i, p in enumerate(prompts)),
        ]
    )
    for one, expected in zip(mixed[:10], slow, strict=False):
        assert_same_tokens(one, expected)


def test_little_memory_queues_and_retracts_and_changes_no_answer(card: Ranks) -> None:
    requests = [Request(prompt=p, sampling=greedy(80), logprobs=SILENT) for p in texts(16, 200, seed=3)]
    expected = card.run([Request(prompt=r.prompt, sampling=r.sampling) for r in requests])
    engine = EngineConfig(max_total_tokens=1024, max_state_slots=12, max_running_requests=10)
    with unified_ranks(device="cuda", engine=engine) as ranks:
        found = ranks.run(requests)
        ranks.assert_all_free()
        assert ranks.roles[0].host.scheduler.counters.retractions > 0  # type: ignore[attr-defined]
    for one, other in zip(found, expected, strict=True):
        assert_same_tokens(one, other)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_no_step_waits_for_the_card_but_to_read_tokens(card: Ranks) -> None:
    """In this mode torch raises where it would synchronise: `.item()`, `.tolist()`, pageable copies."""
    outcomes = [card.submit(Request(prompt=p, sampling=greedy(120), logprobs=SILENT)) for p in texts(8, 60, seed=4)]
    card.run_until(lambda: all(len(o.tokens) >= 3 for o in outcomes))
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(60):
            card.step()
        late = [card.submit(Request(prompt=p, sampling=greedy(5), logprobs=SILENT)) for p in texts(2, 400, seed=5)]
        card.run_until(lambda: all(o.ended for o in late))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    card.run_until(lambda: all(o.ended for o in outcomes))


def test_replayed_steps_equal_eager_ones(card: Ranks) -> None:
    """Graphs of exactly the batch's size and padded ones, fresh rows between them, pools and logits."""
    runner = card.roles[0].host.runner  # type: ignore[attr-defined]
    graphs, pools = runner._graphs, runner.pools
    assert graphs is not None
    prompts = [[(7 * i + j) % 900 + 3 for j in range(20 + 9 * i)] for i in range(9)]
    tables = [list(range(1 + 8 * i, 9 + 8 * i)) for i in range(9)]
    for count in (1, 2, 3, 8, 9):
        results = []
        for used in (graphs, None):
            runner._graphs = used
            runner.forward([Row(prompts[i], 0, tables[i], 20 - i, 0, None) for i in range(count)])
            logits = [
                runner.forward([Row([5 + k], len(prompts[i]) + k, tables[i], 20 - i, 1, None) for i in range(count)])
                for k in range(3)
            ]
            slots = [pools.slot_state(20 - i) for i in range(count)]
            results.append((torch.stack(logits), *map(torch.stack, zip(*slots, strict=True)), pools.kv.clone()))
        runner._graphs = graphs
        for one, other in zip(*results, strict=True):
            if count in graphs.sizes:
                assert torch.equal(one, other)
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_gsm_mini_on_the_card_and_on_the_cpu(card: Ranks) -> None:
    """200 problems: as many right answers within 2."""
    tokenizer = load_tokenizer(str(MODEL))
    asked, shots = problems("heldout", 11, 200), few_shot()
    requests = [
        Request(
            prompt=tokenizer.encode(prompt(problem, shots)),
            sampling=greedy(160, stop=("\n\nQuestion:",)),
            logprobs=SILENT,
        )
        for problem in asked
    ]
    engine = EngineConfig(max_total_tokens=65536, max_state_slots=128, max_running_requests=48, threads=8)
    with unified_ranks(engine=engine) as cpu:
        answers = [card.run(requests, 300), card.run(requests, 300), cpu.run(requests, 300)]
    right = [
        sum(
            extract_answer(tokenizer.decode(outcome.ids).split("\n\nQuestion:")[0]) == problem.answer
            for outcome, problem in zip(outcomes, asked, strict=True)
        )
        for outcomes in answers
    ]
    same = sum(one.ids == other.ids for one, other in zip(answers[0], answers[2], strict=True))
    print(f"gsm-mini right of 200: card cold {right[0]}, warm {right[1]}, CPU {right[2]}; same answers {same}")
    assert min(right) > 100 and max(right) - min(right) <= 2


@pytest.mark.parametrize(("dtype", "cold", "cached"), [(DType.FLOAT32, 1e-5, 1e-5), (DType.BFLOAT16, 0.002, 0.01)])
def test_decoded_and_prefilled_probabilities_agree(dtype: DType, cold: float, cached: float) -> None:
    engine = EngineConfig(max_total_tokens=65536, max_state_slots=128, max_running_requests=32)
    with unified_ranks(device="cuda", dtype=dtype, engine=engine) as ranks:
        sampled = []
        for round_ in range(2):
            prompts = texts(32, 600, seed=6 + round_)
            requests = [
                Request(prompt=p, sampling=SamplingParams(max_new_tokens=200, ignore_eos=True, sampling_seed=i))
                for i, p in enumerate(prompts)
            ]
            sampled += list(zip(prompts, ranks.run(requests), strict=True))
        for bound, flush in ((cached, False), (cold, True)):
            if flush:
                assert ranks.flush() == [None]
            found = _kl(ranks, sampled)
            print(f"KL {dtype} {'cold' if flush else 'cached'}: {found:.3g}")
            assert found <= bound


def _kl(ranks: Ranks, sampled: Sequence[tuple[list[int], Outcome]]) -> float:
    requests = [
        Request(
            prompt=p + outcome.ids,
            sampling=greedy(1),
            logprobs=LogprobOptions(wanted=True, start_len=len(p), top_num=0),
        )
        for p, outcome in sampled
    ]
    total, count = 0.0, 0
    for (_, outcome), again in zip(sampled, ranks.run(requests), strict=True):
        assert again.prompt_logprobs is not None
        for one, two in zip(outcome.tokens, again.prompt_logprobs, strict=True):
            assert one.token_id == two.token_id and one.logprob is not None and two.logprob is not None
            r = two.logprob - one.logprob
            total, count = total + math.exp(r) - 1 - r, count + 1
    return total / count


def test_what_cannot_fit_is_refused_before_any_memory_is_taken() -> None:
    before = torch.cuda.memory_allocated()
    for param, settings in (
        ("max_total_tokens", {"max_total_tokens": 10**9}),
        ("max_mamba_cache_size", {"max_state_slots": 10**6}),
    ):
        refused = pytest.raises(ConfigError, match=f"--{param.replace('_', '-')}")
        with refused as caught, unified_ranks(device="cuda", engine=EngineConfig(**settings)):  # type: ignore[arg-type]
            raise AssertionError("it was not refused")
        assert caught.value.param == param
    assert torch.cuda.memory_allocated() == before


# --- full widths ------------------------------------------------------------------------------------------------------


def nano_layer(kind: LayerKind) -> HybridConfig:
    from bench.gpu import nano_9b

    return dataclasses.replace(nano_9b(), layers=(kind,), vocab_size=512)


@pytest.mark.parametrize("kind", [LayerKind.MAMBA, LayerKind.ATTENTION, LayerKind.MLP])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2)])
def test_one_layer_at_full_width_against_float64(kind: LayerKind, dtype: torch.dtype, bound: float) -> None:
    """Prefill of two prompts off the chunk grid, then two decode steps, of one layer with embedding and head around."""
    from engine.cuda.runner import CudaRunner

    device, config = torch.device("cuda"), nano_layer(kind)
    weights = random_weights(config, dtype, device, seed=1)
    pools = StatePools(
        config,
        num_pages=64,
        num_slots=6,
        page_size=16,
        dtype=dtype,
        ssm_dtype=torch.float32,
        device=device,
        revision="",
        allocate=None,
    )
    runner = CudaRunner(config, dict(weights), pools, max_rows=4, max_tokens=512, max_pages=32, use_graphs=True)
    prompts = [torch.randint(0, 512, (n,)).tolist() for n in (300, 129)]
    more = [torch.randint(0, 512, (2,)).tolist() for _ in prompts]
    tables = [list(range(1, 25)), list(range(30, 50))]
    found = [
        runner.forward(
            [Row(p, 0, t, 4 - i, len(p), None) for i, (p, t) in enumerate(zip(prompts, tables, strict=True))]
        )
    ]
    steps = [
        runner.forward([Row([more[i][k]], len(prompts[i]) + k, tables[i], 4 - i, 1, None) for i in range(2)])
        for k in range(2)
    ]
    for i, (text, extra) in enumerate(zip(prompts, more, strict=True)):
        expected = layer_logits(config, weights, text + extra)
        begin = 0 if i == 0 else len(prompts[0])
        mine = torch.cat((found[0][begin : begin + len(text)], *(step[i : i + 1] for step in steps)))
        error = float((mine.double() - expected).norm() / expected.norm())
        print(f"{kind.name} {dtype} prompt {i}: relative error {error:.2e}")
        assert error <= bound


def layer_logits(config: HybridConfig, weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """Logits of every token of a model with one layer, in float64 throughout: [n, V]."""
    wide = {name.removeprefix("layers.0.mixer."): value.double() for name, value in weights.items()}
    hidden = wide["embeddings.weight"][tokens]
    x = rms_norm_ref(hidden, wide["layers.0.norm.weight"], config.norm_eps)
    match config.layers[0]:
        case LayerKind.MLP:
            out = torch.relu(x @ wide["up_proj.weight"].t()).square() @ wide["down_proj.weight"].t()
        case LayerKind.ATTENTION:
            q, k, v = (x @ wide[f"{name}_proj.weight"].t() for name in "qkv")
            shape = (len(tokens), config.attention.kv_heads, config.attention.head_dim)
            kv = torch.stack((k.view(shape), v.view(shape))).unsqueeze(1)  # one page
            heads = q.view(len(tokens), config.attention.heads, config.attention.head_dim)
            out = attention_ref(heads, kv, [0], 0, config.attention.scale).flatten(1) @ wide["o_proj.weight"].t()
        case LayerKind.MAMBA:
            out = mamba_ref(config, wide, x)
    hidden = rms_norm_ref(hidden + out, wide["norm_f.weight"], config.norm_eps)
    return hidden @ wide["lm_head.weight"].t()


def mamba_ref(config: HybridConfig, wide: dict[str, Tensor], x: Tensor) -> Tensor:
    mamba = config.recurrence
    assert isinstance(mamba, Mamba2Config)
    inner, state, groups = mamba.d_inner, mamba.d_state, mamba.n_groups
    gate, xbc, dt = torch.split(x @ wide["in_proj.weight"].t(), [inner, mamba.conv_dim, mamba.num_heads], dim=1)
    window = torch.zeros(mamba.conv_dim, mamba.conv_kernel - 1, device=x.device, dtype=torch.float64)
    xbc, _ = conv_ref(xbc, window, wide["conv1d.weight"].squeeze(1).t(), wide["conv1d.bias"])
    values, b, c = torch.split(xbc, [inner, groups * state, groups * state], dim=1)
    y, _ = ssd_sequential_ref(
        values.view(-1, mamba.num_heads, mamba.head_dim),
        torch.nn.functional.softplus(dt + wide["dt_bias"]),
        -torch.exp(wide["A_log"]),
        b.view(-1, groups, state),
        c.view(-1, groups, state),
        wide["D"],
        torch.zeros(mamba.num_heads, mamba.head_dim, state, device=x.device, dtype=torch.float64),
    )
    gated = gated_rms_norm_ref(y.flatten(1), gate, wide["norm.weight"], groups, config.norm_eps)
    return gated @ wide["out_proj.weight"].t()


def test_a_full_size_checkpoint_in_shards_is_read(tmp_path: Path) -> None:
    """Every tensor of the 9B shape with its real name, in four files that are holes but for the first values."""
    from bench.gpu import nano_9b

    config = nano_9b()
    shapes = {
        f"backbone.{name}" if name != "lm_head.weight" else name: s for name, s in expected_shapes(config).items()
    }
    names = list(shapes)
    shards = [names[i::4] for i in range(4)]
    placed = {}
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05}-of-00004.safetensors"
        placed |= dict.fromkeys(shard, file)
        write_sparse(tmp_path / file, {name: shapes[name] for name in shard})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    weights = load_weights(tmp_path, config, torch.bfloat16, "cuda")
    assert sum(w.numel() for w in weights.values()) == sum(math.prod(s) for s in shapes.values()) > 8.8e9
    for name, shape in shapes.items():
        canonical = name.removeprefix("backbone.")
        first = weights[canonical].flatten()[:2].float().tolist()
        assert weights[canonical].shape == shape and first == [1.0, float(len(name))]


def write_sparse(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A bfloat16 safetensors file: each tensor is 1, the length of its name, and zeros that take no room on disk."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        nbytes = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, entry in header.items():
            file.seek(8 + len(text) + entry["data_offsets"][0])  # type: ignore[index]
            values = torch.tensor([1.0, len(name)]).bfloat16().view(torch.int16).tolist()
            file.write(struct.pack("<2h", *values))
        file.truncate(8 + len(text) + offset)
