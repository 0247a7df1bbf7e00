"""Errors that cross processes."""

from __future__ import annotations

import msgspec
import pytest

from common.errors import TransferError, from_record


@pytest.mark.parametrize(
    ("said", "kept"), [(400, 400), (502, 502), (599, 599), (399, 500), (600, 500), (200, 500), (0, 500), (-1, 500)]
)
def test_a_status_from_a_peer_is_one_that_http_can_answer_with(said: int, kept: int) -> None:
    error = from_record(msgspec.structs.replace(TransferError("x").record(), status=said))
    assert isinstance(error, TransferError)
    assert error.http_status == error.record().status == kept
