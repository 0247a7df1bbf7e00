"""The CUDA model and runner against their twins: logits and every pool, for all kinds of steps and every family."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

import pytest
import torch
import triton
from torch import Tensor
from torch.testing import assert_close

from common.sampling import LogprobOptions, SamplingParams
from engine.batch import Row, Track
from engine.cuda.batch import LAST_TOKEN
from engine.cuda.device import CudaDevice
from engine.cuda.mixers.moe import MoeMixer
from engine.cuda.runner import CudaRunner
from engine.device import Device, PlannedRow
from engine.families import read_config
from engine.mixers.mixer import within
from engine.mixers.moe import make_experts, moe_shapes, route
from engine.model import HybridModel
from engine.model_config import Activation, HybridConfig, LayerKind, MlpConfig
from engine.pools import StatePools
from engine.runner import ModelRunner
from engine.weights import expected_shapes, keep_float32
from tests.support.families import (
    FALCON_BIASES,
    FALCON_MULTIPLIERS,
    SPARSE,
    falcon_h1,
    granite,
    nemotron_3,
    qwen3_next,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
PAGE = 4
# hidden size, heads, head dim, state, groups, chunk, biases
SHAPES = {
    "plain": (48, 4, 20, 16, 2, 8, False),
    "biased": (40, 6, 8, 20, 3, 16, True),
}

FAMILIES: Mapping[str, Callable[[], PretrainedConfig]] = {
    "nemotron_3": partial(nemotron_3, "ME", 8),
    "nemotron_3_latent": partial(nemotron_3, "EM", 16, moe_latent_size=20, n_group=4, topk_group=2, bias=True),
    "falcon_h1": partial(falcon_h1, 1, 8, **FALCON_MULTIPLIERS),
    "falcon_h1_normed": partial(
        falcon_h1,
        1,
        16,
        mamba_rms_norm=True,
        mamba_norm_before_gate=True,
        mamba_n_groups=2,
        mamba_d_conv=3,
        **{**FALCON_MULTIPLIERS, "attention_in_multiplier": 1.0},
        **FALCON_BIASES,
    ),
    "granite": partial(granite, "ma", 8, position_embedding_type="rope", **SPARSE),
    "granite_dense": partial(granite, "m", 16),
    "qwen3_next": partial(
        qwen3_next, 2, 8, layer_types=["linear_attention", "full_attention"], mlp_only_layers=[1], hidden_size=40
    ),
}  # fmt: skip


@cache
def make_config(name: str) -> HybridConfig:
    return own_config(name) if name in SHAPES else family_config(name)


def family_config(name: str) -> HybridConfig:
    with tempfile.TemporaryDirectory() as folder:
        FAMILIES[name]().save_pretrained(folder)
        return read_config(folder)


def own_config(name: str) -> HybridConfig:
    hidden, heads, head_dim, d_state, groups, chunk, bias = SHAPES[name]
    from bench.gpu import nano_9b

    full = nano_9b()
    return dataclasses.replace(
        full,
        layers=tuple(LayerKind(letter) for letter in "M*-"),
        vocab_size=97,
        hidden_size=hidden,
        max_position_embeddings=512,
        eos_token_ids=(2,),
        recurrence=dataclasses.replace(
            full.recurrence,
            num_heads=heads,
            head_dim=head_dim,
            d_state=d_state,
            n_groups=groups,
            chunk_size=chunk,
            in_bias=bias,
            out_bias=bias,
        ),
        attention=dataclasses.replace(full.attention, heads=4, kv_heads=2, head_dim=16, scale=0.25),
        mlp=MlpConfig(intermediate_size=72, activation=Activation.RELU2, bias=bias, fused=False),
    )


def make_weights(config: HybridConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    weights = {}
    for name, shape in expected_shapes(config).items():
        value = torch.randn(shape) * (1.0 if len(shape) < 2 or "embeddings" in name else shape[-1] ** -0.5)
        kept = torch.float32 if keep_float32(name) else dtype
        weights[name] = (value - 2 if name.endswith("dt_bias") else value).to(device, kept)
    return weights


def make_pools(config: HybridConfig, dtype: torch.dtype, device: torch.device) -> StatePools:
    sizes = {"num_pages": 120, "num_slots": 12, "page_size": PAGE, "revision": ""}
    return StatePools(config, **sizes, dtype=dtype, ssm_dtype=torch.float32, device=device, allocate=None)  # type: ignore[arg-type]


class Pair:
    """The same model and pools twice; `run` runs a step in both and compares everything."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype = torch.float32, few_rows: int = 0) -> None:
        self.config = make_config(name)
        weights = make_weights(self.config, dtype, device)
        self.pools = [make_pools(self.config, dtype, device) for _ in range(2)]
        with torch.inference_mode():
            self.twin = ModelRunner(
                self.config, HybridModel(self.config, weights, self.pools[0]), self.pools[0], device
            )
        self.runner = CudaRunner(
            self.config,
            weights,
            self.pools[1],
            max_rows=8,
            max_tokens=128,
            max_pages=32,
            use_graphs=device.type == "cuda",
            few_rows=few_rows,
        )
        self.tolerance = 1e-4 if dtype is torch.float32 else 5e-2
        for pools in self.pools:
            for slot in range(1, 12):
                pools.poison_slot(slot)
            pools.poison_pages(range(1, 120))

    def run(self, rows: Sequence[Row], twin_rows: Sequence[Row] | None = None) -> Tensor:
        expected, found = self.twin.forward(rows if twin_rows is None else twin_rows), self.runner.forward(rows)
        self.close(found, expected)
        for name in ("kv", "conv", "ssm"):
            mine, its = getattr(self.pools[1], name), getattr(self.pools[0], name)
            self.close(mine, its)
        return expected

    def close(self, found: Tensor, expected: Tensor) -> None:
        scale = float(expected[expected.isfinite() & (expected.abs() < 1e3)].abs().max()) if expected.numel() else 1.0
        assert_close(found, expected, rtol=self.tolerance, atol=self.tolerance * max(1.0, scale), equal_nan=True)


def tokens(n: int, seed: int) -> list[int]:
    return torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


TABLES = [[7, 3, 9, 1, 12, 13, 14, 15, 16, 17, 18, 19], list(range(20, 32)), list(range(40, 52)), list(range(60, 72))]


EVERY = [("plain", 8), ("biased", 0), *((name, 8 * (i % 2)) for i, name in enumerate(FAMILIES))]


@pytest.mark.parametrize(("name", "few_rows"), EVERY)
def test_a_life_of_several_rows(name: str, few_rows: int, device: torch.device) -> None:
    """Prefill in pieces, tracked on the way; mixed steps; decode with and without tracks; in any order of slots."""
    pair = Pair(name, device, few_rows=few_rows)
    chunk = pair.config.chunk_size
    a, b, c = tokens(2 * chunk + 5, 1), tokens(chunk, 2), tokens(3, 3)
    pair.run(
        [
            Row(a[: 2 * chunk], 0, TABLES[0], 5, 1, Track(chunk, 9)),
            Row(b, 0, TABLES[1], 2, 2, Track(chunk, 8)),
            Row(c, 0, TABLES[2], 3, 1, None),
        ]
    )
    pair.run([Row([4], 3, TABLES[2], 3, 1, Track(4, 7)), Row(a[2 * chunk :], 2 * chunk, TABLES[0], 5, 1, None)])
    pair.runner.copy_slots([9], [1])
    pair.twin.copy_slots([9], [1])
    steps = [
        Row([11], len(a), TABLES[0], 5, 1, None),
        Row([12], 4, TABLES[2], 3, 1, Track(5, 6)),
        Row([13], len(b), TABLES[1], 2, 1, None),
    ]
    pair.run(steps)
    resumed = Row(a[chunk : chunk + 3], chunk, [*TABLES[0][: chunk // PAGE], *TABLES[3]], 1, 3, None)
    pair.run([dataclasses.replace(steps[2], start=len(b) + 1), resumed])


@pytest.mark.parametrize("name", ["plain", "falcon_h1", "qwen3_next"])
def test_bfloat16(name: str, device: torch.device) -> None:
    pair = Pair(name, device, torch.bfloat16, few_rows=8)
    pair.run([Row(tokens(21, 1), 0, TABLES[0], 5, 1, Track(16, 9))])
    pair.run([Row([4], 21, TABLES[0], 5, 1, None)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card has them in bfloat16 alone")
@pytest.mark.parametrize("name", ["nemotron_3", "granite"])
def test_experts_multiplied_at_once_are_the_same_model(name: str, device: torch.device) -> None:
    """As captured graphs have them, see `Experts`."""
    pair = Pair(name, device)
    assert not pair.runner._model.can_be_captured
    for mixer in pair.runner._model.mixers:
        if isinstance(mixer, MoeMixer):
            mixer.experts.grouped = True
    assert pair.runner._model.can_be_captured
    pair.run([Row(tokens(11, 1), 0, TABLES[0], 5, 2, Track(8, 9))])
    pair.run([Row([4], 11, TABLES[0], 5, 1, None), Row(tokens(3, 2), 0, TABLES[1], 2, 1, None)])


@pytest.mark.parametrize("name", ["nemotron_3", "granite", "qwen3_next"])
def test_experts_multiplied_at_once_ask_the_device_nothing(name: str) -> None:
    """Tensors without values: whatever depends on some raises."""
    moe, hidden = make_config(name).moe, make_config(name).hidden_size
    assert moe is not None
    weights = {
        name: torch.empty(shape, device="meta", dtype=torch.float32 if keep_float32(name) else torch.bfloat16)
        for name, shape in moe_shapes(moe, hidden).items()
    }
    experts, x = make_experts(moe, within(weights, "experts.")), torch.empty(5, hidden, device="meta").bfloat16()
    chosen = route(moe, x.float() @ weights["router.weight"].t(), weights.get("router.e_score_correction_bias"))
    experts.grouped = True
    assert experts(x, *chosen).shape == x.shape
    experts.grouped = False
    with pytest.raises(NotImplementedError):
        experts(x, *chosen)


def test_decode_goes_on_with_what_its_slot_sampled(device: torch.device) -> None:
    pair = Pair("plain", device)
    prompts = [Row(tokens(5, 1), 0, TABLES[0], 5, 1, None), Row(tokens(9, 2), 0, TABLES[1], 2, 1, None)]
    logits = pair.run(prompts)
    for step in range(2):
        rows = [
            Row([LAST_TOKEN], len(row.token_ids) + step, row.page_table, row.slot, 1, None) for row in reversed(prompts)
        ]
        known = [
            dataclasses.replace(row, token_ids=[token])
            for row, token in zip(rows, logits.argmax(-1).flip(0).tolist(), strict=True)
        ]
        logits = pair.run(rows, known).flip(0)
    pair.runner.set_last_tokens([5], [42])
    pair.run(
        [Row([LAST_TOKEN], 7, TABLES[0], 5, 1, None)],
        [Row([42], 7, TABLES[0], 5, 1, None)],
    )


INTERPRETED = bool(triton.knobs.runtime.interpret)
LAYERS = {
    "decode": [
        "_embed",
        *("_project", "_conv_step", "_scan_step", "_gated_rms_norm", "_project"),
        *("_project", "_write_kv", "_attend_part", "_combine_parts", "_project"),
        *("_project", "_project"),
        "_project",
    ],
    "prefill": [
        "_embed",
        *("_rms_norm", "_conv", "_save_windows", "_scan", "_gated_rms_norm"),
        *("_rms_norm", "_write_kv", "_attend_rows"),
        *("_rms_norm", "_square_relu"),
        "_project",
    ],
}


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter is what is watched")
def test_a_model_pays_for_nothing_that_other_families_have(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launches of NemotronH, kernel by kernel."""
    from triton.runtime.interpreter import InterpretedFunction

    pair, launched = Pair("plain", device, few_rows=2), list[str]()
    launch = InterpretedFunction.__getitem__

    def watched(kernel: InterpretedFunction, grid: object) -> object:
        launched.append(kernel.fn.__name__)
        return launch(kernel, grid)

    monkeypatch.setattr(InterpretedFunction, "__getitem__", watched)
    for kind, row in (
        ("prefill", Row(tokens(5, 1), 0, TABLES[0], 5, 1, None)),
        ("decode", Row([3], 5, TABLES[0], 5, 1, None)),
    ):
        launched.clear()
        pair.runner.forward([row])
        assert launched[: len(LAYERS[kind])] == LAYERS[kind]
        assert launched[len(LAYERS[kind]) :] == ["_keep_tokens"]


def test_layers_are_told_of_in_order(device: torch.device) -> None:
    pair, told = Pair("plain", device), list[int]()
    pair.runner.forward([Row(tokens(5, 1), 0, TABLES[0], 5, 1, None)], told.append)
    assert told == [0, 1, 2]


def planned(key: int, start: int, token_ids: list[int] | None, **how: object) -> PlannedRow:
    """A row of sequence 0 or 1 that samples; greedily and without log-probabilities unless told otherwise."""
    settings = {"sampling": SamplingParams(temperature=0.0), "logprobs": LogprobOptions()} | how
    return PlannedRow(
        key=key,
        token_ids=token_ids,
        start=start,
        page_table=TABLES[key],
        slot=5 - key,
        num_logits=1,
        track=None,
        samples=True,
        prompt_ids=tokens(6, key),
        output_ids=[],
        prompt=None,
        **settings,  # type: ignore[arg-type]
    )


def test_queued_steps_and_steps_sampled_on_the_host_follow_each_other(device: torch.device) -> None:
    """What a step samples, wherever, reaches the next one; its results are those of the plain device."""
    pair = Pair("plain", device)
    plain, cuda = Device(pair.twin, frozenset(), overlap=False), CudaDevice(pair.runner, frozenset())
    drawn = SamplingParams(temperature=1.0, sampling_seed=3)
    wanted = LogprobOptions(wanted=True, top_num=2)
    steps = [
        [planned(0, 0, tokens(6, 0)), planned(1, 0, tokens(6, 1))],
        [planned(0, 6, None), planned(1, 6, None)],
        [planned(0, 7, None, sampling=drawn), planned(1, 7, None, logprobs=wanted)],
        [planned(0, 8, None), planned(1, 8, None)],
    ]
    queued = [cuda.launch(rows) for rows in steps]
    for rows, found in zip(steps, queued, strict=True):
        expected = plain.launch(rows).result()
        assert found.result().failed == expected.failed == {}
        for key, token in expected.tokens.items():
            ours = found.result().tokens[key]
            assert ours.token_id == token.token_id
            assert (ours.logprob is None) == (token.logprob is None)
            assert ours.logprob is None or abs(ours.logprob - (token.logprob or 0.0)) < 1e-4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which interprets the kernels
def test_logits_that_are_not_finite_fail_their_own_row(device: torch.device) -> None:
    pair = Pair("plain", device)
    cuda = CudaDevice(pair.runner, frozenset())
    cuda.launch([planned(0, 0, tokens(6, 0)), planned(1, 0, tokens(6, 1))]).result()
    pair.pools[1].poison_slot(4)
    found = cuda.launch([planned(0, 6, None), planned(1, 6, None)]).result()
    assert set(found.tokens) == {0} and set(found.failed) == {1}
