"""Endless packed training sequences, written by worker processes while the model trains.

A document is 1 to 16 shots and an end-of-text token; documents are laid end to end and cut into rows. A row may
begin in the middle of a problem, and nothing is reset between documents: the model learns to use what lies far back
and to begin anew after an end of text.
"""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Iterator, Sequence
from multiprocessing.queues import Queue
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accuracy.gsm_mini import SCHEMES, shot, stream
from training.tokenizer import END_OF_TEXT_ID

Rows = NDArray[np.int16]  # [rows, row tokens]

SHOTS_AT_ONCE = 1000


def document_lengths(rng: random.Random) -> Iterator[int]:
    """How many shots each document has: a third one, a third 2 to 7, a third 4 to 16."""
    while True:
        yield rng.choice((1, rng.randint(2, 7), rng.randint(4, 16)))


def token_pieces(tokenizer_path: Path, seed: int, schemes: Sequence[str]) -> Iterator[list[int]]:
    """The tokens of shot after shot, with the end-of-text token where a document ends."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    problems, lengths = stream("train", seed, schemes), document_lengths(random.Random(seed))
    left = next(lengths)
    while True:
        texts = [shot(next(problems)) for _ in range(SHOTS_AT_ONCE)]
        for encoding in tokenizer.encode_batch(texts):
            left -= 1
            if left:
                yield encoding.ids
            else:
                yield [*encoding.ids, END_OF_TEXT_ID]
                left = next(lengths)


def blocks(tokenizer_path: Path, seed: int, schemes: Sequence[str], rows: int, row_tokens: int) -> Iterator[Rows]:
    """Blocks of packed rows [rows, row_tokens]."""
    pieces, buffer = token_pieces(tokenizer_path, seed, schemes), list[int]()
    while True:
        while len(buffer) < rows * row_tokens:
            buffer += next(pieces)
        yield np.array(buffer[: rows * row_tokens], dtype=np.int16).reshape(rows, row_tokens)
        del buffer[: rows * row_tokens]


def _work(
    queue: Queue[Rows], tokenizer_path: Path, seed: int, schemes: Sequence[str], rows: int, row_tokens: int
) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for block in blocks(tokenizer_path, seed, schemes, rows, row_tokens):
        queue.put(block)


def scheme_names(extra: Sequence[str]) -> tuple[str, ...]:
    """All schemes once, and those named in `extra` ("name=times") so many times more."""
    names = list(SCHEMES)
    for item in extra:
        name, times = item.split("=")
        names += [name] * int(times)
    return tuple(names)


class BlockFeed:
    """Blocks from several processes, in an order that depends only on the seed and the number of workers."""

    def __init__(
        self, tokenizer_path: Path, *, seed: int, schemes: Sequence[str], workers: int, rows: int, row_tokens: int
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._queues: list[Queue[Rows]] = [context.Queue(maxsize=2) for _ in range(workers)]
        self._processes = [
            context.Process(
                target=_work, args=(queue, tokenizer_path, seed * 1000 + i, schemes, rows, row_tokens), daemon=True
            )
            for i, queue in enumerate(self._queues)
        ]
        self._taken = 0

    def __enter__(self) -> BlockFeed:
        for process in self._processes:
            process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()

    def take(self) -> Rows:
        """The next block; waits until it is written."""
        queue: Any = self._queues[self._taken % len(self._queues)]
        self._taken += 1
        block: Rows = queue.get()
        return block
