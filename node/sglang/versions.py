"""The versions of SGLang whose flags are known, and in what they differ (`tests/sglang/test_versions.py` compares)."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

from common.errors import ConfigError

FIRST, LAST = 12, 23
"""0.5.12 to 0.5.23, post-releases too."""
_RENAMED_STRATEGY, _NAMED_TCP, _RIGHT_STATES = 14, 13, 20
_ASK_S = 60.0
_ASK = "import importlib.metadata as m; print(m.version('sglang'))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """strategy_flag: what chooses extra_buffer. tcp_backend: what --disaggregation-transfer-backend calls Mooncake over
    TCP. mixes_states: with extra_buffer a prefill batch of several requests caches wrong states."""

    name: str
    strategy_flag: str
    tcp_backend: str
    mixes_states: bool


def version_of(name: str) -> Version:
    """Raises ConfigError for a version whose flags are not known."""
    found = re.fullmatch(r"0\.5\.(\d{1,3})(\.post\d+)?(\+.*)?", name)
    number = int(found[1]) if found else -1
    if not FIRST <= number <= LAST:
        raise ConfigError(
            f"--sglang-python: it has sglang {name}, whose flags are not known here; 0.5.{FIRST} to 0.5.{LAST} are",
            param="sglang_python",
        )
    return Version(
        name=name,
        strategy_flag=f"--mamba-{'radix-cache' if number >= _RENAMED_STRATEGY else 'scheduler'}-strategy",
        tcp_backend="mooncake_tcp" if number >= _NAMED_TCP else "mooncake",
        mixes_states=number < _RIGHT_STATES,
    )


def installed_version(python: str) -> str:
    """Of the sglang that this interpreter would run. Raises ConfigError where there is none."""
    try:
        asked = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=_ASK_S, check=False)
    except OSError as error:
        raise ConfigError(f"--sglang-python {python}: {error.strerror or error}", param="sglang_python") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"--sglang-python {python}: no answer in {_ASK_S:g} s", param="sglang_python") from error
    if asked.returncode != 0:
        last = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
        raise ConfigError(f"--sglang-python {python}: no sglang there ({last})", param="sglang_python")
    return asked.stdout.strip()
