"""The section `router` of the benchmark on one card, tried on the CPU with the bundled model."""

from __future__ import annotations

import pytest

from bench.gpu_router import router
from tests.support.stack import MODEL


@pytest.mark.slow
def test_both_ways_are_asked_at_every_rate() -> None:
    found = router(MODEL, 900, {"max-mamba-cache-size": 16}, rates=(1.0, 2.0), seconds=1.0)
    assert {*found} == {f"{way} at {rate}/s" for way in ("unified", "router") for rate in (1, 2)}
    for key, figures in found.items():
        assert figures["asked"] == figures["answered"] == int(key[-3]) and figures["ttft_p50_ms"] > 0
