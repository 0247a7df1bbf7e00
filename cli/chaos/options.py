"""What a chaos run is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.chaos.plan import Kind, possible_kinds
from common.config import TransportName, Verify
from common.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Times are seconds. seconds: how long the disturbed part lasts. rate: requests begun a second at most.

    kinds: of faults. margin_s: added to liveness_s, the longest time that a client may hear nothing. settle_s: from the
    last fault until everything must be free again. dp_size: ranks of each node. logs: folder of the processes' logs;
    None: a temporary one.
    """

    seconds: float
    seed: int
    transport: TransportName
    verify: Verify
    kinds: frozenset[Kind]
    concurrency: int
    rate: float
    liveness_s: float
    margin_s: float
    settle_s: float
    model_path: str
    dp_size: int
    report: Path | None
    logs: Path | None

    @property
    def silence_limit_s(self) -> float:
        return self.liveness_s + self.margin_s


def chaos_options(values: dict[str, Any]) -> Options:
    """values: of the command line. Raises ConfigError for a fault that is not known, or not to the transport."""
    transport = TransportName(values["transport"])
    possible = possible_kinds(transport)
    for name in values["kinds"]:
        if name not in possible:
            raise ConfigError(
                f"--fault {name}: with --transport {transport} one of {', '.join(sorted(possible))}", param="fault"
            )
    kinds = frozenset(map(Kind, values["kinds"])) or possible
    given = {"transport": transport, "verify": Verify(values["verify"]), "kinds": kinds}
    return check_options(Options(**(values | given)))


def check_options(options: Options) -> Options:
    """Raises ConfigError naming the option."""
    for name, value in (
        ("--seconds", options.seconds),
        ("--rate", options.rate),
        ("--liveness-timeout", options.liveness_s),
        ("--margin", options.margin_s),
        ("--settle-timeout", options.settle_s),
    ):
        if not 0 < value < float("inf"):
            raise ConfigError(f"{name} {value}: a positive number", param=name[2:])
    if options.concurrency < 1:
        raise ConfigError(f"--concurrency {options.concurrency}: at least 1", param="concurrency")
    for path in (options.report, options.logs):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path}: no folder {path.absolute().parent}", param="report")
    return options
