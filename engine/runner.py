"""The model with its pools, behind one call: rows in, logits out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from common.config import DType, EngineConfig, ModelConfig
from common.errors import ConfigError
from engine.batch import OnLayer, Row, build_batch
from engine.families import read_config
from engine.model import HybridModel
from engine.model_config import HybridConfig
from engine.pools import StatePools
from engine.shared_weights import shared_weights
from engine.weights import weights_of


class ModelRunner:
    """Owns the weights and the pools of one device. Not thread-safe: one scheduler thread calls it."""

    def __init__(self, config: HybridConfig, model: HybridModel, pools: StatePools, device: torch.device) -> None:
        self.config = config
        self.pools = pools
        self._model = model
        self._device = device

    @classmethod
    def load(
        cls,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        *,
        num_pages: int,
        num_slots: int,
        allocate: Callable[[int], Tensor] | None,
    ) -> ModelRunner:
        """Read the folder and make the pools: num_pages and num_slots include the reserved page 0 and slot 0.

        allocate: where the pools' memory comes from, see `StatePools`. Raises ConfigError.
        """
        device = torch_device(model_config.device)
        dtype = torch_dtype(model_config.dtype)
        config = read_config(model_config.path)
        with shared_weights(model_config.shared_weights) as sharing:
            weights, revision = weights_of(model_config, config, dtype, device)
            pools = StatePools(
                config,
                num_pages=num_pages,
                num_slots=num_slots,
                page_size=engine_config.page_size,
                dtype=dtype,
                ssm_dtype=torch_dtype(model_config.ssm_dtype),
                device=device,
                revision=revision,
                allocate=allocate,
            )
            with torch.inference_mode():
                model = HybridModel(config, weights, pools)
            if sharing is not None:
                sharing.share(model.matrices())
        return cls(config, model, pools, device)

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row], on_layer: OnLayer | None = None) -> Tensor:
        """Advance every row by its tokens. Returns logits float32 [sum of num_logits, vocabulary], rows in order.

        Writes K and V of the tokens in the rows' pages, conv and SSM state in their slots, and in their track slots the
        states to be kept. on_layer: see `OnLayer`; what it raises ends the step.
        """
        batch = build_batch(
            rows,
            page_size=self.pools.page_size,
            with_positions=self._model.rotary is not None,
            device=self._device,
        )
        return self._model.forward(batch, on_layer)

    @torch.inference_mode()
    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy conv and SSM state of all layers, sources[i] to targets[i]."""
        self.pools.copy_slots(sources, targets)


def torch_device(name: str) -> torch.device:
    """Raises ConfigError for a device that this machine or this torch does not have."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--device {name}: torch cannot use it here: {reason}", param="device") from error
    return device


def torch_dtype(dtype: DType) -> torch.dtype:
    match dtype:
        case DType.FLOAT32:
            return torch.float32
        case DType.BFLOAT16:
            return torch.bfloat16
