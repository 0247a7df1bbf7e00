"""Reading bodies: whole, within limits, at a cost that grows with their length alone."""

from __future__ import annotations

import time

import pytest
from starlette.types import Message, Receive, Scope

from common.errors import AbortedError, RequestError
from common.http_server import read_body


def parts(*bodies: bytes) -> Receive:
    messages = [{"type": "http.request", "body": body, "more_body": True} for body in bodies]
    messages[-1]["more_body"] = False
    remaining = iter(messages)

    async def receive() -> Message:
        return next(remaining)

    return receive


def scope(**headers: str) -> Scope:
    return {"headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]}


async def test_a_body_may_be_as_long_as_the_limit() -> None:
    assert await read_body(scope(content_length="4"), parts(b"ab", b"", b"cd"), max_bytes=4, timeout_s=1) == b"abcd"
    for headers, receive in ((scope(), parts(b"ab", b"cde")), (scope(content_length="5"), parts(b"abcde"))):
        with pytest.raises(RequestError) as refused:
            await read_body(headers, receive, max_bytes=4, timeout_s=1)
        assert (refused.value.http_status, refused.value.code) == (413, "body_too_large")


async def test_a_client_that_leaves() -> None:
    async def gone() -> Message:
        return {"type": "http.disconnect"}

    with pytest.raises(AbortedError):
        await read_body(scope(), gone, max_bytes=4, timeout_s=1)


async def test_many_parts_cost_no_more_each_than_few() -> None:
    async def seconds(count: int) -> float:
        receive = parts(*[b"x"] * count)
        start = time.process_time()
        await read_body(scope(), receive, max_bytes=count, timeout_s=60)
        return time.process_time() - start

    few, many = await seconds(2_000), await seconds(32_000)
    assert many < 60 * few, "16 times as many parts; the square would be 256"
