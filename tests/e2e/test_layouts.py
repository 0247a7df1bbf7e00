"""Ranks whose states do not lie alike refuse each other, naming what differs; nothing is written."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from common.layout import StateLayout
from tests.support.families import qwen3_next
from tests.support.models import FAMILIES, Models, save_model
from tests.support.ranks import Request, disaggregated_ranks

CHUNK = 16
LAYERS = ["linear_attention", "full_attention"]


def refused(prefill_model: Path, decode_model: Path) -> tuple[str, StateLayout, StateLayout]:
    """What the client is told, and both layouts. No byte has crossed and nothing is held."""
    with disaggregated_ranks(model=prefill_model, decode_model=decode_model) as ranks:
        for role in ranks.roles:
            role.host.runner.pools.conv.fill_(0.37)  # type: ignore[attr-defined]
        outcome = ranks.submit(Request(prompt=list(range(3, 60))))
        ranks.run_until(lambda: outcome.ended)
        assert outcome.error is not None and outcome.error.code == "layout_mismatch" and outcome.tokens == []
        assert bool((ranks.decode.host.runner.pools.conv == 0.37).all())
        assert ranks.decode.transfer.stats()["bytes"] == {}
        layouts = (ranks.prefill.host.layout, ranks.decode.host.layout)
        ranks.abort(outcome)
        ranks.assert_all_free()
    return outcome.error.message, *layouts


@pytest.mark.parametrize(("one", "other"), [*itertools.pairwise(FAMILIES), (FAMILIES[-1], FAMILIES[0])])
def test_families_refuse_each_other(one: str, other: str, models: Models) -> None:
    message, ours, theirs = refused(models(one, CHUNK), models(other, CHUNK))
    if ours.model != theirs.model:
        assert f"model: {ours.model} here, {theirs.model} there" in message
    assert ours.pools != theirs.pools
    assert "pools: " in message or "pool of layer " in message


def test_another_chunk_of_the_same_family(models: Models) -> None:
    message, *_ = refused(models("qwen3_next", 8), models("qwen3_next", 16))
    assert "chunk: 8 here, 16 there" in message


def test_as_many_channels_in_other_parts(tmp_path: Path) -> None:
    """q, k and v of 24, 24 and 64 channels, and of 32, 32 and 48: the conv states have the same size, not the same
    meaning."""
    folders = [tmp_path / name for name in ("narrow", "wide")]
    for folder, (key, value) in zip(folders, ((12, 16), (16, 12)), strict=True):
        config = qwen3_next(2, CHUNK, layer_types=LAYERS, linear_key_head_dim=key, linear_value_head_dim=value)
        save_model(config, folder)
    message, ours, theirs = refused(*folders)
    assert [layout.pools[0].item_shape for layout in (ours, theirs)] == [(112, 3)] * 2
    assert "pool of layer 0 (conv): " in message
    assert "[112, 3] of parts [24, 24, 64] here" in message and "[112, 3] of parts [32, 32, 48] there" in message


def test_every_family_takes_its_like(models: Models) -> None:
    """The refusals above are not for another reason."""
    for family in FAMILIES:
        with disaggregated_ranks(model=models(family, CHUNK)) as ranks:
            (outcome,) = ranks.run([Request(prompt=list(range(3, 60)))])
            assert outcome.error is None and len(outcome.tokens) == 8
