"""The few functions of the CUDA driver that the transport `cuda_ipc` needs. Codes become typed errors here.

They act in the device's primary context, which is also torch's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from common.errors import ConfigError, TransferError
from transfer.transport import Block

HANDLE_BYTES = 64
_GRANULE_BYTES = 2 << 20  # a handle stands for a whole allocation of the driver, which never shares one of this size
_EVENT_BLOCKS, _EVENT_WITHOUT_TIME = 1, 2
_STREAM_NON_BLOCKING = 1
_OPEN_ENABLES_PEERS = 1
_IN_STREAM_ORDER = 1
_FEW_BLOCKS = 8


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * HANDLE_BYTES)]


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: when the source may be read, hints where both ends are, flags."""

    _fields_ = [("order", c_int), ("hints", c_int * 4), ("flags", c_uint)]


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
            raise ConfigError(
                f"--transport cuda_ipc: no CUDA device {ordinal} here: {error}", param="device"
            ) from error
        uuid = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid_v2", uuid, device)
        self.uuid = bytes(uuid).hex()
        self._batches = hasattr(self._lib, "cuMemcpyBatchAsync_v2")  # since CUDA 13

    def allocate(self, nbytes: int) -> int:
        """The address of zeroed device memory. It is given back when the process ends."""
        size, address = c_size_t(-(-nbytes // _GRANULE_BYTES) * _GRANULE_BYTES), c_uint64()
        self._here()
        self._call("cuMemAlloc_v2", byref(address), size)
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), size)
        self._call("cuCtxSynchronize")
        return address.value

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

    def close(self, address: int) -> None:
        """Let go of what `open` gave. No copy may be under way."""
        self._here()
        self._call("cuIpcCloseMemHandle", c_uint64(address))

    def make_stream(self) -> c_void_p:
        """Of the highest priority: a copy shall not wait for the kernels of a whole prompt."""
        least, greatest, stream = c_int(), c_int(), c_void_p()
        self._here()
        self._call("cuCtxGetStreamPriorityRange", byref(least), byref(greatest))
        self._call("cuStreamCreateWithPriority", byref(stream), c_uint(_STREAM_NON_BLOCKING), greatest)
        return stream

    def end_stream(self, stream: c_void_p) -> None:
        self._here()
        self._call("cuStreamDestroy_v2", stream)

    def synchronize(self, stream: c_void_p) -> None:
        """Wait until nothing of the stream is under way."""
        self._here()
        self._call("cuStreamSynchronize", stream)

    def copy(self, blocks: Sequence[Block], stream: c_void_p) -> None:
        """Queue the copies. Many are queued as one batch where the driver can."""
        self._here()
        if self._batches and len(blocks) > _FEW_BLOCKS:
            self._copy_batch(blocks, stream)
            return
        for block in blocks:
            self._call("cuMemcpyDtoDAsync_v2", c_uint64(block.dst), c_uint64(block.src), c_size_t(block.nbytes), stream)

    def _copy_batch(self, blocks: Sequence[Block], stream: c_void_p) -> None:
        count = len(blocks)
        sources, targets, sizes, _ = zip(*blocks, strict=True)
        self._call(
            "cuMemcpyBatchAsync_v2",
            (c_uint64 * count)(*targets),
            (c_uint64 * count)(*sources),
            (c_size_t * count)(*sizes),
            c_size_t(count),
            byref(_CopyAttributes(order=_IN_STREAM_ORDER)),
            byref(c_size_t(0)),
            c_size_t(1),
            stream,
        )

    def mark(self, stream: c_void_p) -> c_void_p:
        """An event behind everything queued so far; `wait` ends it."""
        event = c_void_p()
        self._here()
        self._call("cuEventCreate", byref(event), c_uint(_EVENT_BLOCKS | _EVENT_WITHOUT_TIME))
        self._call("cuEventRecord", event, stream)
        return event

    def wait(self, event: c_void_p) -> None:
        """Sleep until the event has happened."""
        self._here()
        try:
            self._call("cuEventSynchronize", event)
        finally:
            self._lib.cuEventDestroy_v2(event)

    def _here(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code:
            meaning = ctypes.c_char_p()
            self._lib.cuGetErrorName(code, byref(meaning))
            said = meaning.value.decode() if meaning.value else f"code {code}"
            raise TransferError(f"cuda_ipc: {name}: {said}", code="write_failed")
