"""What two SGLang servers must agree on before one hands its state to the other.

Their own handshake compares the page size and the KV dtype alone. So the supervisor registers its server with this, and
the router pairs only servers for which it is the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FIELDS = {
    "page": "page_size",
    "dtype": "dtype",
    "kv": "kv_cache_dtype",
    "ssm": "mamba_ssm_dtype",
    "quantization": "quantization",
    "tp": "tp_size",
    "pp": "pp_size",
}
"""Names of /server_info. Not the strategy of the state cache: that decides what is kept, not what crosses, and a decode
server resolves `auto` otherwise than its prefill server."""
_DIGITS = 12


def fingerprint(info: Mapping[str, Any], model: str) -> str:
    """info: of SGLang's /server_info, where flags are resolved. model: `model_name`. Readable, so that a difference
    shows."""
    parts = [f"{name}={info.get(field)}" for name, field in _FIELDS.items()]
    return ",".join([f"sglang {info.get('version')}", f"model={model}", *parts]).replace(" ", "-")


def model_name(path: str, revision: str | None) -> str:
    """A digest of a folder's config and of its weight files' names and sizes; for another name itself and revision."""
    folder = Path(path)
    if not folder.is_dir():
        return f"{path}@{revision or 'main'}"
    digest = hashlib.sha256()
    config = folder / "config.json"
    digest.update(config.read_bytes() if config.is_file() else b"")
    for weights in sorted(folder.glob("*.safetensors")):
        digest.update(f"{weights.name} {weights.stat().st_size}\n".encode())
    return digest.hexdigest()[:_DIGITS]
