"""Plots as SVG text, made by hand: nothing to load, nothing to run."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

WIDTH, HEIGHT = 640, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 16, 36
COLOURS = {"cold": "#1f6feb", "warm": "#d9730d", "baseline": "#8a8f98", "bar": "#c93c37", "night": "#1f6feb"}

Scale = Callable[[float], float]


class Point(NamedTuple):
    """A figure with its interval. colour: a key of COLOURS."""

    label: str
    value: float
    low: float
    high: float
    colour: str


@dataclass(slots=True)
class _Canvas:
    parts: list[str]

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str, extra: str = "") -> None:
        place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self.parts.append(f'<line {place} stroke="{colour}" {extra}/>')

    def text(self, x: float, y: float, said: str, anchor: str = "middle", colour: str = "#57606a") -> None:
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self.parts.append(f'<text {place} fill="{colour}">{html.escape(said)}</text>')

    def dot(self, x: float, y: float, colour: str, title: str) -> None:
        hint = f"<title>{html.escape(title)}</title>"
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}">{hint}</circle>')

    def bar(self, x: float, y: float, width: float, height: float, colour: str, title: str) -> None:
        place = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.5, width):.1f}" height="{height:.1f}"'
        self.parts.append(
            f'<rect {place} fill="{colour}" fill-opacity="0.75"><title>{html.escape(title)}</title></rect>'
        )

    def svg(self, label: str) -> str:
        head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(label)}">'
        return head + "".join(self.parts) + "</svg>"


def intervals(points: Sequence[Point], threshold: float | None, label: str) -> str:
    """Dots with whiskers side by side, and the bar that they have to reach."""
    canvas = _Canvas([])
    bounds = [threshold] if threshold is not None else []
    y = _share_axis(canvas, [p.low for p in points] + bounds, [p.high for p in points] + bounds)
    if threshold is not None:
        _threshold(canvas, y(threshold), threshold)
    every = max(1, math.ceil(len(points) / 8))
    for i, point in enumerate(points):
        x, colour = _place(i, len(points)), COLOURS[point.colour]
        canvas.line(x, y(point.low), x, y(point.high), colour, 'stroke-width="2"')
        for end in (point.low, point.high):
            canvas.line(x - 5, y(end), x + 5, y(end), colour, 'stroke-width="2"')
        canvas.dot(x, y(point.value), colour, f"{point.label}: {point.value:.4f} ({point.low:.4f} to {point.high:.4f})")
        if i % every == 0:
            canvas.text(x, HEIGHT - BOTTOM + 17, point.label)
    return canvas.svg(label)


def sums(values: Sequence[float], labels: Sequence[str], limit: float, label: str) -> str:
    """CUSUM by night, and the limit above which it is an alarm."""
    canvas = _Canvas([])
    y = _axis(canvas, 0.0, max([limit * 1.25, *values]), 4, lambda v: f"{v:.1f}")
    canvas.line(LEFT, y(limit), WIDTH - RIGHT, y(limit), COLOURS["bar"], 'stroke-dasharray="5 4"')
    canvas.text(WIDTH - RIGHT, y(limit) - 5, f"alarm above {limit:g}", "end", COLOURS["bar"])
    every = max(1, math.ceil(len(values) / 8))
    for i, value in enumerate(values):
        x = _place(i, len(values))
        colour = COLOURS["bar"] if value > limit else COLOURS["night"]
        if i:
            canvas.line(_place(i - 1, len(values)), y(values[i - 1]), x, y(value), colour, 'stroke-width="2"')
        canvas.dot(x, y(value), colour, f"{labels[i]}: {value:.2f}")
        if i % every == 0:
            canvas.text(x, HEIGHT - BOTTOM + 17, labels[i])
    return canvas.svg(label)


def histogram(values: Sequence[float], longest: float, colour: str, label: str) -> str:
    """Of seconds, in 30 equal bins from 0 to `longest` at least, which makes several of them comparable."""
    canvas, bins = _Canvas([]), 30
    width = _round_up(max(longest, 1e-6) / bins)
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int(value / width))] += 1
    y = _axis(canvas, 0.0, max(counts, default=1) or 1, 4, lambda v: f"{v:.0f}")
    step = (WIDTH - LEFT - RIGHT) / bins
    for i, count in enumerate(counts):
        if count:
            title = f"{i * width:.3g} to {(i + 1) * width:.3g} s: {count}"
            canvas.bar(LEFT + i * step + 1, y(count), step - 2, y(0) - y(count), COLOURS[colour], title)
    for i in range(0, bins + 1, 6):
        canvas.text(LEFT + i * step, HEIGHT - BOTTOM + 17, f"{i * width:.3g}")
    canvas.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 3, "seconds")
    return canvas.svg(label)


def _place(index: int, count: int) -> float:
    return LEFT + (index + 0.5) * (WIDTH - LEFT - RIGHT) / count


def _threshold(canvas: _Canvas, y: float, threshold: float) -> None:
    canvas.line(LEFT, y, WIDTH - RIGHT, y, COLOURS["bar"], 'stroke-dasharray="5 4"')
    canvas.text(WIDTH - RIGHT, y - 5, f"bar {threshold:g}", "end", COLOURS["bar"])


def _share_axis(canvas: _Canvas, lows: Sequence[float], highs: Sequence[float]) -> Scale:
    """To the twentieths around the lowest and the highest, within 0 … 1."""
    low, high = max(0.0, math.floor(min(lows) * 20) / 20), min(1.0, math.ceil(max(highs) * 20) / 20)
    high = max(high, 0.05)
    return _axis(canvas, min(low, high - 0.05), high, 5, lambda v: f"{v:.2f}")


def _axis(canvas: _Canvas, low: float, high: float, steps: int, shown: Callable[[float], str]) -> Scale:
    span = HEIGHT - TOP - BOTTOM

    def y(value: float) -> float:
        return TOP + (high - value) / (high - low) * span

    for value in _ticks(low, high, steps):
        canvas.line(LEFT, y(value), WIDTH - RIGHT, y(value), "#e3e6ea")
        canvas.text(LEFT - 8, y(value) + 4, shown(value), "end")
    return y


def _ticks(low: float, high: float, steps: int) -> list[float]:
    """Round numbers from low to high, about `steps` of them."""
    step = _round_up((high - low) / steps)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, int(high / step + 1e-9) + 1)]


def _round_up(value: float) -> float:
    """To 1, 2, 2.5 or 5 times a power of ten."""
    unit = 10.0 ** math.floor(math.log10(value))
    return next(unit * f for f in (1, 2, 2.5, 5, 10) if unit * f >= value * 0.999)
