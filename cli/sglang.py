"""`--engine sglang` of the node commands: SGLang's server in place of our own engine (docs/sglang.md)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cli.settings import NODE_SETTINGS, node_config
from common.config import Role
from common.errors import ConfigError

_OPTIONS = (
    click.option(
        "--engine",
        type=click.Choice(["native", "sglang"]),
        default="native",
        show_default=True,
        help="sglang: SGLang's server, started, watched and registered by this command",
    ),
    click.option(
        "--sglang-python",
        default=sys.executable,
        show_default="this one",
        metavar="PATH",
        help="With --engine sglang: the Python that has sglang, or a script that runs it",
    ),
    click.option(
        "--sglang-arg",
        "sglang_arguments",
        multiple=True,
        metavar="ARG",
        help="With --engine sglang: passed on to it as it is; may be given several times",
    ),
    click.option(
        "--tp-size", "--tensor-parallel-size", type=int, default=1, show_default=True, help="With --engine sglang"
    ),
    click.option(
        "--sglang-start-timeout",
        "sglang_start_timeout_s",
        type=float,
        default=1800.0,
        show_default=True,
        help="Seconds until SGLang must be ready",
    ),
    click.option(
        "--sglang-health-timeout",
        "sglang_health_timeout_s",
        type=float,
        default=60.0,
        show_default=True,
        help="Seconds without an answer until SGLang is started again",
    ),
)
_NAMES = ("sglang_python", "sglang_arguments", "tp_size", "sglang_start_timeout_s", "sglang_health_timeout_s")


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a node's command the options of this module, which `serve_sglang` and `refuse_sglang_options` take."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def refuse_sglang_options() -> None:
    """Of a node with the native engine. Raises ConfigError for the first that was given."""
    for parameter in click.get_current_context().command.params:
        if parameter.name in _NAMES and _is_given(parameter.name):
            raise ConfigError(f"{parameter.opts[0]}: only with --engine sglang", param=parameter.name)


def serve_sglang(role: Role, values: dict[str, Any]) -> None:
    """values: of all options of a node's command. Raises ConfigError, and WorkerError when SGLang does not start."""
    from node.sglang.config import SglangConfig
    from node.sglang.supervisor import serve

    config = node_config(role, values)
    path = Path(config.model.path)
    if config.model.path.startswith(("/", ".", "~")) and not (path / "config.json").is_file():
        raise ConfigError(f"--model-path {path}: no folder with a config.json", param="model_path")
    serve(
        SglangConfig(
            node=config,
            given={f"{each.section}.{each.field}": each.flags[0] for each in NODE_SETTINGS if _is_given(each.name)},
            python=values["sglang_python"],
            arguments=values["sglang_arguments"],
            tp_size=values["tp_size"],
            start_timeout_s=values["sglang_start_timeout_s"],
            health_timeout_s=values["sglang_health_timeout_s"],
        )
    )


def _is_given(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source not in (None, ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)
