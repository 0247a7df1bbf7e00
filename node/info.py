"""What a node tells about itself: every setting flat, under the names that an SGLang server has for them."""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from common.config import NodeConfig, Role, chosen_transport
from node.answers import WEIGHT_VERSION
from node.limits import ServingLimits
from node.messages import Ready
from node.tokenizer import load_json
from transfer.messages import PROTOCOL_VERSION


def model_info(config: NodeConfig) -> dict[str, Any]:
    hf = load_json(Path(config.model.path) / "config.json")
    return {
        "model_path": config.model.path,
        "tokenizer_path": config.model.path,
        "served_model_name": served_name(config),
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": WEIGHT_VERSION,
        "model_type": hf.get("model_type"),
        "architectures": hf.get("architectures"),
    }


def server_info(
    config: NodeConfig,
    limits: ServingLimits,
    readies: list[Ready],
    *,
    usable: Collection[int],
    bootstrap_port: int | None,
) -> dict[str, Any]:
    """All but `internal_states`, which the caller asks the ranks for. readies, usable: of all ranks, and which of them
    take sequences.

    The settings come first, the names that SGLang's clients read overwrite them.
    """
    first = readies[0]
    wire = config.transfer.ssm_wire_dtype or config.model.ssm_dtype
    return {
        **_flat(config),
        "model_path": config.model.path,
        "tokenizer_path": config.model.path,
        "served_model_name": served_name(config),
        "dtype": config.model.dtype.value,
        "mamba_ssm_dtype": config.model.ssm_dtype.value,
        "max_mamba_cache_size": config.engine.max_state_slots,
        "context_length": limits.context_length,
        "max_total_num_tokens": limits.max_total_tokens,
        "vocab_size": limits.vocab_size,
        "tp_size": 1,
        "dp_size": limits.num_ranks,
        "disaggregation_mode": "null" if config.role is Role.UNIFIED else config.role.value,
        "disaggregation_transfer_backend": chosen_transport(config.transfer.transport, config.model.device).value,
        "disaggregation_bootstrap_port": bootstrap_port,
        "bootstrap_port": bootstrap_port,
        "transport": first.transport,
        "fingerprint": first.fingerprint,
        "state_layout": None if first.layout is None else first.layout.brief(),
        "handoff": f"protocol {PROTOCOL_VERSION}, {first.transport}, verify {config.transfer.verify.value}, "
        f"SSM state {wire.value}",
        "weight_version": WEIGHT_VERSION,
        "resumes_answers": True,
        "version": version("tandem-serve"),
        "ranks": [_rank(ready) | {"alive": rank in usable} for rank, ready in enumerate(readies)],
    }


def served_name(config: NodeConfig) -> str:
    return config.model.served_name or Path(config.model.path).name


def _rank(ready: Ready) -> dict[str, Any]:
    """What a rank said when it was ready, but its layout, which the fingerprint stands for."""
    fields: dict[str, Any] = msgspec.to_builtins(ready)
    return {name: value for name, value in fields.items() if name not in ("type", "layout")}


def _flat(config: NodeConfig) -> dict[str, Any]:
    """Every setting of every section; no two sections share a name but `host` and `device`, which get a prefix."""
    sections = msgspec.to_builtins(config)
    transfer = sections["transfer"]
    return {
        "role": sections["role"],
        **sections["model"],
        **sections["engine"],
        **{f"transfer_{name}" if name in ("host", "device") else name: value for name, value in transfer.items()},
        **sections["server"],
    }
