"""What a rank computes with: plain torch, or the kernels for CUDA where the device is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from common.config import EngineConfig, ModelConfig
from common.errors import ConfigError
from engine.device import Device
from engine.runner import ModelRunner, torch_device

if TYPE_CHECKING:
    from engine.cuda.runner import CudaRunner


def make_engine(
    model: ModelConfig,
    engine: EngineConfig,
    *,
    num_pages: int,
    step_tokens: int,
    context_length: int,
    eos_ids: frozenset[int],
    overlap: bool,
    allocate: Callable[[int], Tensor] | None,
) -> tuple[ModelRunner | CudaRunner, Device]:
    """The runner with its weights and pools, and the device that runs planned steps on it.

    num_pages: with page 0. step_tokens: of the largest step. allocate: see `StatePools`. Raises ConfigError.
    """
    device, num_slots = torch_device(model.device), engine.max_state_slots
    if device.type != "cuda":
        runner = ModelRunner.load(model, engine, num_pages=num_pages, num_slots=num_slots, allocate=allocate)
        return runner, Device(runner, eos_ids, overlap=overlap)
    return _cuda_engine(model, engine, device, num_pages, step_tokens, context_length, eos_ids, allocate)


def _cuda_engine(
    model: ModelConfig,
    engine: EngineConfig,
    device: torch.device,
    num_pages: int,
    step_tokens: int,
    context_length: int,
    eos_ids: frozenset[int],
    allocate: Callable[[int], Tensor] | None,
) -> tuple[CudaRunner, Device]:
    try:
        from engine.cuda.device import CudaDevice
        from engine.cuda.load import load_cuda_runner
    except ImportError as error:
        raise ConfigError(f"--device {device}: {error}; install the extra gpu", param="device") from error
    # Of this thread: kernels are launched there. Not on the default stream, behind which libraries queue their copies.
    torch.cuda.set_device(device.index or 0)
    torch.cuda.set_stream(torch.cuda.Stream(device))
    runner = load_cuda_runner(
        model,
        engine,
        device,
        num_pages=num_pages,
        num_slots=engine.max_state_slots,
        step_tokens=step_tokens,
        context_length=context_length,
        allocate=allocate,
    )
    return runner, CudaDevice(runner, eos_ids)
