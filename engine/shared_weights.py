"""One copy of the weights in memory for all ranks of a node on the CPU.

Every rank loads and prepares its weights as ever, one rank after the other. Then the pages that they lie in are
replaced by pages of a file in memory that the node's front has made: the first rank writes it, the others find their
own bytes there. So it does not matter how the weights were prepared; oneDNN's packed layouts too, which nothing else
can place, are shared. What a rank would write to them it alone would see. A buffer that differs stays the rank's own.

    load, prepare ──► for each buffer: bytes equal to the file's? ──► map the file's pages over them (private, fixed)
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from common.errors import WorkerError

log = logging.getLogger(__name__)

MIN_BYTES = 64 * 1024
PAGE = mmap.PAGESIZE
_MAP_FIXED = 0x10
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1
_LARGEST_THRESHOLD = 32 * 1024 * 1024  # where glibc's own, which grows, ends

_libc = ctypes.CDLL(None, use_errno=True)
_MAP_FAILED = ctypes.c_void_p(-1).value
_libc.mmap.restype = ctypes.c_void_p
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *([ctypes.c_int] * 3), ctypes.c_long]


class SharedWeights:
    """The file, locked. shared_bytes: how much of this process's weights lies in it."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._offset = 0
        self.shared_bytes = 0

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Replace the whole pages of large CPU tensors. All ranks call it with the same ones in the same order; nothing
        may be written to them afterwards that others should see."""
        for tensor in tensors:
            address, size = _bytes_of(tensor)
            begin = -(-address // PAGE) * PAGE
            length = (address + size) // PAGE * PAGE - begin
            if length >= MIN_BYTES:
                self._share(begin, length)

    def _share(self, begin: int, length: int) -> None:
        if os.fstat(self._file).st_size < self._offset + length:  # the first rank, or the first one died here
            own = memoryview((ctypes.c_char * length).from_address(begin)).cast("B")
            _write(self._file, own, self._offset)
        stored = self._map(None, length)
        is_equal = _libc.memcmp(begin, stored, length) == 0
        _libc.munmap(stored, length)
        if is_equal:
            self._map(begin, length)
            self.shared_bytes += length
        self._offset += length

    def _map(self, at: int | None, length: int) -> int:
        """Address of this part of the file, where it was asked for or anywhere."""
        flags, access = mmap.MAP_PRIVATE | (0 if at is None else _MAP_FIXED), mmap.PROT_READ | mmap.PROT_WRITE
        found = _libc.mmap(at, length, access, flags, self._file, self._offset)
        if found in (None, _MAP_FAILED):
            raise WorkerError(f"weights could not be shared: {os.strerror(ctypes.get_errno())}")
        return int(found)


@contextmanager
def shared_weights(path: str | None) -> Iterator[SharedWeights | None]:
    """Of the node whose front has made this file, while no other rank loads; None without a file.

    Large blocks of memory begin at page borders meanwhile, so that the same bytes lie on the same places of a page.
    """
    if path is None:
        yield None
        return
    file = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        _libc.mallopt(_M_MMAP_THRESHOLD, MIN_BYTES)
        try:
            yield (sharing := SharedWeights(file))
        finally:
            _libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
            _libc.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST_THRESHOLD)
        log.info("weights shared with the other ranks: %.1f MB", sharing.shared_bytes / 1e6)
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # mappings keep the file, and the lock, open
        os.close(file)


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """(address, bytes) of what a contiguous tensor, or one in a layout of oneDNN, occupies."""
    if tensor.is_mkldnn:
        return int(torch.ops.mkldnn.data_ptr(tensor)), int(torch.ops.mkldnn._nbytes(tensor))
    return tensor.data_ptr(), tensor.nbytes if tensor.is_contiguous() else 0


def _write(file: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written
