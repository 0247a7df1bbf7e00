"""The few functions of the CUDA driver that transports of device memory need. Codes become typed errors here.

They act in the device's primary context, which is also torch's; streams, events and kernels are torch's.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from common.errors import ConfigError, TransferError

HANDLE_BYTES = 64
_GRANULE_BYTES = 2 << 20  # a handle stands for a whole allocation of the driver, which never shares one of this size
_OPEN_ENABLES_PEERS = 1
_PORTABLE = 1
_LEGACY_STREAM = 1


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * HANDLE_BYTES)]


class CudaDriver:
    """One device. Every method may be called from any thread; what the driver refuses is a TransferError."""

    def __init__(self, ordinal: int) -> None:
        """Raises ConfigError when there is no driver or no such device."""
        try:
            self._lib: Any = ctypes.CDLL("libcuda.so.1")
            self._call("cuInit", 0)
            device, self._context = c_int(), c_void_p()
            self._call("cuDeviceGet", byref(device), ordinal)
            self._call("cuDevicePrimaryCtxRetain", byref(self._context), device)
        except (OSError, TransferError) as error:
            raise ConfigError(f"--device cuda:{ordinal}: there is none here: {error}", param="device") from error
        uuid = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid_v2", uuid, device)
        self.uuid = bytes(uuid).hex()

    def allocate(self, nbytes: int) -> int:
        """The address of zeroed device memory. It is given back when the process ends."""
        size, address = c_size_t(-(-nbytes // _GRANULE_BYTES) * _GRANULE_BYTES), c_uint64()
        self._here()
        self._call("cuMemAlloc_v2", byref(address), size)
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), size)
        self._call("cuCtxSynchronize")
        return address.value

    def allocate_pinned(self, nbytes: int) -> int:
        """The address of page-locked memory of the host, which the card reaches at the same one. It is given back when
        the process ends."""
        address = c_void_p()
        self._here()
        self._call("cuMemHostAlloc", byref(address), c_size_t(nbytes), c_uint(_PORTABLE))
        assert address.value is not None
        return address.value

    def settle(self) -> None:
        """Wait for the default stream, where libraries copy that were not given one; nothing of ours runs there."""
        self._here()
        self._call("cuStreamSynchronize", c_void_p(_LEGACY_STREAM))

    def export(self, address: int) -> bytes:
        """What another process of this host needs to `open` an allocation."""
        handle = _Handle()
        self._here()
        self._call("cuIpcGetMemHandle", byref(handle), c_uint64(address))
        return bytes(handle.bytes)

    def open(self, handle: bytes) -> int:
        """Where another process' allocation lies here."""
        address = c_uint64()
        self._here()
        self._call(
            "cuIpcOpenMemHandle_v2", byref(address), _Handle.from_buffer_copy(handle), c_uint(_OPEN_ENABLES_PEERS)
        )
        return address.value

    def copy(self, source: int, target: int, nbytes: int, stream: int) -> None:
        """Queue a copy on a stream (its handle), to be made by a copy engine."""
        self._here()
        self._call("cuMemcpyDtoDAsync_v2", c_uint64(target), c_uint64(source), c_size_t(nbytes), c_void_p(stream))

    def copy_to_host(self, source: int, target: int, nbytes: int, stream: int) -> None:
        """The same to page-locked memory."""
        self._here()
        self._call("cuMemcpyDtoHAsync_v2", c_void_p(target), c_uint64(source), c_size_t(nbytes), c_void_p(stream))

    def close(self, address: int) -> None:
        """Let go of what `open` gave. No copy may be under way."""
        self._here()
        self._call("cuIpcCloseMemHandle", c_uint64(address))

    def _here(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code:
            meaning = ctypes.c_char_p()
            self._lib.cuGetErrorName(code, byref(meaning))
            said = meaning.value.decode() if meaning.value else f"code {code}"
            raise TransferError(f"CUDA: {name}: {said}", code="write_failed")


def card_of(device: str) -> int:
    """The number in "cuda:1"; of "cuda" 0."""
    return int(device.partition(":")[2] or 0)
