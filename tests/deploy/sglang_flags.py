"""Prints the flags that an SGLang server takes, from its sources, which do not import without a GPU.

    pip download --no-deps sglang==0.5.17
    python -m tests.deploy.sglang_flags sglang-0.5.17-*.whl > tests/deploy/sglang-0.5.17.json

A flag is a field of the class ServerArgs, with `aliases`, or an `add_argument` call of that file. With choices where
they are written out.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Iterator

SOURCE = "sglang/srt/server_args.py"
Flags = dict[str, list[str] | None]
"""By flag, its choices; None: any value."""


def flags(source: str) -> Flags:
    tree = ast.parse(source)
    constants = dict(lists(tree))
    server_args = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ServerArgs")
    found: Flags = {}
    for field in server_args.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            found |= of_field(field.target.id, field.annotation, constants)
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            found |= {each.value: None for each in call.args if isinstance(each, ast.Constant)}
    return found


def lists(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.List(elts=items)):
                yield name, [item.value for item in items if isinstance(item, ast.Constant)]


def of_field(name: str, annotation: ast.expr, constants: dict[str, list[str]]) -> Flags:
    names, choices = [f"--{name.replace('_', '-')}"], None
    for node in ast.walk(annotation):
        match node:
            case ast.keyword(arg="no_cli"):
                return {}
            case ast.keyword(arg="aliases", value=ast.List(elts=items)):
                names += [item.value for item in items if isinstance(item, ast.Constant)]
            case ast.keyword(arg="choices", value=ast.List(elts=items)):
                choices = [item.value for item in items if isinstance(item, ast.Constant)]
            case ast.keyword(arg="choices", value=ast.Name(id=constant)):
                choices = constants.get(constant)
            case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Tuple(elts=items)):
                choices = [item.value for item in items if isinstance(item, ast.Constant)]
    return dict.fromkeys(names, choices)


if __name__ == "__main__":
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        found = flags(wheel.read(SOURCE).decode())
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(choices)}" for name, choices in sorted(found.items()))
    print(f"{{\n{lines}\n}}")
