"""Detokenisers: streamed text is the whole text, and no character is ever split."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import ConfigError
from node.tokenizer import (
    MAX_HELD_TOKENS,
    ByteLevelDetokenizer,
    Detokenizer,
    Tokenizer,
    WindowDetokenizer,
    load_eos_token_ids,
    load_tokenizer,
)

TEXT = "Question: naïve 日本語 😀👍🏽 Привет — €5\n<|end|> done"


@pytest.fixture(scope="module")
def tokenizer(model_path: str) -> Tokenizer:
    return load_tokenizer(model_path)


def byte_level(tokenizer: Tokenizer) -> Detokenizer:
    return ByteLevelDetokenizer(tokenizer, frozenset())


def window(tokenizer: Tokenizer) -> Detokenizer:
    return WindowDetokenizer(tokenizer, frozenset())


MAKERS = pytest.mark.parametrize("make", [byte_level, window])


def test_the_bundled_kind_of_vocabulary_takes_the_exact_path(tokenizer: Tokenizer) -> None:
    assert isinstance(tokenizer.detokenizer(skip_special_tokens=True), ByteLevelDetokenizer)


@MAKERS
def test_tokens_one_by_one_give_the_text_and_no_half_character(
    tokenizer: Tokenizer, make: Callable[[Tokenizer], Detokenizer]
) -> None:
    detokenizer = make(tokenizer)
    ids = tokenizer.encode(TEXT)
    assert len(ids) > len("Question: naïve") and any("\ufffd" in tokenizer.token_text(i) for i in ids)
    shown = ""
    for token_id in ids:
        shown += detokenizer.push([token_id])
        assert "\ufffd" not in shown and TEXT.startswith(shown)
    assert shown + detokenizer.finish() == TEXT


@MAKERS
def test_an_unfinished_character_comes_out_at_the_end_only(
    tokenizer: Tokenizer, make: Callable[[Tokenizer], Detokenizer]
) -> None:
    detokenizer = make(tokenizer)
    ids = tokenizer.encode("a\U0001f9ff")[:-1]
    assert "".join(detokenizer.push([i]) for i in ids) == "a"
    assert detokenizer.finish() == tokenizer.decode(ids)[1:] == "\ufffd"


@pytest.mark.parametrize("seed", range(20))
def test_any_bytes_in_any_pieces_give_the_text_of_the_whole(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    ids = [rng.randrange(tokenizer.vocab_size) for _ in range(200)]
    for skip in (True, False):
        detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
        shown, rest = "", list(ids)
        while rest:
            size = rng.randrange(1, 5)
            shown += detokenizer.push(rest[:size])
            rest = rest[size:]
        assert shown + detokenizer.finish() == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("seed", range(5))
def test_the_window_agrees_with_the_exact_path_on_real_text(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("aé日😀 \n€1") for _ in range(150))
    exact, other = byte_level(tokenizer), window(tokenizer)
    shown, waiting = "", ""
    for token_id in tokenizer.encode(text):
        shown += exact.push([token_id])
        waiting += other.push([token_id])
        assert shown.startswith(waiting) and len(shown) - len(waiting) < 5
    assert shown + exact.finish() == waiting + other.finish() == text


def test_the_window_does_not_wait_for_ever_for_broken_bytes(tokenizer: Tokenizer) -> None:
    broken = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xf0")
    detokenizer = window(tokenizer)
    shown = [detokenizer.push([broken]) for _ in range(3 * MAX_HELD_TOKENS)]
    assert "".join(shown) and not any(shown[:MAX_HELD_TOKENS])


def test_special_tokens_are_skipped_on_request(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|end|>b")
    assert tokenizer.detokenizer(skip_special_tokens=True).push(ids) == "ab"
    assert tokenizer.detokenizer(skip_special_tokens=False).push(ids) == "a<|end|>b"


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is broken"):
        load_tokenizer(str(tmp_path))


def test_eos_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    assert load_eos_token_ids(str(tmp_path)) == frozenset()
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    assert load_eos_token_ids(str(tmp_path)) == {3}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert load_eos_token_ids(str(tmp_path)) == {3, 5}
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        load_eos_token_ids(str(tmp_path))


def test_the_longest_token_bounds_every_prompt(tokenizer: Tokenizer) -> None:
    longest = tokenizer.longest_token_bytes
    assert longest == max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)) >= len("<|end|>")
    for text in (TEXT, "Question: " * 50, "😀" * 40):
        assert len(text.encode()) <= longest * len(tokenizer.encode(text))


def test_long_texts_are_tokenised_alike_and_let_others_run(tokenizer: Tokenizer) -> None:
    text = TEXT * 4000
    results: list[list[int]] = []
    thread = threading.Thread(target=lambda: results.append(tokenizer.encode_long(text)))
    start, turns = time.monotonic(), 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.002)
        turns += 1
    took = time.monotonic() - start
    assert results == [tokenizer.encode(text)]
    assert turns > 3 and turns > took / 0.1, f"{turns} turns in {took:.2f} s"
