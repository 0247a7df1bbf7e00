"""The packages may import each other only along the arrows of docs/architecture.md; some may not import torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]

ALLOWED: dict[str, set[str]] = {
    "common": set(),
    "engine": {"common"},
    "transfer": {"common"},
    "node": {"common", "engine", "transfer"},
    "prefill_node": {"common", "engine", "transfer", "node"},
    "decode_node": {"common", "engine", "transfer", "node"},
    "router": {"common"},
    "accuracy": {"common"},
    "cli": {"common", "router", "node", "accuracy", "transfer"},
}
"""What each package may import besides itself."""


def imported_packages(source: Path) -> set[str]:
    tree = ast.parse(source.read_text())
    names: set[str] = set()
    for item in ast.walk(tree):
        if isinstance(item, ast.Import):
            names |= {alias.name.split(".")[0] for alias in item.names}
        elif isinstance(item, ast.ImportFrom) and item.module and item.level == 0:
            names.add(item.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_follow_the_arrows(package: str) -> None:
    for source in (REPO / package).rglob("*.py"):
        ours = (imported_packages(source) & ALLOWED.keys()) - {package}
        assert ours <= ALLOWED[package], f"{source.relative_to(REPO)} imports {sorted(ours - ALLOWED[package])}"


@pytest.mark.parametrize(
    "module", ["router.app", "node.front", "cli.main", "transfer.sender", "common.config", "node.grammar_check"]
)
def test_torch_stays_out_of_processes_that_do_not_compute(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode == 0
