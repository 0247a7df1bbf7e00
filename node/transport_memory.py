"""Pool memory that a transport can write from and into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from common.errors import TransferError
from transfer.transport import DeviceTransport, Transport


def pool_allocator(transport: Transport) -> Callable[[int], Tensor]:
    """An allocator of memory that the transport carries: uint8 tensors of the asked number of bytes."""
    return device_allocator(cast(DeviceTransport, transport)) if transport.on_device else host_allocator(transport)


def host_allocator(transport: Transport) -> Callable[[int], Tensor]:
    """An allocator of registered host memory: uint8 tensors of the asked number of bytes."""

    def allocate(nbytes: int) -> Tensor:
        return torch.frombuffer(transport.host_buffer(nbytes), dtype=torch.uint8)

    return allocate


def device_allocator(transport: DeviceTransport) -> Callable[[int], Tensor]:
    """The same of the memory of the transport's card."""

    def allocate(nbytes: int) -> Tensor:
        try:
            address = transport.device_buffer(nbytes)
        except TransferError as error:
            raise MemoryError(error.message) from error
        return torch.as_tensor(_DeviceBytes(address, nbytes), device=torch.device("cuda", transport.card))

    return allocate


class _DeviceBytes:
    """Device memory as torch takes it over without copying."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
