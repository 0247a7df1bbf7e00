"""Speed of a server as its clients see it, for `sglang.py`: decode steps, prefill, hand-off.

decode: so many streams at once; a step is the time from one token to the next of a stream while all of them run.
prefill: prompts at once, a token each, until the last one's token. hand-off: the same through a router, less what the
unified server takes. No prompt comes twice.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.load import Prompts, body_of, session
from bench.sglang_servers import Scale

LIMIT_S = 120.0
WARM_UPS = 2
_COUNT = re.compile(rb'"completion_tokens":\s*(\d+)')
Figures = dict[str, Any]


@dataclass(slots=True)
class Stream:
    """begin_s: when it was asked for. tokens: times, and how many tokens there were by then."""

    begin_s: float
    tokens: list[tuple[float, int]] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        return self.tokens[0][0] - self.begin_s


async def listen(client: aiohttp.ClientSession, url: str, body: bytes) -> Stream:
    """Raises AssertionError for what is no whole answer: a server that sends several tokens in one event is right."""
    stream = Stream(time.perf_counter())
    headers = {"content-type": "application/json"}
    rest = b""
    async with client.post(f"{url}/generate", data=body, headers=headers) as response:
        assert response.status == 200, f"{url}: {response.status} {(await response.read())[:300]!r}"
        async for chunk in response.content.iter_any():
            *events, rest = (rest + chunk).split(b"\n\n")
            counts = [int(found[1]) for event in events if (found := _COUNT.search(event))]
            if counts and counts[-1] > 0:
                stream.tokens.append((time.perf_counter(), counts[-1]))
            assert not any(b'"error"' in event[:20] for event in events), events[0][:300]
    assert stream.tokens, f"{url}: a stream without a token"
    return stream


async def together(client: aiohttp.ClientSession, url: str, bodies: Sequence[bytes]) -> list[Stream]:
    return list(await asyncio.gather(*(listen(client, url, body) for body in bodies)))


async def speed(unified: str, router: str, scale: Scale) -> Figures:
    """All figures of one engine, flat."""
    prompts = Prompts(scale.vocabulary, 41)
    figures: Figures = {}
    async with session(LIMIT_S) as client:
        for count, length in scale.prefill:
            figures |= await _first(client, (unified, router), prompts, (count, length), scale.repeats)
        for count in scale.decode:
            bodies = [body_of(prompts(scale.context), scale.decode_tokens) for _ in range(count)]
            figures |= step(count, await together(client, unified, bodies))
    return figures


async def _first(
    client: aiohttp.ClientSession, urls: tuple[str, str], prompts: Prompts, case: tuple[int, int], repeats: int
) -> Figures:
    """Milliseconds to the last first token, unified and through the router by turns: medians."""
    count, length = case
    took: dict[str, list[float]] = {url: [] for url in urls}
    for _ in range(WARM_UPS + repeats):
        for url in urls:
            bodies = [body_of(prompts(length), 1) for _ in range(count)]
            took[url].append(max(stream.first_s for stream in await together(client, url, bodies)) * 1e3)
    unified, routed = (statistics.median(took[url][WARM_UPS:]) for url in urls)
    return {
        f"prefill {count}x{length} ms": round(unified, 2),
        f"prefill {count}x{length} tokens_s": round(count * length / unified * 1e3),
        f"handoff {count}x{length} ms": round(routed - unified, 2),
    }


def step(count: int, streams: Sequence[Stream]) -> Figures:
    """Of the time in which all of them run. Raises AssertionError when there is none."""
    begin_s = max(stream.tokens[0][0] for stream in streams)
    end_s = min(stream.tokens[-1][0] for stream in streams)
    means, gaps = [], list[float]()
    for stream in streams:
        inside = [each for each in stream.tokens if begin_s <= each[0] <= end_s]
        if len(inside) > 2:
            means.append((inside[-1][0] - inside[0][0]) / (inside[-1][1] - inside[0][1]))
            gaps += [(b - a) / (n - m) for (a, m), (b, n) in itertools.pairwise(inside) if n > m]
    assert means, f"{count} streams never ran together"
    return {
        f"decode {count} step_ms": round(statistics.median(means) * 1e3, 2),
        f"decode {count} itl_p50_ms": round(statistics.median(gaps) * 1e3, 2),
    }


def ratios(native: Mapping[str, Any], sglang: Mapping[str, Any]) -> Iterator[str]:
    """A line for each figure that both have: 1 or more where native is at least as good."""
    shared = [key for key in native if key in sglang and key.startswith(("decode", "prefill", "handoff"))]
    if shared:
        yield f"\n{'9B shape':26} {'native':>10} {'SGLang':>10} {'native/SGLang':>14}"
    for key in shared:
        ours, theirs = native[key], sglang[key]
        better, worse = (ours, theirs) if key.endswith("tokens_s") else (theirs, ours)
        ratio = f"{better / worse:.2f}" if better > 0 and worse > 0 else "-"
        yield f"{key:26} {ours:10g} {theirs:10g} {ratio:>14}"
