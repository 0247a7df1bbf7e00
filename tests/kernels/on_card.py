"""A `CudaRunner` behind the face of `ModelRunner`: what it returns is on the CPU, where tests compare it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from common.config import EngineConfig, ModelConfig
from engine.batch import OnLayer, Row
from engine.cuda.load import load_cuda_runner
from engine.cuda.runner import CudaRunner
from engine.pools import StatePools


class PoolsOnCard:
    def __init__(self, pools: StatePools) -> None:
        self._pools = pools

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pools, name)

    def slot_state(self, slot: int) -> tuple[Tensor, Tensor]:
        conv, ssm = self._pools.slot_state(slot)
        return conv.cpu(), ssm.cpu()


class OnCard:
    def __init__(self, runner: CudaRunner) -> None:
        self.runner, self.config = runner, runner.config
        self.pools = PoolsOnCard(runner.pools)
        self.copy_slots = runner.copy_slots

    def forward(self, rows: Sequence[Row], on_layer: OnLayer | None = None) -> Tensor:
        return self.runner.forward(rows, on_layer).cpu()


def load_on_card(
    model_config: ModelConfig,
    engine_config: EngineConfig,
    *,
    num_pages: int,
    num_slots: int,
    allocate: Callable[[int], Tensor] | None,
) -> OnCard:
    """In the place of `ModelRunner.load`."""
    return OnCard(
        load_cuda_runner(
            msgspec.structs.replace(model_config, device="cuda"),
            msgspec.structs.replace(engine_config, max_running_requests=min(16, num_slots)),
            torch.device("cuda"),
            num_pages=num_pages,
            num_slots=num_slots,
            step_tokens=4096,
            context_length=1024,
            allocate=allocate,
        )
    )
