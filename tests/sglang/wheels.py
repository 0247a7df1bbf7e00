"""The flags in the wheels of SGLang, read from their sources as syntax trees (importing them needs a GPU).

python -m tests.sglang.wheels [FOLDER]      downloads each version's wheel to FOLDER and writes flags.json again
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from node.sglang.flags import OTHER_FLAGS, PLAIN
from node.sglang.versions import FIRST, LAST

TABLE = Path(__file__).with_name("flags.json")
STRATEGY_FLAGS = ("--mamba-scheduler-strategy", "--mamba-radix-cache-strategy")
BACKEND = "mooncake_tcp"
VARIABLES = (
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION",
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
)
NAMES = (*PLAIN.values(), *OTHER_FLAGS, *STRATEGY_FLAGS, BACKEND, *VARIABLES)
"""What the table says of each version whether it has it."""
_SOURCES = ("sglang/srt/server_args.py", "sglang/srt/environ.py", "sglang/srt/arg_groups/")
VERSIONS = tuple(f"0.5.{number}" for number in range(FIRST, LAST + 1))


def download(version: str, folder: Path) -> Path | None:
    """None when it cannot be had."""
    found = next(folder.glob(f"sglang-{version}-*.whl"), None)
    if found is None:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), f"sglang=={version}"]
        if subprocess.run(pip, capture_output=True).returncode != 0:
            return None
    return next(folder.glob(f"sglang-{version}-*.whl"), None)


def known(wheel: Path) -> list[str]:
    """Which of NAMES this version has."""
    with zipfile.ZipFile(wheel) as files:
        found: set[str] = set()
        for name in files.namelist():
            if name.endswith(".py") and name.startswith(_SOURCES):
                found |= set(_names(ast.parse(files.read(name))))
    return [name for name in NAMES if name in found]


def _names(tree: ast.AST) -> Iterator[str]:
    """Flags of add_argument, of annotated fields (`page_size: A[…]` is --page-size) and their aliases; variables of
    environ.py; names of backends."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="add_argument")):
                yield from (each.value for each in node.args if isinstance(each, ast.Constant))
            case ast.AnnAssign(
                target=ast.Name(id=field), annotation=ast.Subscript(value=ast.Name(id="A" | "Annotated"))
            ):
                if "no_cli=True" not in ast.unparse(node.annotation):
                    yield f"--{field.replace('_', '-')}"
            case ast.Assign(targets=[ast.Name(id=variable)]):
                yield variable
            case ast.Constant(value=str(text)) if text == BACKEND:
                yield text


def main(folder: Path) -> None:
    table = {}
    for version in VERSIONS:
        wheel = download(version, folder)
        if wheel is None:
            sys.exit(f"sglang {version} cannot be downloaded")
        table[version] = known(wheel)
    lines = [f"  {json.dumps(version)}: {json.dumps(names)}" for version, names in table.items()]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as made:
            main(Path(made))
