"""What a run has found, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from cli.chaos.load import End, Outcome
from cli.chaos.options import Options
from cli.chaos.plan import Fault

_SHOWN = 12
LEFT_OUT = " (left out)"


@dataclass(slots=True, kw_only=True)
class Report:
    """violations: what may not be, by check; a run has passed when there is none. done: what became of each fault.

    memory: resident bytes by process and moment.
    """

    options: Options
    plan: Sequence[Fault]
    done: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    violations: dict[str, list[str]] = field(default_factory=dict)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    lives: dict[str, int] = field(default_factory=dict)
    second_tries: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def check(self, name: str, found: Sequence[str]) -> None:
        self.violations.setdefault(name, []).extend(found)

    @property
    def passed(self) -> bool:
        return bool(self.violations) and not any(self.violations.values())

    def to_json(self) -> bytes:
        options = self.options
        content = {
            "passed": self.passed,
            "seed": options.seed,
            "seconds": options.seconds,
            "transport": options.transport,
            "verify": options.verify,
            "kinds": sorted(options.kinds),
            "plan": [str(fault) for fault in self.plan],
            "done": self.done,
            "answers": self._ends(),
            "errors": self._codes(),
            "slowest_error_s": self._slowest_error_s(),
            "longest_silence_s": max((o.silence_s for o in self.outcomes), default=0.0),
            "lives": self.lives,
            **self.second_tries,
            "memory": self.memory,
            "violations": self.violations,
            "wall_s": self.seconds,
        }
        return msgspec.json.format(msgspec.json.encode(content)) + b"\n"

    def lines(self) -> list[str]:
        ends, codes = self._ends(), self._codes()
        lines = [f"{sum(ends.values())} requests: " + ", ".join(f"{count} {end}" for end, count in ends.items())]
        lines += [f"typed errors: {', '.join(f'{code} {count}' for code, count in codes.items())}"] if codes else []
        left_out = [line for line in self.done if line.endswith(LEFT_OUT)]
        lines.append(f"faults: {len(self.done) - len(left_out)} of {len(self.plan)} planned ones done")
        lines += [f"          {line}" for line in left_out[:_SHOWN]]
        silence = max((o.silence_s for o in self.outcomes), default=0.0)
        lines.append(f"slowest error {self._slowest_error_s():.1f} s, longest silence {silence:.1f} s")
        lines.append("router: " + ", ".join(f"{count} {name}" for name, count in self.second_tries.items()))
        lines.append("lives: " + ", ".join(f"{name} {count}" for name, count in self.lives.items()))
        lines.append("")
        for name, found in self.violations.items():
            lines.append(f"{'FAILED' if found else 'ok':7} {name}" + (f": {len(found)}" if found else ""))
            lines += [f"          {line}" for line in found[:_SHOWN]]
            lines += [f"          and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        return lines

    def _ends(self) -> dict[str, int]:
        return dict(Counter(outcome.end.value for outcome in self.outcomes).most_common())

    def _codes(self) -> dict[str, int]:
        return dict(Counter(o.code for o in self.outcomes if o.end is End.ERROR).most_common())

    def _slowest_error_s(self) -> float:
        return max((o.seconds for o in self.outcomes if o.end is End.ERROR), default=0.0)
