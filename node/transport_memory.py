"""Pool memory that a transport can write from and into."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from transfer.transport import Transport


def host_allocator(transport: Transport) -> Callable[[int], Tensor]:
    """An allocator of registered host memory: uint8 tensors of the asked number of bytes."""

    def allocate(nbytes: int) -> Tensor:
        return torch.frombuffer(transport.host_buffer(nbytes), dtype=torch.uint8)

    return allocate
