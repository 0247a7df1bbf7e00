"""Where the state of every sequence lives: KV pages, conv slots and SSM slots of one rank, on one device.

Legend: A layers with keys and values, M layers with recurrent state, C conv_dim, W conv width; a state is [H, P, N] for
Mamba2 (heads, head dim, state) and [H, K, V] for gated delta (value heads, key dim, value dim).
    kv    [A, 2, pages, page_size, kv_heads, head_dim]   item: one page of K or V of one layer
    conv  [slots, M, C, W - 1]                           item: one slot of one layer; a slot of all layers is one block
    ssm   [slots, M, *state]                             likewise
Page 0 and slot 0 pad short rows of a batch; they never belong to a request. Who owns the others is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from common.errors import ConfigError
from common.layout import MemoryRange, PoolLayout, PoolPlacement, StateKind, StateLayout
from engine.model_config import HybridConfig

ALIGNMENT_BYTES = 64
_POISON_KV = 1e4


class StatePools:
    """The pools and their description. Forward passes write `kv`, `conv` and `ssm` in place."""

    def __init__(
        self,
        config: HybridConfig,
        *,
        num_pages: int,
        num_slots: int,
        page_size: int,
        dtype: torch.dtype,
        ssm_dtype: torch.dtype,
        device: torch.device | str,
        revision: str,
        allocate: Callable[[int], Tensor] | None,
    ) -> None:
        """allocate(nbytes): zeroed uint8 memory that outlives the pools, registered with a transport.

        None: plain memory. All pools lie in one allocation, each aligned to 64 bytes. They are not touched here: memory
        that the system zeroes on first use costs nothing until a page or slot is used. Raises ConfigError when the
        memory cannot be had.
        """
        assert num_pages >= 2 and num_slots >= 2, "page 0 and slot 0 are reserved"
        self.config = config
        self.num_pages, self.num_slots, self.page_size = num_pages, num_slots, page_size
        self.revision = revision
        self.state_layers, self.kv_layers = config.state_layers, config.kv_layers
        recurrence, attention = config.recurrence, config.attention
        kv_shape = (len(self.kv_layers), 2, num_pages, page_size, attention.kv_heads, attention.head_dim)
        conv_shape = (num_slots, len(self.state_layers), recurrence.conv_dim, recurrence.conv_kernel - 1)
        ssm_shape = (num_slots, len(self.state_layers), *recurrence.state_shape)
        specs = ((kv_shape, dtype), (conv_shape, dtype), (ssm_shape, ssm_dtype))
        kv_bytes, conv_bytes, ssm_bytes = (_padded_bytes(shape, item_dtype) for shape, item_dtype in specs)
        try:
            self._memory = _take(kv_bytes + conv_bytes + ssm_bytes + ALIGNMENT_BYTES, allocate, device)
        except (OSError, MemoryError, OverflowError, RuntimeError, ValueError) as error:  # mmap's, numpy's, torch's
            raise _too_large(num_pages * page_size, kv_bytes, num_slots, conv_bytes + ssm_bytes, error) from error
        self.kv, self.conv, self.ssm = _carve(self._memory, specs)

    def layout(self) -> StateLayout:
        """Every pool in the order of the layers: of a layer conv, ssm, k, v, as far as it has them."""
        return StateLayout(
            model=self.config.model,
            revision=self.revision,
            page_size=self.page_size,
            chunk=self.config.chunk_size,
            conv_width=self.config.recurrence.conv_kernel,
            vocab_size=self.config.vocab_size,
            pools=tuple(self._describe(*pool) for pool in self._pools()),
        )

    def placements(self) -> tuple[PoolPlacement, ...]:
        """Where each pool of `layout().pools` lies, in the same order."""
        return tuple(_place(items) for *_, items in self._pools())

    def ranges(self) -> tuple[MemoryRange, ...]:
        """The one allocation that holds all pools."""
        return (MemoryRange(address=self._memory.data_ptr(), nbytes=self._memory.nbytes),)

    def copy_slot(self, src: int, dst: int) -> None:
        """Copy conv and SSM state of all layers from slot src to slot dst."""
        self.copy_slots([src], [dst])

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy conv and SSM state of all layers from each source to its target, in one go and without a buffer.

        Targets are distinct and none is a source; there may be none.
        """
        assert len(sources) == len(targets) == len(set(targets)), "each target has one source"
        assert not {*sources} & {*targets}, "no target is a source"
        assert 0 not in sources and 0 not in targets, "slot 0 belongs to nobody"
        for pool in (self.conv, self.ssm) if targets else ():
            torch._foreach_copy_([pool[target] for target in targets], [pool[source] for source in sources])

    def slot_state(self, slot: int) -> tuple[Tensor, Tensor]:
        """Clones of a slot: conv [M, C, W - 1] and ssm [M, *state]. For tests."""
        return self.conv[slot].clone(), self.ssm[slot].clone()

    def poison_slot(self, slot: int) -> None:
        """Fill a slot with NaN, so that whoever reads a state that is not its own is found out. For tests."""
        self.conv[slot].fill_(math.nan)
        self.ssm[slot].fill_(math.nan)

    def poison_pages(self, pages: Iterable[int]) -> None:
        """Fill pages with huge finite numbers: padding may be multiplied by zero, never counted. For tests."""
        self.kv[:, :, list(pages)] = _POISON_KV

    def _pools(self) -> Iterable[tuple[StateKind, int, str, Tensor]]:
        """(kind, layer, part, items) of every pool; items[i] is item i, a view."""
        for layer in sorted({*self.state_layers, *self.kv_layers}):
            if layer in self.state_layers:
                index = self.state_layers.index(layer)
                yield StateKind.CONV, layer, "conv", self.conv[:, index]
                yield StateKind.SSM, layer, "ssm", self.ssm[:, index]
            if layer in self.kv_layers:
                index = self.kv_layers.index(layer)
                yield StateKind.KV, layer, "k", self.kv[index, 0]
                yield StateKind.KV, layer, "v", self.kv[index, 1]

    def _describe(self, kind: StateKind, layer: int, part: str, items: Tensor) -> PoolLayout:
        shape = tuple(items.shape[1:])
        return PoolLayout(
            kind=kind,
            layer=layer,
            part=part,
            dtype=str(items.dtype).removeprefix("torch."),
            item_shape=shape,
            item_bytes=math.prod(shape) * items.element_size(),
            blocks=self.config.recurrence.conv_blocks if kind is StateKind.CONV else (),
        )


def _padded_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    nbytes = math.prod(shape) * dtype.itemsize
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _too_large(num_tokens: int, kv_bytes: int, num_slots: int, state_bytes: int, error: Exception) -> ConfigError:
    """Names the setting that asks for more."""
    if kv_bytes >= state_bytes:
        asked, nbytes, param = f"--max-total-tokens {num_tokens}", kv_bytes, "max_total_tokens"
    else:
        asked, nbytes, param = f"--max-mamba-cache-size {num_slots}", state_bytes, "max_mamba_cache_size"
    reason = str(error).partition("\n")[0]
    return ConfigError(f"{asked}: {nbytes:,} bytes cannot be had ({reason})", param=param)


def _take(nbytes: int, allocate: Callable[[int], Tensor] | None, device: torch.device | str) -> Tensor:
    if allocate is None and torch.device(device).type == "cpu":
        return torch.from_numpy(np.zeros(nbytes, dtype=np.uint8))  # zeroed by the system on first use
    if allocate is None:
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    memory = allocate(nbytes)
    assert memory.dtype is torch.uint8 and memory.numel() >= nbytes and memory.is_contiguous()
    assert memory.device.type == torch.device(device).type, "the allocator must serve the engine's device"
    return memory


def _carve(memory: Tensor, specs: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> tuple[Tensor, ...]:
    """Views of the given shapes and dtypes, one behind the other, each aligned to ALIGNMENT_BYTES."""
    offset = -memory.data_ptr() % ALIGNMENT_BYTES
    views = []
    for shape, dtype in specs:
        nbytes = math.prod(shape) * dtype.itemsize
        views.append(memory[offset : offset + nbytes].view(dtype).view(shape))
        offset += _padded_bytes(shape, dtype)
    return tuple(views)


def _place(items: Tensor) -> PoolPlacement:
    return PoolPlacement(
        base=items.data_ptr(), stride_bytes=items.stride(0) * items.element_size(), count=items.shape[0]
    )
