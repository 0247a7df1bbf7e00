"""Which device each rank of a node gets."""

from __future__ import annotations

import pytest

from common.config import MAX_RANKS, EngineConfig, ModelConfig, NodeConfig, Role, rank_config, rank_devices
from common.errors import ConfigError


def config(device: str, dp_size: int) -> NodeConfig:
    return NodeConfig(
        role=Role.DECODE, model=ModelConfig(path="m", device=device), engine=EngineConfig(dp_size=dp_size)
    )


@pytest.mark.parametrize(
    ("device", "dp_size", "devices"),
    [
        ("cpu", 1, ("cpu",)),
        ("cpu", 3, ("cpu", "cpu", "cpu")),
        ("cuda", 1, ("cuda",)),
        ("cuda:3", 1, ("cuda:3",)),
        ("cuda", 2, ("cuda:0", "cuda:1")),
        ("cuda:4, cuda:2", 2, ("cuda:4", "cuda:2")),
    ],
)
def test_one_a_rank(device: str, dp_size: int, devices: tuple[str, ...]) -> None:
    assert rank_devices(config(device, dp_size)) == devices
    assert rank_config(config(device, dp_size), dp_size - 1).model.device == devices[-1]


@pytest.mark.parametrize(
    ("device", "dp_size"),
    [("cuda:1", 2), ("cuda:0,cuda:0", 2), ("cuda:0,cuda:1", 1), ("cuda:0,cuda:1", 3), ("cpu,cuda:0", 2), ("cuda,", 2)],
)
def test_cards_that_do_not_go_round_are_refused(device: str, dp_size: int) -> None:
    with pytest.raises(ConfigError, match=f"--device {device}") as refusal:
        rank_devices(config(device, dp_size))
    assert refusal.value.param == "device"


@pytest.mark.parametrize("dp_size", [0, -1, MAX_RANKS + 1])
def test_a_number_of_ranks_that_cannot_be_is_refused(dp_size: int) -> None:
    with pytest.raises(ConfigError, match=f"--dp-size {dp_size}: 1 to") as refusal:
        rank_devices(config("cpu", dp_size))
    assert refusal.value.param == "dp_size"
