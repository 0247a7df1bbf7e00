"""What the card is asked for is counted first, and refused by name when it is too much."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from common.config import EngineConfig, ModelConfig
from common.errors import ConfigError
from engine.cuda.load import load_cuda_runner
from engine.cuda.memory import MemoryPlan, check_memory, plan_memory
from tests.kernels.test_cuda_model import FAMILIES, make_config, make_pools, make_weights
from tests.support.families import falcon_h1, granite, qwen3_next

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WIDE: list[tuple[Callable[[], PretrainedConfig], str]] = [
    (partial(falcon_h1, 1, 16, mamba_d_state=257), "mamba_d_state"),
    (partial(qwen3_next, 1, 16, linear_key_head_dim=129), "linear_key_head_dim"),
    (partial(qwen3_next, 1, 16, head_dim=264), "head_dim"),
    (partial(granite, "m", 16, hidden_size=1056), "hidden_size"),
]


@pytest.mark.parametrize(("wide", "key"), WIDE)
def test_what_no_program_has_room_for_is_refused_naming_the_key(
    wide: Callable[[], PretrainedConfig], key: str, tmp_path: Path
) -> None:
    wide().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"config\.json: {key} is .*at most") as caught:
        load_cuda_runner(
            ModelConfig(path=str(tmp_path)),
            EngineConfig(),
            CPU,
            num_pages=9,
            num_slots=3,
            step_tokens=64,
            context_length=64,
            allocate=None,
        )
    assert caught.value.param == key


CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["biased", *FAMILIES])
def test_weights_pages_and_slots_are_counted_to_the_byte(name: str, dtype: torch.dtype) -> None:
    config = make_config(name)
    pools = make_pools(config, dtype, CPU)
    plan = plan_memory(
        config,
        dtype=dtype,
        ssm_dtype=torch.float32,
        num_pages=pools.num_pages,
        page_size=pools.page_size,
        num_slots=pools.num_slots,
        step_tokens=128,
        logit_rows=8,
    )
    assert plan.weights == sum(weight.nbytes for weight in make_weights(config, dtype, CPU).values())
    assert plan.pages == pools.kv.nbytes and plan.slots == pools.conv.nbytes + pools.ssm.nbytes


@pytest.mark.parametrize(
    ("most", "param"),
    [
        ("pages", "max_total_tokens"),
        ("slots", "max_mamba_cache_size"),
        ("step", "chunked_prefill_size"),
        ("weights", "model_path"),
    ],
)
def test_the_setting_that_asks_for_most_is_named(most: str, param: str) -> None:
    sizes = dict.fromkeys(("weights", "pages", "slots", "step", "other"), 10) | {most: 60}
    plan = MemoryPlan(**sizes)
    check_memory(plan, 100)
    with pytest.raises(ConfigError, match=f"--{param.replace('_', '-')}") as caught:
        check_memory(plan, 99)
    assert caught.value.param == param
