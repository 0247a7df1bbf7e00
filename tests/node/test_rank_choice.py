"""Which rank of a node gets a prompt."""

from __future__ import annotations

import pytest

from node.rank_choice import BLOCK_TOKENS, MAX_BLOCKS, RankChoice


def prompt(place: int, blocks: int = 3) -> list[int]:
    return [place, *range(blocks * BLOCK_TOKENS - 1)]


def test_the_rank_where_the_fewest_run() -> None:
    assert RankChoice().choose(prompt(1), None, {0: 3, 1: 1, 2: 2}) == 1


def test_a_prompt_goes_where_its_beginning_is_unless_that_one_has_much_more_to_do() -> None:
    choice = RankChoice()
    assert choice.choose(prompt(1), None, {0: 1, 1: 0}) == 1
    longer = [*prompt(1), *range(200)]
    assert choice.choose(longer, None, {0: 0, 1: 1}) == 1
    assert choice.choose(longer, None, {0: 0, 1: 2}) == 0
    assert choice.choose(longer, None, {0: 0, 1: 0}) == 0, "it is there too now"


def test_other_keys_share_no_beginnings() -> None:
    choice = RankChoice()
    choice.choose(prompt(1), "a", {0: 1, 1: 0})
    assert choice.choose(prompt(1), "b", {0: 0, 1: 1}) == 0


def test_a_dead_rank_is_forgotten() -> None:
    choice = RankChoice()
    choice.choose(prompt(1), None, {0: 1, 1: 0})
    assert choice.choose(prompt(1), None, {0: 0}) == 0, "it may not be chosen"
    choice.choose(prompt(2), None, {0: 1, 1: 0})
    choice.forget(1)
    assert choice.choose(prompt(2), None, {0: 0, 1: 0}) == 0


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_common_beginning_does_not_unbalance_a_burst(num_ranks: int) -> None:
    """200 prompts at once, behind one system prompt: within 20 %."""
    choice, loads = RankChoice(), dict.fromkeys(range(num_ranks), 0)
    for place in range(200):
        loads[choice.choose([*prompt(1), place], None, loads)] += 1
    assert max(loads.values()) <= 1.2 * min(loads.values()), loads


def test_what_is_remembered_is_bounded() -> None:
    choice = RankChoice()
    for place in range(4):
        choice.choose([place] * (MAX_BLOCKS // 2 * BLOCK_TOKENS), None, {0: 0})
    assert len(choice._ranks) == MAX_BLOCKS
