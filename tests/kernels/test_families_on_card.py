"""Every family on a card: against the CPU, in replayed graphs, in bfloat16, at the width of real models, within the
memory that was planned."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from common.config import EngineConfig, ModelConfig
from engine.batch import Row, Track
from engine.cuda.memory import plan_memory
from engine.cuda.runner import CudaRunner
from engine.families import read_config
from engine.model_config import HybridConfig, LayerKind
from engine.pools import StatePools
from engine.runner import ModelRunner
from engine.weights import load_weights, random_weights
from tests.kernels.dry import falcon_h1_34b, granite_4_small, qwen3_next_80b
from tests.support.models import FAMILIES, Models
from tests.support.sequential import sequential

if TYPE_CHECKING:
    from transformers import PretrainedConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.timeout(300),
]
CHUNK, PAGE = 16, 16
LENGTHS = (37, 8, 65)
TABLES = [list(range(1 + 10 * i, 11 + 10 * i)) for i in range(6)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("families"))


def runner_of(config: HybridConfig, weights: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> CudaRunner:
    pools = StatePools(
        config,
        num_pages=1024,
        num_slots=12,
        page_size=PAGE,
        dtype=dtype,
        ssm_dtype=torch.float32,
        device=device,
        revision="",
        allocate=None,
    )
    graphs = device.type == "cuda"
    return CudaRunner(config, dict(weights), pools, max_rows=6, max_tokens=8192, max_pages=600, use_graphs=graphs)


def load(models: Models, family: str, dtype: torch.dtype, device: torch.device) -> CudaRunner:
    folder = models(family, CHUNK)
    config = read_config(folder)
    return runner_of(config, load_weights(folder, config, dtype, device), dtype, device)


def on_cpu(models: Models, family: str) -> ModelRunner:
    where = ModelConfig(path=str(models(family, CHUNK)))
    return ModelRunner.load(where, EngineConfig(page_size=PAGE), num_pages=1024, num_slots=12, allocate=None)


def text(seed: int, length: int, vocabulary: int = 97) -> list[int]:
    return torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def prompts() -> list[Row]:
    """Of LENGTHS, in slots 5, 4, 3; the first and the third save a state on their way."""
    return [
        Row(text(i, n), 0, TABLES[i], 5 - i, n, Track(CHUNK, 8 + i) if n > CHUNK else None)
        for i, n in enumerate(LENGTHS)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode_are_those_of_the_cpu(family: str, models: Models, device: torch.device) -> None:
    """Logits and every state; then on from the states that were saved on the way."""
    runner, twin = load(models, family, torch.float32, device), on_cpu(models, family)

    def both(rows: Sequence[Row]) -> Tensor:
        found, expected = runner.forward(rows).cpu(), twin.forward(rows)
        assert_close(found, expected, rtol=1e-3, atol=1e-3)
        assert torch.equal(found.argmax(-1), expected.argmax(-1))
        return expected

    logits = both(prompts())
    last = [int(token) for token in logits.argmax(-1)[torch.tensor(LENGTHS).cumsum(0) - 1]]
    for step in range(24):
        rows = [Row([last[i]], n + step, TABLES[i], 5 - i, 1, None) for i, n in enumerate(LENGTHS)]
        last = both(rows).argmax(-1).tolist()
    both([Row(text(i, n)[CHUNK : CHUNK + 5], CHUNK, TABLES[i], 8 + i, 2, None) for i, n in ((0, 37), (2, 65))])
    for slot in (3, 4, 5, 8, 10):
        for ours, theirs in zip(runner.pools.slot_state(slot), twin.pools.slot_state(slot), strict=True):
            assert_close(ours.cpu(), theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_steps_are_the_eager_ones(family: str, models: Models, device: torch.device) -> None:
    """bit for bit where a graph has the batch's size; experts are multiplied at once."""
    runner = load(models, family, torch.bfloat16, device)
    graphs = runner._graphs
    assert graphs is not None
    for count in (1, 2, 4, 6):
        assert count in graphs.sizes
        found = []
        for runner._graphs in (graphs, None):
            runner.forward([Row(text(i, 20 + i), 0, TABLES[i], 6 - i, 0, None) for i in range(count)])
            steps = [
                runner.forward([Row([5 + k], 20 + i + k, TABLES[i], 6 - i, 1, None) for i in range(count)])
                for k in range(3)
            ]
            states = [runner.pools.slot_state(6 - i) for i in range(count)]
            found.append([torch.stack(steps), *map(torch.stack, zip(*states, strict=True))])
        runner._graphs = graphs
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_no_step_waits_for_the_card(family: str, models: Models, device: torch.device) -> None:
    """Prefill and decode in bfloat16; in this mode torch raises where it would synchronise."""
    runner = load(models, family, torch.bfloat16, device)
    steps = [prompts(), [Row([3], n, TABLES[i], 5 - i, 1, None) for i, n in enumerate(LENGTHS)]]
    for graphs in (runner._graphs, None):
        runner._graphs = graphs
        for rows in steps:
            runner.step(rows)  # compiles
            try:
                torch.cuda.set_sync_debug_mode("error")
                runner.step(rows)
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("family", FAMILIES)
def test_probabilities_in_bfloat16_are_those_of_float32(family: str, models: Models, device: torch.device) -> None:
    """KL of what decode gives, and of what prefill gives, from the CPU's in float32, over 200 tokens."""
    runner, twin, tokens = load(models, family, torch.bfloat16, device), on_cpu(models, family), text(9, 200)
    table = list(range(100, 120))
    expected = twin.forward([Row(tokens, 0, table, 2, 200, None)])
    prefilled = runner.forward([Row(tokens, 0, table, 2, 200, None)]).cpu()
    runner.forward([Row(tokens[:50], 0, table, 3, 0, None)])
    decoded = [runner.forward([Row(tokens[at : at + 1], at, table, 3, 1, None)]).cpu() for at in range(50, 200)]
    bound = 0.02 if runner.config.moe is None else 0.05  # a token's experts may be others after rounding
    for name, found, wanted in (
        ("prefill", prefilled, expected),
        ("decode", torch.cat(decoded), expected[50:]),
    ):
        kl = torch.nn.functional.kl_div(
            found.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="batchmean"
        )
        print(f"KL {family} {name}: {float(kl):.2g}")
        assert 0 <= float(kl) < bound


# --- full widths ------------------------------------------------------------------------------------------------------


def nemotron_3_nano() -> PretrainedConfig:
    from transformers import NemotronHConfig

    return NemotronHConfig(
        vocab_size=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        hybrid_override_pattern="ME*",
        hidden_size=2688,
        mamba_num_heads=64,
        mamba_head_dim=64,
        ssm_state_size=128,
        n_groups=8,
        conv_kernel=4,
        chunk_size=128,
        num_attention_heads=32,
        num_key_value_heads=2,
        head_dim=128,
        intermediate_size=1856,
        n_routed_experts=128,
        num_experts_per_tok=6,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        routed_scaling_factor=2.5,
    )


WIDE: dict[str, Callable[[], PretrainedConfig]] = {
    "falcon_h1": falcon_h1_34b,
    "granitemoehybrid": lambda: granite_4_small(experts=72),
    "nemotron_3": nemotron_3_nano,
    "qwen3_next": lambda: qwen3_next_80b(dense=()),
}
LAYERS = [
    ("falcon_h1", LayerKind.PARALLEL),
    ("falcon_h1", LayerKind.MLP),
    ("granitemoehybrid", LayerKind.MAMBA),
    ("granitemoehybrid", LayerKind.MOE),
    ("nemotron_3", LayerKind.MOE),
    ("qwen3_next", LayerKind.GATED_DELTA),
    ("qwen3_next", LayerKind.ATTENTION),
    ("qwen3_next", LayerKind.MOE),
]


@cache
def wide_config(family: str) -> HybridConfig:
    with tempfile.TemporaryDirectory() as folder:
        WIDE[family]().save_pretrained(folder)
        return read_config(folder)


def one_layer(family: str, kind: LayerKind) -> HybridConfig:
    assert kind in wide_config(family).layers
    return dataclasses.replace(wide_config(family), layers=(kind,))


@pytest.mark.parametrize(("family", "kind"), LAYERS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_one_layer_at_full_width_against_float64(
    family: str, kind: LayerKind, dtype: torch.dtype, bound: float, device: torch.device
) -> None:
    """Prefill of two prompts off the chunk grid, then two decode steps. Of experts, in bfloat16 all tokens but a few:
    their own may be others after rounding."""
    config = one_layer(family, kind)
    weights = random_weights(config, dtype, device, seed=1)
    runner = runner_of(config, weights, dtype, device)
    texts, tables = [text(1, 152, 512), text(2, 131, 512)], [TABLES[0], list(range(30, 50))]
    rows = [Row(tokens[:-2], 0, tables[i], 4 - i, len(tokens) - 2, None) for i, tokens in enumerate(texts)]
    found = list(runner.forward(rows).split([150, 129]))
    for back in (2, 1):
        ends = [len(tokens) - back for tokens in texts]
        step = runner.forward([Row([texts[i][at]], at, tables[i], 4 - i, 1, None) for i, at in enumerate(ends)])
        found = [torch.cat((one, step[i : i + 1])) for i, one in enumerate(found)]
    for logits, tokens in zip(found, texts, strict=True):
        expected = sequential(config, weights, tokens)[0]
        errors = (logits.double() - expected).norm(dim=1) / expected.norm(dim=1)
        print(f"{family} {kind.name} {dtype}: relative error {float(errors.median()):.1e}, {float(errors.max()):.1e}")
        most = 0.9 if kind is LayerKind.MOE and dtype is torch.bfloat16 else 1.0
        assert float(errors.quantile(most)) <= bound


@pytest.mark.parametrize(("family", "kind"), LAYERS)
def test_a_step_takes_no_more_memory_than_was_planned(family: str, kind: LayerKind, device: torch.device) -> None:
    config, tokens = one_layer(family, kind), 8192
    plan = plan_memory(
        config,
        dtype=torch.bfloat16,
        ssm_dtype=torch.float32,
        num_pages=1024,
        page_size=PAGE,
        num_slots=12,
        step_tokens=tokens,
        logit_rows=4,
    )
    runner = runner_of(config, random_weights(config, torch.bfloat16, device), torch.bfloat16, device)
    rows = [
        Row(text(i, tokens // 4, 512), 0, list(range(1 + 128 * i, 129 + 128 * i)), 4 - i, 1, None) for i in range(4)
    ]
    runner.step(rows)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    runner.step(rows)
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    print(f"{family} {kind.name}: {taken / 2**20:.0f} MiB of {plan.step / 2**20:.0f}")
    assert taken <= plan.step
