"""What the state of a request looked like, part by part and layer by layer, so that two nodes can be compared.

Off until it is asked for: reading every byte of the state costs time. Of each part of each layer it keeps a digest,
which tells equal bytes, and a sketch, which tells how far apart two states are that should be equal up to rounding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from torch import Tensor

from engine.batch import Track
from engine.pools import StatePools
from engine.sequence import Sequence

KEPT = 256
DIRECTIONS = 16
"""Projections in a sketch: the mean square of their differences is about the square of the distance."""


class StateLog:
    """Records of the newest requests, once `enabled`. A record: rid, event, tokens (the position that the state stands
    for), cached (prompt tokens that were not computed for it), tracked (position of the saved state, -1: none) and
    parts: part, layer, digest, norm, sketch."""

    def __init__(self, pools: StatePools) -> None:
        self._pools = pools
        self._records: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.enabled = False

    def switch(self, enabled: bool) -> None:
        """Forget everything and go on, or stop."""
        self.enabled = enabled
        self._records.clear()

    def listing(self) -> list[dict[str, Any]]:
        return list(self._records)

    @torch.inference_mode()
    def record(self, event: str, sequence: Sequence, tracked: Track | None) -> None:
        """event: prefill (the prompt is computed), commit (it has arrived) or end (the answer is complete)."""
        if not self.enabled or sequence.slot is None:
            return
        length = sequence.num_computed_tokens
        self._records.append(
            {
                "rid": sequence.rid,
                "event": event,
                "tokens": length,
                "cached": sequence.num_cached_tokens,
                "tracked": tracked.position if tracked else -1,
                "parts": [describe(*part) for part in self._parts(sequence, length, tracked)],
            }
        )

    def _parts(self, sequence: Sequence, length: int, tracked: Track | None) -> Iterator[tuple[str, int, Tensor]]:
        pools, slot = self._pools, sequence.slot
        assert slot is not None
        pages = sequence.page_table[: -(-length // pools.page_size)]
        for i, layer in enumerate(pools.kv_layers):
            yield "kv", layer, pools.kv[i][:, pages].flatten(1, 2)[:, :length]
        for i, layer in enumerate(pools.state_layers):
            yield "conv", layer, pools.conv[slot, i]
            yield "ssm", layer, pools.ssm[slot, i]
        if tracked is not None:
            for i, layer in enumerate(pools.state_layers):
                yield "track conv", layer, pools.conv[tracked.slot, i]
                yield "track ssm", layer, pools.ssm[tracked.slot, i]


def describe(part: str, layer: int, state: Tensor) -> dict[str, Any]:
    """state: of any shape and float dtype."""
    flat = state.reshape(-1).to("cpu")
    values = flat.to(torch.float64)
    return {
        "part": part,
        "layer": layer,
        "digest": xxhash.xxh3_64_hexdigest(flat.contiguous().view(torch.uint8).numpy().tobytes()),
        "norm": float(values.norm()),
        "sketch": [float(values @ direction) for direction in _directions(values.numel())],
    }


def _directions(size: int) -> Iterator[Tensor]:
    """Vectors of plus and minus one, the same everywhere."""
    generator = torch.Generator().manual_seed(size)
    for _ in range(DIRECTIONS):
        yield torch.randint(0, 2, (size,), generator=generator, dtype=torch.int8).to(torch.float64).mul_(2).sub_(1)
