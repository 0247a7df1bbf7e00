"""Weights that several ranks have in one place of memory."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil
import pytest
import torch
from torch import Tensor

from engine.ops.linear import Projection
from engine.shared_weights import MIN_BYTES, PAGE, SharedWeights, shared_weights


@pytest.fixture
def path() -> Iterator[str]:
    file = os.memfd_create("tandem-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    yield f"/proc/self/fd/{file}"
    os.close(file)


def shared(path: str, *tensors: Tensor) -> SharedWeights:
    with shared_weights(path) as sharing:
        assert sharing is not None
        sharing.share(tensors)
        return sharing


def matrix(seed: int = 0) -> Tensor:
    return torch.randn(512, 512, generator=torch.Generator().manual_seed(seed))


def weights(seed: int = 0, *, rows: int = 512, at: int = 64) -> Tensor:
    """At the same place of a page each time, as in ranks, whose heaps are fresh. at: bytes from the page's begin."""
    buffer = torch.empty(rows * 512 + 2048)
    begin = (-buffer.data_ptr() % PAGE + at) // 4
    generator = torch.Generator().manual_seed(seed)
    return buffer[begin : begin + rows * 512].view(rows, 512).copy_(torch.randn(rows, 512, generator=generator))


def test_what_is_shared_stays_as_it_is_and_what_one_writes_the_others_do_not_see(path: str) -> None:
    first, second = weights(), weights()
    assert shared(path, first).shared_bytes >= first.nbytes - 2 * 4096
    assert shared(path, second).shared_bytes == shared(path, first).shared_bytes
    assert torch.equal(first, matrix()) and torch.equal(second, matrix())
    maps = [each for each in psutil.Process().memory_maps(grouped=False) if "tandem-weights" in each.path]
    assert sum(each.rss for each in maps) >= 2 * (first.nbytes - 2 * 4096)
    first += 1
    assert torch.equal(second, matrix())


def test_products_are_as_before(path: str) -> None:
    with shared_weights(path):
        ranks = [Projection(matrix()) for _ in range(2)]
    x = torch.randn(8, 512)
    expected = ranks[0](x), ranks[0](x[:1])
    for rank in ranks:
        assert rank.packed is not None
        shared(path, rank.matrix, rank.packed)
        assert torch.equal(rank(x), expected[0]) and torch.equal(rank(x[:1]), expected[1])


def test_what_differs_stays_the_rank_s_own(path: str) -> None:
    first, other = weights(), weights(1)
    shared(path, first)
    assert shared(path, other).shared_bytes == 0
    assert torch.equal(other, matrix(1)) and torch.equal(first, matrix())


@pytest.mark.parametrize("rows", [520, 1024])
def test_another_model_in_the_folder_leaves_what_a_living_rank_has_as_it_is(path: str, rows: int) -> None:
    first, last = weights(), weights(1)
    shared(path, first, last)
    others = weights(2, rows=rows), weights(3)
    assert shared(path, *others).shared_bytes == 0
    assert torch.equal(first, weights()) and torch.equal(last, weights(1))
    assert torch.equal(others[0], weights(2, rows=rows)) and torch.equal(others[1], weights(3))


def test_a_buffer_that_lies_elsewhere_on_its_page_is_alone_with_that(path: str) -> None:
    first, last = weights(at=0), weights(1)
    both = shared(path, first, last).shared_bytes
    other, same = weights(at=64), weights(1)
    assert 0 < shared(path, other, same).shared_bytes < both
    assert all(torch.equal(each, weights()) for each in (first, other))
    assert torch.equal(last, weights(1)) and torch.equal(same, weights(1))


def test_what_is_mapped_can_no_longer_be_written(path: str) -> None:
    shared(path, weights())
    file = os.open(path, os.O_RDWR)
    try:
        for write in (
            lambda: os.pwrite(file, b"x", 0),
            lambda: os.ftruncate(file, 0),
            lambda: os.truncate(path, 1 << 30),
        ):
            with pytest.raises(PermissionError):
                write()
    finally:
        os.close(file)


def test_a_rank_that_died_while_it_wrote_is_done_again(path: str) -> None:
    first = weights()
    file = os.open(path, os.O_RDWR)
    os.pwrite(file, b"half of it", 0)
    os.close(file)
    assert shared(path, first).shared_bytes > 0 and torch.equal(first, matrix())


def test_small_and_scattered_ones_are_left_alone(path: str) -> None:
    small, scattered = torch.zeros(MIN_BYTES // 8), matrix().t()
    assert shared(path, small, scattered).shared_bytes == 0
    with shared_weights(None) as sharing:
        assert sharing is None
