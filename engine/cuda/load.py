"""A runner on a CUDA device from a model's folder, when the device's memory holds what the settings ask for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from common.config import EngineConfig, ModelConfig
from engine.config_keys import Keys, read_json
from engine.cuda.memory import check_memory, plan_memory
from engine.cuda.runner import CudaRunner
from engine.families import read_config
from engine.model_config import GatedDeltaConfig, HybridConfig
from engine.pools import StatePools
from engine.runner import torch_dtype
from engine.weights import weights_of

_WIDEST_STATE, _WIDEST_KEY, _WIDEST_HEAD = 256, 128, 256


def check_widths(config: HybridConfig, path: str) -> None:
    """Raises ConfigError naming the key of config.json that is more than a program of the kernels has room for."""
    recurrence, folder = config.recurrence, Path(path)
    limits: list[tuple[tuple[str, ...], int, int]]
    if isinstance(recurrence, GatedDeltaConfig):
        limits = [(("linear_key_head_dim",), recurrence.key_dim, _WIDEST_KEY)]
    else:
        limits = [(("ssm_state_size", "mamba_d_state"), recurrence.d_state, _WIDEST_STATE)]
    limits.append((("head_dim", "attention_head_dim", "hidden_size"), config.attention.head_dim, _WIDEST_HEAD))
    for names, value, most in limits:
        if value > most:
            keys = Keys(folder / "config.json", read_json(folder / "config.json"))
            key = next((name for name in names if keys.values.get(name) is not None), names[-1])
            raise keys.error(key, f"on CUDA at most {most} for each head, and this is {value}")


def load_cuda_runner(
    model_config: ModelConfig,
    engine_config: EngineConfig,
    device: torch.device,
    *,
    num_pages: int,
    num_slots: int,
    step_tokens: int,
    context_length: int,
    allocate: Callable[[int], Tensor] | None,
) -> CudaRunner:
    """See `ModelRunner.load`. step_tokens: of the largest step. Raises ConfigError, also when memory does not suffice:
    before any of it is taken."""
    config = read_config(model_config.path)
    check_widths(config, model_config.path)
    dtype, ssm_dtype = torch_dtype(model_config.dtype), torch_dtype(model_config.ssm_dtype)
    page_size = engine_config.page_size
    plan = plan_memory(
        config,
        dtype=dtype,
        ssm_dtype=ssm_dtype,
        num_pages=num_pages,
        page_size=page_size,
        num_slots=num_slots,
        step_tokens=step_tokens,
        logit_rows=step_tokens,
    )
    check_memory(plan, torch.cuda.mem_get_info(device)[0])
    weights, revision = weights_of(model_config, config, dtype, device)
    pools = StatePools(
        config,
        num_pages=num_pages,
        num_slots=num_slots,
        page_size=page_size,
        dtype=dtype,
        ssm_dtype=ssm_dtype,
        device=device,
        revision=revision,
        allocate=allocate,
    )
    return CudaRunner(
        config,
        weights,
        pools,
        max_rows=engine_config.max_running_requests,
        max_tokens=step_tokens,
        max_pages=-(-min(context_length, num_pages * page_size) // page_size),
        use_graphs=True,
    )
