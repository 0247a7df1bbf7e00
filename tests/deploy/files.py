"""The files of deploy/, read as Compose and Kubernetes read them, and the command lines in them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import yaml

from cli.main import tandem
from cli.settings import BUNDLED_MODEL, node_config
from common.config import NodeConfig, Role, check_node_config

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
_VARIABLE = re.compile(r"\$\{(\w+)(?:(:?[-?])([^}]*))?\}")

HOST: dict[str, str] = {
    "MODEL_PATH": "/models/nemotron",
    "HOST_ADDRESS": "10.0.0.1",
    "ROUTER_URL": "http://10.0.0.3:30000",
    "RDMA_DEVICES": "mlx5_0,mlx5_1",
}
"""What a file may ask of whoever uses it."""


def compose(name: str, environment: Mapping[str, str] = HOST) -> dict[str, Any]:
    """A Compose file with its variables put in. Raises KeyError for one that has no default and is not set."""

    def value(match: re.Match[str]) -> str:
        variable, kind, word = match.groups()
        return environment.get(variable, word) if kind in (":-", "-") else environment[variable]

    return yaml.safe_load(_VARIABLE.sub(value, (DEPLOY / name).read_text()))


def variables(name: str) -> dict[str, str | None]:
    """Those of a file, with their defaults; None: it must be set."""
    return {
        variable: word if kind in (":-", "-") else None
        for variable, kind, word in _VARIABLE.findall((DEPLOY / name).read_text())
    }


def made_secrets(folder: Path) -> Path:
    """A new folder inside with keys of make_secrets.sh, under their names in containers."""
    made = folder / "secrets"
    subprocess.run([DEPLOY / "make_secrets.sh", made], check=True, timeout=30)
    for name in ("cluster", "admin", "user"):
        (made / f"{name}.key").rename(made / f"{name}_key")
    (made / "api.keys").rename(made / "api_keys")
    return made


def parse(arguments: list[str]) -> dict[str, Any]:
    """The options of a `tandem` command line. Raises click.ClickException. Starts nothing."""
    role, *rest = arguments
    command = tandem.commands[role]
    with click.Context(tandem, info_name="tandem") as parent:
        return command.make_context(role, list(rest), parent=parent).params


def node(arguments: list[str], secrets: Path) -> NodeConfig:
    """The checked settings of `tandem prefill …`, keys being those of `made_secrets`, the model the bundled one.

    Raises ConfigError too.
    """
    here = {"/run/secrets": str(secrets), "/models/model": str(BUNDLED_MODEL)}
    for there, path in here.items():
        arguments = [each.replace(there, path) for each in arguments]
    values = {name: value for name, value in parse(arguments).items() if name != "parent_pid"}
    return check_node_config(node_config(Role(arguments[0]), values))
