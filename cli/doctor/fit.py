"""Whether two nodes could ever work together, by what each doctor knows of its own."""

from __future__ import annotations

from cli.doctor.checks import shown
from common.config import NodeConfig

Settings = dict[str, str | None]
"""By option, or "fingerprint" of the state's layout. None: not known, or left open."""


def settings_of(config: NodeConfig, fingerprint: str | None) -> Settings:
    """fingerprint: None when it is not known."""
    wire = config.transfer.ssm_wire_dtype
    return {
        "--dtype": config.model.dtype.value,
        "--mamba-ssm-dtype": config.model.ssm_dtype.value,
        "--page-size": str(config.engine.page_size),
        "--verify": config.transfer.verify.value,
        "--ssm-wire-dtype": None if wire is None else wire.value,
        "fingerprint": fingerprint,
    }


def differences(mine: Settings, theirs: object) -> list[str]:
    """With both values. theirs: what the other end said, be it nonsense or nothing. Fingerprints follow from the other
    settings and the model, and are told apart only when those agree."""
    there = theirs if isinstance(theirs, dict) else {}
    found = [
        f"{name}: {value} here, {shown(there[name])} there"
        for name, value in mine.items()
        if value is not None and there.get(name) is not None and there[name] != value
    ]
    return [line for line in found if not line.startswith("fingerprint")] or [
        f"{line} (another model folder)" for line in found
    ]
