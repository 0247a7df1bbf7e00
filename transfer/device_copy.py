"""Copies of a card's memory that the hand-off makes: large blocks by a copy engine, the others by one kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from common.errors import TransferError
from transfer.cuda_driver import CudaDriver
from transfer.device_kernels import WORD_BYTES, copy_blocks
from transfer.transport import Block

_LARGE_BYTES = 1 << 16


def queue_copies(
    blocks: Sequence[Block], copy: Callable[[int, int, int, int], None], stream: torch.cuda.Stream
) -> torch.cuda.Event:
    """Queue copies from `src` to `dst`, both as this process' device sees them. The event: when all are made.

    copy(source, target, bytes, stream's handle): queues one that is large, so that the multiprocessors are left to the
    prompt, or not of whole words. What is read must be complete: nothing orders the copies behind other streams. Raises
    TransferError.
    """
    with torch.cuda.stream(stream), as_errors("write"):
        for block in blocks:
            if not _is_for_kernel(block):
                copy(block.src, block.dst, block.nbytes, stream.cuda_stream)
        small = [(block.src, block.dst, block.nbytes // WORD_BYTES) for block in blocks if _is_for_kernel(block)]
        sources, targets, words = np.array(small, np.int64).reshape(-1, 3).T
        copy_blocks(sources, targets, words, stream.device)
        written = torch.cuda.Event(blocking=True)
        written.record()
    return written


def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Of high priority: a copy shall not wait for the kernels of a whole prompt."""
    return torch.cuda.Stream(device, priority=-1)


def wait_for(done: torch.cuda.Event | torch.cuda.Stream) -> None:
    with as_errors("write"):
        done.synchronize()


@contextmanager
def as_errors(what: str) -> Iterator[None]:
    """What torch raises for CUDA as a TransferError."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise TransferError(f"CUDA: {what}: {reason}", code="write_failed") from error


def _is_for_kernel(block: Block) -> bool:
    return block.nbytes < _LARGE_BYTES and not (block.src | block.dst | block.nbytes) % WORD_BYTES


class HostCopies:
    """Copies from a card to page-locked memory of the host."""

    def __init__(self, driver: CudaDriver, card: int) -> None:
        self._driver = driver
        self._stream = copy_stream(torch.device("cuda", card))

    def __call__(self, blocks: Sequence[Block]) -> None:
        """Returns when all are made. Raises TransferError."""
        wait_for(queue_copies(blocks, self._driver.copy_to_host, self._stream))
