"""Load on a server: streams that are timed token by token, and requests that arrive at random whatever became of the
ones before (an open loop). Times are seconds of `time.perf_counter`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

Figures = dict[str, Any]
_EVENT = b"data: {"


@dataclass(slots=True, kw_only=True)
class Heard:
    """One streamed answer. times: when each event came, one a token. failed: why there was no whole answer.
    last: the end of the stream."""

    begin_s: float
    times: list[float] = field(default_factory=list)
    failed: str | None = None
    last: bytes = b""

    @property
    def first_s(self) -> float:
        """Time to first token."""
        return self.times[0] - self.begin_s

    def meta(self) -> Figures:
        """`meta_info` of the last event. Raises ValueError when there is none."""
        line = next(line for line in reversed(self.last.splitlines()) if line.startswith(_EVENT))
        found: Figures = json.loads(line.removeprefix(b"data: "))["meta_info"]
        return found


class Prompts:
    """Random token ids below `vocabulary`, no prompt twice."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self._draw, self._vocabulary = random.Random(seed), vocabulary

    def __call__(self, length: int) -> list[int]:
        return [self._draw.randrange(1, self._vocabulary) for _ in range(length)]


@asynccontextmanager
async def session(limit_s: float) -> Any:
    """limit_s: of a whole answer."""
    timeout = aiohttp.ClientTimeout(total=limit_s)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as made:
        yield made


def body_of(ids: Sequence[int], new_tokens: int) -> bytes:
    params = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return json.dumps({"input_ids": ids, "sampling_params": params, "stream": True}).encode()


async def listen(client: aiohttp.ClientSession, url: str, body: bytes, heard: Heard | None = None) -> Heard:
    """Ask and time every event; an error is noted, not raised. heard: filled while the answer comes."""
    heard = heard or Heard(begin_s=0.0)
    heard.begin_s = time.perf_counter()
    headers = {"content-type": "application/json"}
    try:
        async with client.post(f"{url}/generate", data=body, headers=headers) as response:
            if response.status != 200:
                heard.failed = _code(response.status, await response.read())
                return heard
            await _time_events(response, heard)
    except (aiohttp.ClientError, TimeoutError) as error:
        heard.failed = type(error).__name__
    return heard


async def _time_events(response: aiohttp.ClientResponse, heard: Heard) -> None:
    tail = b""
    async for chunk in response.content.iter_any():
        now, text = time.perf_counter(), tail + chunk
        if b'data: {"error"' in text:
            heard.failed = _code(200, text[text.index(b'{"error"') :].partition(b"\n")[0])
            return
        heard.times += [now] * (text.count(_EVENT) - tail.count(_EVENT))
        if b'"timing"' in text:
            heard.last = text
        tail = text[text.rfind(b"\n\n") + 2 :] if b"\n\n" in text else text


def _code(status: int, body: bytes) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return f"{status} {json.loads(body)['error']['code']}"
    return str(status)


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """When rate x seconds requests arrive within `seconds`: a Poisson process of which the count is known."""
    draw = random.Random(seed)
    return sorted(draw.uniform(0.0, seconds) for _ in range(round(rate * seconds)))


async def open_loop(
    client: aiohttp.ClientSession, urls: Sequence[str], times: Sequence[float], body: Callable[[], bytes]
) -> list[Heard]:
    """A request at each of these times from now on, to each of the urls by turns; returns when all have ended."""
    turn, begin, asked = itertools.cycle(urls), time.perf_counter(), list[asyncio.Task[Heard]]()
    for at in times:
        made = body()
        await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
        asked.append(asyncio.create_task(listen(client, next(turn), made)))
    return list(await asyncio.gather(*asked))


@asynccontextmanager
async def running_streams(
    client: aiohttp.ClientSession, urls: Sequence[str], count: int, body: Callable[[], bytes]
) -> Any:
    """`count` answers on their way, over the urls by turns, each past its first token; aborted on leaving."""
    heard = [Heard(begin_s=0.0) for _ in range(count)]
    turn = itertools.cycle(urls)
    tasks = [asyncio.create_task(listen(client, next(turn), body(), each)) for each in heard]
    try:
        while not all(each.times or each.failed for each in heard):  # noqa: ASYNC110 (a benchmark's patience)
            await asyncio.sleep(0.02)
        yield heard
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def gaps_ms(heard: Sequence[Heard], begin_s: float = 0.0, end_s: float = float("inf")) -> list[float]:
    """Between two tokens of an answer (ITL), where the first of them came between begin and end."""
    return [(b - a) * 1e3 for each in heard for a, b in itertools.pairwise(each.times) if begin_s <= a < end_s]


def percentiles(values: Sequence[float], name: str) -> Figures:
    """p50, p99 and max, as NAME_p50_ms …; nothing of nothing."""
    ordered = sorted(values)
    if not ordered:
        return {}
    cuts = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {f"{name}_{cut}_ms": round(_at(ordered, share), 2) for cut, share in cuts.items()}


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def summary(heard: Sequence[Heard]) -> Figures:
    """How many were asked and answered, why others were not, TTFT and ITL."""
    answered = [each for each in heard if each.failed is None and each.times]
    failures = Counter(each.failed for each in heard if each.failed is not None)
    figures: Figures = {"asked": len(heard), "answered": len(answered)}
    figures |= {"failed": dict(failures)} if failures else {}
    figures |= percentiles([each.first_s * 1e3 for each in answered], "ttft")
    return figures | percentiles(gaps_ms(answered), "itl")


def lines(figures: Figures) -> Iterator[str]:
    """One line for each entry of a section."""
    for key, value in figures.items():
        if isinstance(value, dict):
            cells = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in value.items())
            yield f"  {key:28} {cells}"
        else:
            yield f"  {key} = {value:.4g}" if isinstance(value, float) else f"  {key} = {value}"
