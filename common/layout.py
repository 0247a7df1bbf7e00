"""What the state of a model looks like in memory, and where one rank keeps it.

`StateLayout` is what two ranks must agree on; `PoolPlacement` is what they may differ in (addresses and counts).
The engine makes both, the transfer reads both.
"""

from __future__ import annotations

import enum
import hashlib

import msgspec


class StateKind(enum.StrEnum):
    KV = "kv"
    CONV = "conv"
    SSM = "ssm"


class PoolLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of state of one layer. An item is a page (KV) or a slot (conv, SSM).

    part: "k" or "v" for KV, otherwise the kind. item_shape: for KV [page_size, kv_heads, head_dim], for conv
    [conv_dim, d_conv - 1], for SSM [heads, head_dim, d_state] or [heads, key_dim, value_dim]. blocks: for conv, how
    many channels belong to each of its parts (x, B, C or q, k, v), otherwise empty.
    """

    kind: StateKind
    layer: int
    part: str
    dtype: str
    item_shape: tuple[int, ...]
    item_bytes: int
    blocks: tuple[int, ...]


class StateLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a rank's state that decides whether another rank can take it over.

    model: the architecture; revision: digest of the weights and the config. pools: in the order of the layers.
    """

    model: str
    revision: str
    page_size: int
    chunk: int
    conv_width: int
    vocab_size: int
    pools: tuple[PoolLayout, ...]

    def fingerprint(self) -> str:
        """16 hex digits over every field; equal exactly when the layouts are."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]

    def brief(self) -> str:
        """What a person looks at first when two layouts differ; at most 250 characters."""
        kinds = {pool.kind.value: pool.dtype for pool in self.pools}
        dtypes = ", ".join(f"{kind} {dtype}" for kind, dtype in sorted(kinds.items()))
        model = f"{self.model} {self.revision}, vocabulary {self.vocab_size}, {len(self.pools)} pools: {dtypes}"
        return f"{model}; page {self.page_size}, chunk {self.chunk}, conv width {self.conv_width}"[:250]

    def differences(self, other: StateLayout) -> list[str]:
        """A line for each field that differs, with both values: `page_size: 16 here, 32 there`."""
        found = [
            f"{name}: {mine} here, {theirs} there"
            for name in ("model", "revision", "page_size", "chunk", "conv_width", "vocab_size")
            if (mine := getattr(self, name)) != (theirs := getattr(other, name))
        ]
        if len(self.pools) != len(other.pools):
            return [*found, f"pools: {len(self.pools)} here, {len(other.pools)} there"]
        for mine, theirs in zip(self.pools, other.pools, strict=True):
            if mine != theirs:
                return [
                    *found,
                    f"pool of layer {mine.layer} ({mine.part}): {_brief(mine)} here, {_brief(theirs)} there",
                ]
        return found


def _brief(pool: PoolLayout) -> str:
    blocks = f" of parts {list(pool.blocks)}" if pool.blocks else ""
    return f"{pool.kind.value} layer {pool.layer} {pool.dtype} {list(pool.item_shape)}{blocks}"


class PoolPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank keeps one pool: item i lies at `base + i * stride_bytes`, 0 <= i < count (bytes, addresses)."""

    base: int
    stride_bytes: int
    count: int


class MemoryRange(msgspec.Struct, frozen=True, kw_only=True):
    """One allocation that holds pools and that a transport registers as a whole."""

    address: int
    nbytes: int
