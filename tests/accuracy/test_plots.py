"""Plots hold what they are given, also where it does not vary or is not there."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from accuracy.plots import HEIGHT, Point, histogram, intervals, sums

SVG = [
    intervals([Point("1 <cold>", 1.0, 1.0, 1.0, "cold")], None, "same"),
    intervals([Point("a", 0.0, 0.0, 0.0, "warm")], 0.87, "none"),
    intervals([Point(str(i), 0.9, 0.85, 0.95, "night") for i in range(40)], 0.87, "many"),
    sums([0.0, 1.0, 9.0], ["a", "b", "c"], 4.0, "sums"),
    histogram([0.1, 0.2, 0.2, 3.0], 3.0, "cold", "latency"),
    histogram([], 0.0, "baseline", "empty"),
]


@pytest.mark.parametrize("text", SVG)
def test_everything_is_inside_the_picture(text: str) -> None:
    root = ET.fromstring(text)
    assert len(root) > 4
    for shape in root:
        for name in ("y", "y1", "y2", "cy"):
            assert 0 <= float(shape.get(name, "1")) <= HEIGHT, ET.tostring(shape)


def test_a_dot_says_what_it_is() -> None:
    titles = [title.text for title in ET.fromstring(SVG[0]).iter("title")]
    assert titles == ["1 <cold>: 1.0000 (1.0000 to 1.0000)"]


def test_each_value_has_its_bar() -> None:
    titles = [title.text or "" for title in ET.fromstring(SVG[4]).iter("title")]
    assert [title.split(": ")[1] for title in titles] == ["1", "2", "1"]
