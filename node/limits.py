"""What a node can take, known once its ranks are ready."""

from __future__ import annotations

import msgspec

from common.config import Role


class ServingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What this node can take: its role, the model's sizes and the default bootstrap endpoint (tokens, ranks)."""

    role: Role
    vocab_size: int
    context_length: int
    max_total_tokens: int
    num_ranks: int
    bootstrap_host: str
    bootstrap_port: int
