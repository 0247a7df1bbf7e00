"""A runner on a CUDA device from a model's folder, when the device's memory holds what the settings ask for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.config import EngineConfig, ModelConfig
from engine.cuda.memory import check_memory, plan_memory
from engine.cuda.runner import CudaRunner
from engine.families import read_config
from engine.pools import StatePools
from engine.runner import torch_dtype
from engine.weights import weights_of


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
