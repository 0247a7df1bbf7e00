"""The router's options that say how workers are chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from common.config import PolicyName, RouterConfig

_ALIASES = ("cache_aware", "manual")
"""SGLang's names for prefix_aware and sticky."""
_OPTIONS = (
    ("--policy", RouterConfig().policy.value, "How workers are chosen"),
    ("--prefill-policy", None, "How prefill workers are chosen, if not by --policy"),
    ("--decode-policy", None, "How decode workers are chosen, if not by --policy"),
)


class _Policy(click.Choice[str]):
    def __init__(self) -> None:
        super().__init__([*(name.value for name in PolicyName), *_ALIASES])

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return f"[{'|'.join(PolicyName)}]"


def policy_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for name, default, about in reversed(_OPTIONS):
        option = click.option(name, type=_Policy(), default=default, show_default=True, callback=_named, help=about)
        command = option(command)
    return command


def _named(_: click.Context, __: click.Parameter, value: str | None) -> PolicyName | None:
    return None if value is None else PolicyName(value)
