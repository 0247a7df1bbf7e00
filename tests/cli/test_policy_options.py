"""--policy, --prefill-policy and --decode-policy of the router."""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.testing import CliRunner

from cli.main import tandem
from cli.router_settings import router_options
from common.config import PolicyName, RouterConfig


def read(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    @click.command()
    @router_options
    def command(**values: Any) -> None:
        found.update(values)

    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    return {name: value for name, value in found.items() if name.endswith("policy")}


def test_names_and_those_of_sglang() -> None:
    assert read() == {"policy": RouterConfig().policy, "prefill_policy": None, "decode_policy": None}
    assert read("--policy", "cache_aware", "--decode-policy", "manual") == {
        "policy": PolicyName.PREFIX_AWARE,
        "prefill_policy": None,
        "decode_policy": PolicyName.STICKY,
    }
    for name in PolicyName:
        assert read("--prefill-policy", name.value)["prefill_policy"] is name


@pytest.mark.parametrize("option", ["--policy", "--prefill-policy", "--decode-policy"])
def test_another_name_is_refused_and_all_are_named(option: str) -> None:
    result = CliRunner().invoke(tandem, ["router", option, "bucket"])
    assert result.exit_code == 2
    assert option in result.output and "bucket" in result.output
    assert all(f"'{name.value}'" in result.output for name in PolicyName)
