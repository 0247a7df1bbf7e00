"""One copy of the weights in memory for all ranks of a node on the CPU.

Every rank loads and prepares its weights as ever, one rank after the other. Then the pages that they lie in are
replaced by pages of a file in memory that the node's front has made: the first rank writes it, the others find their
own bytes there. So it does not matter how the weights were prepared; oneDNN's packed layouts too, which nothing else
can place, are shared. What a rank would write to them it alone would see. A buffer that differs stays the rank's own.

    load, prepare ──► not sealed: write all, seal ──► for each buffer: bytes equal to the file's? ──► map the file's
                                                      pages over them (private, fixed)

Nothing is mapped from a file before it is sealed, and nothing can write to a sealed one: what a rank has mapped stays
as it is, whatever another one brings. A file that is not sealed is what a rank that died has left: it is written anew.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

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


_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class _Span(NamedTuple):
    """Whole pages of a buffer, and their place in the file; bytes."""

    begin: int
    length: int
    offset: int


class SharedWeights:
    """The file, locked. shared_bytes: how much of this process's weights lies in it."""

    def __init__(self, file: int) -> None:
        self._file = file
        self.shared_bytes = 0

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Replace the whole pages of large CPU tensors. All ranks call it once, with the same ones in the same order;
        nothing may be written to them afterwards that others should see. Raises WorkerError."""
        spans = _spans(tensors)
        if not fcntl.fcntl(self._file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE:
            self._write(spans)
        size = os.fstat(self._file).st_size
        for span in spans:
            if span.offset + span.length <= size:
                self._share(span)

    def _write(self, spans: list[_Span]) -> None:
        try:
            os.ftruncate(self._file, 0)
            for span in spans:
                _write(self._file, memoryview((ctypes.c_char * span.length).from_address(span.begin)), span.offset)
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            raise _not_shared(error.errno) from error

    def _share(self, span: _Span) -> None:
        stored = self._map(None, span)
        is_equal = _libc.memcmp(span.begin, stored, span.length) == 0
        _libc.munmap(stored, span.length)
        if is_equal:
            self._map(span.begin, span)
            self.shared_bytes += span.length

    def _map(self, at: int | None, span: _Span) -> int:
        """Address of this part of the file, where it was asked for or anywhere."""
        flags, access = mmap.MAP_PRIVATE | (0 if at is None else _MAP_FIXED), mmap.PROT_READ | mmap.PROT_WRITE
        found = _libc.mmap(at, span.length, access, flags, self._file, span.offset)
        if found in (None, _MAP_FAILED):
            raise _not_shared(ctypes.get_errno())
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


def _spans(tensors: Iterable[Tensor]) -> list[_Span]:
    """A buffer's place follows from the sizes of those before it, wherever on their pages they lie."""
    found, offset = [], 0
    for address, size in map(_bytes_of, tensors):
        begin = -(-address // PAGE) * PAGE
        length = (address + size) // PAGE * PAGE - begin
        if length >= MIN_BYTES:
            found.append(_Span(begin, length, offset))
        offset += -(-size // PAGE) * PAGE
    return found


def _not_shared(number: int | None) -> WorkerError:
    return WorkerError(f"weights could not be shared: {os.strerror(number or 0)}")


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """(address, bytes) of what a contiguous tensor, or one in a layout of oneDNN, occupies."""
    if tensor.is_mkldnn:
        return int(torch.ops.mkldnn.data_ptr(tensor)), int(torch.ops.mkldnn._nbytes(tensor))
    return tensor.data_ptr(), tensor.nbytes if tensor.is_contiguous() else 0


def _write(file: int, data: memoryview, offset: int) -> None:
    data = data.cast("B")
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written
